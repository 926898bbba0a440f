"""Nodes with models of different kinds: the dense solution, stationary points, classes, every chunk, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsRegressor
from sklearn.tree import DecisionTreeRegressor
from support.oracles.closed_forms import ROUNDING, distance, linear, same_bits
from support.oracles.gtv_problems import bare_linear_clients, weighted_network
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.regressors import fitted, gtv_regressors

SIZES = [7, 4, 9, 5, 12]
N = len(SIZES)
ALPHA = 0.2
DATA, NETWORK = bare_linear_clients(SIZES), weighted_network(N)
INPUTS = random.normal(random.key(9), (10, 3), torch.float64)
LABELLED = DATA.map(lambda rows: (rows[0], (rows[1] > 0).long()))


def lines() -> LinearRegression:
    return LinearRegression(fit_intercept=False)


def exact() -> ft.LocalSolver:
    return ft.least_squares(linear(bias=False))


def descent(module: nn.Module, steps: int = 5, rate: float = 0.1, **arguments: Any) -> ft.LocalSolver:
    loss = arguments.pop("loss", lambda output, y: (output[:, 0] - y).square().mean())
    make = lambda parameters: torch.optim.SGD(parameters, lr=rate)
    return ft.gradient_descent(module, steps=steps, loss=loss, optimizer=make, **arguments)


def network(width: int, seed: int, outputs: int = 1) -> nn.Module:
    return nn.Sequential(linear(3, width, seed=seed), nn.Tanh(), linear(width, outputs, seed=seed + 1))


def dense_lines() -> Tensor:
    blocks = torch.block_diag(*[x.T @ x / len(x) for x, _ in DATA])
    right = torch.cat([x.T @ y / len(x) for x, y in DATA])
    metric = INPUTS.T @ INPUTS / len(INPUTS)
    matrix = blocks + ALPHA * torch.kron(NETWORK.laplacian().to_dense(), metric)
    return torch.linalg.solve(matrix, right).reshape(N, 3)


@pytest.mark.parametrize("cohort", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_regressors_and_modules_reach_the_dense_solution_together(cohort: int | None) -> None:
    """Three nodes refit, one solves its least squares, one takes gradient steps; for h_i(x) = w_i'x all are exact."""
    makes = [lines, exact(), lines, descent(linear(bias=False), steps=10), lines]
    algorithm = gtv_regressors(makes, NETWORK, ALPHA, INPUTS)
    run = ft.run(algorithm, ft.InProcess(DATA), {}, cohort=cohort, rounds=45 if cohort is None else 120)
    found = [m.weight[0].detach() if isinstance(m, nn.Module) else torch.as_tensor(m.coef_) for m in fitted(run)]
    assert distance(torch.stack(found), dense_lines()) < 1e-8  # it contracts by a third a round


@pytest.mark.slow
def test_networks_of_different_widths_stop_where_the_objective_is_stationary() -> None:
    modules, path, data = [network(1, 5), network(3, 6)], ft.Network([[0, 1]], [0.7]), DATA.select([2, 4])
    algorithm = gtv_regressors([descent(module, 40, 0.05) for module in modules], path, ALPHA, INPUTS)
    run = ft.run(algorithm, ft.InProcess(data), {}, rounds=40)

    def slopes(models: list[nn.Module]) -> list[float]:
        sizes = []
        for i, (model, (x, y)) in enumerate(zip(models, data)):
            heard = models[1 - i](INPUTS)[:, 0].detach()
            coupling = ALPHA * 0.7 * (model(INPUTS)[:, 0] - heard).square().mean()
            loss = (model(x)[:, 0] - y).square().mean() + coupling
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            sizes.append(float(torch.cat([g.reshape(-1) for g in gradients]).norm()))
        return sizes

    before, after = slopes(modules), slopes(fitted(run))
    assert max(after) < 0.01 * min(before)


def test_one_step_solvers_take_steps_on_the_whole_objective() -> None:
    module, path, data = network(3, 6), ft.Network([[0, 1]], [0.7]), DATA.select([2, 4])
    algorithm = gtv_regressors([lines, descent(module, 1, 0.05)], path, ALPHA, INPUTS, repeats=4)
    run = ft.run(algorithm, ft.InProcess(data), {}, rounds=2)
    plain, (x, y) = network(3, 6), data[1]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    own = torch.as_tensor(lines().fit(*data[0]).predict(INPUTS))
    for step in range(8):
        optimizer.zero_grad()
        loss = (plain(x)[:, 0] - y).square().mean()
        if step >= 4:  # the second round, with the neighbour's first predictions
            loss = loss + ALPHA * 0.7 * (plain(INPUTS)[:, 0] - own).square().mean()
        loss.backward()
        optimizer.step()
    assert distance(dict(fitted(run)[1].state_dict()), dict(plain.state_dict())) < 100 * ROUNDING


