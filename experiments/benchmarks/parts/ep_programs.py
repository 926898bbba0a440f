"""Pyro programs of clients with few rows each, by expectation propagation: what a client costs in a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pyro
import torch
from pyro.distributions import LogNormal, Normal, Poisson, StudentT
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from experiments import common
from experiments.compositions import program as page
from fedtorch.models.hierarchical.pyro_factor import pyro_factor

Program = Callable[[Tensor, Tensor, Tensor], None]


def level_of(phi: Tensor) -> Tensor:
    """A client's own level, given their mean and spread."""
    return pyro.sample("level", Normal(phi[0], phi[1].exp()))


def slope_of(phi: Tensor) -> Tensor:
    """A client's own slope, given their mean."""
    return pyro.sample("slope", Normal(phi[2], 0.3))


def one_latent(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """Counts around a client's own level."""
    level = level_of(phi)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", Poisson((level + phi[2] * x).exp()), obs=y)


def three_latents(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """Counts around a client's own level, slope and bend."""
    level, slope, bend = level_of(phi), slope_of(phi), pyro.sample("bend", Normal(0.0, 0.3))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", Poisson((level + slope * x + bend * x.square()).clamp(max=20).exp()), obs=y)


def student(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """Errors of long tails."""
    level, slope = level_of(phi), slope_of(phi)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", StudentT(4.0, level + slope * x, 0.5), obs=y)


def own_scale(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """Normal errors of a client's own size."""
    level, scale = level_of(phi), pyro.sample("scale", LogNormal(phi[2], 0.5))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", Normal(level + x, scale), obs=y)


def student_own_scale(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """Errors of long tails and of a client's own size."""
    level, scale = level_of(phi), pyro.sample("scale", LogNormal(phi[2], 0.5))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", StudentT(4.0, level + x, scale), obs=y)


def three_with_scale(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """A client's own level, slope and size of errors, all but unknown with four rows."""
    level, slope, scale = level_of(phi), slope_of(phi), pyro.sample("scale", LogNormal(phi[3], 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", Normal(level + slope * x, scale), obs=y)


def student_three(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """The same with errors of long tails."""
    level, slope, scale = level_of(phi), slope_of(phi), pyro.sample("scale", LogNormal(phi[3], 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", StudentT(3.0, level + slope * x, scale), obs=y)


PROGRAMS: dict[str, tuple[Program, int, bool]] = {
    "counts, level and slope (the page's)": (page.counts, 3, True),
    "counts, level": (one_latent, 3, True),
    "counts, level, slope and bend": (three_latents, 3, True),
    "Student t, level and slope": (student, 3, False),
    "normal, level and own scale": (own_scale, 3, False),
    "Student t, level and own scale": (student_own_scale, 3, False),
    "normal, level, slope and own scale": (three_with_scale, 4, False),
    "Student t, level, slope and own scale": (student_three, 4, False),
}


def clients(count: int, counts: bool) -> ft.data.FederatedData:
    """Four to nine rows each: counts, or numbers with errors of Student's t."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    rows = []
    for k in range(count):
        x = draw(4 + k % 6)
        eta = 0.5 + 0.6 * draw(1) + (0.8 + 0.3 * draw(1)) * x
        errors = draw(len(x), 5)
        long_tailed = eta + 0.5 * errors[:, 0] / errors[:, 1:].square().mean(1).sqrt()
        rows.append((x, torch.poisson(eta.exp(), generator=generator) if counts else long_tailed))
    return ft.data.from_tensors(rows)


def measured(count: int, rounds: int) -> list[common.Row]:
    """Processor milliseconds of a client in the first two rounds, whose cavities are wide, and in later ones."""
    found = []
    for name, (program, size, counts) in PROGRAMS.items():
        mean = torch.tensor([0.0, -1.0, 0.0, 0.0][:size], dtype=torch.float64)
        model = pyro_factor(program).model(MultivariateNormal(mean, torch.eye(size, dtype=torch.float64)))
        run = ft.Run(ft.ep(model), ft.InProcess(clients(count, counts)))
        spent = [1000 * common.seconds(run.step, time.process_time) / count for _ in range(rounds)]
        title = f"EP of a Pyro program, K = {count}: {name}"
        found.append(common.Row(title, "processor ms a client and round, first two (target 10)", sum(spent[:2]) / 2))
        found.append(common.Row(title, "the same, later rounds (median)", statistics.median(spent[2:])))
    return found
