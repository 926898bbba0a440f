"""Log densities of counts against 60 digits, of counts from none to a thousand million."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mpmath
import pytest
import torch
from torch import Tensor

from fedtorch.models import counts

COUNTS = (0.0, 1.0, 7.0, 999.0, 1001.0, 1e5, 1e9)
AWAY = (-30.0, -0.9, 0.0, 1e-4, 1.5, 5.0)


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def near(y: float) -> Iterator[float]:
    return (math.log(max(y, 1.0)) + away for away in AWAY)


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mpmath.workdps(60):
        yield


def same(found: Tensor, exact: mpmath.mpf, within: float) -> None:
    assert abs(float(found) - float(exact)) <= within * max(1.0, abs(float(exact)))


@pytest.mark.parametrize("y", COUNTS)
def test_poisson(y: float) -> None:
    for eta in near(y):
        exact = mpmath.mpf(y) * eta - mpmath.exp(mpmath.mpf(eta)) - mpmath.loggamma(mpmath.mpf(y) + 1)
        same(counts.poisson(one(y), one(eta)), exact, 1e-11)


@pytest.mark.parametrize("y", COUNTS)
@pytest.mark.parametrize("trials", [lambda y: y, lambda y: y + 1, lambda y: 2 * y + 3, lambda y: 100 * y + 7])
def test_binomial(y: float, trials: object) -> None:
    n = trials(y)  # type: ignore[operator]
    for away in AWAY:
        eta = math.log((y + 0.5) / (n - y + 0.5)) + away
        exact = mpmath.log(mpmath.binomial(mpmath.mpf(n), mpmath.mpf(y))) + mpmath.mpf(y) * eta
        exact -= mpmath.mpf(n) * mpmath.log(1 + mpmath.exp(mpmath.mpf(eta)))
        same(counts.binomial(one(y), one(eta), one(n)), exact, 1e-11)


@pytest.mark.parametrize("y", COUNTS)
@pytest.mark.parametrize("log_r", [-5.0, 0.0, 3.0, 25.0])
def test_negative_binomial(y: float, log_r: float) -> None:
    size, r = mpmath.mpf(y), mpmath.exp(mpmath.mpf(log_r))
    ways = mpmath.loggamma(size + r) - mpmath.loggamma(r) - mpmath.loggamma(size + 1) + r * log_r
    for eta in near(y):
        exact = ways + size * eta - (size + r) * mpmath.log(r + mpmath.exp(mpmath.mpf(eta)))
        same(counts.negative_binomial(one(y), one(eta), one(log_r)), exact, 1e-8)


def test_slopes_are_those_of_the_densities() -> None:
    """Also where no count was seen, and beyond where ratios are expanded."""
    y, r = torch.tensor([0.0, 3.0, 3.0, 40.0]).double(), torch.tensor(0.7).double()
    eta = torch.tensor([-1.0, 1.0, 6.0, 3.0]).double().requires_grad_()
    p = eta.sigmoid()
    cases = (
        (counts.poisson(y, eta), y - eta.exp()),
        (counts.binomial(y, eta, y + 2), y - (y + 2) * p),
        (counts.negative_binomial(y, eta, r), y - (y + r.exp()) * (eta - r).sigmoid()),
    )
    for value, slope in cases:
        torch.testing.assert_close(torch.autograd.grad(value.sum(), eta)[0], slope, rtol=1e-9, atol=1e-9)