def test_classifiers_of_two_kinds_are_labelled_by_their_neighbours() -> None:
    """At the end each node's own cross-entropy and that of its neighbour's probabilities have opposite gradients."""
    pair = ft.Network.from_edges([(0, 1)])
    data = LABELLED.select([2, 4])
    logits = descent(linear(3, 2), 20, 0.5, loss=nn.functional.cross_entropy)
    makes = [lambda: LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000), logits]
    run = ft.run(gtv_regressors(makes, pair, 0.7, INPUTS, classes=2), ft.InProcess(data), {}, rounds=60)
    heard = run.tensors()["predictions"]
    assert heard.shape == (2, 10, 2)
    assert distance(heard.sum(-1), torch.ones(2, 10).double()) < ROUNDING
    (theirs, module), (x, y) = fitted(run), data[1]
    shares = module(INPUTS).log_softmax(-1)
    loss = nn.functional.cross_entropy(module(x), y) - 0.7 * (heard[0] * shares).sum(-1).mean()
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    assert max(float(g.abs().max()) for g in gradients) < 1e-4
    assert float((heard[0] - heard[1]).abs().mean()) < 0.2  # alone, rows of one class would be certain
    assert theirs.predict_proba(INPUTS.numpy()).shape == (10, 2)


def test_the_same_in_every_chunk_and_after_a_stop(tmp_path: Any) -> None:
    makes = [lines, descent(network(3, 1), batch_size=3), exact(), lambda: DecisionTreeRegressor(random_state=0), lines]
    algorithm = gtv_regressors(makes, NETWORK, ALPHA, INPUTS)
    one, alone = (ft.run(algorithm, ft.InProcess(DATA, chunk), {}, cohort=3, rounds=4) for chunk in (None, 1))
    assert distance(one.tensors(), alone.tensors()) < ROUNDING
    half = ft.run(algorithm, ft.InProcess(DATA), {}, cohort=3, rounds=2)
    half.save(tmp_path / "half.safetensors")
    again = ft.Run(algorithm, ft.InProcess(DATA), {}, cohort=3).load(tmp_path / "half.safetensors")
    for _ in again.rounds(4):
        pass
    assert same_bits(again.tensors(), one.tensors())
    makes[1] = descent(network(3, 1), 6, batch_size=3)
    other = ft.Run(gtv_regressors(makes, NETWORK, ALPHA, INPUTS), ft.InProcess(DATA), {}, cohort=3)
    with pytest.raises(ValueError, match=r"Expected a checkpoint of a run with node 1\.steps 6, but got one with 5"):
        other.load(tmp_path / "half.safetensors")


class Wide(LinearRegression):
    """A regressor of two outputs."""

    def predict(self, X: Any) -> Any:
        return np.stack([super().predict(X)] * 2, 1)


def test_what_does_not_fit_is_refused_by_the_name_of_its_node() -> None:
    def begin(makes: Any, data: ft.data.FederatedData = DATA, **settings: Any) -> None:
        ft.Run(gtv_regressors(makes, NETWORK, ALPHA, INPUTS, **settings), ft.InProcess(data), {}).step()

    with pytest.raises(ValueError, match="Expected a model for each of 5 nodes, but got 2"):
        begin([lines, lines])
    with pytest.raises(ValueError, match="Expected repeats of at least 1, but got 0"):
        begin(lines, repeats=0)
    with pytest.raises(
        ValueError, match=r"client '3' did not: expected predictions of shape \(10,\) .* but got \(10, 2\)"
    ):
        begin([lines, lines, lines, descent(linear(3, 2), loss=lambda output, y: output.square().mean()), lines])
    with pytest.raises(ValueError, match=r"client '1' did not: expected finite predictions on the shared inputs"):
        begin([lines, descent(linear(), steps=400, rate=1e10), lines, lines, lines])
    with pytest.raises(ValueError, match=r"client '2' did not: .* for each of \d+ rows, but Wide.predict gives shape"):
        begin([lines, lines, Wide, lines, lines])
    with pytest.raises(ValueError, match=r"client '4' did not: its model raised TypeError: .* 'sample_weight'"):
        begin([lines, lines, lines, lines, KNeighborsRegressor])
    with pytest.raises(ValueError, match="Expected finite shared inputs, but got NaN or Inf"):
        gtv_regressors(lines, NETWORK, ALPHA, INPUTS / 0)
    with pytest.raises(ValueError, match=r"Client '0': expected labels 0 to 1, but got others; count them from 0"):
        begin(LogisticRegression, classes=2)
    x, y = DATA.rows
    holes = ft.data.FederatedData((x, y), torch.tensor([11, 0, 9, 5, 12]), allow_empty=True)
    with pytest.raises(ValueError, match="Client '1': expected rows to fit, but got none"):
        begin([exact()] * N, holes)
    with pytest.raises(TypeError, match=r"Expected a run of ft\.gtv_regressors on data at hand, but got one of fedavg"):
        fitted(ft.run(ft.fedavg(exact()), ft.InProcess(DATA), rounds=1))
