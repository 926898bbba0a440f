"""FedAvg and FedProx against closed forms, gradients and explicit loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import (
    ROUNDING,
    client_tensors,
    distance,
    fedprox_fixed_point,
    joined,
    last,
    linear,
    linear_clients,
    mean_squared_error,
    moments,
    same_bits,
    sgd,
)
from torch import Tensor
from torch.func import functional_call

import fedtorch as ft
from fedtorch import tree
from fedtorch.tree import Tree

SIZES = [5, 2, 9, 4, 17, 6]
COUNTS = torch.tensor(SIZES, dtype=torch.float64)
ODD = torch.tensor([3.0, 0.5, 1.0, 2.0, 0.25, 1.5], dtype=torch.float64)  # weights that are not the rows


def odd_weight(data: Any) -> Tensor:
    """`ODD`, found by the number of rows."""
    return (data.count[:, None] == COUNTS).to(torch.float64) @ ODD


def alone(local: ft.LocalSolver, data: ft.data.FederatedData, **settings: Any) -> list[Tree]:
    """Every client's parameters after one round of its own, from the common start."""
    round = ft.Run(ft.separate(local), ft.InProcess(data), **settings).step()
    return [client_tensors(round.clients, round.server, k) for k in range(len(data))]


def average(parameters: list[Tree], weights: Tensor) -> Tree:
    share = (weights / weights.sum()).tolist()
    return tree.map(lambda *each: sum(p * leaf for p, leaf in zip(share, each)), *parameters)


def pooled_gradient(data: ft.data.FederatedData, parameters: Tree, weights: Tensor) -> Tree:
    """The gradient of Σ_k p_k L_k by autograd."""
    own = {name: leaf.clone().requires_grad_() for name, leaf in parameters.items()}
    losses = torch.stack([mean_squared_error(functional_call(linear(), own, (x,)), y) for x, y in data])
    gradient = torch.autograd.grad(losses @ (weights / weights.sum()), list(own.values()))
    return dict(zip(own, gradient))


def test_one_full_step_is_a_step_of_pooled_gradient_descent() -> None:
    data, rate = linear_clients(SIZES), 0.1
    federated = ft.Run(ft.fedavg(sgd(rate)), ft.InProcess(data)).rounds(5)
    central = ft.Run(ft.pooled(sgd(rate)), ft.InProcess(data.pool())).rounds(5)
    for ours, theirs in zip(federated, central):
        assert distance(ours.server, client_tensors(theirs.clients, {}, 0)) < ROUNDING


@pytest.mark.parametrize("weights", [COUNTS, ODD], ids=["rows", "odd"])
def test_the_change_is_minus_the_gradient(weights: Tensor) -> None:
    data, rate, lr = linear_clients(SIZES), 0.1, 0.5
    weight = {} if weights is COUNTS else {"weight": odd_weight}
    local = sgd(rate)
    round = ft.Run(ft.fedavg(local, lr=lr, **weight), ft.InProcess(data)).step()
    expected = tree.add_scaled(local.parameters, pooled_gradient(data, local.parameters, weights), -rate * lr)
    assert distance(round.server, expected) < ROUNDING


def test_many_small_steps_are_one_large_one_to_second_order() -> None:
    data = linear_clients(SIZES)

    def gap(rate: float) -> Tensor:
        many = ft.Run(ft.fedavg(sgd(rate / 5, steps=5)), ft.InProcess(data)).step()
        one = ft.Run(ft.fedavg(sgd(rate)), ft.InProcess(data)).step()
        return torch.cat([leaf.flatten() for leaf in tree.leaves(tree.subtract(many.server, one.server))]).norm()

    order = torch.log2(gap(2e-3) / gap(1e-3))
    assert float(order) == pytest.approx(2, abs=0.02)  # the next term is O(rate)


