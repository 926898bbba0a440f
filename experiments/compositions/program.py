"""A user's Pyro model of counts by expectation propagation, with posteriors of every client."""

from __future__ import annotations

import time

import pyro
import torch
from pyro.distributions import Normal, Poisson
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from fedtorch.federation.algorithms.ep import devices, settled
from fedtorch.models.hierarchical.pyro_factor import pyro_factor

COMPOSED = "Pyro model by EP, each clinic's posterior"
PARTS = "each clinic alone", "one model for all"
COEFFICIENTS = 2


def counts(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """Counts around a clinic's own level and slope, given the mean level, its spread and the mean slope."""
    level = pyro.sample("level", Normal(phi[0], phi[1].exp()))
    slope = pyro.sample("slope", Normal(phi[2], 0.3))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", Poisson((level + slope * x).exp()), obs=y)


def alone(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """The same for a clinic that has heard nobody: wide priors in the place of what is shared."""
    level, slope = (pyro.sample(name, Normal(0.0, 2.0)) for name in ("level", "slope"))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", Poisson((level + slope * x).exp()), obs=y)


def clinics(seed: int, count: int = 60) -> tuple[ft.data.FederatedData, Tensor]:
    """Four to nine rows each, and the true (level, slope) `(K, 2)`."""
    draw = lambda at, *shape: ft.random.normal(ft.random.fold_in(ft.random.key(seed), at), shape, torch.float64)
    truth = torch.stack([0.5 + 0.6 * draw(0, count), 0.8 + 0.3 * draw(1, count)], 1)
    rows = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for k, (level, slope) in enumerate(truth):
            x = draw(2 + k, 4 + k % 6)
            rows.append((x, torch.poisson((level + slope * x).exp())))
    return ft.data.from_tensors(rows), truth


def errors(seed: int, rounds: int) -> dict[str, float]:
    """Root mean squared error of the clinics' coefficients."""
    rows, truth = clinics(seed)
    distance = lambda found: float((found - truth).square().mean().sqrt())
    run, _ = fit(rows, rounds)
    block = rows.stack(range(len(rows)))
    wide = MultivariateNormal(torch.zeros(1).double(), torch.eye(1).double())
    nothing, one = torch.zeros(len(rows), 1, 1).double(), torch.ones(len(rows), 1).double()
    separate = pyro_factor(alone).model(wide).given(nothing, one, block)
    pooled = rows.pool()
    shared = pyro_factor(alone).model(wide).given(nothing[:1], one[:1], pooled.stack([0]))
    return {
        "each clinic alone": distance(separate.distribution().mean),
        "one model for all": distance(shared.distribution().mean),
        COMPOSED: distance(devices(run, tolerance=torch.inf).distribution().mean),
    }


def fit(rows: ft.data.FederatedData, rounds: int) -> tuple[ft.Run, float]:
    """A run, and how many seconds a round took for each clinic."""
    prior = MultivariateNormal(torch.tensor([0.0, -1.0, 0.0]).double(), torch.eye(3).double())
    model = pyro_factor(counts).model(prior, names=["mean level", "log sd of levels", "mean slope"])
    began = time.process_time()
    run = ft.run(ft.ep(model), ft.InProcess(rows), rounds=rounds, until=settled())
    return run, (time.process_time() - began) / run.number / len(rows)
