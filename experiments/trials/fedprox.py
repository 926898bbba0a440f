"""FedProx's synthetic data: stragglers that are dropped (FedAvg) or answer with partial work (FedProx).

Softmax regression of 60 inputs and 10 classes on 30 devices, generated as the authors' scripts do: log-normal sizes of
at least 50 rows, models and inputs that differ by (α, β) between devices, or not (IID). In a round 10 devices are
asked; so many of them are stragglers (0, 50 or 90 %), who do 1 to 19 of 20 epochs, drawn uniformly; the others do all,
by SGD of batches of 10 and rate 0.01. FedAvg drops the stragglers. Figures 1 and 2 of Li et al. (2020) show training
loss, test accuracy and dissimilarity (the variance of the devices' gradients) over 200 rounds, μ being 0 or 1; they
print no table. In words the authors say of 90 % stragglers on all their data that FedProx has 22 % more accuracy than
FedAvg on average (abstract), that IID data show no difference, and that μ = 1 is steadier the more devices differ.

Ambiguous: the scripts draw 1 to 19 epochs where the paper says up to E, and each seed of the generator gives other
sizes (8 000 to 22 000 rows). We take the scripts' epochs and several seeds. Runs that are done are kept in a folder
below `--out` and not repeated.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith (2020), "Federated optimization in heterogeneous networks",
section 5 and appendix C.1; their repository litian96/FedProx.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages

DEVICES, ASKED, EPOCHS, FEATURES, CLASSES = 30, 10, 20, 60, 10
DATA: dict[str, tuple[float, float] | None] = {
    "IID": None,
    "(0, 0)": (0, 0),
    "(0.5, 0.5)": (0.5, 0.5),
    "(1, 1)": (1, 1),
}
METRICS = ("training loss", "test accuracy", "dissimilarity")
READING = result_pages.Reading(across="(?P<line>.*), (?P<column>FedAvg.*|FedProx.*)")


class Method(NamedTuple):
    """What happens to stragglers, and the proximal term."""

    drops: bool
    mu: float


METHODS = {"FedAvg": Method(True, 0.0), "FedProx, μ = 0": Method(False, 0.0), "FedProx, μ = 1": Method(False, 1.0)}


def generate(between: tuple[float, float] | None, seed: int) -> tuple[ft.data.FederatedData, ft.data.FederatedData]:
    """(training rows, test rows) of every device, nine tenths and one, drawn as in the authors' scripts."""
    draws = np.random.RandomState(seed)
    sizes = draws.lognormal(4, 2, DEVICES).astype(int) + 50
    sd = np.arange(1, FEATURES + 1) ** -0.6
    rows: list[tuple[Tensor, Tensor]] = []
    if between is None:
        common_model = draws.normal(0, 1, (FEATURES, CLASSES)), draws.normal(0, 1, CLASSES)
        centres, models = np.zeros((DEVICES, FEATURES)), [common_model] * DEVICES
    else:
        alpha, beta = between
        model_means, input_means = draws.normal(0, alpha, DEVICES), draws.normal(0, beta, DEVICES)
        centres = np.stack([draws.normal(mean, 1, FEATURES) for mean in input_means])
        models = [(draws.normal(mean, 1, (FEATURES, CLASSES)), draws.normal(mean, 1, CLASSES)) for mean in model_means]
    for size, centre, (weight, bias) in zip(sizes, centres, models):
        x = centre + sd * draws.normal(size=(size, FEATURES))
        rows.append((torch.from_numpy(x), torch.from_numpy(np.argmax(x @ weight + bias, 1))))
    return ft.data.from_tensors(rows).split(0.9, seed=seed)


def stragglers(share: float, drops: bool) -> ft.Faults | None:
    """So many of the devices of a round, those of the smallest draws, are dropped or do 1 to 19 of 20 epochs."""

    def slow(keys: Tensor, ids: Tensor) -> Tensor:
        hit = torch.zeros(len(ids), dtype=torch.bool)
        order = ft.random.uniform(ft.random.fold_in(keys, 0), (), torch.float64).argsort()
        hit[order[: round(share * len(ids))]] = True
        return hit

    def part(keys: Tensor, ids: Tensor) -> Tensor:
        epochs = 1 + (ft.random.uniform(ft.random.fold_in(keys, 1)) * (EPOCHS - 1)).floor()
        return torch.where(slow(keys, ids), epochs / EPOCHS, 1.0)

    if share == 0:
        return None
    return ft.Faults(before=slow) if drops else ft.Faults(work=part)


