"""What rows that are repeated must not change: a client's weight in an average, and a small ρ."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.trust import explain, privacy

OWN, GUESSED, RHO = [1, 2, 4, 9, 30], [1, 2, 4, 4, 30], 0.6  # with the guesses 8, 8, 8, 32 and 8 times as many rows
SLOPES = [1.0, 2.0, 3.0, 5.0, 4.0]


def clients(sizes: list[int], seed: int, noise: float = 0.0) -> ft.data.FederatedData:
    """Clients of other slopes; without noise each is solved by its slope, whatever the rows."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for size, slope in zip(sizes, SLOPES):
        x, error = torch.randn(2, size, generator=generator, dtype=torch.float64)
        rows.append((x[:, None], slope * x + noise * error))
    return ft.data.from_tensors(rows)


def curvature_and_slope(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the mean squared error in w: 2 x'x / n and 2 x'y / n."""
    x, y = rows
    return 2 * (x[:, 0] @ x[:, 0]) / len(y), 2 * (x[:, 0] @ y) / len(y)


@pytest.mark.parametrize("chunk", [None, 1])
def test_exact_guesses_leave_an_average_by_rows_as_it_is(chunk: int | None) -> None:
    data = clients(OWN, 1)
    wide = explain.augmented(data, clients(GUESSED, 2), RHO)
    assert wide.counts.tolist() == [8, 16, 32, 288, 240]
    local = ft.least_squares(linear(1, bias=False))
    guided = explain.explainable(local, RHO)
    for make in (ft.fedavg, lambda solver: ft.fedadam(solver, lr=0.1)):
        plain = ft.run(make(local), ft.InProcess(data, chunk), rounds=2)
        found = ft.run(make(guided), ft.InProcess(wide, chunk), rounds=2)
        assert distance(found.tensors(), plain.tensors()) < ROUNDING
    whole = ft.run(ft.fedavg(guided), ft.InProcess(wide, chunk), rounds=1)
    mean = sum(n * slope for n, slope in zip(OWN, SLOPES)) / sum(OWN)
    assert abs(float(whole.server["weight"]) - mean) < ROUNDING


@pytest.mark.parametrize("rho", [0.05, 0.6, 7.0])
@pytest.mark.parametrize("mu", [0.0, 0.8])
def test_fedavg_and_fedprox_are_the_formulas_weighted_by_the_clients_own_rows(rho: float, mu: float) -> None:
    """θ + Σ n_k (w_k − θ) / Σ n_k with w_k the minimiser of (8.12) + μ/2 |w − θ|²; guesses that are wrong."""
    data, signals, start = clients(OWN, 3, noise=0.5), clients(GUESSED, 4, noise=2.0), 0.75
    solved = []
    for rows, said in zip(data, signals):
        (a, b), (c, d) = curvature_and_slope(rows), curvature_and_slope(said)
        solved.append((b + rho * d + mu * start) / (a + rho * c + mu))
    best = sum(n * w for n, w in zip(OWN, solved)) / sum(OWN)
    algorithm = ft.fedavg(explain.explainable(ft.least_squares(linear(1, bias=False)), rho), mu=mu)
    population = ft.InProcess(explain.augmented(data, signals, rho))
    run = ft.run(algorithm, population, {"weight": torch.tensor([[start]]).double()}, rounds=1)
    assert abs(float(run.server["weight"] - best)) < ROUNDING


def test_one_pool_of_rows_and_one_of_guesses() -> None:
    data = clients(OWN, 5, noise=0.5)
    local = ft.least_squares(linear(1, bias=False))
    plain = ft.run(ft.pooled(local), ft.InProcess(data.pool()), rounds=1).tensors()["weight"]
    signals = explain.guesses(clients(GUESSED, 6), lambda x: x[:, 0] * plain.flatten()[0])  # what the pool will say
    guided = explain.explainable(local, RHO)
    wide = explain.augmented(data.pool(), signals.pool(), RHO)
    assert distance(ft.run(ft.pooled(guided), ft.InProcess(wide), rounds=1).tensors()["weight"], plain) < ROUNDING
    with pytest.raises(ValueError, match="'pool': expected rows that were pooled before they were augmented"):
        ft.Run(ft.pooled(guided), ft.InProcess(explain.augmented(data, signals, RHO).pool()))


def test_gradient_steps_weigh_alike() -> None:
    data, signals, rate = linear_clients(OWN, seed=7), linear_clients(GUESSED, seed=8), 0.05
    local = explain.explainable(sgd(rate * (1 + RHO), steps=2), RHO)
    run = ft.run(ft.fedavg(local), ft.InProcess(explain.augmented(data, signals, RHO)), rounds=1)
    begin, total = linear(), torch.zeros(4, dtype=torch.float64)
    for (x, y), (s, u) in zip(data, signals):
        w = torch.cat([begin.weight.detach()[0], begin.bias.detach()])
        x, s = (torch.cat([rows, torch.ones_like(rows[:, :1])], 1) for rows in (x, s))
        for _ in range(2):
            w = w - rate * 2 * (x.T @ (x @ w - y) / len(y) + RHO * s.T @ (s @ w - u) / len(u))
        total += len(y) / sum(OWN) * w
    assert distance(torch.cat([run.server["weight"][0], run.server["bias"]]), total) < ROUNDING


def test_a_small_rho_is_small_or_refused() -> None:
    """Below 1 / most no number of repeats stands for it; it was taken as one repeat, which is a ρ of t / m."""
    data, signals = clients([4] * 5, 9, noise=0.5), clients([4] * 5, 10, noise=2.0)
    with pytest.raises(ValueError, match=r"rho of at least 0\.01 for client '0'.*but got 0\.001; pass most=1000"):
        explain.augmented(data, signals, 0.001)
    found = explain.augmented(data, signals, 0.001, most=1000)
    assert found.counts.tolist() == [4 * 1001] * 5
    for rho in (torch.inf, torch.nan, -0.1):
        with pytest.raises(ValueError, match="finite rho of at least 0"):
            explain.augmented(data, signals, rho)


def test_rows_that_are_repeated_are_read_by_explainable_solvers_only() -> None:
    data, signals = clients(OWN, 1), clients(GUESSED, 2)
    wide = explain.augmented(data, signals, RHO)
    local, steps = ft.least_squares(linear(1, bias=False)), sgd(0.1, linear(1, bias=False))
    for solver, rows in ((local, wide), (steps, wide), (explain.explainable(local, RHO), data)):
        with pytest.raises(ValueError, match="Expected rows"):
            ft.Run(ft.fedavg(solver), ft.InProcess(rows))
    private = privacy.example_level(
        linear(1, bias=False), clip=1.0, noise=1.0, sampling_rate=0.5, steps=1, delta=1e-3, loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    with pytest.raises(ValueError, match="without a privacy budget"):
        explain.explainable(private, RHO)
