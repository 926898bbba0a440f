"""T steps as one affine map against T steps, and the exact solution against least squares."""

from __future__ import annotations

import pytest
import torch
from closed_forms import ROUNDING, distance, linear_clients
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithm import Quadratic
from fedtorch.models.linear import LinearHead

SIZES = [5, 2, 9, 4, 17, 6]
K = len(SIZES)
DATA = linear_clients(SIZES)
HEAD = LinearHead(3, dtype=torch.float64)
KEY = random.fold_in(random.key(0), torch.arange(K))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


START = {"coefficients": draw(K, 4)}
QUADRATIC = Quadratic(draw(K, seed=1).square(), {"coefficients": draw(K, 4, seed=2)})


def solve(local: ft.LocalSolver, quadratic: Quadratic | None) -> ft.Local:
    data = local.prepare(DATA.stack(range(K)))
    return local(START, ft.tree.expand(local.init(local.parameters), K), data, quadratic, KEY)


@pytest.mark.parametrize("quadratic", [None, QUADRATIC], ids=["alone", "with a quadratic"])
@pytest.mark.parametrize(("steps", "rate"), [(1, 0.05), (20, 0.05), (20, 1e-9), (7, 0.2)])
def test_steps_in_closed_form_are_the_plain_loop(steps: int, rate: float, quadratic: Quadratic | None) -> None:
    found = solve(ft.linear_descent(HEAD, steps=steps, rate=rate), quadratic)
    for k, (x, y) in enumerate(DATA):
        theta, design = START["coefficients"][k], HEAD.design(x)
        for _ in range(steps):
            gradient = 2 / len(y) * design.T @ (design @ theta - y)
            if quadratic is not None:
                gradient = gradient + quadratic.precision[k] * theta - quadratic.shift["coefficients"][k]
            theta = theta - rate * gradient
        assert distance(found.parameters["coefficients"][k], theta) < 100 * ROUNDING  # 0.2 · curvature exceeds 2
        error = (design @ found.parameters["coefficients"][k] - y).square().mean()
        assert float(found.info["loss"][k]) == pytest.approx(float(error), rel=1e-9)
    assert torch.allclose(found.steps, torch.full((K,), steps * rate, dtype=torch.float64))


def test_it_is_gradient_descent_of_the_module() -> None:
    by_autograd = ft.gradient_descent(
        HEAD,
        steps=12,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )
    found, expected = solve(ft.linear_descent(HEAD, steps=12, rate=0.05), QUADRATIC), solve(by_autograd, QUADRATIC)
    assert distance(found.parameters, expected.parameters) < 10 * ROUNDING
    assert distance(found.steps, expected.steps) < ROUNDING


def test_the_exact_solution() -> None:
    found = solve(ft.linear_descent(HEAD), QUADRATIC).parameters["coefficients"]
    expected = ft.least_squares(nn.Linear(3, 1, dtype=torch.float64))
    parts = {"weight": START["coefficients"][:, None, :3], "bias": START["coefficients"][:, 3:]}
    shift = {"weight": QUADRATIC.shift["coefficients"][:, None, :3], "bias": QUADRATIC.shift["coefficients"][:, 3:]}
    for quadratic, mine in ((Quadratic(QUADRATIC.precision, shift), QUADRATIC), (None, None)):
        data = expected.prepare(DATA.stack(range(K)))
        theirs = expected(parts, expected.init(expected.parameters), data, quadratic, KEY).parameters
        found = solve(ft.linear_descent(HEAD), mine).parameters["coefficients"]
        joined = torch.cat([theirs["weight"][:, 0], theirs["bias"]], 1)
        assert distance(found, joined) < 1e-9  # two and four rows for four coefficients: condition numbers of 1e5


def test_many_steps_of_the_default_rate_are_the_exact_solution() -> None:
    found = solve(ft.linear_descent(HEAD, steps=10**7), QUADRATIC).parameters
    assert distance(found, solve(ft.linear_descent(HEAD), QUADRATIC).parameters) < 1e-9


def test_the_default_rate_never_increases_the_loss() -> None:
    before = [float((HEAD.design(x) @ START["coefficients"][k] - y).square().mean()) for k, (x, y) in enumerate(DATA)]
    for steps in (1, 3, 10):
        after = solve(ft.linear_descent(HEAD, steps=steps), None).info["loss"]
        assert all(new <= old for new, old in zip(after.tolist(), before))
        before = after.tolist()


def test_a_client_without_rows_stays_or_follows_the_others() -> None:
    rows = DATA.rows
    data = ft.data.FederatedData(rows, torch.tensor([sum(SIZES), 0]), allow_empty=True).stack([0, 1])
    start = {"coefficients": draw(2, 4)}
    pull = Quadratic(torch.ones(2), {"coefficients": torch.ones(2, 4, dtype=torch.float64)})
    for steps in (None, 20):
        local = ft.linear_descent(HEAD, steps=steps)
        alone = local(start, None, local.prepare(data), None, KEY[:2]).parameters["coefficients"]
        assert torch.equal(alone[1], start["coefficients"][1])
        pulled = local(start, None, local.prepare(data), pull, KEY[:2]).parameters["coefficients"]
        assert torch.allclose(pulled[1], torch.ones(4, dtype=torch.float64), atol=ROUNDING)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="Expected a LinearHead, but got Linear"):
        ft.linear_descent(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="Expected steps to be a whole number of at least 1, or None, but got 0"):
        ft.linear_descent(HEAD, steps=0)
    with pytest.raises(ValueError, match=r"Expected a positive rate, but got 0\.0"):
        ft.linear_descent(HEAD, steps=1, rate=0.0)
