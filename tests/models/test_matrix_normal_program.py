"""What the server of HM1 computes by programs is what torch's operations give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.programs import reference
from torch import Tensor

from fedtorch import random, tree
from fedtorch.federation.algorithms.matrix_normal import noise
from fedtorch.federation.algorithms.matrix_normal.noise import Summary
from fedtorch.models import low_rank
from fedtorch.models.low_rank import LowRank
from fedtorch.programs import choice, matrix_normal as program

pytest.importorskip("numba")
SHAPES = [(100, 8, 64), (7, 3, 5), (7, 9, 7), (30, 8, 5), (1, 4, 1), (5, 8, 5), (9, 1, 3), (12, 40, 12), (0, 2, 3)]


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


def normal(seed: int, *shape: int) -> Tensor:
    return random.normal(random.key(seed), shape, torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def both(function: str, monkeypatch: pytest.MonkeyPatch, work: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What work gives by the program's function, which runs, and what by operations of torch."""
    called: list[str] = []
    original = getattr(program, function)
    with monkeypatch.context() as patch:
        patch.setattr(program, function, lambda *a: called.append(function) or original(*a))
        found = work(*args)
    assert called
    with reference():
        return found, work(*args)


def close(found: tree.Tree, wanted: tree.Tree, rtol: float = 1e-10) -> None:
    for one, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(("units", "columns", "rank"), SHAPES)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_covariances_of_factors(
    units: int, columns: int, rank: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of strided factors, cut down to their rank, and with more columns than rows."""
    factor = (normal(1, columns, units).mT * torch.logspace(0, -spread, columns, dtype=torch.float64))[:, :columns]
    found, wanted = both("factored", monkeypatch, LowRank.from_factor, number(0.2), factor, rank)
    close(found, wanted)
    gram = found.vectors.mT @ found.vectors
    close(gram, torch.diag((found.values > 0).double()) if rank >= min(units, columns) else gram.diag().diag())


def test_covariances_of_factors_that_are_special(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = normal(1, 20, 4)
    equal = torch.cat([draw, draw, torch.zeros(20, 2).double()], 1)
    for factor in (torch.zeros(5, 3).double(), equal, 1e150 * draw, 1e-170 * draw, 5e-324 * torch.ones(3, 2).double()):
        for rank in (2, 6):
            found, wanted = both("factored", monkeypatch, LowRank.from_factor, number(0.1), factor, rank)
            size = float(wanted.values.amax().clamp(min=1e-300))
            close((found.multiple, found.values / size), (wanted.multiple, wanted.values / size))
            assert ((found.values > 0) == (wanted.values > 0)).all()
            close(*((made.vectors * (made.values / size)) @ made.vectors.mT for made in (found, wanted)))
    with pytest.raises(RuntimeError, match=r"non-finite|converge"):
        LowRank.from_factor(number(0.1), draw * torch.nan, 2)
    with pytest.raises(RuntimeError, match=r"non-finite|converge"):
        LowRank.from_factor(number(0.1), draw / 0, 2)


@pytest.mark.parametrize(("units", "columns", "rank"), SHAPES[:-1])
@pytest.mark.parametrize("multiple", [1e-4, 1.0, 1e6])
@pytest.mark.parametrize("accuracy", [0.1, 0.001])
def test_majorised_priors(
    units: int, columns: int, rank: int, multiple: float, accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reference():
        covariance = LowRank.from_factor(number(multiple), normal(2, units, columns), rank)
    strided = covariance._replace(vectors=covariance.vectors.mT.contiguous().mT)
    theta = normal(3, 3, units).mT
    for each in (covariance, strided):
        found, wanted = both("majorised", monkeypatch, low_rank.majorised, each, theta, accuracy)
        size = float(low_rank.solve(covariance, theta).abs().max())  # what the shift is a difference of
        close((found[0], found[1] / size), (wanted[0], wanted[1] / size), rtol=1e-10 / min(multiple, 1.0))


def test_majorised_flat_priors(monkeypatch: pytest.MonkeyPatch) -> None:
    theta = normal(3, 4, 2)
    for covariance in (low_rank.identity(4, 3, float("inf")), low_rank.identity(4, 3, 2.0)):
        close(*both("majorised", monkeypatch, low_rank.majorised, covariance, theta))
    theta[1, 0] = torch.inf  # of a run that is about to end
    covariance = LowRank.from_factor(number(0.1), normal(4, 4, 2), 3)
    found, wanted = both("majorised", monkeypatch, low_rank.majorised, covariance, theta)
    assert torch.equal(found[1].isfinite(), wanted[1].isfinite())


def summaries(units: int, *, seed: int = 5) -> Summary:
    freedom = (torch.arange(units) % 4).double()
    return Summary(normal(seed, units).square() * freedom, freedom, normal(seed + 1, units).square())


@pytest.mark.parametrize("units", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("heard", [True, False])
def test_messages_to_devices(units: int, heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prior = normal(3, units).square(), normal(4, 3, units).mT
    which = torch.arange(units) % 3 == 1 if heard else None
    some, nothing = summaries(units), Summary(*torch.zeros(3, units, dtype=torch.float64))
    lying = some._replace(freedom=some.freedom - 4.0, residual=some.residual + 1.0)
    for told in (some, nothing, lying):
        close(*both("priors", monkeypatch, noise.priors, told, which, None, prior))


@pytest.mark.parametrize(("units", "answered"), [(1, [0]), (6, [0, 2, 5]), (6, []), (50, list(range(50)))])
@pytest.mark.parametrize("given", ["not", "one", "each"])
def test_messages_of_devices(given: str, units: int, answered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    variance = {"not": None, "one": 0.3, "each": normal(9, units).square()}[given]
    heard = torch.arange(units) % 3 == 1
    ids, told = torch.tensor(answered, dtype=torch.int64), summaries(max(len(answered), 1), seed=11)
    told = tree.take(told, slice(0, len(answered)))
    before = normal(7, units, 3), summaries(units), heard, ids, normal(8, 3, len(answered)).mT
    kept = tree.map(torch.clone, before)
    for fresh in (told, told._replace(spread=torch.zeros_like(told.spread))):
        found, wanted = both("renewed", monkeypatch, noise.renewed, *before, fresh, variance)
        close(found[:4], wanted[:4])
        assert (found.finite, found.units) == (wanted.finite, wanted.units)
        close((number(found.reach), found.typical), (number(wanted.reach), wanted.typical))
    assert all(torch.equal(*pair) for pair in zip(tree.leaves(before), tree.leaves(kept)))  # nothing is changed


def test_typical_variances_and_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, ids = torch.ones(5).bool(), torch.arange(5)
    for spread in (
        [1.0, 5.0, 2.0, 0.0, -1.0],
        [torch.nan, 1, 2, 3, 4],
        [0.0] * 5,
        [torch.inf] * 5,
        [1.0, 1.0, 1.0, 1, 3],
    ):
        fresh = summaries(5)._replace(spread=torch.tensor(spread, dtype=torch.float64))
        for variance in (2.0, torch.tensor([1.0, 2.0, torch.inf, 3.0, 1.0]).double()):
            told = normal(1, 5, 2), summaries(5), heard, ids, normal(2, 5, 2), fresh, variance
            found, wanted = both("renewed", monkeypatch, noise.renewed, *told)
            assert found.finite == wanted.finite
            close(found.typical, wanted.typical)
    with pytest.raises(IndexError, match="numbers of 5 devices"):
        noise.renewed(normal(1, 5, 2), summaries(5), heard, ids + 1, normal(2, 5, 2), summaries(5), None)


def test_single_precision_and_derivatives_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("factored", "majorised"):
        monkeypatch.setattr(program, function, lambda *a: pytest.fail("it knows float64 numbers alone"))
    factor = normal(1, 6, 2)
    made = LowRank.from_factor(number(0.1).float(), factor.float(), 2)
    low_rank.majorised(made, factor.float())
    LowRank.from_factor(number(0.1), factor.requires_grad_(), 2).dense().sum().backward()
    assert factor.grad is not None
