"""Cadmium in the Swiss Jura from nickel and zinc: multi-output processes by FedMGP, beside GPyTorch's in one place.

At 259 places three metals were measured; at 100 others nickel and zinc are known and cadmium is to be predicted, scored
by the mean absolute error in mg/kg. Each metal is a client, as laboratories would be: FedMGP with convolved processes
and with a linear model of coregionalisation, two latent processes of 80 inducing inputs each. Beside them cadmium
alone, and in one place GPyTorch's own multitask example, an `IndexKernel` of rank 1 times an RBF kernel trained by 100
steps of Adam. What is done to the concentrations first differs between sources, so both readings are run:
concentrations, standardised; and their logarithms, standardised, whose predictions' medians are scored. A seed is
another draw of inducing inputs and another start of weights.

The task is that of Wilson, Knowles and Ghahramani (2012), "Gaussian process regression networks", Table 1; the paper
was not at hand, so that none of its figures stands here. Data: Goovaerts (1997); `git clone
https://github.com/GAMES-UChile/mogptk`, and `--mogptk` with its folder (rows 260 to 359 are the validation set). The
Exchange table is left out: its file is on a server only, in no package.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedmgp import models as fm
from fedtorch.models.gaussian_process import ConvolutionProcess, ConvolvedGP
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

METALS = ("Cd", "Ni", "Zn")
OBSERVED, LATENTS, INDUCING = 259, 2, 80
METHODS = ("cadmium alone", "GPyTorch multitask, central", "FedMGP, coregionalised", "FedMGP, convolved")
READING = result_pages.Reading(smaller="error")


class Metals(NamedTuple):
    """Standardised outputs of the metals and where they were measured."""

    x: list[Tensor]  # (N_m, 2) each, cadmium first
    y: list[Tensor]  # (N_m,) each
    at: Tensor  # (100, 2) where cadmium is to be predicted
    truth: Tensor  # (100,) in mg/kg
    location: float  # of cadmium
    scale: float
    logarithms: bool

    def concentration(self, mean: Tensor) -> Tensor:
        """Cadmium in mg/kg of predictions on the scale of `y`."""
        value = self.location + self.scale * mean
        return value.exp() if self.logarithms else value


def read(file: Path) -> tuple[Tensor, Tensor]:
    """(places `(359, 2)` in km, concentrations `(359, 3)` in mg/kg)."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    table = torch.tensor([[float(row[name]) for name in ("X", "Y", *METALS)] for row in rows], dtype=fm.DTYPE)
    return table[:, :2], table[:, 2:]


def metals(x: Tensor, y: Tensor, logarithms: bool) -> Metals:
    """Cadmium at the first places, the others everywhere, each standardised by what is known of it."""
    values = y.log() if logarithms else y
    outputs = [values[:OBSERVED, 0], values[:, 1], values[:, 2]]
    location, scale = float(outputs[0].mean()), float(outputs[0].std())
    standard = [(each - each.mean()) / each.std() for each in outputs]
    places = [x[:OBSERVED], x, x]
    return Metals(places, standard, x[OBSERVED:], y[OBSERVED:, 0], location, scale, logarithms)


def federated(data: Metals, convolved: bool, seed: int, rounds: int) -> Tensor:
    """Predicted means of cadmium by FedMGP of the three metals."""
    keys = ft.random.fold_in(ft.random.key(seed), torch.arange(2))
    inducing = data.x[1][ft.random.choice(keys[0], len(data.x[1]), INDUCING)]
    rbf = gpytorch.kernels.RBFKernel(ard_num_dims=2, batch_shape=torch.Size([LATENTS]))
    process = ConvolvedGP(inducing, ConvolutionProcess(2, LATENTS) if convolved else rbf)
    weight = process.kernel.weight
    weight.data = weight.detach() + 0.3 * ft.random.normal(keys[1], (LATENTS,)).to(weight)
    algorithm = ft.fedmgp(process, accept_disclosure=True)
    run = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(list(zip(data.x, data.y)))), rounds=rounds)
    with torch.no_grad():
        return fm.unit_model(run, 0).marginals(data.at)[0]


class _Exact(gpytorch.models.ExactGP):
    """GPyTorch's multitask example with a task index, or one task."""

    def __init__(self, inputs: tuple[Tensor, ...], y: Tensor, likelihood: object) -> None:
        super().__init__(inputs, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.RBFKernel(ard_num_dims=2)
        self.tasks = gpytorch.kernels.IndexKernel(num_tasks=len(METALS), rank=1)

    def forward(self, x: Tensor, task: Tensor) -> object:
        covariance = self.covar_module(x).mul(self.tasks(task))
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)


