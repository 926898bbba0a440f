"""Sweeps in registers are those of Cholesky factors with the same random numbers."""

from __future__ import annotations

import pytest
import torch
from support.programs import launches, reference
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.models.gibbs import sparse
from fedtorch.models.gibbs._gaussian_conditional import elimination
from fedtorch.models.gibbs.gibbs_sweeps import Chains, Rows, SweepPrior, gibbs_sweeps
from fedtorch.random import philox


def problem(clients: int, chains: int, size: int) -> tuple[Rows, SweepPrior, Chains, Tensor]:
    normal = lambda seed, *shape: random.normal(random.key(seed), shape, torch.float64)
    x = normal(1, clients, size + 4, size)
    rows = Rows(
        x.mT @ x,
        normal(2, clients, size),
        normal(3, clients).square() + 1,
        torch.linspace(1.0, 9.0, clients, dtype=torch.float64),
    )
    shape = (clients, chains, size)
    heard = SweepPrior(normal(4, *shape), normal(5, *shape).square() + 0.5, normal(6, clients, chains).square() + 1)
    ones = torch.ones(shape, dtype=torch.float64)
    keys = random.fold_in(random.key(7), torch.arange(clients * chains).reshape(clients, chains))
    return rows, heard, Chains(0 * ones, 2 * ones, ones / 2, ones[..., 0]), keys


@pytest.mark.parametrize(("clients", "chains", "size"), [(1, 1, 1), (3, 2, 3), (1, 2, 16), (0, 2, 3)])
def test_against_cholesky_factors(clients, chains, size, device, monkeypatch) -> None:
    args = problem(clients, chains, size)
    sweeps = 1 if size == 16 else 3
    with reference():
        wanted = gibbs_sweeps(*args, sweeps)
    with launches(monkeypatch):
        found = gibbs_sweeps(*tree.to(args, device), sweeps)
    for one, other in zip(found, wanted):
        # Condition numbers of some hundreds, over a few sweeps.
        torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-11)


def test_a_chain_does_not_see_the_others(device) -> None:
    rows, heard, chains, keys = tree.to(problem(3, 1, 2), device)
    whole = gibbs_sweeps(rows, heard, chains, keys, 1)
    for k in (0, 2):
        one = tree.take((rows, heard, chains, keys), slice(k, k + 1))
        alone = gibbs_sweeps(*one, 1)
        assert all(torch.equal(part[0], together[k]) for part, together in zip(alone, whole))


def test_columns_that_are_alike(device) -> None:
    """A pivot of zero between others; powers of two round nowhere, so that the torch sampler says the same."""
    ones, key = torch.ones(1, 1, 4, dtype=torch.float64), random.key(7).reshape(1, 1)
    rows = Rows(torch.full((1, 4, 4), 2.0**60), ones[0] / 4, ones[0, :, 0], ones[0, :, 0])
    rows = Rows(*(each.double() for each in rows))
    heard, chains = SweepPrior(0 * ones, ones, ones[..., 0]), Chains(0 * ones, ones, ones, ones[..., 0])
    found = gibbs_sweeps(*tree.to((rows, heard, chains, key), device), 1)
    z = philox.normal(philox.folded(key, 0), (1, 4), torch.float64).reshape(4, 1)
    draw = elimination(rows.gram, rows.estimate, rows.rss, heard.centre)
    delta, _ = draw(torch.ones(1).double(), torch.ones(4, 1).double(), z)
    torch.testing.assert_close(found.deviation.cpu().reshape(4, 1), delta, rtol=1e-12, atol=1e-12)
    assert all(bool(part.isfinite().all()) for part in found)


def test_strides_and_many_coefficients(device, monkeypatch) -> None:
    rows, heard, chains, keys = tree.to(problem(1, 2, 2), device)
    strided = heard._replace(centre=heard.centre.mT.contiguous().mT)
    for one, other in zip(gibbs_sweeps(rows, strided, chains, keys, 1), gibbs_sweeps(rows, heard, chains, keys, 1)):
        assert torch.equal(one, other)
    wide = tree.to(problem(1, 1, 17), device)
    with launches(monkeypatch, at_least=0) as seen:
        gibbs_sweeps(*wide, 1)
    assert "gibbs_sweeps" not in seen


def test_the_sampler_uses_it(device, monkeypatch) -> None:
    x = random.normal(random.key(1), (3, 12, 2), torch.float64)
    y = x @ torch.tensor([1.0, 0.0], dtype=torch.float64) + 0.1 * random.normal(random.key(2), (3, 12), torch.float64)

    def server(device: str):
        data = ft.data.from_tensors(list(zip(x.to(device), y.to(device))))
        start = torch.zeros(2, dtype=torch.float64)
        algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(scale=1.0), sweeps=1, chains=1)
        return tree.to(ft.run(algorithm, ft.InProcess(data, device=device), rounds=2, parameters=start).server, "cpu")

    with reference():
        wanted = server("cpu")
    with launches(monkeypatch) as seen:
        found = server(device)
    assert "gibbs_sweeps" in seen
    for one, other in zip(tree.leaves(found.variables), tree.leaves(wanted.variables)):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
