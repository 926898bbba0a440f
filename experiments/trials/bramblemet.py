"""Tides at four weather stations: multi-output processes by FedMGP beside mogptk's published errors.

Each station in the south of England is a client with a week of the water's depth, of which nine tenths of the rows at
random and a day of its own are to be predicted; errors are those of all these rows together, in metres. mogptk's
notebook prints them for three models of one such split (MAE, MAPE and RMSE: MOSM .2356, 11.34, .2949; CSM .2366, 11.38,
.2970; SM-LMC .2315, 11.22, .2942). Ours is the last one's model, two latent processes with spectral kernels that every
station weighs, by FedMGP with 80 inducing inputs; beside it each station alone with such kernels, and in one place
GPyTorch's multitask process, an `IndexKernel` times the same kernel. Kernels begin at the tide's 1.93 periods a day,
which the notebook names, and at twice that. A linear trend of each station is removed first, of all its rows as there.

The first seed's split is the notebook's, row by row (the 639 rows that are left are its number); other seeds are other
splits, and our spread is over these.

Source: github.com/GAMES-UChile/mogptk, commit ad47f2c, `examples/example_bramblemet.ipynb`, and its data in
`examples/data/bramblemet` (in no package: `git clone https://github.com/GAMES-UChile/mogptk`, and `--mogptk` with its
folder). Its notebooks of exchange rates, where MOGP papers have their other table, are too large for the copy that was
at hand; `wbml`, by which GPAR and OILMM read them, fetches its data from a server, and neither repository (wesselb/gpar
b196f05, wesselb/oilmm e121345) prints an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedmgp import models as fm
from experiments.trials import jura
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

STATIONS = {"bramblemet": 2, "cambermet": 6, "chimet": 7, "sotonmet": 4}  # the day of June 2020 that is missing
METHODS = ("FedMGP, spectral", "GPyTorch multitask, central", "each alone")
INDUCING, TIDE = 80, 1.93  # periods a day
PUBLISHED = {
    "mean absolute error": 0.231526,
    "mean absolute percentage error": 11.223486,
    "root mean squared error": 0.294165,
}
READING = result_pages.Reading(smaller="error")


class Depths(NamedTuple):
    """A station's week; depths without their trend in units of their standard deviation."""

    x: Tensor  # (n, 1) in days
    y: Tensor  # (n,)
    depth: Tensor  # (n,) in metres
    trend: Tensor  # (n,) likewise
    scale: float
    known: Tensor  # (n,) bool


def read(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(days of June 2020, metres) of each station's first week."""
    made = []
    for name in STATIONS:
        table = pd.read_csv(folder / f"{name}.csv.gz", low_memory=False)
        at = pd.to_datetime(table["Date"] + " " + table["Time"], format="%d/%m/%Y %H:%M")
        table = table.assign(at=at)[(at >= "2020-06-01") & (at < "2020-06-08")]
        table = table.assign(DEPTH=pd.to_numeric(table["DEPTH"], errors="coerce")).dropna(subset="DEPTH")
        days = (table["at"] - pd.Timestamp("2020-06-01")) / pd.Timedelta("1D")
        made.append((days.to_numpy(copy=True), table["DEPTH"].to_numpy(copy=True)))
    return made


def split(weeks: Sequence[tuple[np.ndarray, np.ndarray]], seed: int) -> list[Depths]:
    """Remove nine tenths at random, as mogptk draws them, and the station's day, both its midnights included."""
    made = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1 + seed)
        for (days, depth), missing in zip(weeks, STATIONS.values()):
            known = torch.ones(len(days), dtype=torch.bool)
            known[torch.randperm(len(days))[: int(0.9 * len(days))]] = False
            x, metres = (torch.as_tensor(each, dtype=fm.DTYPE) for each in (days, depth))
            known &= (x < missing - 1) | (x > missing)
            trend = torch.as_tensor(np.polyval(np.polyfit(days, depth, 1), days), dtype=fm.DTYPE)
            rest = metres - trend
            scale = float(rest[known].std())
            made.append(Depths(x[:, None], rest / scale, metres, trend, scale, known))
    return made


def spectral(shape: torch.Size, components: int) -> Any:
    """A spectral mixture that begins at the tide and at twice its frequency, a component each or a batch of them."""
    kernel = gpytorch.kernels.SpectralMixtureKernel(num_mixtures=components, batch_shape=shape).to(fm.DTYPE)
    frequencies = TIDE * torch.tensor([1.0, 2.0], dtype=fm.DTYPE)
    kernel.mixture_means = frequencies.reshape(kernel.mixture_means.shape)
    kernel.mixture_scales = torch.full_like(kernel.mixture_scales, 0.1)
    kernel.mixture_weights = torch.full_like(kernel.mixture_weights, 1 / components)
    return kernel


