"""A run by programs is the run by operations of torch: the same bits of whole numbers, and rounding of the others.

Threads and forks change no bit. Clients have one row, an odd number of them or two.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.programs import reference
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse
from fedtorch.programs import Program, choice, threads

pytest.importorskip("numba")
SIZES, FEATURES = (9, 1, 2, 7, 3), 3


class Kind(NamedTuple):
    """A run, what it is run by, and how far rounding goes through its rounds."""

    algorithm: Callable[[torch.dtype], ft.Algorithm]
    programs: set[str]
    close: float  # of numbers of order one; 0 where bits are the same
    dtype: torch.dtype = torch.float64
    parameters: object = None


def descent(module: nn.Module, loss: Callable[..., Tensor]) -> Callable[[torch.dtype], ft.Algorithm]:
    settings: Any = {"epochs": 2, "batch_size": 2, "loss": loss, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    return lambda dtype: ft.fedavg(ft.gradient_descent(module.to(dtype), **settings))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(-2))


def sampler(dtype: torch.dtype) -> ft.Algorithm:
    return ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=3)


DRAWS = {"draw_integers", "draw_coins", "fold_keys"}
KINDS = {
    "words": Kind(descent(network(), F.mse_loss), DRAWS, 0.0),
    "words, float32": Kind(descent(network(), F.mse_loss), DRAWS, 0.0, torch.float32),
    "steps": Kind(descent(ft.LinearHead(FEATURES), F.mse_loss), DRAWS | {"take_steps"}, 1e-12),
    "steps, float32": Kind(descent(ft.LinearHead(FEATURES), F.mse_loss), {"take_steps"}, 1e-5, torch.float32),
    "sweeps, exact sums, the server's draws": Kind(
        sampler,
        {"sweep_tiles", "write_limbs", "write_values", "write_about", "write_moves", "write_scales"},
        1e-8,
        parameters=torch.zeros(FEATURES).double(),
    ),
    "variance components": Kind(
        lambda dtype: ft.ep(hierarchical.linear(hierarchical.normal(FEATURES))),
        {"write_log_densities", "write_scores"},
        1e-8,
    ),
    "HM1": Kind(
        lambda dtype: ft.matrix_normal(ft.least_squares(ft.LinearHead(FEATURES, intercept=False, dtype=dtype))),
        {"write_majorised", "write_renewed", "write_priors"},
        1e-8,
    ),
}


def data(dtype: torch.dtype) -> ft.data.FederatedData:
    """Rows that do not lie next to each other."""
    x = [random.uniform(random.key(size), (FEATURES, size), torch.float64).mT.to(dtype) - 0.5 for size in SIZES]
    return ft.data.from_tensors([(rows, rows.sum(1) + 0.1 * rows[:, 0] ** 2) for rows in x])


def result(kind: Kind) -> list[Tensor]:
    """What a run ends at: the clients of a round, who of them answers, and their batches are drawn."""
    algorithm = kind.algorithm(kind.dtype)
    run = ft.run(
        algorithm,
        ft.InProcess(data(kind.dtype)),
        kind.parameters,
        rounds=4,
        faults=ft.dropouts(0.2),
        cohort=4,
        progress=False,
    )
    # Limbs of the sampler's sums are digits, of which any may differ where a number's last bit does.
    return tree.leaves(run.server.variables if kind.algorithm is sampler else run.server)


@contextmanager
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The programs that are called inside."""
    names: set[str] = set()
    original = Program.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Program, "__call__", lambda self, *a: names.add(self.name) or original(self, *a))
        yield names


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_on_is_off(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")
    with called(monkeypatch) as names:
        found = result(kind)
    assert kind.programs <= names
    with reference(), called(monkeypatch) as names:
        wanted = result(kind)
    assert names == set()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=kind.close, atol=kind.close)

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put([part.tolist() for part in result(kind)]))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == [part.tolist() for part in found]

    monkeypatch.setattr(threads, "ENOUGH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert all(map(torch.equal, result(kind), found))
