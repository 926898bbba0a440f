"""Personal layers against an explicit loop, the joint gradient, and its two limits."""

from __future__ import annotations

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import (
    ROUNDING,
    client_tensors,
    distance,
    linear,
    linear_clients,
    mean_squared_error,
    same_bits,
    sgd,
)
from torch import Tensor, nn
from torch.func import functional_call

import fedtorch as ft
from fedtorch import tree
from fedtorch.tree import Tree

SIZES = [5, 2, 9, 4, 17, 6]
K = len(SIZES)
COUNTS = torch.tensor(SIZES, dtype=torch.float64)


def network() -> nn.Module:
    module = nn.Sequential(linear(3, 4, seed=1), nn.Tanh(), linear(4, 1, seed=2))
    return module


def step(parameters: Tree, x: Tensor, y: Tensor, rate: float, mu: float, centre: Tree) -> Tree:
    own = {name: leaf.clone().requires_grad_() for name, leaf in parameters.items()}
    loss = mean_squared_error(functional_call(network(), own, (x,)), y)
    loss = loss + mu / 2 * sum((leaf - centre[name]).square().sum() for name, leaf in own.items())
    gradients = torch.autograd.grad(loss, list(own.values()))
    return {name: (leaf - rate * g).detach() for (name, leaf), g in zip(own.items(), gradients)}


@pytest.mark.parametrize("personal", ["2.*", "0.*", ["*.bias", "0.*"]], ids=str)
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_the_explicit_loop(personal: str | list[str], mu: float) -> None:
    data, rate, lr = linear_clients(SIZES), 0.1, 0.7
    algorithm = ft.personal_layers(sgd(rate, network(), steps=3), personal, mu=mu, lr=lr)
    start = {name: p.detach().clone() for name, p in network().named_parameters()}
    mine, shared = ft.functional.split(start, personal)
    own = [dict(mine) for _ in range(K)]
    rounds = ft.Run(algorithm, ft.InProcess(data), cohort=4, seed=1).rounds(6)
    for round in rounds:
        ids = round.ids.tolist()
        new = {}
        for k in ids:
            centre = {name: {**shared, **own[k]}[name] for name in start}
            new[k] = centre
            for _ in range(3):
                new[k] = step(new[k], *data[k], rate, mu, centre)
        total = sum(SIZES[k] for k in ids)
        mean = {name: sum(SIZES[k] / total * new[k][name] for k in ids) for name in shared}
        for k in ids:
            own[k] = {name: new[k][name] for name in mine}
        shared = {name: shared[name] + lr * (mean[name] - shared[name]) for name in shared}
        assert distance(round.server, shared) < ROUNDING
        for k in range(K):
            assert distance(client_tensors(round.clients, round.server, k), {**shared, **own[k]}) < ROUNDING


def test_one_step_follows_the_gradient_of_the_joint_loss() -> None:
    """L(shared, personal_1, …) = Σ_k p_k L_k: the shared part moves by −η∇, personal parts by −η∇/p_k."""
    data, rate = linear_clients(SIZES), 0.1
    algorithm = ft.personal_layers(sgd(rate, network()), "2.*")
    round = ft.Run(algorithm, ft.InProcess(data)).step()
    start = {name: p.detach().clone() for name, p in network().named_parameters()}
    mine, shared = ft.functional.split(start, "2.*")
    shared = {name: leaf.requires_grad_() for name, leaf in shared.items()}
    own = [{name: leaf.clone().requires_grad_() for name, leaf in mine.items()} for _ in range(K)]
    share = COUNTS / COUNTS.sum()
    losses = [mean_squared_error(functional_call(network(), {**shared, **o}, (x,)), y) for o, (x, y) in zip(own, data)]
    (share @ torch.stack(losses)).backward()
    for name, leaf in shared.items():
        assert distance(round.server[name], (leaf - rate * leaf.grad).detach()) < ROUNDING
    for k in range(K):
        found = client_tensors(round.clients, round.server, k)
        for name, leaf in own[k].items():
            assert distance(found[name], (leaf - rate * leaf.grad / share[k]).detach()) < ROUNDING


