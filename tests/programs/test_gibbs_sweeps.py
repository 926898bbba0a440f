"""Sweeps by the program for the CPU are those of torch's operations with the same random numbers."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from support.programs import reference
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.models.gibbs import gibbs_sweeps as sweeps, sparse
from fedtorch.models.gibbs._gaussian_conditional import elimination
from fedtorch.models.gibbs.gibbs_sweeps import Chains, Rows, SweepPrior, gibbs_sweeps
from fedtorch.programs import choice

pytest.importorskip("numba")


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
    ("clients", "chains", "size"), [(1, 1, 1), (3, 2, 3), (4, 4, 11), (1, 2, 16), (5, 7, 33), (0, 2, 3), (2, 0, 3)]
)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_against_cholesky_factors(
    clients: int, chains: int, size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = problem(clients, chains, size)
    with reference():
        wanted = gibbs_sweeps(*args, count)
    monkeypatch.setattr(sweeps, "_reference", lambda *a: pytest.fail("the reference draws"))
    for one, other in zip(gibbs_sweeps(*args, count), wanted):
        assert one.is_contiguous()
        # Condition numbers of some hundreds, over a few sweeps.
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_a_chain_does_not_see_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits alone, beside others and in several threads."""
    rows, heard, chains, keys = problem(11, 3, 5)
    whole = gibbs_sweeps(rows, heard, chains, keys, 3)
    assert torch.equal(chains.precision, 2 * torch.ones(11, 3, 5).double())  # what is given stays as it is
    for k in (0, 4, 10):
        one = tree.take((rows, heard, chains, keys), slice(k, k + 1))
        assert all(torch.equal(part[0], together[k]) for part, together in zip(gibbs_sweeps(*one, 3), whole))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, gibbs_sweeps(rows, heard, chains, keys, 3), whole))


def test_gamma_numbers_that_no_first_proposal_gives() -> None:
    """Shape parameters below one and odd ones, and many sweeps, in some of which a proposal is refused."""
    shapes = torch.tensor([0.01, 0.7, 1.0, 1.2, 1e6, torch.nan, torch.inf, -1.0]).double()
    rows, heard, chains, keys = problem(8, 3, 2)
    args = rows._replace(degrees=shapes), heard, chains, keys, 41
    found = gibbs_sweeps(*args).noise
    with reference(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "cholesky", lambda a: torch.linalg.cholesky_ex(a)[0])  # of NaN too
        wanted = gibbs_sweeps(*args).noise
    torch.testing.assert_close(found[:5], wanted[:5], rtol=1e-8, atol=0.0)
    assert bool(found[5:].isnan().all())


def test_the_same_numbers_after_a_fork() -> None:
    args = problem(11, 3, 5)
    here = gibbs_sweeps(*args, 3)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put([part.tolist() for part in gibbs_sweeps(*args, 3)]))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == [part.tolist() for part in here]


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
    monkeypatch.setattr(sweeps, "_reference", lambda *a: pytest.fail("the reference draws"))
    monkeypatch.setattr(sparse, "gaussian_conditional", lambda *a: pytest.fail("the sampler draws"))
    found = server()
    for one, other in zip(tree.leaves(found.variables), tree.leaves(wanted.variables)):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_program_runs_without_interception() -> None:
    """Other dtypes are of the reference, and derivatives."""
    rows, heard, chains, keys = problem(2, 1, 3)
    single = tree.map(lambda part: part.float(), (rows, heard, chains))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "_reference", lambda *a: "torch's")
        assert gibbs_sweeps(*single, keys, 1) == "torch's"
        asked = heard._replace(centre=heard.centre.clone().requires_grad_())
        assert gibbs_sweeps(rows, asked, chains, keys, 1) == "torch's"
        with torch.no_grad():
            assert isinstance(gibbs_sweeps(rows, asked, chains, keys, 1), Chains)
