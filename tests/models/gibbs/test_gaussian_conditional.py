"""Least squares of least norm, and problems laid out in columns."""

from __future__ import annotations

import pytest
import torch

from fedtorch import random
from fedtorch.models.gibbs._gaussian_conditional import columns, elimination, from_columns, least_norm


@pytest.mark.parametrize("shape", [(7, 4), (3, 6), (0, 3)])
def test_estimates_of_least_norm(shape: tuple[int, int]) -> None:
    """Of collinear columns, of more columns than rows, and of no rows."""
    x = random.normal(random.key(0), shape, torch.float64)
    x[:, -1] = x[:, 0]
    y = random.normal(random.key(1), (shape[0], 2), torch.float64)
    found = least_norm(x, y)
    assert float((found - torch.linalg.pinv(x) @ y).abs().amax()) < 1e-12


@pytest.mark.parametrize("clients", [0, 3])
def test_columns_and_back(clients: int) -> None:
    values = random.normal(random.key(0), (clients, 2, 4, 5), torch.float64)
    assert columns(values).shape == (4, 5, 2 * clients)
    assert torch.equal(from_columns(columns(values), clients, 2), values)


def test_columns_that_almost_depend_on_each_other_give_finite_draws():
    """Of which rounding makes a pivot negative; no pivot is below the prior's precision."""
    x = random.normal(random.key(3), (20, 40, 2), torch.float64)
    x = torch.cat([x, x.sum(-1, keepdim=True)], -1)
    gram = x.mT @ x
    zeros = torch.zeros(20, 3, dtype=torch.float64)
    draw = elimination(gram, zeros, zeros[:, 0], zeros[:, None])
    delta, rss = draw(torch.ones(20).double(), torch.full((3, 20), 1e-20).double(), torch.ones(3, 20).double())
    assert bool(delta.isfinite().all())
    assert bool(rss.isfinite().all())


def test_columns_that_are_alike_give_draws_of_the_right_size():
    """A pivot of zero between others: what the columns say together is known, what each says is of the prior's size."""
    x = random.normal(random.key(3), (30, 1), torch.float64).expand(-1, 5)
    gram, estimate = (x.mT @ x)[None], torch.full((1, 5), 0.2).double()
    draw = elimination(gram, estimate, torch.ones(1).double(), torch.zeros(1, 40, 5).double())
    z = random.normal(random.key(4), (5, 40), torch.float64)
    for noise in (1e12, 1e16, 1e20):
        delta, rss = draw(torch.full((40,), noise).double(), torch.full((5, 40), 0.1).double(), z)
        assert float((delta.sum(0) - 1).abs().max()) < 1e-5
        assert float(delta.abs().max()) < 30
        assert float((rss - 1).abs().max()) < 1e-8


def test_a_problem_of_alike_columns_changes_no_other():
    """They are side by side; whatever one needs, the others' bits stay."""
    gram = torch.stack([torch.ones(3, 3).double() + 1e-3 * torch.eye(3).double(), torch.ones(3, 3).double()])
    zeros, noise = torch.zeros(2, 3).double(), torch.tensor([1.0, 1e20]).double()
    rest = torch.full((3, 2), 0.3).double(), torch.ones(3, 2).double()
    whole = elimination(gram, zeros, zeros[:, 0], zeros[:, None])(noise, *rest)[0]
    alone = elimination(gram[:1], zeros[:1], zeros[:1, 0], zeros[:1, None])(noise[:1], *(each[:, :1] for each in rest))
    assert bool(whole.isfinite().all())
    assert torch.equal(whole[:, :1], alone[0])