def test_personal_bias_with_least_squares_reaches_the_joint_solution() -> None:
    """At the fixed point every intercept answers itself, and the slopes' answers average to the slopes."""
    data, mu = linear_clients([30, 12, 50, 9]), 0.2
    algorithm = ft.personal_layers(ft.least_squares(linear()), "bias", mu=mu)
    final = ft.run(algorithm, ft.InProcess(data), rounds=100).last
    slopes, rows, gradient = final.server["weight"][0], int(data.counts.sum()), torch.zeros(3, dtype=torch.float64)
    for k, (x, y) in enumerate(data):
        intercept = client_tensors(final.clients, final.server, k)["bias"]
        # The client's answer solves its proximal problem at (slopes, intercept), with the gradient μ(θ − answer).
        design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        matrix = 2 / len(x) * design.T @ design + mu * torch.eye(4, dtype=torch.float64)
        own = torch.linalg.solve(matrix, 2 / len(x) * design.T @ y + mu * torch.cat([slopes, intercept]))
        assert float((own[3] - intercept).abs()) < ROUNDING
        gradient += len(x) / rows * (own[:3] - slopes)
    assert float(gradient.abs().max()) < ROUNDING


def test_only_the_shared_part_is_sent() -> None:
    population = ft.InProcess(linear_clients(SIZES))
    whole = ft.Run(ft.fedavg(sgd(0.1, network())), population).step()
    part = ft.Run(ft.personal_layers(sgd(0.1, network()), "0.*"), population).step()
    assert sorted(part.server) == ["2.bias", "2.weight"]
    assert 0 < part.bytes_up < whole.bytes_up
    assert part.bytes_down == K * ft.wire.size(part.server)


def test_clients_that_never_answered_predict_with_the_start() -> None:
    data = linear_clients(SIZES)
    silent = ft.Faults(after=lambda keys, ids: ids == 2)
    local = sgd(0.1, network())
    final = ft.run(ft.personal_layers(local, "2.*"), ft.InProcess(data), faults=silent, rounds=3).last
    others = data.select([0, 1, 3, 4, 5])
    without = ft.run(ft.personal_layers(local, "2.*"), ft.InProcess(others), rounds=3).last
    assert distance(final.server, without.server) < ROUNDING
    mine, _ = ft.functional.split(local.parameters, "2.*")
    assert same_bits({name: client_tensors(final.clients, final.server, 2)[name] for name in mine}, mine)
    assert (
        distance(client_tensors(final.clients, final.server, 3), client_tensors(without.clients, without.server, 2))
        < ROUNDING
    )


def test_the_order_of_the_clients_does_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([3, 5, 0, 1, 4, 2])
    algorithm = ft.personal_layers(sgd(0.1, network(), steps=2), "2.*")
    one = ft.run(algorithm, ft.InProcess(data), rounds=3).last
    two = ft.run(algorithm, ft.InProcess(data.select(order)), rounds=3).last
    assert distance(one.server, two.server) < ROUNDING
    for row, k in enumerate(order.tolist()):
        assert (
            distance(client_tensors(one.clients, one.server, k), client_tensors(two.clients, two.server, row))
            < ROUNDING
        )


def test_without_personal_parts_it_is_fedavg() -> None:
    population = ft.InProcess(linear_clients(SIZES))
    personal = ft.run(ft.personal_layers(sgd(0.1, steps=2), [], mu=0.2), population, rounds=3).last
    plain = ft.run(ft.fedprox(sgd(0.1, steps=2), 0.2), population, rounds=3).last
    assert same_bits(personal.server, plain.server)


def test_a_start_of_ones_own() -> None:
    start = tree.map(lambda leaf: leaf + 2, sgd(0.1).parameters)
    algorithm = ft.personal_layers(sgd(0.1), "bias")
    progress = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES)), start)
    assert same_bits(client_tensors(progress.clients, progress.server, 1), start)


def test_no_clients() -> None:
    for local in (ft.least_squares(linear()), sgd(0.1)):
        algorithm = ft.personal_layers(local, "bias", mu=0.1)
        progress = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES)))
        reply = progress.clients.reply(progress.clients.empty_block(), progress.server, ft.Turn(torch.tensor(0), 0))
        assert all(len(leaf) == 0 for leaf in tree.leaves(reply))


def test_wrong_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"matches one of \['0.bias', .*\], but got 'head.\*'"):
        ft.personal_layers(sgd(0.1, network()), "head.*")
    for everything in ("*", ["0.*", "2.*"]):
        with pytest.raises(ValueError, match=r"Expected some parameters to remain shared.*use ft\.separate"):
            ft.personal_layers(sgd(0.1, network()), everything)


CASES: dict[str, Case] = {"personal_layers": Case(lambda: ft.personal_layers(sgd(0.1, steps=2, batch_size=3), "bias"))}
