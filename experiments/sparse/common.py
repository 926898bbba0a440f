"""What the experiments on sparse Bayesian models share: the lengths of chains, a timed run, what its chains say."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import arviz as az
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common


class Sizes(NamedTuple):
    """How long the chains are."""

    rounds: int
    sweeps: int
    chains: int


class Report(NamedTuple):
    """What a study found."""

    rows: list[common.Row]
    figures: dict[str, Figure]


def finish(name: str, reports: Sequence[Report], options: argparse.Namespace) -> None:
    """Write the rows of all studies, and draw their figures, as `common.finish` does."""
    rows = [row for report in reports for row in report.rows]
    common.finish(name, rows, options, lambda: {k: v for report in reports for k, v in report.figures.items()})


class Sampled(NamedTuple):
    """A finished run."""

    sampler: ft.Sampler
    run: ft.Run
    seconds: float

    def largest_r_hat(self, name: str) -> float:
        """Of the watched coefficients whose name begins so."""
        each = self.sampler.summary()["r_hat"]
        return float(each[each.index.str.startswith(name)].max())


def sample(
    algorithm: ft.Algorithm,
    data: ft.data.FederatedData,
    start: Tensor,
    rounds: int,
    burn_in: int,
    seed: int,
    watch: Callable[[ft.Round], dict[str, Tensor]],
) -> Sampled:
    """Run the chains over sites in this process, and keep what `watch` says of every round after the burn-in."""
    sampler, began = ft.Sampler(burn_in=burn_in, watch=watch), time.perf_counter()
    run = ft.run(algorithm, ft.InProcess(data), start, rounds=rounds, seed=seed, record=sampler)
    return Sampled(sampler, run, time.perf_counter() - began)


def shared(round: ft.Round) -> dict[str, Tensor]:
    """The global coefficients and their indicators."""
    return {"theta": round.server.variables.theta, "included": round.server.variables.prior.included}


def standardised(data: ft.data.FederatedData) -> ft.data.FederatedData:
    """Every site's columns with mean zero and standard deviation one."""
    return data.map(lambda y: (y - y.mean(0)) / y.std(0))


def share(part: Tensor, whole: Tensor) -> float:
    """How many of `whole` are in `part`; 0 where there are none."""
    return float((part & whole).sum() / whole.sum().clamp(min=1))


def largest_r_hat(draws: Tensor) -> float:
    """The largest rank-normalised R-hat of quantities `(C, T, q)` that are not the same in all draws.

    It is infinite if each chain stands still at a number of its own; quantities of so few draws that theirs is not
    defined are left out.
    """
    each = draws.movedim(-1, 0).numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        values = [float(az.rhat(chains)) for chains in each if chains.min() < chains.max()]
    return max((value for value in values if value == value), default=1.0)


def interval(draws: Tensor) -> Tensor:
    """The ends of 95 % of draws `(T, ...)`, `(2, ...)`."""
    return draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype), dim=0)
