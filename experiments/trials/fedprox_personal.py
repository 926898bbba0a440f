r"""Personal and Bayesian methods on FedProx's synthetic data and on LEAF's, every one a softmax regression.

*FedProx's*: 30 devices as in `trials.fedprox`, without stragglers; 10 devices a round. *LEAF's*: 1 000 devices of five
classes (`leaf_data`), 100 a round. Where a device works by gradient steps it does 20 epochs of SGD with batches of 10
and rate 0.01, for 200 rounds, as in FedProx; every pull is as strong as its μ = 1. Methods:

- *FedAvg*, and *FedProx, μ = 1*, both one model for all; *alone*, the same steps without a federation;
- *own intercepts*: FedAvg of the weights, each device its intercepts (`ft.personal_layers`);
- *Ditto*, λ = 1; *GTV* over the complete graph with :math:`2\alpha(K - 1) = 1`;
- *APFL*, its α at first 0.5 and moved after each epoch; predictions by the personal model, mixed at the end of a round;
- *pFedMe* as its repository runs it on synthetic data: 20 minibatches of 20, five steps of rate 0.01 on each, λ = 20,
  η = 0.005; fewer steps than the others take. Predictions by the personal θ of a device's last round;
- *HM1, against the rest*: `ft.matrix_normal` of the log-odds of every class against all others (61 coefficients a
  class), all devices in each of 20 rounds of two Newton steps; how devices are related is learnt;
- *EP, own intercepts*: a hierarchical logistic regression of every class against the rest, the 60 slopes the same in
  all devices, by Laplace's method; with `--methods` only. A round of one class took some nine seconds of a processor on
  (1, 1), ten classes of twenty rounds half an hour. With all 61 coefficients different between devices the rule over
  their variances has 3 904 nodes, and the package warns of ten minutes for a round of one class: not run.

FedRep, FedPer and FedBABU have a body that is shared and a head; a softmax regression has no body. Accuracy is that of
each device's own model on its own test rows; the loss of methods against the rest is that of their probabilities,
normalised. Nothing is published of this; the sources give the data and FedProx's settings.

`--kept DIR` keeps every training that is done as a file, from where the next call goes on.

Sources: Li et al. (2020), "Federated optimization in heterogeneous networks"; Caldas et al. (2018), "LEAF: a benchmark
for federated settings"; for pFedMe's settings the README of github.com/CharlieDinh/pFedMe.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedlin.common import infer
from experiments.trials import fedprox, leaf_data, pfedme, pfllib
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import generalised

ROUNDS, BATCH, LR, PULL, LEAF_ASKED = 200, 10, 0.01, 1.0, 100
HM1_ROUNDS, NEWTON, EP_ROUNDS = 20, 2, 20
OF_PFEDME = pfedme.Setting(batches=20, lr=0.01, strength=20.0, outer=0.005, size=20)
LEAF, DATA = "LEAF", [*fedprox.DATA, "LEAF"]
METRICS = ("training loss", "test accuracy", "accuracy, mean of devices", "accuracy, worst tenth", "accuracy, worst")
READING = result_pages.Reading(smaller="loss", larger="accuracy", across="(?P<line>.*): (?P<column>.*)")


class Federation(NamedTuple):
    """The rows of all devices, and how they are federated."""

    train: ft.data.FederatedData
    test: ft.data.FederatedData
    classes: int
    asked: int  # devices of a round


class Models(NamedTuple):
    """A linear model of each device."""

    weight: Tensor  # (K, C, d)
    bias: Tensor  # (K, C)
    against_the_rest: bool = False  # log-odds of each class, in place of logits


def federation(name: str, seed: int, small: bool = False) -> Federation:
    """One of the data sets; LEAF's with 40 devices if it is to be small."""
    if name != LEAF:
        return Federation(*fedprox.generate(fedprox.DATA[name], seed), fedprox.CLASSES, fedprox.ASKED)
    sets = leaf_data.generate(seed, 40 if small else leaf_data.DEVICES)
    return Federation(*sets, leaf_data.CLASSES, min(LEAF_ASKED, 10 if small else LEAF_ASKED))


