"""HM1 for yes-or-no responses and counts: related devices, each with few rows.

Coefficients of related devices (Ω = BB'/3 + 0.01 I, shrunk so that log-odds and log rates are moderate). *HM1* with
`ft.least_squares(head, family=…)`; *HM2*, logistic or Poisson regression with normal coefficients by expectation
propagation; *alone*, maximum likelihood of each device, 8 steps of reweighted least squares, for where responses are
separated there is no maximum; *pooled*; and who knows Ω, the mode by HM1 with Ω held fixed. The error is the root mean
square of θ̂ − θ, "loss" the mean negative log-likelihood of fresh rows, "coverage" that of HM1's intervals of 90 %.

The paper names generalised linear models as a next step (section 7) and has no figures for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedlin.common import infer
from fedtorch.federation.algorithms.matrix_normal import devices
from fedtorch.models import hierarchical, low_rank
from fedtorch.models.device_posterior import interval
from fedtorch.models.hierarchical import generalised
from fedtorch.models.matrix_normal import inverse_wishart

LEVEL, SIZE, NEWTON = 0.9, 0.8, 8
MODELS = {"logistic": generalised.logistic, "poisson": generalised.poisson}
METHODS = ("HM1", "HM2", "alone", "pooled", "knows Ω")
READING = result_pages.Reading(smaller="error|loss", across="(?P<line>[^,]*), (?P<column>.*)")


def responses(family: str, eta: Tensor, generator: torch.Generator) -> Tensor:
    """Draw responses at linear predictors."""
    if family == "logistic":
        return torch.bernoulli(eta.sigmoid(), generator=generator)
    return torch.poisson(eta.exp(), generator=generator)


def simulate(
    family: str, units: int, d: int, rows: int, seed: int
) -> tuple[ft.data.FederatedData, ft.data.FederatedData, Tensor, low_rank.LowRank]:
    """Training rows, 200 fresh rows of every device, Θ and Ω."""
    generator = torch.Generator().manual_seed(60_000 + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    multiple, factor = torch.tensor(0.01 * SIZE**2).double(), SIZE * draw(units, 3) / (3 * d) ** 0.5
    theta = factor @ draw(3, d) + multiple.sqrt() * draw(units, d)
    parts = []
    for size in (rows, 200):
        x = draw(units, size, d)
        y = responses(family, (x @ theta[..., None])[..., 0].clamp(max=4), generator)
        parts.append(ft.data.from_tensors(list(zip(x, y))))
    return parts[0], parts[1], theta, low_rank.LowRank.from_factor(multiple, factor, 3)


def loss(family: str, test: ft.data.FederatedData, theta: Tensor) -> float:
    """The mean negative log-likelihood, of counts without the part that has no θ."""
    total = []
    for (x, y), own in zip(test, theta):
        eta = x @ own
        total.append((torch.nn.functional.softplus(eta) if family == "logistic" else eta.exp()) - y * eta)
    return float(torch.stack(total).mean())


def compare(family: str, units: int, d: int, rows: int, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Errors and losses by method."""
    data, test, theta, omega = simulate(family, units, d, rows, seed)
    head = ft.LinearHead(d, intercept=False, dtype=torch.float64)
    local, population = ft.least_squares(head, family=family), ft.InProcess(data)
    few = ft.least_squares(head, family=family, steps=NEWTON)
    run = ft.run(ft.matrix_normal(local), population, rounds=rounds)
    told = ft.run(
        ft.matrix_normal(local, covariance=inverse_wishart()._replace(update=lambda *_: omega)),
        population,
        rounds=rounds,
    )
    _, marginals = infer(MODELS[family](hierarchical.normal(d)), data)
    alone = ft.run(ft.separate(few), population, rounds=1).tensors()["coefficients"]
    pooled = ft.run(ft.pooled(few), ft.InProcess(data.pool()), rounds=1).tensors()["coefficients"]
    estimates = (run.server.parameters, marginals.mean, alone, pooled.expand_as(theta), told.server.parameters)
    found = {
        name: {"error": float((each - theta).square().mean().sqrt()), "loss": loss(family, test, each)}
        for name, each in zip(METHODS, estimates)
    }
    low, high = interval(devices(run).marginals(), LEVEL)
    found["HM1"]["coverage"] = float(((low < theta) & (theta < high)).double().mean())
    return found


def draw(rows: Sequence[common.Row]) -> Figure:
    """Errors of all methods in both families."""
    figure, axis = common.subplots(figsize=(5.6, 3.6))
    for i, family in enumerate(MODELS):
        those = [next(r for r in rows if r.setting == f"{name}, {family}" and r.metric == "error") for name in METHODS]
        places = [place + 0.16 * (i - 0.5) for place in range(len(METHODS))]
        axis.errorbar(places, [r.ours for r in those], [r.sd or 0.0 for r in those], fmt="o", capsize=3, label=family)
    axis.set_xticks(range(len(METHODS)), METHODS)
    axis.set_yscale("log")
    axis.set_ylabel("RMSE of coefficients, ± sd over runs")
    axis.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Both families over simulated federations."""
    options = common.arguments(__doc__).parse_args(argv)
    sizes = (10, 3, 20, 8) if options.smoke else (60, 4, 30, 40)
    rows = []
    for family in MODELS:
        runs = [compare(family, *sizes, seed) for seed in range(options.seeds)]
        for name in METHODS:
            rows += common.over_seeds(f"{name}, {family}", [run[name] for run in runs])
    common.show_rows(f"Generalised linear models, {options.seeds} runs", rows)
    common.finish("fedlin.generalised", rows, options, lambda: {"fedlin_generalised": draw(rows)})


if __name__ == "__main__":
    main()
