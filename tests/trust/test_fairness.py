"""Fairness and explainability: the papers' updates in loops, closed forms, and what they are good for."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize
from support.oracles.closed_forms import ROUNDING, distance, joined, linear, linear_clients, sgd
from support.oracles.gtv_problems import bare_linear_clients
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.plots import runs
from fedtorch.trust import explain, fairness

SIZES = [12, 5, 9, 20]
DATA = linear_clients(SIZES)
RATE = 0.05


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output[..., 0] - target).square()


def risks(parameters: dict[str, Tensor]) -> Tensor:
    w, b = parameters["weight"][0], parameters["bias"]
    return torch.stack([(x @ w + b - y).square().mean() for x, y in DATA])


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_q_ffl_is_the_papers_loop(q: float) -> None:
    """Algorithm 2 of Li et al. (2020) with one full-batch step of each client, by autograd."""
    algorithm = fairness.q_ffl(sgd(RATE), squared, q, lr=RATE)
    theta = joined(algorithm.start)[:, 0]
    for _ in range(4):
        deltas, steps = [], []
        for x, y in DATA:
            leaf = theta.clone().requires_grad_()
            risk = (x @ leaf[:3] + leaf[3] - y).square().mean()
            (gradient,) = torch.autograd.grad(risk, leaf)
            solved, value = theta - RATE * gradient, risk.detach()
            delta = (theta - solved) / RATE
            deltas.append(value**q * delta)
            steps.append(q * value ** (q - 1) * delta.square().sum() + value**q / RATE)
        theta = theta - sum(deltas) / sum(steps)
    for chunk in (None, 1):
        run = ft.run(algorithm, ft.InProcess(DATA, chunk), rounds=4)
        assert distance(joined(run.server)[:, 0], theta) < ROUNDING


def test_q_ffl_refuses_losses_and_clients_that_it_cannot_weigh() -> None:
    signed = lambda output, target: output[..., 0] - target
    with pytest.raises(ValueError, match="Expected losses of at least 0, which have powers, but got -"):
        ft.run(fairness.q_ffl(sgd(RATE), signed, 1.0, lr=RATE), ft.InProcess(DATA), rounds=1)
    rows = ft.data.FederatedData(DATA[0], torch.tensor([12, 0]), allow_empty=True)
    local = ft.least_squares(linear(), steps=1, lr=RATE)
    with pytest.raises(ValueError, match="Client '1': expected a positive weight, but got 0"):
        ft.Run(fairness.q_ffl(local, squared, 0.0, lr=RATE), ft.InProcess(rows))


def test_more_q_makes_losses_more_alike() -> None:
    found = {}
    for q in (0.0, 1.0, 5.0):
        local = ft.least_squares(linear(), steps=1, lr=RATE)
        run = ft.run(fairness.q_ffl(local, squared, q, lr=RATE), ft.InProcess(DATA), rounds=60)
        found[q] = risks(run.server)
    assert float(found[0.0].max()) > float(found[1.0].max()) > float(found[5.0].max())
    assert float(found[0.0].std()) > float(found[1.0].std()) > float(found[5.0].std())


def test_agnostic_learning_finds_the_least_largest_loss() -> None:
    """(w − 1)² and 4(w + 1)² are equal, and their maximum least, at w = −1/3: 16/9."""
    one, two = torch.ones(1, 1).double(), 2 * torch.ones(1, 1).double()
    data = ft.data.from_tensors([(one, torch.ones(1).double()), (two, -2 * torch.ones(1).double())])
    local = ft.least_squares(linear(1, bias=False), steps=1, lr=0.05)
    run = ft.run(fairness.agnostic(local, squared, 0.1), ft.InProcess(data), rounds=500)
    assert abs(float(run.server.parameters["weight"]) + 1 / 3) < 1e-4  # what 500 rounds leave
    assert abs(float(run.history["mixture_loss"].iloc[-1]) - 16 / 9) < 1e-3
    plain = ft.run(fairness.agnostic(local, squared, 0.0), ft.InProcess(data), rounds=9)
    fedavg = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=9)
    assert distance(plain.server.parameters, fedavg.server) < ROUNDING


def test_agnostic_learning_is_the_same_in_any_chunks_and_with_faults() -> None:
    settings = {"rounds": 6, "cohort": 3, "faults": ft.lost_messages(after=0.3), "seed": 1}
    algorithm = fairness.agnostic(sgd(RATE), squared, 0.1)
    one, two = (ft.run(algorithm, ft.InProcess(DATA, chunk), **settings) for chunk in (None, 1))
    assert distance(one.server, two.server) < ROUNDING
    assert distance(one.clients.state_dict(), two.clients.state_dict()) < ROUNDING


def test_agnostic_learning_is_mirror_ascent_of_the_weights() -> None:
    """λ_k ∝ n_k exp(γ Σ F_k) over the rounds from the second on, gradient steps of every client on θ, in a loop."""
    gamma, algorithm = 0.1, fairness.agnostic(sgd(RATE), squared, 0.1)
    theta, total = joined(algorithm.start)[:, 0], torch.zeros(len(SIZES)).double()
    for t in range(5):
        losses, steps = [], []
        for x, y in DATA:
            rest = x @ theta[:3] + theta[3] - y
            losses.append(rest.square().mean())
            steps.append(-RATE * 2 * torch.cat([x.T @ rest, rest.sum()[None]]) / len(y))
        total += torch.stack(losses) * (t > 0)
        share = (torch.tensor(SIZES) * (gamma * (total - total.mean())).exp()).double()
        theta = theta + share @ torch.stack(steps) / share.sum()
        mixture = share @ torch.stack(losses) / share.sum()
    for chunk in (None, 1):
        run = ft.run(algorithm, ft.InProcess(DATA, chunk), rounds=5)
        assert distance(joined(run.server.parameters)[:, 0], theta) < ROUNDING
        assert abs(float(run.server.loss - mixture)) < ROUNDING


def minimax(data: ft.data.FederatedData) -> tuple[float, np.ndarray]:
    """The least largest mean squared error of a linear model on any client, and where it is, by SLSQP."""
    rows = [(x.numpy(), y.numpy()) for x, y in data]
    errors = lambda z: np.array([np.square(x @ z[:-1] - y).mean() for x, y in rows])
    start = np.append(np.zeros(rows[0][0].shape[1]), 50.0)
    epigraph = {"type": "ineq", "fun": lambda z: z[-1] - errors(z)}
    found = optimize.minimize(lambda z: z[-1], start, constraints=epigraph, options={"ftol": 1e-14, "maxiter": 500})
    assert found.success
    return float(errors(found.x).max()), found.x[:-1]


@pytest.mark.parametrize(
    ("cohort", "lost"), [(None, 0.0), pytest.param(2, 0.0, marks=pytest.mark.slow), (1, 0.0), (2, 0.3)]
)
@pytest.mark.slow
def test_agnostic_learning_finds_it_also_by_asking_some(cohort: int | None, lost: float) -> None:
    """Who is not asked counts as it last did; the mean over who is asked ended elsewhere."""
    data = linear_clients([6, 20, 9, 11], features=2, seed=1)
    best, where = minimax(data)
    algorithm = fairness.agnostic(ft.least_squares(linear(2, bias=False), steps=1, lr=0.2), squared, 0.4)
    faults = ft.lost_messages(after=lost) if lost else None
    run = ft.run(algorithm, ft.InProcess(data), rounds=300, cohort=cohort, faults=faults, seed=1)
    w = run.server.parameters["weight"][0]
    assert distance(w, torch.from_numpy(where)) < 1e-4  # what 300 rounds leave
    assert abs(float(torch.stack([(x @ w - y).square().mean() for x, y in data]).max()) - best) < 1e-3 * best


def test_a_swapped_feature_loses_its_effect() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator).double()
    x[:, 1] = (x[:, 1] > 0).double()
    y = x[:, 0] + 3 * x[:, 1]
    data = ft.data.from_tensors([(x[:150], y[:150]), (x[150:], y[150:])])
    both = fairness.swapped(data, 1, [0.0, 1.0])
    assert both.counts.tolist() == [300, 500]
    assert torch.equal(both[1][0][0::2, 0], data[1][0][:, 0])
    assert both[1][0][:4, 1].tolist() == [0, 1, 0, 1]
    for rows, effect in ((data, 3.0), (both, 0.0)):
        run = ft.run(ft.pooled(ft.least_squares(linear(2))), ft.InProcess(rows.pool()), rounds=1)
        assert abs(float(run.tensors()["weight"][0, 0, 1]) - effect) < 1e-9


def test_group_scores_are_those_of_the_groups_rows() -> None:
    run = ft.run(ft.fedavg(ft.least_squares(linear())), ft.InProcess(DATA), rounds=2)
    member = lambda rows: (rows[0][:, 0] > 0).double()
    found = fairness.group_scores(run, DATA, squared, member, [0.0, 1.0])
    x, y = DATA.rows
    error = (x @ run.server["weight"][0] + run.server["bias"] - y).square()
    for value in (0.0, 1.0):
        assert abs(found[value] - float(error[member(DATA.rows) == value].mean())) < 1e-12
    with pytest.raises(ValueError, match="q of at least 0"):
        fairness.q_ffl(sgd(RATE), squared, -1, lr=RATE)
    with pytest.raises(ValueError, match="gamma of at least 0"):
        fairness.agnostic(sgd(RATE), squared, -1)


def test_the_worst_decile_is_the_mean_of_the_worst_tenth() -> None:
    data = linear_clients([4] * 21)
    run = ft.run(ft.fedavg(ft.least_squares(linear())), ft.InProcess(data), rounds=1)
    losses = run.client_losses["train_loss"].sort_values()
    assert abs(run.history["train_loss_worst_decile"][0] - losses[-3:].mean()) < 1e-6  # losses are kept in float32
    score = run.evaluate(data, {"error": squared})["error"]
    ordered = score.clients.sort().values
    assert abs(score.worst_decile(largest_is_best=False) - float(ordered[-3:].mean())) < 1e-12
    assert abs(score.worst_decile(largest_is_best=True) - float(ordered[:3].mean())) < 1e-12


def test_groups_and_the_worst_tenth_are_in_the_history() -> None:
    data = linear_clients([4] * 21)
    run = ft.Run(ft.fedavg(sgd(RATE)), ft.InProcess(data))
    member, x = (lambda rows: (rows[0][:, 0] > 0).double()), data.rows[0]
    for _ in run.rounds(3):
        found = fairness.watch_groups(run, data, {"error": squared}, member, [0.0, 1.0], largest_is_best=False)
        rows = (x @ run.server["weight"][0] + run.server["bias"] - data.rows[1]).square()
        groups = [float(rows[(x[:, 0] > 0) == bool(g)].mean()) for g in (0, 1)]
        clients = rows.reshape(21, 4).mean(1).sort(descending=True).values
        assert abs(found["val_error_gap"] - abs(groups[0] - groups[1])) < 1e-12
        assert abs(found["val_error_worst_decile"] - float(clients[:3].mean())) < 1e-12
    row = run.history.iloc[-1]
    assert {name: row[name] for name in found} == found
    other = ft.Run(ft.fedavg(sgd(RATE)), ft.InProcess(data))
    other.load_state_dict(run.state_dict())
    assert other.history["val_error_group_1"].tolist() == run.history["val_error_group_1"].tolist()


def test_a_group_without_rows_is_left_out_of_the_gap_whatever_the_order() -> None:
    run = ft.run(ft.fedavg(sgd(RATE)), ft.InProcess(DATA), rounds=1)
    member, mse = (lambda rows: (rows[0][:, 0] > 0).double()), {"error": ft.metrics.mean_squared_error()}
    plain = fairness.watch_groups(run, DATA, mse, member, [0.0, 1.0])
    for order in itertools.permutations([0.0, 1.0, 7.0]):
        with pytest.warns(UserWarning, match=r"Expected rows of every group, but got none of 7"):
            found = fairness.watch_groups(run, DATA, mse, member, order)
        assert math.isnan(found.pop("val_error_group_7"))
        assert found == plain
    band = runs.groups(run, "error").axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() - band.min() == pytest.approx(plain["val_error_gap"])
    for groups in ([0.0], [0.0, 7.0], [7.0, 8.0]):  # nothing to compare with
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert math.isnan(fairness.watch_groups(run, DATA, mse, member, groups)["val_error_gap"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_group_that_is_predicted_badly_is_not_left_out(bad: float) -> None:
    run = ft.run(ft.fedavg(sgd(RATE)), ft.InProcess(DATA), rounds=1)
    member = lambda rows: (rows[0][:, 0] > 0).double() + (rows[0][:, 1] > 0)
    wrong = lambda output, target: torch.where(target == DATA[0][1][0], bad, squared(output, target))
    worst = float(member((DATA[0][0][:1],)))
    error = {"error": ft.metrics.mean_of(wrong, False)}
    for order in itertools.permutations([0.0, 1.0, 2.0]):
        found = fairness.watch_groups(run, DATA, error, member, order)
        assert str(found[f"val_error_group_{worst:g}"]) == str(bad)
        assert str(found["val_error_gap"]) == str(bad)


# -- explainability --------------------------------------------------------------------------------------------------

ROWS = bare_linear_clients([10, 14, 9], seed=4)
SIGNALS = explain.guesses(bare_linear_clients([4, 7, 3], seed=5), lambda x: x[:, 0] - x[:, 1])


@pytest.mark.parametrize("rho", [0.0, 0.3, 2.5])
def test_explainable_models_minimise_8_12_beside_their_neighbours(rho: float) -> None:
    network, alpha, n, d = ft.Network.from_edges([(0, 1), (1, 2)]), 0.7, 3, 3
    matrix, right = torch.zeros(n, d, n, d).double(), torch.zeros(n, d).double()
    for i, ((x, y), (s, u)) in enumerate(zip(ROWS, SIGNALS)):
        matrix[i, :, i] += x.T @ x / len(y) + rho * s.T @ s / len(u)
        right[i] += x.T @ y / len(y) + rho * s.T @ u / len(u)
    eye = torch.eye(d).double()
    for i, j in network.edges.tolist():
        for a, b in ((i, j), (j, i)):
            matrix[a, :, a] += alpha * eye
            matrix[a, :, b] -= alpha * eye
    best = torch.linalg.solve(matrix.reshape(n * d, n * d), right.flatten()).reshape(n, d)
    local = explain.explainable(ft.least_squares(linear(bias=False)), rho)
    data = explain.augmented(ROWS, SIGNALS, rho)
    run = ft.run(ft.gtv(local, network, alpha), ft.InProcess(data), rounds=150)
    assert distance(run.tensors()["weight"][:, 0], best) < 1e-9  # what 150 rounds leave


def test_steps_on_augmented_rows_are_steps_on_8_12() -> None:
    rho, rate = 0.5, 0.02
    local = explain.explainable(sgd(rate * (1 + rho), linear(bias=False), steps=3), rho)
    run = ft.run(ft.separate(local), ft.InProcess(explain.augmented(ROWS, SIGNALS, rho)), rounds=1)
    for k, ((x, y), (s, u)) in enumerate(zip(ROWS, SIGNALS)):
        w = linear(bias=False).weight[0].detach().clone()
        for _ in range(3):
            w -= rate * 2 * (x.T @ (x @ w - y) / len(y) + rho * s.T @ (s @ w - u) / len(u))
        assert distance(run.tensors()["weight"][k, 0], w) < ROUNDING


def test_the_more_a_user_is_listened_to_the_better_the_user_anticipates() -> None:
    found = []
    for rho in (0.0, 0.5, 5.0, 50.0):
        data = explain.augmented(ROWS, SIGNALS, rho)
        local = explain.explainable(ft.least_squares(linear(bias=False)), rho)
        run = ft.run(ft.separate(local), ft.InProcess(data), rounds=1)
        score = explain.explainability(run, SIGNALS)
        found.append(score.overall)
        x, u = SIGNALS[1]
        direct = (u - x @ run.tensors()["weight"][1, 0]).square().mean()
        assert abs(float(score.clients[1] - direct)) < 1e-12
    assert found == sorted(found, reverse=True)


def test_signals_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="signals of all 3 clients, but got 2"):
        explain.augmented(ROWS, SIGNALS.select([0, 1]), 1.0)
    with pytest.raises(ValueError, match="rho of at least 0"):
        explain.augmented(ROWS, SIGNALS, -1.0)
    assert tree.leaves(explain.augmented(ROWS, SIGNALS, 0.0).rows)[0] is ROWS.rows[0]
