"""Weighted medians and trimmed means, coordinate by coordinate, against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedtorch import random
from fedtorch.federation.exchanges.robust.order_statistics import median, trimmed_mean


def messages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers with ties, zeros of both signs and infinities."""
    values = random.normal(random.key(1), shape, dtype)
    values[:, ..., :2] = values[:, ..., :2].round()
    values.flatten()[::17] = torch.inf
    values.flatten()[5::19] = -torch.inf
    values.flatten()[3::7] = -0.0
    return values


def test_against_the_definition() -> None:
    value = messages((9, 6), torch.float64).nan_to_num(posinf=3.0, neginf=-3.0)
    equal = torch.full((9,), 1 / 9, dtype=torch.float64)
    assert torch.equal(median(value, equal), value.median(0).values)
    ordered = value.sort(0).values[2:-2]
    torch.testing.assert_close(trimmed_mean(value, equal, 2 / 9), ordered.mean(0), rtol=1e-13, atol=1e-13)
    even = torch.full((4,), 0.25, dtype=torch.float64)
    four = torch.tensor([[4.0], [1.0], [3.0], [100.0]])
    assert median(four, even).tolist() == [3.5]


def test_weights_count_as_copies() -> None:
    """A message of weight k is k messages of weight one."""
    value = messages((5, 6), torch.float64).nan_to_num(posinf=3.0, neginf=-3.0)
    times = torch.tensor([1, 3, 2, 4, 1])
    copies = value.repeat_interleave(times, 0)
    share, equal = times.double() / times.sum(), torch.full((len(copies),), 1 / len(copies), dtype=torch.float64)
    assert torch.equal(median(value, share), median(copies, equal))
    for fraction in (0.0, 0.1, 0.3, 0.49):
        one, other = trimmed_mean(value, share, fraction), trimmed_mean(copies, equal, fraction)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # of 1 − 2 · 0.49


def test_infinities_that_are_cut_do_not_count() -> None:
    value = torch.tensor([[-torch.inf], [1.0], [2.0], [3.0], [torch.inf]])
    assert trimmed_mean(value, torch.full((5,), 0.2, dtype=torch.float64), 0.2).tolist() == pytest.approx([2.0])
    assert median(value, torch.full((5,), 0.2, dtype=torch.float64)).tolist() == [2.0]


def test_nan_counts_as_the_greatest() -> None:
    value = torch.tensor([[1.0, torch.nan], [2.0, torch.nan], [torch.nan, torch.nan], [0.5, 0.0], [4.0, 1.0]])
    for sign in (1.0, -1.0):  # of NaN's bits
        given, share = (
            (value * sign).abs().where(value.isfinite(), value * sign),
            torch.full((5,), 0.2, dtype=torch.float64),
        )
        assert median(given, share).isnan().tolist() == [False, True]
        assert trimmed_mean(given, share, 0.2).isnan().tolist() == [False, True]
        assert trimmed_mean(given, share, 0.1).isnan().tolist() == [True, True]


def test_gradients() -> None:
    value = random.normal(random.key(5), (5, 3), torch.float64).requires_grad_()
    share = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda value: (median(value, share), trimmed_mean(value, share, 0.2)), value)