def federated(stations: Sequence[Depths], rounds: int) -> list[Tensor]:
    """Predicted means of all rows by FedMGP."""
    inducing = torch.linspace(0, 7, INDUCING, dtype=fm.DTYPE)[:, None]
    process = ConvolvedGP(inducing, spectral(torch.Size([2]), 1))
    data = ft.data.from_tensors([(each.x[each.known], each.y[each.known]) for each in stations])
    run = ft.run(ft.fedmgp(process, accept_disclosure=True), ft.InProcess(data), rounds=rounds)
    with torch.no_grad():
        return [fm.unit_model(run, k).marginals(each.x)[0] for k, each in enumerate(stations)]


class _Exact(gpytorch.models.ExactGP):
    """GPyTorch's multitask example with a task index."""

    def __init__(self, inputs: tuple[Tensor, ...], y: Tensor, likelihood: object, tasks: int) -> None:
        super().__init__(inputs, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), spectral(torch.Size(), 2)
        self.tasks = gpytorch.kernels.IndexKernel(num_tasks=tasks, rank=1)

    def forward(self, x: Tensor, task: Tensor) -> Any:
        covariance = self.covar_module(x).mul(self.tasks(task))
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance)


def central(stations: Sequence[Depths], steps: int) -> list[Tensor]:
    """Predicted means of all rows by an exact process of the stations in one place."""
    x, y = (torch.cat([getattr(each, name)[each.known] for each in stations]) for name in ("x", "y"))
    task = torch.cat([torch.full((int(each.known.sum()), 1), k) for k, each in enumerate(stations)])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    gp = _Exact((x, task), y, likelihood, len(stations)).to(fm.DTYPE)
    likelihood.noise = 0.05
    gp.tasks.covar_factor.data = torch.linspace(0.8, 1.0, len(stations), dtype=fm.DTYPE)[:, None]
    gp.tasks.raw_var.data = torch.full((len(stations),), -2.0, dtype=fm.DTYPE)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.05)
    with gpytorch.settings.fast_computations(False, False, False):
        for _ in range(steps):
            optimizer.zero_grad()
            (-objective(gp(x, task), y)).backward()
            optimizer.step()
        gp.eval()
        with torch.no_grad():
            return [gp(each.x, torch.full((len(each.x), 1), k)).mean for k, each in enumerate(stations)]


def errors(stations: Sequence[Depths], means: Sequence[Tensor]) -> dict[str, float]:
    """mogptk's three errors of the rows that are not known."""
    truth = torch.cat([each.depth[~each.known] for each in stations])
    guess = torch.cat([(each.trend + each.scale * mean)[~each.known] for each, mean in zip(stations, means)])
    gap = (guess - truth).abs()
    above = truth > 1e-6
    values = gap.mean(), 100 * (gap[above] / truth[above]).mean(), gap.square().mean().sqrt()
    return dict(zip(PUBLISHED, map(float, values)))


def predicted(stations: Sequence[Depths], rounds: int, steps: int) -> dict[str, list[Tensor]]:
    """Means of all rows of all stations by method."""
    alone = [central([each], steps)[0] for each in stations]
    return dict(zip(METHODS, (federated(stations, rounds), central(stations, steps), alone)))


def draw(stations: Sequence[Depths], means: Sequence[Tensor]) -> dict[str, Figure]:
    """Each station's week, what is known of it, and what FedMGP makes of it."""
    figure, axes = common.subplots(len(stations), 1, figsize=(8, 7), sharex=True)
    for axis, name, each, mean in zip(axes, STATIONS, stations, means):
        axis.plot(each.x[:, 0], each.depth, ".", ms=1.5, color="silver", label="to be predicted")
        axis.plot(each.x[each.known, 0], each.depth[each.known], ".", ms=3, color="black", label="known")
        axis.plot(each.x[:, 0], each.trend + each.scale * mean, lw=0.8, label="FedMGP")
        axis.set(ylabel=f"{name}, m")
    axes[-1].set(xlabel="days of June 2020")
    axes[0].legend(frameon=False, fontsize="small", ncols=3)
    return {"trials_bramblemet": figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Predict depths over splits and print the errors."""
    parser = common.arguments(__doc__)
    parser.add_argument("--mogptk", type=Path, default=Path("mogptk"), help="its folder (default mogptk)")
    options = parser.parse_args(argv)
    rounds, steps = (3, 3) if options.smoke else (60, 150)
    weeks = read(jura.in_mogptk(options.mogptk, "bramblemet"))
    splits = [split(weeks, seed) for seed in range(options.seeds)]
    means = [predicted(each, rounds, steps) for each in splits]
    rows = []
    for method in METHODS:
        runs = [errors(stations, found[method]) for stations, found in zip(splits, means)]
        rows += common.over_seeds(method, runs, None if method == METHODS[2] else PUBLISHED)
    known = sum(int(each.known.sum()) for each in splits[0])
    rows.append(common.Row("the notebook's split", "rows that are known", known))
    common.show_rows(f"Tides at four stations, {options.seeds} splits", rows, ".4f")
    common.finish("trials.bramblemet", rows, options, lambda: draw(splits[0], means[0][METHODS[0]]))


if __name__ == "__main__":
    main()
