"""Ditto against closed forms, an explicit loop, and its two limits."""

from __future__ import annotations

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import (
    ROUNDING,
    client_tensors,
    distance,
    joined,
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
from fedtorch import random, tree
from fedtorch.tree import Tree

SIZES = [5, 2, 9, 4, 17, 6]
K = len(SIZES)
COUNTS = torch.tensor(SIZES, dtype=torch.float64)


def step(parameters: Tree, x: Tensor, y: Tensor, rate: float, strength: float, centre: Tree) -> Tree:
    own = {name: leaf.clone().requires_grad_() for name, leaf in parameters.items()}
    loss = mean_squared_error(functional_call(linear(), own, (x,)), y)
    loss = loss + strength / 2 * sum((leaf - centre[name]).square().sum() for name, leaf in own.items())
    gradients = torch.autograd.grad(loss, list(own.values()))
    return {name: (leaf - rate * g).detach() for (name, leaf), g in zip(own.items(), gradients)}


@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_the_explicit_loop(mu: float) -> None:
    data, rate, lr, strength = linear_clients(SIZES), 0.1, 0.7, 0.9
    algorithm = ft.ditto(sgd(rate, steps=3), strength, mu=mu, lr=lr)
    shared = algorithm.start
    own = [shared] * K
    for round in ft.Run(algorithm, ft.InProcess(data), cohort=4, seed=1).rounds(5):
        ids = round.ids.tolist()
        total, mean = sum(SIZES[k] for k in ids), shared
        for k in ids:
            new = shared
            for _ in range(3):
                new = step(new, *data[k], rate, mu, shared)
                own[k] = step(own[k], *data[k], rate, strength, shared)
            mean = tree.add_scaled(mean, tree.subtract(new, shared), lr * SIZES[k] / total)
        shared = mean
        assert distance(round.server, shared) < ROUNDING
        for k in range(K):
            assert distance(client_tensors(round.clients, round.server, k), own[k]) < ROUNDING


def test_the_personal_solution_in_closed_form() -> None:
    data, strength = linear_clients(SIZES), 0.6
    local = ft.least_squares(linear())
    rounds = list(ft.Run(ft.ditto(local, strength, mu=0.3), ft.InProcess(data)).rounds(3))
    heard, eye = joined(rounds[1].server), torch.eye(4, dtype=torch.float64)
    for k, (x, y) in enumerate(data):
        matrix, vector = moments(x, y)
        expected = torch.linalg.solve(matrix + strength * eye, vector + strength * heard)
        found = joined(client_tensors(rounds[2].clients, rounds[2].server, k))
        assert distance(found, expected) < ROUNDING
        own = found.clone().requires_grad_()  # and the gradient of its problem is zero there
        loss = (own * (matrix @ own)).sum() / 2 - (vector * own).sum() + strength / 2 * (own - heard).square().sum()
        (gradient,) = torch.autograd.grad(loss, own)
        assert float(gradient.abs().max()) < 10 * ROUNDING


def test_the_shared_model_is_that_of_fedavg() -> None:
    population = ft.InProcess(linear_clients(SIZES))
    local = sgd(0.1, epochs=2, batch_size=3)
    ours = ft.run(ft.ditto(local, 0.5), population, cohort=3, seed=1, rounds=4).last
    plain = ft.run(ft.fedavg(local), population, cohort=3, seed=1, rounds=4).last
    assert same_bits(ours.server, plain.server)
    assert (ours.bytes_up, ours.bytes_down) == (plain.bytes_up, plain.bytes_down)


def test_without_strength_it_is_separate_training() -> None:
    data, local = linear_clients(SIZES), sgd(0.1, steps=3)
    ours = ft.run(ft.ditto(local, 0.0), ft.InProcess(data), rounds=4).last
    alone = ft.run(ft.separate(local), ft.InProcess(data), rounds=4).last
    for k in range(K):
        assert same_bits(client_tensors(ours.clients, ours.server, k), client_tensors(alone.clients, alone.server, k))


def test_the_personal_model_approaches_the_shared_one_to_first_order_in_the_inverse_strength() -> None:
    data, local = linear_clients(SIZES), ft.least_squares(linear())

    def gap(strength: float) -> float:
        round = ft.Run(ft.ditto(local, strength), ft.InProcess(data)).step()
        return float((joined(client_tensors(round.clients, round.server, 2)) - joined(local.parameters)).norm())

    assert gap(1e5) / gap(2e5) == pytest.approx(2, abs=1e-3)  # the next term is O(1/λ) times curvatures of order ten


def test_the_order_of_the_clients_does_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([3, 5, 0, 1, 4, 2])
    algorithm = ft.ditto(sgd(0.1, steps=2), 0.5)
    one = ft.run(algorithm, ft.InProcess(data), rounds=3).last
    two = ft.run(algorithm, ft.InProcess(data.select(order)), rounds=3).last
    assert distance(one.server, two.server) < ROUNDING
    for row, k in enumerate(order.tolist()):
        assert (
            distance(client_tensors(one.clients, one.server, k), client_tensors(two.clients, two.server, row))
            < ROUNDING
        )


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_whose_message_is_lost_keeps_its_start(when: str) -> None:
    data, local = linear_clients(SIZES), sgd(0.1, steps=2)
    start = tree.map(lambda leaf: leaf + 2, local.parameters)
    silent = ft.Faults(**{when: lambda keys, ids: ids == 2})
    final = ft.run(ft.ditto(local, 0.5), ft.InProcess(data), start, faults=silent, rounds=3).last
    others = data.select([0, 1, 3, 4, 5])
    without = ft.run(ft.ditto(local, 0.5), ft.InProcess(others), start, rounds=3).last
    assert distance(final.server, without.server) < ROUNDING
    assert same_bits(client_tensors(final.clients, final.server, 2), start)
    assert (
        distance(client_tensors(final.clients, final.server, 3), client_tensors(without.clients, without.server, 2))
        < ROUNDING
    )


def test_both_losses_are_told() -> None:
    round = ft.Run(ft.ditto(sgd(0.1), 0.5), ft.InProcess(linear_clients(SIZES))).step()
    assert set(round.info) == {"loss", "personal_loss"}


def test_no_clients() -> None:
    for local in (ft.least_squares(linear()), sgd(0.1)):
        progress = ft.Run(ft.ditto(local, 0.5), ft.InProcess(linear_clients(SIZES)))
        reply = progress.clients.reply(progress.clients.empty_block(), progress.server, ft.Turn(random.key(0), 0))
        assert all(len(leaf) == 0 for leaf in tree.leaves(reply))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected strength of at least 0, but got -1"):
        ft.ditto(sgd(0.1), -1.0)
    with pytest.raises(ValueError, match="Expected a positive lr, but got 0"):
        ft.ditto(sgd(0.1), 1.0, lr=0.0)


CASES: dict[str, Case] = {
    "ditto": Case(
        lambda: ft.ditto(sgd(0.1, steps=2, batch_size=3), 0.5),
        waits=6,  # counts of rows and the history's numbers of both models; total weight, messages
    )
}