def dissimilarity(data: ft.data.FederatedData, parameters: dict[str, Tensor]) -> float:
    """The mean over devices of ‖∇F_k − ∇f‖², f being the mean over all rows."""
    gradients = []
    for x, y in data:
        gap = (x @ parameters["weight"].mT + parameters["bias"]).softmax(1) - F.one_hot(y, CLASSES)
        gradients.append(torch.cat([(gap.mT @ x).flatten(), gap.sum(0)]) / len(x))
    each = torch.stack(gradients)
    whole = data.counts.to(each) @ each / data.counts.sum()
    return float((each - whole).square().sum(1).mean())


def course(name: str, level: float, method: Method, rounds: int, seed: int) -> dict[str, list[float]]:
    """The three metrics after every tenth round."""
    training, test = generate(DATA[name], seed)
    module = torch.nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    local = ft.gradient_descent(
        module, epochs=EPOCHS, batch_size=10, loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.01)
    )
    run = ft.Run(
        ft.fedprox(local, method.mu),
        ft.InProcess(training),
        cohort=ASKED,
        faults=stragglers(level, method.drops),
        seed=seed,
    )
    curves: dict[str, list[float]] = {metric: [] for metric in METRICS}
    every = max(1, rounds // 20)
    for done in run.rounds(rounds):
        if done.number % every == 0:
            loss = run.evaluate(training, {"loss": F.cross_entropy})["loss"].overall
            accuracy = run.evaluate(test, {"accuracy": ft.metrics.accuracy()})["accuracy"].overall
            for metric, value in zip(METRICS, (loss, accuracy, dissimilarity(training, done.server))):
                curves[metric].append(float(value))
    return curves


def kept(folder: Path | None, *setting: Any) -> dict[str, list[float]]:
    """The course of a run, from a file where it has been run before."""
    if folder is None:
        return course(*setting)
    name, level, method, rounds, seed = setting
    words = [name.strip("()").replace(", ", "_"), f"{level:.0%}", "drops" if method.drops else f"mu{method.mu:g}"]
    file = folder / ("-".join([*words, str(rounds), str(seed)]) + ".json")
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(course(*setting)))
    curves: dict[str, list[float]] = json.loads(file.read_text())
    return curves


def draw(curves: dict[str, dict[str, dict[str, list[float]]]], level: float) -> Figure:
    """A row of panels per metric, a column per data set; methods are colours."""
    figure, axes = common.subplots(
        len(METRICS), len(curves), figsize=(3.2 * len(curves), 7.5), sharex=True, squeeze=False
    )
    for column, (name, methods) in zip(axes.T, curves.items()):
        column[0].set_title(f"{name}, {level:.0%} stragglers")
        for axis, metric in zip(column, METRICS):
            for method, lines in methods.items():
                every = 200 // max(1, len(lines[metric]))
                axis.plot([every * (i + 1) for i in range(len(lines[metric]))], lines[metric], label=method)
            axis.set_ylabel(metric if axis in axes[:, 0] else "")
            if metric == "dissimilarity":
                axis.set_yscale("log")
        column[-1].set_xlabel("round")
    axes[0, 0].legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run all methods at all levels on all data sets, print what they end with and draw their course."""
    parser = common.arguments(__doc__)
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=DATA, help="data sets (default all)")
    parser.add_argument("--levels", type=float, nargs="*", default=[0.0, 0.5, 0.9], help="shares of stragglers")
    options = parser.parse_args(argv)
    rounds, names = (1, ["(1, 1)"]) if options.smoke else (200, options.data)
    levels = [0.9] if options.smoke else options.levels
    folder = None if options.out is None or options.smoke else Path(options.out) / "fedprox_runs"
    rows, figures = [], {}
    for level in levels:
        curves: dict[str, dict[str, dict[str, list[float]]]] = {}
        for name in names:
            for label, method in METHODS.items():
                if level == 0 and method.drops:
                    continue  # nobody is dropped: FedProx with μ = 0
                runs = [kept(folder, name, level, method, rounds, seed) for seed in range(options.seeds)]
                curves.setdefault(name, {})[label] = runs[0]
                for metric in METRICS:
                    values = [run[metric][-1] for run in runs]
                    rows.append(common.row(f"{name}, {level:.0%} stragglers, {label}", metric, values))
        figures[f"fedprox_{round(100 * level)}"] = draw(curves, level)
    common.show_rows("Synthetic data of FedProx", rows)
    common.finish("trials.fedprox", rows, options, lambda: figures)


if __name__ == "__main__":
    main()
