"""Estimates from nodes and draws, beside closed forms and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtorch.models.estimates import Estimates, weighted_moments, weighted_quantile
from fedtorch.models.gaussian import Moments
from fedtorch.models.quadrature import quasi_random


def test_quantiles_of_draws_are_numpys() -> None:
    draws = torch.randn(501, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for probability in (0.001, 0.05, 0.5, 0.975):
        expected = np.quantile(draws.numpy(), probability, axis=0, method="hazen")
        np.testing.assert_allclose(weighted_quantile(draws, probability).numpy(), expected, rtol=0, atol=1e-12)


def test_a_weight_counts_as_often() -> None:
    nodes = torch.tensor([[3.0], [1.0], [2.0]], dtype=torch.float64)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    repeated = torch.tensor([[3.0]] * 20 + [[1.0]] * 50 + [[2.0]] * 30, dtype=torch.float64)
    mean, sd = weighted_moments(nodes, weights)
    torch.testing.assert_close(mean, repeated.mean(0))
    torch.testing.assert_close(sd, repeated.std(0, correction=0))
    assert float(weighted_quantile(nodes, 0.25, weights)) == 1.0


def test_intervals_of_nodes_are_those_of_the_density() -> None:
    rule = quasi_random(2, 2**14)
    table = Estimates(("a", "b"), rule.nodes.exp(), rule.weights, 2).table(0.95)
    edge = 1.959963984540054
    np.testing.assert_allclose(table["low"], np.exp(-edge), rtol=2e-3)
    np.testing.assert_allclose(table["high"], np.exp(edge), rtol=5e-3)
    np.testing.assert_allclose(table["estimate"], np.exp(0.5), atol=1e-3 * 2.16)


def test_normal_coefficients_have_exact_intervals_and_combinations() -> None:
    covariance = torch.tensor([[4.0, 1.0], [1.0, 9.0]], dtype=torch.float64)
    normal = Moments(torch.tensor([1.0, 2.0], dtype=torch.float64), covariance)
    found = Estimates(("a", "b", "sd"), torch.rand(50, 3, dtype=torch.float64), None, 2, normal)
    table = found.table(0.95)
    assert table.loc["b", "high"] == pytest.approx(2 + 3 * 1.959963984540054)
    difference = found.combined(torch.tensor([[1.0, -1.0, 0.0]]), ("a - b",)).table(0.95)
    assert difference.loc["a - b", "sd"] == pytest.approx((4 + 9 - 2) ** 0.5)
    mixed = found.combined(torch.tensor([[1.0, 0.0, 1.0]]), ("a + sd",))
    assert mixed.normal is None, "an sd is not normal: its combinations are those of the nodes"


def test_a_level_is_a_probability() -> None:
    with pytest.raises(ValueError, match="Expected a level between 0 and 1, but got 95"):
        Estimates(("a",), torch.zeros(2, 1)).table(95)
