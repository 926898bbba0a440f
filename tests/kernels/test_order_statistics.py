"""Medians and trimmed means by bisection are those of sorted values."""

from __future__ import annotations

import pytest
import torch
from support.programs import launches, reference
from torch import Tensor

from fedtorch import random
from fedtorch.kernels import order_statistics
from fedtorch.kernels.order_statistics import median, trimmed_mean

# The interpreter computes with NumPy, which tells of Inf − Inf; the device does not.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
SHAPES = [(1, 3), (7, 2, 3), (4, 0), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 5), (10, 1)))]


def messages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers with ties, zeros of both signs and infinities."""
    values = random.normal(random.key(1), shape, dtype)
    values[:, ..., :2] = values[:, ..., :2].round()
    values.flatten()[::17] = torch.inf
    values.flatten()[5::19] = -torch.inf
    values.flatten()[3::7] = -0.0
    return values


def shares(count: int) -> dict[str, Tensor]:
    weights = random.uniform(random.key(2), (count,), torch.float64) + 0.1
    few = torch.ones(count, dtype=torch.float64)
    few[0] = 2.0 * count  # one that has most of the weight
    return {
        name: weight / weight.sum()
        for name, weight in (("equal", torch.ones_like(few)), ("any", weights), ("one", few))
    }


def compare(value: Tensor, share: Tensor, device: str, fractions: tuple[float, ...]) -> None:
    with reference():
        wanted = [median(value, share), *(trimmed_mean(value, share, fraction) for fraction in fractions)]
    here, weight = value.to(device), share.to(device)
    found = [median(here, weight), *(trimmed_mean(here, weight, fraction) for fraction in fractions)]
    torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=0, atol=0, equal_nan=True)
    for one, other in zip(found[1:], wanted[1:]):
        # Ends cut by rounding of the summed weights weigh up to 1e-16 / (1 − 2 · 0.49), and values are a few units.
        torch.testing.assert_close(one.cpu(), other, rtol=1e-13, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_sorting(shape, device, monkeypatch) -> None:
    value = messages(shape, torch.float32)
    with launches(monkeypatch, at_least=8):
        for name, share in shares(shape[0]).items():
            compare(value, share, device, (0.0, 0.2, 0.49) if name == "any" else (0.2,))


def test_double_precision(device) -> None:
    compare(messages((6, 4), torch.float64), shares(6)["any"], device, (0.1,))


def test_several_programs(device, monkeypatch) -> None:
    monkeypatch.setattr(order_statistics, "_SIZE", 64)  # bytes: two columns of eight messages
    compare(messages((7, 5), torch.float32), shares(7)["any"], device, (0.2,))


def test_against_the_definition(device) -> None:
    value = messages((9, 6), torch.float64).nan_to_num(posinf=3.0, neginf=-3.0).to(device)
    equal = torch.full((9,), 1 / 9, dtype=torch.float64, device=device)
    assert torch.equal(median(value, equal), value.median(0).values)
    ordered = value.sort(0).values[2:-2]
    torch.testing.assert_close(trimmed_mean(value, equal, 2 / 9), ordered.mean(0), rtol=1e-13, atol=1e-13)
    even = torch.full((4,), 0.25, dtype=torch.float64, device=device)
    four = torch.tensor([[4.0], [1.0], [3.0], [100.0]], device=device)
    assert median(four, even).tolist() == [3.5]


def test_nan_counts_as_the_greatest(device) -> None:
    value = torch.tensor([[1.0, torch.nan], [2.0, torch.nan], [torch.nan, torch.nan], [0.5, 0.0], [4.0, 1.0]])
    for sign in (1.0, -1.0):  # of NaN's bits
        given, share = (value * sign).abs().where(value.isfinite(), value * sign), torch.full((5,), 0.2).double()
        with reference():
            wanted = median(given, share), trimmed_mean(given, share, 0.2), trimmed_mean(given, share, 0.1)
        args = given.to(device), share.to(device)
        found = median(*args), trimmed_mean(*args, 0.2), trimmed_mean(*args, 0.1)
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-14, atol=0.0, equal_nan=True)
        assert found[0].isnan().tolist() == [False, True]


def test_strides_and_limits(device, monkeypatch) -> None:
    value = random.normal(random.key(4), (6, 5), torch.float64).to(device)
    share = torch.full((5,), 0.2, dtype=torch.float64, device=device)
    assert torch.equal(median(value.mT, share), median(value.mT.contiguous(), share))
    many = torch.ones(order_statistics.MOST + 1, 2, device=device)
    with launches(monkeypatch, at_least=0) as seen:
        median(many, torch.full((len(many),), 1 / len(many), device=device).double())
        trimmed_mean(value.half(), torch.full((6,), 1 / 6, device=device).double(), 0.1)
    assert seen == []


def test_gradients_come_from_the_reference(device) -> None:
    value = random.normal(random.key(5), (5, 3), torch.float64).to(device).requires_grad_()
    share = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64, device=device)
    assert torch.autograd.gradcheck(lambda value: (median(value, share), trimmed_mean(value, share, 0.2)), value)


@pytest.mark.slow
def test_as_many_messages_as_it_takes(device) -> None:
    value = messages((order_statistics.MOST - 3, 70), torch.float32)
    share = shares(len(value))["any"]
    with reference():
        wanted = median(value, share), trimmed_mean(value, share, 0.1)
    found = median(value.to(device), share.to(device)), trimmed_mean(value.to(device), share.to(device), 0.1)
    torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-12, atol=1e-12)