def zeros(of: Federation) -> nn.Linear:
    """The first weights."""
    module = nn.Linear(of.train.rows[0].shape[1], of.classes, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def descent(of: Federation, epochs: int = fedprox.EPOCHS) -> ft.LocalSolver:
    """What devices do in a round."""
    optimizer = partial(torch.optim.SGD, lr=LR)
    return ft.gradient_descent(zeros(of), epochs=epochs, batch_size=BATCH, loss=F.cross_entropy, optimizer=optimizer)


def after(run: ft.Run, rounds: int, clients: int) -> Models:
    """The devices' models after so many rounds."""
    for _ in run.rounds(rounds):
        pass
    models = {name: leaf.expand(clients, *leaf.shape[1:]) for name, leaf in run.tensors().items()}
    return Models(models["weight"], models["bias"])


def stepwise(build: Callable[[Federation], ft.Algorithm], of: Federation, rounds: int, seed: int) -> Models:
    """A method of gradient steps, of a part of the devices in each round."""
    run = ft.Run(build(of), ft.InProcess(of.train), cohort=of.asked, seed=seed)
    return after(run, rounds, of.train.clients)


def gtv(of: Federation) -> ft.Algorithm:
    """GTV minimisation over all pairs, with FedProx's pull in sum."""
    nodes = of.train.clients
    return ft.gtv(descent(of), ft.Network.complete(nodes), PULL / (2 * (nodes - 1)))


def own_models_of_pfedme(of: Federation, rounds: int, seed: int) -> Models:
    """The devices' θ."""
    algorithm = pfedme.pfedme(OF_PFEDME, of.train.rows, zeros(of))
    population = pfedme.OneBlock(ft.data.from_tensors(pfedme.places(of.train)))
    return after(ft.Run(algorithm, population, cohort=of.asked, seed=seed), rounds, of.train.clients)


def against_the_rest(fit: Callable[[ft.data.FederatedData], Tensor], of: Federation) -> Models:
    """Models of which `fit` finds the coefficients `(K, d + 1)` of each class, the intercept last."""
    x, y = of.train.rows
    each = [fit(of.train.map(partial(lambda label, rows: (x, (y == label).double()), c))) for c in range(of.classes)]
    coefficients = torch.stack(each, 1)
    return Models(coefficients[..., :-1], coefficients[..., -1], True)


def related_devices(of: Federation, rounds: int, seed: int) -> Models:
    """HM1, which draws nothing."""
    head = ft.LinearHead(of.train.rows[0].shape[1], dtype=torch.float64)
    algorithm = ft.matrix_normal(ft.least_squares(head, steps=NEWTON, family="logistic"))

    def fit(data: ft.data.FederatedData) -> Tensor:
        run = ft.run(algorithm, ft.InProcess(data), rounds=min(rounds, HM1_ROUNDS), progress=False)
        return run.tensors()["coefficients"]

    return against_the_rest(fit, of)


def own_intercepts_by_ep(of: Federation, rounds: int, seed: int) -> Models:
    """Means of the posterior of one variance, that of the intercepts; it draws nothing."""
    features = of.train.rows[0].shape[1] + 1
    model = generalised.logistic(hierarchical.normal(features, random=[features - 1]), inner=None)

    def fit(data: ft.data.FederatedData) -> Tensor:
        whole = data.map(lambda rows: (F.pad(rows[0], (0, 1), value=1.0), rows[1]))
        return infer(model, whole, rounds=min(rounds, EP_ROUNDS), tolerance=0.05)[1].mean

    return against_the_rest(fit, of)


METHODS: dict[str, Callable[[Federation, int, int], Models]] = {
    "FedAvg": partial(stepwise, lambda of: ft.fedavg(descent(of))),
    "FedProx, μ = 1": partial(stepwise, lambda of: ft.fedprox(descent(of), PULL)),
    "alone": partial(stepwise, lambda of: ft.separate(descent(of))),
    "own intercepts": partial(stepwise, lambda of: ft.personal_layers(descent(of), "bias")),
    "Ditto": partial(stepwise, lambda of: ft.ditto(descent(of), PULL)),
    "GTV": partial(stepwise, gtv),
    "APFL": partial(stepwise, lambda of: pfllib.apfl(descent(of, 1), LR, fedprox.EPOCHS)),
    "pFedMe": own_models_of_pfedme,
    "HM1, against the rest": related_devices,
}
ASKED_FOR = {"EP, own intercepts": own_intercepts_by_ep}


def scores(models: Models, of: Federation) -> dict[str, float]:
    """The metrics; devices without test rows count in none of them but the loss."""
    own: list[tuple[Tensor, Tensor]] = list(zip(models.weight.mT, models.bias))
    loss, right = 0.0, []
    for (x, y), (weight, bias) in zip(of.train, own):
        logits = torch.addmm(bias, x, weight)
        logits = F.logsigmoid(logits) if models.against_the_rest else logits
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    for (x, y), (weight, bias) in zip(of.test, own):
        right.append(float((torch.addmm(bias, x, weight).argmax(1) == y).sum()))
    rows = of.test.counts.double()
    share = (torch.tensor(right).double() / rows)[rows > 0].sort().values
    tenth = share[: max(1, len(share) // 10)].mean()
    loss, overall = loss / int(of.train.counts.sum()), sum(right) / float(rows.sum())
    return dict(zip(METRICS, (loss, overall, float(share.mean()), float(tenth), float(share[0]))))


def kept(folder: Path | None, name: str, method: str, rounds: int, seed: int, small: bool = False) -> dict[str, float]:
    """The metrics of a training, from its file where it has been done."""
    file = None if folder is None else folder / f"{name} {method} {rounds} {seed}.json".replace(" ", "_")
    if file is not None and file.exists():
        found: dict[str, float] = json.loads(file.read_text())
        return found
    began = time.process_time()
    of = federation(name, seed, small)
    found = scores({**METHODS, **ASKED_FOR}[method](of, rounds, seed), of)
    found["seconds of a processor"] = time.process_time() - began
    sys.stderr.write(f"{name}, {method}, seed {seed}: {found[METRICS[1]]:.4f}, {time.process_time() - began:.0f} s\n")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found


def draw(rows: Sequence[common.Row]) -> Mapping[str, Figure]:
    """The accuracy of all rows and of the worst tenth of devices by method, a panel for each data set."""
    places = [row.setting.partition(": ") for row in rows]
    methods, names = (list(dict.fromkeys(place[part] for place in places)) for part in (0, 2))
    figure, axes = common.subplots(
        1, len(names), figsize=(2 + 2.2 * len(names), 1 + 0.3 * len(methods)), sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], names):
        for metric, marker in ((METRICS[1], "o"), (METRICS[3], "|")):
            those = [(row.setting.partition(": ")[0], row) for row in rows if row.metric == metric]
            found = [(methods.index(method), row) for method, row in those if row.setting.endswith(f": {name}")]
            values, spread = [row.ours for _, row in found], [row.sd or 0.0 for _, row in found]
            axis.errorbar(values, [at for at, _ in found], xerr=spread, fmt=marker, capsize=3, label=metric)
        axis.set(title=name, xlabel="accuracy")
    axes[0, 0].set_yticks(range(len(methods)), methods)
    axes[0, 0].invert_yaxis()
    axes[0, -1].legend(frameon=False, fontsize="small")
    return {"fedprox_personal": figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Train all methods on all data sets; with --smoke one round of two of them."""
    parser = common.arguments(__doc__)
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA, help="data sets (default all)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=[*METHODS, *ASKED_FOR], metavar="NAME")
    parser.add_argument("--kept", type=Path, help="folder of the trainings that are done, where the next call goes on")
    options = parser.parse_args(argv)
    rounds, names = (1, ["(1, 1)", LEAF]) if options.smoke else (ROUNDS, options.data)
    rows = []
    for name in names:
        for method in options.methods:
            runs = [kept(options.kept, name, method, rounds, seed, options.smoke) for seed in range(options.seeds)]
            rows += common.over_seeds(f"{method}: {name}", runs)
    common.show_rows("Personal and Bayesian methods on synthetic data", rows)
    common.finish("trials.fedprox_personal", rows, options, lambda: draw(rows))


if __name__ == "__main__":
    main()