@pytest.mark.parametrize("lr", [1.0, 0.3])
@pytest.mark.parametrize("weights", [COUNTS, ODD], ids=["rows", "odd"])
@pytest.mark.parametrize("solver", ["least squares", "descent"])
def test_the_average_of_the_clients_own_fits(weights: Tensor, lr: float, solver: str) -> None:
    data = linear_clients(SIZES)
    local = ft.least_squares(linear()) if solver == "least squares" else sgd(0.05, epochs=2, batch_size=3)
    weight = {} if weights is COUNTS else {"weight": odd_weight}
    round = ft.Run(ft.fedavg(local, lr=lr, **weight), ft.InProcess(data), seed=4).step()
    mean = average(alone(local, data, seed=4), weights)
    expected = tree.map(lambda start, end: start + lr * (end - start), local.parameters, mean)
    assert distance(round.server, expected) < 10 * ROUNDING  # systems of two rows and four unknowns


@pytest.mark.parametrize("weights", [COUNTS, ODD], ids=["rows", "odd"])
@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_fedprox_reaches_its_fixed_point(mu: float, weights: Tensor) -> None:
    data = linear_clients(SIZES)
    weight = {} if weights is COUNTS else {"weight": odd_weight}
    algorithm = ft.fedprox(ft.least_squares(linear()), mu, **weight)
    rounds = ft.Run(algorithm, ft.InProcess(data)).rounds(120)
    expected = fedprox_fixed_point(data, mu, weights)
    assert distance(joined(last(rounds).server), expected) < 10 * ROUNDING


def test_fedprox_follows_the_gradient_of_the_envelope() -> None:
    """The change is −1/μ times the gradient of Σ_k p_k min_x L_k(x) + μ/2‖x − θ‖²."""
    data, mu = linear_clients(SIZES), 0.7
    local = ft.least_squares(linear())
    round = ft.Run(ft.fedprox(local, mu), ft.InProcess(data)).step()
    theta = joined(local.parameters).requires_grad_()
    eye = torch.eye(4, dtype=torch.float64)
    envelope = torch.zeros((), dtype=torch.float64)
    for share, (x, y) in zip(COUNTS / COUNTS.sum(), data):
        matrix, vector = moments(x, y)
        nearest = torch.linalg.solve(matrix + mu * eye, vector + mu * theta)
        loss = (nearest * (matrix @ nearest)).sum() / 2 - (vector * nearest).sum()
        envelope = envelope + share * (loss + mu / 2 * (nearest - theta).square().sum())
    (gradient,) = torch.autograd.grad(envelope, theta)
    assert distance(joined(round.server) - theta.detach(), -gradient / mu) < ROUNDING


@pytest.mark.parametrize("solver", ["least squares", "descent"])
def test_a_strong_proximal_term_stays_at_the_start(solver: str) -> None:
    """The change is −∇/μ to first order in 1/μ."""
    data, mu = linear_clients(SIZES), 1e6
    local = ft.least_squares(linear()) if solver == "least squares" else sgd(0.9 / mu, steps=30)
    round = ft.Run(ft.fedprox(local, mu), ft.InProcess(data)).step()
    expected = tree.scale(pooled_gradient(data, local.parameters, COUNTS), -1.0)
    change = tree.scale(tree.subtract(round.server, local.parameters), mu)
    assert distance(change, expected) < 1e-4  # O(1/μ) times curvatures of order ten


def test_fedprox_without_mu_is_fedavg() -> None:
    data = linear_clients(SIZES)
    prox = ft.run(ft.fedprox(sgd(0.1, steps=3), 0.0, lr=0.5), ft.InProcess(data), rounds=3).last
    plain = ft.run(ft.fedavg(sgd(0.1, steps=3), lr=0.5), ft.InProcess(data), rounds=3).last
    assert same_bits(prox.server, plain.server)


def test_the_proximal_term_by_descent_is_that_in_closed_form() -> None:
    data = linear_clients(SIZES)
    by_steps = ft.Run(ft.fedprox(sgd(0.05, steps=400), 2.0), ft.InProcess(data)).step()
    exact = ft.Run(ft.fedprox(ft.least_squares(linear()), 2.0), ft.InProcess(data)).step()
    assert distance(by_steps.server, exact.server) < 10 * ROUNDING  # (1 − 0.05·2)^400 is below 1e-16


def locals_() -> list[ft.LocalSolver]:
    return [ft.least_squares(linear()), sgd(0.1, steps=3)]