def central(data: Metals, some: Sequence[int], steps: int) -> Tensor:
    """Predicted means of cadmium by an exact process of some of the metals in one place, as GPyTorch's example does."""
    x, y = torch.cat([data.x[k] for k in some]), torch.cat([data.y[k] for k in some])
    task = torch.cat([torch.full((len(data.x[k]), 1), k) for k in some])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    gp = _Exact((x, task), y, likelihood).to(fm.DTYPE)
    start = torch.linspace(0.5, 1.0, len(METALS), dtype=fm.DTYPE)[:, None]
    gp.tasks.covar_factor.data, gp.tasks.raw_var.data = start, torch.zeros(len(METALS), dtype=fm.DTYPE)
    objective, optimizer = (
        gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp),
        torch.optim.Adam(gp.parameters(), lr=0.1),
    )
    with gpytorch.settings.fast_computations(False, False, False):
        for _ in range(steps):
            optimizer.zero_grad()
            (-objective(gp(x, task), y)).backward()
            optimizer.step()
        gp.eval()
        with torch.no_grad():
            return gp(data.at, torch.zeros(len(data.at), 1, dtype=torch.long)).mean


def errors(data: Metals, seed: int, rounds: int, steps: int) -> dict[str, Tensor]:
    """Absolute errors of cadmium `(100,)` by method."""
    means = {
        METHODS[2]: federated(data, False, seed, rounds),
        METHODS[3]: federated(data, True, seed, rounds),
    }
    if seed == 0:
        means |= {METHODS[0]: central(data, [0], steps), METHODS[1]: central(data, range(len(METALS)), steps)}
    return {name: (data.concentration(mean) - data.truth).abs() for name, mean in means.items()}


def draw(rows: Sequence[common.Row]) -> Figure:
    """Errors by method and reading."""
    figure, axis = common.subplots(figsize=(8, 3.6))
    for i, reading in enumerate(("concentrations", "logarithms")):
        found = [row for row in rows if row.setting == f"{reading}, {row.setting.partition(', ')[2]}"]
        found = [row for row in found if row.metric == "mean absolute error"]
        places = [METHODS.index(row.setting.partition(", ")[2]) + 0.2 * i - 0.1 for row in found]
        axis.errorbar(places, [row.ours for row in found], [row.sd or 0.0 for row in found], fmt="o", label=reading)
    axis.set_xticks(range(len(METHODS)), [name.replace(", ", ",\n") for name in METHODS])
    axis.set_ylabel("mean absolute error of cadmium, mg/kg")
    axis.legend(frameon=False, fontsize="small")
    return figure


def in_mogptk(folder: Path, name: str) -> Path:
    """The path of data of mogptk's repository; exit with how to get them where there are none."""
    path = folder / "examples" / "data" / name
    if not path.exists():
        raise SystemExit(
            f"The data are not in {path}: git clone https://github.com/GAMES-UChile/mogptk, then --mogptk with its "
            "folder"
        )
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Predict cadmium in both readings over seeds and print the errors."""
    parser = common.arguments(__doc__)
    parser.add_argument("--mogptk", type=Path, default=Path("mogptk"), help="its folder (default mogptk)")
    options = parser.parse_args(argv)
    x, y = read(in_mogptk(options.mogptk, "jura.csv"))
    rounds, steps = (3, 3) if options.smoke else (60, 100)
    rows, spread = [], []
    for reading in ("concentrations", "logarithms"):
        data = metals(x, y, reading == "logarithms")
        runs = [errors(data, seed, rounds, steps) for seed in range(options.seeds)]
        for name in METHODS:
            found = [run[name] for run in runs if name in run]
            setting = f"{reading}, {name}"
            rows.append(common.row(setting, "mean absolute error", [float(each.mean()) for each in found]))
            spread.append(common.Row(setting, "its standard error over the 100 places", float(found[0].std() / 10)))
    common.show_rows(f"Cadmium in the Jura, {options.seeds} seeds", rows, ".4f")
    common.finish("trials.jura", [*rows, *spread], options, lambda: {"trials_jura": draw(rows)})


if __name__ == "__main__":
    main()
