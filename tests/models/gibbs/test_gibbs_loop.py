"""Sweeps by the program in C are those of torch's operations with the same random numbers."""

from __future__ import annotations

import pytest
import torch
from support.programs import reference
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.dispatch import choice, compiled
from fedtorch.kernels import gibbs_sweeps as sweeps
from fedtorch.kernels.gibbs_sweeps import Chains, Rows, SweepPrior, gibbs_sweeps
from fedtorch.models.gibbs import sparse
from fedtorch.models.gibbs._gaussian_conditional import elimination

pytestmark = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


def problem(clients: int, chains: int, size: int) -> tuple[Rows, SweepPrior, Chains, Tensor]:
    normal = lambda seed, *shape: random.normal(random.key(seed), shape, torch.float64)
    x = normal(1, clients, size + 4, size)
    degrees = torch.linspace(0.3, 9.0, clients, dtype=torch.float64)
    rows = Rows(x.mT @ x, normal(2, clients, size), normal(3, clients).square() + 1, degrees)
    shape = (clients, chains, size)
    heard = SweepPrior(normal(4, *shape), normal(5, *shape).square() + 0.5, normal(6, clients, chains).square() + 1)
    ones = torch.ones(shape, dtype=torch.float64)
    keys = random.fold_in(random.key(7), torch.arange(clients * chains).reshape(clients, chains))
    return rows, heard, Chains(0 * ones, 2 * ones, ones / 2, ones[..., 0]), keys


@pytest.mark.parametrize(
    ("clients", "chains", "size"), [(1, 1, 1), (3, 2, 3), (4, 4, 11), (1, 2, 16), (5, 1, 33), (0, 2, 3), (2, 0, 3)]
)
def test_against_cholesky_factors(clients: int, chains: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = problem(clients, chains, size)
    with reference():
        wanted = gibbs_sweeps(*args, 5)
    monkeypatch.setattr(sweeps, "_reference", lambda *a: pytest.fail("the reference draws"))
    for one, other in zip(gibbs_sweeps(*args, 5), wanted):
        assert one.is_contiguous()
        # Condition numbers of some hundreds, over a few sweeps.
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_a_chain_does_not_see_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits alone, beside others and in several threads."""
    rows, heard, chains, keys = problem(11, 3, 5)
    whole = gibbs_sweeps(rows, heard, chains, keys, 3)
    for k in (0, 4, 10):
        one = tree.take((rows, heard, chains, keys), slice(k, k + 1))
        assert all(torch.equal(part[0], together[k]) for part, together in zip(gibbs_sweeps(*one, 3), whole))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, gibbs_sweeps(rows, heard, chains, keys, 3), whole))


def test_strides() -> None:
    rows, heard, chains, keys = problem(2, 3, 4)
    strided = heard._replace(centre=heard.centre.mT.contiguous().mT, scale=heard.scale[:1, :1].expand(2, 3))
    plain = heard._replace(scale=strided.scale.contiguous())
    assert all(
        map(torch.equal, gibbs_sweeps(rows, strided, chains, keys, 2), gibbs_sweeps(rows, plain, chains, keys, 2))
    )


@pytest.mark.parametrize("beside", [0, 3])
def test_columns_that_are_alike(beside: int) -> None:
    """A pivot of zero, alone or beside others; powers of two round nowhere, so torch's sampler says the same."""
    count = 1 + beside
    ones, keys = (
        torch.ones(count, 1, 4, dtype=torch.float64),
        random.fold_in(random.key(7), torch.arange(count))[:, None],
    )
    gram = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    gram[0] = 2.0**60
    rows = Rows(gram, ones[:, 0] / 4, ones[:, 0, 0], ones[:, 0, 0])
    heard, chains = SweepPrior(0 * ones, ones, ones[..., 0]), Chains(0 * ones, ones, ones, ones[..., 0])
    found = gibbs_sweeps(rows, heard, chains, keys, 1)
    z = random.normal(random.fold_in(keys[:, 0], 0), (1, 4), torch.float64)[:, 0].mT
    delta, _ = elimination(rows.gram, rows.estimate, rows.rss, heard.centre)(ones[:, 0, 0], ones[:, 0].mT, z)
    torch.testing.assert_close(found.deviation[:, 0], delta.mT, rtol=1e-12, atol=1e-12)
    assert all(bool(part.isfinite().all()) for part in found)


@pytest.mark.parametrize("features", [2, 5])
def test_the_sampler_uses_it(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for sites of fewer rows than coefficients."""
    x = random.normal(random.key(1), (3, 12, features), torch.float64)
    y = x[..., 0] + 0.1 * random.normal(random.key(2), (3, 12), torch.float64)
    data = ft.data.from_tensors([(x[k, :n], y[k, :n]) for k, n in enumerate((12, 1, 3))])
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=3)

    def server() -> tree.Tree:
        return ft.run(algorithm, ft.InProcess(data), rounds=3, parameters=torch.zeros(features)).server

    with reference():
        wanted = server()
    called: list[int] = []
    original = sweeps.gibbs_loop.run
    monkeypatch.setattr(sweeps.gibbs_loop, "run", lambda *a: called.append(1) or original(*a))
    found = server()
    assert len(called) == 3
    for one, other in zip(tree.leaves(found.variables), tree.leaves(wanted.variables)):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
