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

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from fedtorch.federation.exchange import Exchange
from fedtorch.trust import attacks, robust

FIXED = "mixed trimmed mean"
REFUSED = {("not a number", "Bulyan")}  # which is left with fewer messages than it needs, 4f + 3
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
        "sign flip, rows × 10": Attacked(
            messages=dataclasses.replace(attacks.sign_flip(wrong), weight=10.0, name="sign_flip_rows")
        ),
        "noise": Attacked(messages=attacks.noise(wrong, 1.0)),
        "free riders": Attacked(messages=attacks.free_rider(wrong)),
        "not a number": Attacked(messages=attacks.denial_of_service(wrong)),
        "a little is enough": Attacked(messages=attacks.a_little_is_enough(wrong, 1.5)),
        "inner products × 4": Attacked(messages=attacks.inner_product_manipulation(wrong, 4.0)),
        "min-max": Attacked(messages=attacks.min_max(wrong)),
    }


def all_rules(clients: int, faulty: int, trusted: int) -> dict[str, Callable[[], Exchange]]:
    """The exchanges by name, for so many clients, of whom so many are faulty; FLTrust trusts client `trusted`."""
    share = faulty / clients
    rules = {
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
    made: dict[str, Callable[[], Exchange]] = {"FedAvg": ft.star}
    return {**made, **{name: lambda rule=rule: robust.star(rule) for name, rule in rules.items()}}


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


def trial(data: Digits, rule: str, exchange: Exchange, attack: Attacked, rounds: int, seed: int) -> dict[str, float]:
    """The accuracy of the server's model, and how often the trigger succeeds with digits that are not the target."""
    rows = data.trusted if rule == "FLTrust" else data.training
    algorithm = dataclasses.replace(ft.fedavg(local(seed)), exchange=exchange)
    algorithm = algorithm if attack.messages is None else algorithm | attack.messages
    rows = rows if attack.rows is None else rows | attack.rows
    run = ft.Run(algorithm, ft.InProcess(rows), seed=seed, on_bad_message="drop")
    for _ in run.rounds(rounds):
        pass
    model = run.global_module().eval()
    with torch.no_grad():
        right = model(data.x).argmax(1) == data.y
        others = data.y != TARGET
        caught = model(stamp(data.x[others])).argmax(1) == TARGET
    return {"accuracy": float(right.double().mean()), "trigger": float(caught.double().mean())}


def draw(means: dict[str, dict[str, float]], clean: float) -> Figure:
    """The table in colours, of clean accuracy."""
    figure, axes = common.subplots(figsize=(8.5, 6))
    names = list(next(iter(means.values())))
    values = torch.tensor([[means[attack].get(rule, torch.nan) for rule in names] for attack in means])
    image = axes.imshow((values / clean).numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for i, j in [(i, j) for i in range(len(means)) for j in range(len(names))]:
        dark = float(values[i, j]) < 0.6 * clean
        axes.text(
            j,
            i,
            common.number(means[list(means)[i]].get(names[j]), form=".2f"),
            ha="center",
            va="center",
            color="white" if dark else "black",
        )
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(means)), list(means))
    figure.colorbar(image, label="part of clean accuracy")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all attacks against all rules, prints the table and says whether the rule fixed in advance holds."""
    options = common.arguments(__doc__).parse_args(argv)
    clients, faulty, rounds = (12, 2, 2) if options.smoke else (100, 20, 60)
    rules, wrong = all_rules(clients, faulty, trusted=clients), range(faulty)
    sets = [digits(clients, seed) for seed in range(options.seeds)]
    rows, lines, means = [], [], {}
    if options.smoke:
        rules = {name: rules[name] for name in ("FedAvg", "Krum", "FLTrust", FIXED)}
    chosen = all_attacks(list(wrong))
    for attack in ("none", "backdoor", "inner products × 4") if options.smoke else chosen:
        what = chosen[attack]
        line, means[attack] = [attack], {}
        for rule, exchange in rules.items():
            if (attack, rule) in REFUSED:
                line.append("refused")
                continue
            found = [trial(data, rule, exchange(), what, rounds, seed) for seed, data in enumerate(sets)]
            made = common.over_seeds(f"{attack} against {rule}", found)
            rows += made if what.rows is not None and attack != "flipped labels" else made[:1]
            means[attack][rule] = made[0].ours
            line.append(f"{made[0].ours:.3f}")
        lines.append(line)
    common.show(f"Accuracy with {faulty} of {clients} clients attacking", ["", *rules], lines)
    clean = means["none"]["FedAvg"]
    broken = [attack for attack, each in means.items() if each["FedAvg"] < clean / 2]
    kept = min([means[attack][FIXED] / clean for attack in broken], default=1.0)
    rows.append(common.row(FIXED, "least part of clean accuracy where FedAvg is broken", [kept]))
    rows.append(common.row("FedAvg", "attacks that break it", [float(len(broken))]))
    title = "The rule fixed in advance"
    common.show_rows(title, rows[-2:])
    common.finish("robustness", rows, options, lambda: {"robustness": draw(means, clean)})


if __name__ == "__main__":
    main()