@pytest.mark.parametrize("local", locals_(), ids=["least squares", "descent"])
def test_the_order_of_the_clients_does_not_matter(local: ft.LocalSolver) -> None:
    data = linear_clients(SIZES)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    one = ft.run(ft.fedprox(local, 0.3), ft.InProcess(data), rounds=3).last
    two = ft.run(ft.fedprox(local, 0.3), ft.InProcess(data.select(order)), rounds=3).last
    assert distance(one.server, two.server) < ROUNDING


@pytest.mark.parametrize("how", ["cohort", "before", "after"])
@pytest.mark.parametrize("local", locals_(), ids=["least squares", "descent"])
def test_only_answers_count(local: ft.LocalSolver, how: str) -> None:
    data, silent = linear_clients(SIZES), torch.tensor([1, 4])
    others = torch.tensor([0, 2, 3, 5])
    settings: dict[str, Any] = {
        "cohort": {"cohort": lambda key, round: others},
        "before": {"faults": ft.Faults(before=lambda keys, ids: torch.isin(ids, silent))},
        "after": {"faults": ft.Faults(after=lambda keys, ids: torch.isin(ids, silent))},
    }[how]
    some = ft.run(ft.fedprox(local, 0.3), ft.InProcess(data), **settings, rounds=3).last
    all_of_them = ft.run(ft.fedprox(local, 0.3), ft.InProcess(data.select(others)), rounds=3).last
    assert distance(some.server, all_of_them.server) < ROUNDING


def test_partial_participation_is_fedavg_over_the_cohort() -> None:
    data, local = linear_clients(SIZES), sgd(0.1, epochs=1)
    server = local.parameters
    for round in ft.Run(ft.fedavg(local), ft.InProcess(data), cohort=3, seed=2).rounds(4):
        ids = round.ids.sort().values
        (theirs,) = ft.Run(ft.fedavg(local), ft.InProcess(data.select(ids)), server).rounds(1)
        assert distance(round.server, theirs.server) < ROUNDING
        server = round.server


def test_copies_of_one_client_are_that_client() -> None:
    x, y = linear_clients([9])[0]
    data = ft.data.from_tensors([(x, y)] * 4)
    many = ft.run(ft.fedavg(sgd(0.1, steps=3)), ft.InProcess(data), rounds=3).last
    one = ft.run(ft.fedavg(sgd(0.1, steps=9)), ft.InProcess(ft.data.from_tensors([(x, y)])), rounds=1).last
    assert distance(many.server, one.server) < ROUNDING


def test_a_start_of_ones_own() -> None:
    data, start = linear_clients(SIZES), tree.map(lambda leaf: leaf + 2, sgd(0.1).parameters)
    round = ft.Run(ft.fedavg(sgd(0.1)), ft.InProcess(data), start).step()
    expected = tree.add_scaled(start, pooled_gradient(data, start, COUNTS), -0.1)
    assert distance(round.server, expected) < ROUNDING


def test_no_clients() -> None:
    data = linear_clients(SIZES)
    for local in locals_():
        progress = ft.Run(ft.fedprox(local, 0.3), ft.InProcess(data))
        block = progress.clients.empty_block()
        message, state, info = progress.clients.reply(block, progress.server, ft.Turn(torch.tensor(0), 0))
        assert all(len(leaf) == 0 for leaf in tree.leaves((message, state, info)))


def test_all_clients_predict_with_server_parameters() -> None:
    round = ft.Run(ft.fedavg(sgd(0.1)), ft.InProcess(linear_clients(SIZES))).step()
    for k in range(len(SIZES)):
        assert same_bits(client_tensors(round.clients, round.server, k), round.server)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mu": -0.1}, "Expected mu of at least 0, but got -0.1"),
        ({"mu": float("nan")}, "Expected mu of at least 0, but got nan"),
        ({"lr": 0.0}, "Expected a positive lr, but got 0.0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.fedavg(sgd(0.1), **settings)
    with pytest.raises(ValueError, match=message):
        ft.personal_layers(sgd(0.1), "bias", **settings)


CASES: dict[str, Case] = {
    "fedavg": Case(lambda: ft.fedavg(sgd(0.1, epochs=1, batch_size=4))),
    "fedprox": Case(lambda: ft.fedprox(sgd(0.1, steps=2), 0.3)),
}
