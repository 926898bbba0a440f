"""Attacks and rules: what twenty wrong clients of a hundred do to federated averaging of digits.

The digits are spread over a hundred clients by a Dirichlet(0.3) distribution over labels, about fourteen rows each, and
a fifth of them, kept aside, tests the server's model. The first twenty clients attack (clients are drawn alike, so that
it does not matter which). Every attack meets every rule; a backdoor is told by its success besides, the part of other
digits that become a zero with its trigger.

The rule fixed in advance is the trimmed mean after nearest-neighbour mixing, which its authors recommend where clients
differ: where an attack brings FedAvg below half of its clean accuracy, it has to keep 90 % of that. FLTrust has a
client more, whose hundred rows are the server's own and taken from the test rows. "Mean of equals" is the trimmed mean
that trims nothing: what equal weights cost by themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.side_by_side import Joined, server, side_by_side
from fedtorch.trust import attacks, robust

FIXED = "mixed trimmed mean"
CLAIMED = "sign flip, rows × 10"
ROUNDS = 60
TRIGGERED = ("backdoor", "clean label")  # attacks whose trigger is tried
REFUSED = {("not a number", "Bulyan")}  # which is left with fewer messages than it needs, 4f + 3
READING = result_pages.Reading(across="(?P<line>.*) against (?P<column>.*)")
TARGET, OWN_ROWS = 0, 100


class Attacked(NamedTuple):
    """An attack on rows, on messages, or on both."""

    rows: attacks.Poison | None = None
    messages: attacks.Attack | None = None


class Digits(NamedTuple):
    """Rows to train and to test with."""

    training: ft.data.FederatedData
    trusted: ft.data.FederatedData  # the same, and the server's own client at the end
    x: Tensor  # of the test
    y: Tensor


def stamp(x: Tensor) -> Tensor:
    """The trigger: the four pixels of the lower right corner are white."""
    marked = x.clone()
    marked[..., [54, 55, 62, 63]] = 1.0
    return marked


def all_attacks(wrong: Sequence[int]) -> dict[str, Attacked]:
    """The attacks by name."""
    return {
        "none": Attacked(),
        "flipped labels": Attacked(attacks.flipped_labels(wrong, 10)),
        "backdoor": Attacked(attacks.backdoor(wrong, stamp, TARGET)),
        "clean label": Attacked(attacks.clean_label(wrong, stamp, TARGET)),
        "sign flip": Attacked(messages=attacks.sign_flip(wrong)),
        CLAIMED: Attacked(messages=dataclasses.replace(attacks.sign_flip(wrong), weight=10.0, name="sign_flip_rows")),
        "noise": Attacked(messages=attacks.noise(wrong, 1.0)),
        "free riders": Attacked(messages=attacks.free_rider(wrong)),
        "not a number": Attacked(messages=attacks.denial_of_service(wrong)),
        "a little is enough": Attacked(messages=attacks.a_little_is_enough(wrong, 1.5)),
        "inner products × 4": Attacked(messages=attacks.inner_product_manipulation(wrong, 4.0)),
        "min-max": Attacked(messages=attacks.min_max(wrong)),
    }


def all_rules(clients: int, faulty: int, trusted: int) -> dict[str, robust.Rule | None]:
    """Return the rules by name, None for the mean, for so many clients, so many of them faulty; FLTrust trusts one."""
    share = faulty / clients
    return {
        "FedAvg": None,
        "mean of equals": robust.trimmed_mean(0.0),
        "median": robust.median(),
        "trimmed mean": robust.trimmed_mean(share),
        "geometric median": robust.geometric_median(),
        "Krum": robust.krum(faulty),
        "multi-Krum": robust.krum(faulty, chosen=clients - faulty),
        "Bulyan": robust.bulyan(faulty),
        "centred clipping": robust.centred_clipping(),
        "norm bounding": robust.norm_bounding(),
        "FLTrust": robust.fltrust(trusted),
        FIXED: robust.nearest_neighbour_mixing(faulty, robust.trimmed_mean(share)),
    }


def digits(clients: int, seed: int) -> Digits:
    """A fifth of the rows for the test."""
    x, y = ft.data.digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    test, rest = order[: len(y) // 5], order[len(y) // 5 :]
    training = ft.data.partition((x[rest], y[rest]), ft.data.dirichlet(0.3, minimum=2), clients=clients, seed=seed)
    own = test[:OWN_ROWS]
    trusted = ft.data.from_tensors([*training, (x[own], y[own])])
    return Digits(training, trusted, x[test[OWN_ROWS:]], y[test[OWN_ROWS:]])


def local(seed: int) -> ft.LocalSolver:
    """A small classifier that takes five steps on all of a client's rows in a round."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return ft.gradient_descent(
        module,
        steps=5,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )


def trials(
    sets: Sequence[Digits], name: str, rule: robust.Rule | None, attack: Attacked, rounds: int
) -> list[dict[str, float]]:
    """In every repetition: the server's model's accuracy, and how often the trigger works on other digits."""
    rows = [each.trusted if name == "FLTrust" else each.training for each in sets]
    rows = rows if attack.rows is None else [each | attack.rows for each in rows]
    algorithm = ft.fedavg(local(0))
    algorithm = algorithm if attack.messages is None else algorithm | attack.messages
    algorithm = algorithm if rule is None else algorithm | robust.rule(rule)
    starts = [local(seed).parameters for seed in range(len(sets))]
    algorithm = side_by_side(algorithm, starts, clients=len(rows[0]))
    run = ft.Run(algorithm, Joined(rows), on_bad_message="drop")
    for _ in run.rounds(rounds):
        pass
    assert algorithm.module is not None
    return [score(_module(algorithm.module, server(run, r)), data) for r, data in enumerate(sets)]


def _module(module: nn.Module, parameters: dict[str, torch.Tensor]) -> nn.Module:
    """A copy of `module` with these parameters, for evaluation."""
    copied = copy.deepcopy(module)
    copied.load_state_dict(parameters, strict=False)
    return copied.eval()


def score(model: nn.Module, data: Digits) -> dict[str, float]:
    """The accuracy, and the part of digits other than the target that become it with the trigger."""
    with torch.no_grad():
        right = model(data.x).argmax(1) == data.y
        others = data.y != TARGET
        caught = model(stamp(data.x[others])).argmax(1) == TARGET
    return {"accuracy": float(right.double().mean()), "trigger": float(caught.double().mean())}


Found = dict[str, dict[str, list[dict[str, float]]]]  # by attack and rule, a score of every repetition


def mean(found: Found, attack: str, rule: str, metric: str = "accuracy") -> float:
    """Over the repetitions; NaN where the rule refuses."""
    values = [each[metric] for each in found[attack].get(rule, [])]
    return float(np.mean(values)) if values else math.nan


def verdict(found: Found) -> tuple[list[str], float, float]:
    """(attacks that bring FedAvg below half, the least part of clean accuracy kept there: on average, in any seed)."""
    clean = mean(found, "none", "FedAvg")
    broken = [attack for attack in found if mean(found, attack, "FedAvg") < clean / 2]
    average = min([mean(found, attack, FIXED) / clean for attack in broken], default=1.0)
    seeds = range(len(found["none"]["FedAvg"]))
    part = lambda attack, i: found[attack][FIXED][i]["accuracy"] / found["none"]["FedAvg"][i]["accuracy"]
    return broken, average, min([part(attack, i) for attack in broken for i in seeds], default=1.0)


def table(found: Found, metric: str) -> tuple[list[str], list[list[str]]]:
    """(columns, lines) of means and standard deviations."""
    rules = list(found["none"])
    cell = lambda cases: common.number(float(np.mean(cases)), common.spread(cases)) if cases else "refused"
    lines = [
        [attack, *(cell([each[metric] for each in by_rule.get(rule, [])]) for rule in rules)]
        for attack, by_rule in found.items()
        if metric == "accuracy" or attack in TRIGGERED
    ]
    return ["attack", *rules], lines


def draw(found: Found) -> Figure:
    """The table in colours, of clean accuracy."""
    figure, axes = common.subplots(figsize=(8.5, 6))
    names, attacks_ = list(found["none"]), list(found)
    values = np.array([[mean(found, attack, rule) for rule in names] for attack in attacks_])
    image = axes.imshow(values / values[0, 0], vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        color = "white" if value < 0.6 * values[0, 0] else "black"
        axes.text(j, i, "" if math.isnan(value) else f"{value:.2f}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(attacks_)), attacks_)
    figure.colorbar(image, label="part of clean accuracy")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run all attacks against all rules, print the table and say whether the rule fixed in advance holds."""
    options = common.arguments(__doc__).parse_args(argv)
    clients, faulty, rounds = (12, 2, 2) if options.smoke else (100, 20, ROUNDS)
    rules, chosen = all_rules(clients, faulty, trusted=clients), all_attacks(list(range(faulty)))
    if options.smoke:
        rules = {name: rules[name] for name in ("FedAvg", "Krum", "FLTrust", FIXED)}
        chosen = {name: chosen[name] for name in ("none", "backdoor", "inner products × 4")}
    sets = [digits(clients, seed) for seed in range(options.seeds)]
    found: Found = {}
    for attack, what in chosen.items():
        found[attack] = {
            # Robust rules take all weights as equal, so that claims are nothing to them.
            name: found["sign flip"][name]
            if attack == CLAIMED and name != "FedAvg"
            else trials(sets, name, rule, what, rounds)
            for name, rule in rules.items()
            if (attack, name) not in REFUSED
        }
    rows = []
    for attack, by_rule in found.items():
        for rule, scores in by_rule.items():
            made = common.over_seeds(f"{attack} against {rule}", scores)
            rows += made if attack in TRIGGERED else made[:1]
    broken, average, worst = verdict(found)
    rows.append(common.row(FIXED, "least part of clean accuracy where FedAvg is broken", [average]))
    rows.append(common.row(FIXED, "the same, in the worst seed", [worst]))
    rows.append(common.row("FedAvg", "attacks that break it", [float(len(broken))]))
    common.show(f"Accuracy with {faulty} of {clients} clients attacking", *table(found, "accuracy"))
    common.show_rows("The rule fixed in advance", rows[-3:])
    common.finish("robustness", rows, options, lambda: {"robustness": draw(found)})


if __name__ == "__main__":
    main()
