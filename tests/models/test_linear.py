"""Linear heads and their statistics, centrally: against scikit-learn, and for every kind of bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from support.oracles.closed_forms import ROUNDING, clock_clients, distance, linear_clients
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.models._reduced import reduced
from fedtorch.models.linear import (
    LinearHead,
    SufficientStatistics,
    least_norm,
    polynomial,
    residual_sum,
    residual_variance,
    ridge,
    sufficient_statistics,
)

DATA = linear_clients([9, 14, 5, 30])


def statistics(data: ft.data.FederatedData = DATA) -> SufficientStatistics:
    block = data.stack(range(len(data)))
    head = LinearHead(3)
    return sufficient_statistics(head.design(block.batch[0]), block.batch[1], block.mask)


def test_ridge_is_scikit_learns() -> None:
    found = ridge(statistics(), 0.7)
    for (x, y), theta in zip(DATA, found):
        design = np.column_stack([x.numpy(), np.ones(len(x))])
        expected = Ridge(0.7, fit_intercept=False).fit(design, y.numpy()).coef_
        assert np.allclose(theta.numpy(), expected, rtol=0, atol=10 * ROUNDING)


def test_least_squares_is_scikit_learns() -> None:
    found = ridge(statistics())
    for (x, y), theta in zip(DATA, found):
        fit = LinearRegression().fit(x.numpy(), y.numpy())
        assert np.allclose(theta.numpy(), [*fit.coef_, fit.intercept_], rtol=0, atol=100 * ROUNDING)


def test_a_penalty_for_each_client() -> None:
    penalty = torch.tensor([0.1, 1.0, 3.0, 0.5])
    found = ridge(statistics(), penalty)
    for k in range(4):
        alone = ridge(SufficientStatistics(*(leaf[k] for leaf in statistics())), float(penalty[k]))
        assert torch.allclose(found[k], alone, rtol=0, atol=1e-6)  # the penalties are float32


def test_residual_variance_is_unbiased_least_squares() -> None:
    found = residual_variance(statistics())
    for (x, y), variance in zip(DATA, found):
        fit = LinearRegression().fit(x.numpy(), y.numpy())
        rss = np.square(y.numpy() - fit.predict(x.numpy())).sum()
        assert float(variance) == pytest.approx(rss / (len(y) - 4), rel=1e-9)


def test_the_residual_sum_of_any_coefficients() -> None:
    theta = torch.arange(4.0, dtype=torch.float64)
    head = LinearHead(3, dtype=torch.float64)
    with torch.no_grad():
        head.coefficients.copy_(theta)
        sums = torch.stack([(y - head(x)).square().sum() for x, y in DATA])
    assert torch.allclose(residual_sum(statistics(), theta.expand(4, 4)), sums, rtol=1e-10)


def test_masked_rows_do_not_count() -> None:
    block = DATA.stack(range(4))
    spoiled = torch.where(block.mask, block.batch[1], torch.nan)
    design = LinearHead(3).design(torch.where(block.mask[..., None], block.batch[0], torch.inf))
    for found, expected in zip(sufficient_statistics(design, spoiled, block.mask), statistics()):
        assert torch.equal(found, expected)


def test_a_polynomial_head_fits_its_polynomial() -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    head = LinearHead(3, polynomial(3), dtype=torch.float64)
    y = 1 + 2 * x[:, 0] - x[:, 0] ** 3
    theta = ridge(sufficient_statistics(head.design(x), y))
    assert torch.allclose(theta, torch.tensor([2.0, 0, -1, 1], dtype=torch.float64), atol=100 * ROUNDING)
    with torch.no_grad():
        head.coefficients.copy_(theta)
    assert torch.allclose(head(x), y, atol=100 * ROUNDING)


def test_any_feature_map_and_training_by_gradients() -> None:
    body = nn.Sequential(nn.Linear(2, 5), nn.Tanh()).requires_grad_(False)
    with torch.no_grad():
        body[0].weight.copy_(torch.arange(10.0).reshape(5, 2).sin())
    head = LinearHead(5, body)
    x = torch.linspace(-1, 1, 40).reshape(20, 2)
    with torch.no_grad():
        expected = ridge(sufficient_statistics(head.design(x), x.sum(1)), 1e-3 * 20)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(head(x), x.sum(1)) + 1e-3 * head.coefficients.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.allclose(head.coefficients.detach().double(), expected, atol=2e-2)  # single precision, flat valley


def test_it_trains_federated_by_gradients() -> None:
    head = LinearHead(3, dtype=torch.float64)
    by_gradients = ft.gradient_descent(
        head,
        steps=2,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    in_closed_form = ft.least_squares(head, steps=2, lr=0.1)
    one = ft.run(ft.fedavg(by_gradients), ft.InProcess(DATA), rounds=10).last
    two = ft.run(ft.fedavg(in_closed_form), ft.InProcess(DATA), rounds=10).last
    assert distance(one.server, two.server) < 10 * ROUNDING


def dependent(x: Tensor) -> Tensor:
    return torch.cat([x, x.sum(-1, keepdim=True)], -1)


def test_solutions_that_are_not_unique_are_refused_with_the_reason() -> None:
    few = linear_clients([9, 2])
    with pytest.raises(ValueError, match=r"got 2 rows for 4 features \(data set 1 of 2\); pass a positive penalty"):
        ridge(statistics(few))
    assert ridge(statistics(few), 1e-3).isfinite().all()
    x, y = DATA[3]
    for feature_map in (dependent, lambda x: torch.cat([x, 2 * torch.ones_like(x[:, :1])], -1)):
        design = LinearHead(4, feature_map).design(x)  # the second has a constant feature beside the intercept
        with pytest.raises(ValueError, match="got features that are dependent; pass a positive penalty"):
            ridge(sufficient_statistics(design, y))
    with pytest.raises(ValueError, match=r"Expected a penalty of at least 0, but got -1\.0"):
        ridge(statistics(), -1.0)


def test_least_norm_where_the_solution_is_not_unique() -> None:
    few = linear_clients([9, 2])
    fit = least_norm(statistics(few))
    assert fit.rank.tolist() == [4, 2]
    x, y = few[1]
    expected = torch.linalg.pinv(LinearHead(3).design(x)) @ y
    assert torch.allclose(fit.solution[1], expected, atol=1000 * ROUNDING)  # the Gram matrix squares the condition
    nobody = least_norm(SufficientStatistics(*(torch.zeros_like(leaf) for leaf in statistics())))
    assert not nobody.solution.any()
    assert not nobody.spread.any()


def test_a_residual_variance_needs_more_rows_than_features() -> None:
    with pytest.raises(ValueError, match="got 4 rows of rank 4; pool data sets"):
        residual_variance(statistics(linear_clients([9, 4])))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="Expected at least one feature"):
        LinearHead(0, intercept=False)
    with pytest.raises(ValueError, match="Expected a degree of at least 1, but got 0"):
        polynomial(0)
    with pytest.raises(ValueError, match=r"Expected 2 features per row, but the feature map gives shape \(4, 3\)"):
        LinearHead(2)(torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"Expected design \(\.\.\., N, p\), y \(\.\.\., N\)"):
        sufficient_statistics(torch.zeros(4, 3), torch.zeros(5))


UNITS = torch.tensor([1e6, 1e-6, 1.0, 1e3], dtype=torch.float64)  # a power of ten is a unit that somebody brings


def test_units_of_columns_do_not_matter() -> None:
    """Scaling columns scales every answer back: least squares, ridge without penalty, variance, the triangular root."""
    plain, data = statistics(), SufficientStatistics(*statistics())
    scaled = data._replace(gram=data.gram * UNITS * UNITS[:, None], cross=data.cross * UNITS)
    for fit in (lambda one: least_norm(one).solution, ridge):
        assert distance(fit(scaled) * UNITS, fit(plain)) < 1000 * ROUNDING
    assert least_norm(scaled).rank.tolist() == [4, 4, 4, 4]
    assert torch.allclose(residual_variance(scaled), residual_variance(plain), rtol=1e-9)
    spread = torch.linalg.inv(plain.gram).diagonal(dim1=1, dim2=2) / UNITS.square()
    assert torch.allclose(least_norm(scaled).spread, spread.mean(1), rtol=1e-9)
    root, fit, response, rest, _ = reduced(scaled)
    assert distance(root @ root.mT / UNITS / UNITS[:, None], plain.gram) < ROUNDING
    cross = (scaled.gram @ fit[..., None] + root @ response[..., None])[..., 0]
    assert distance(cross / UNITS, plain.cross) < ROUNDING
    assert torch.allclose(rest, reduced(plain).rest, rtol=1e-9)
    order = torch.tensor([0, 3, 2, 1])  # large columns first, as which the root is triangular
    assert not root[:, order].triu(1).any()


def test_a_clock_beside_an_indicator() -> None:
    x, y = clock_clients([50]).rows
    for fit in (lambda one: least_norm(one).solution, ridge):
        assert fit(sufficient_statistics(x, y)).tolist() == pytest.approx([1e-9, 3.0], rel=1e-9)


def test_dependent_columns_are_warned_of_and_have_the_least_norm_in_their_units() -> None:
    x, y = clock_clients([50]).rows
    both = torch.cat([x, 1000 * x[:, :1], torch.zeros(50, 1)], 1)  # seconds, another, milliseconds, nothing
    with pytest.warns(UserWarning, match="Expected columns of rank 3, but got rank 2 in data set 0 of 1"):
        fit = least_norm(sufficient_statistics(both, y))
    share = 1e-9 / (1 + 1000**2)
    assert fit.solution.tolist() == pytest.approx([share, 3.0, 1000 * share, 0.0], rel=1e-9)
    assert fit.solution[3] == 0
    with pytest.raises(ValueError, match="got features that are dependent"):
        ridge(sufficient_statistics(both, y))
