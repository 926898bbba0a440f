"""FedBN: BatchNorm stays with its client, everything else is federated averaging."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import (
    NUMBERS,
    ROUNDING,
    client_tensors,
    distance,
    linear,
    linear_clients,
    mean_squared_error,
    same_bits,
    sgd,
)
from torch import nn

import fedtorch as ft
from fedtorch import tree

SIZES = [5, 3, 9, 4, 17, 6]
K = len(SIZES)
OWN = ["1.bias", "1.weight"]
STATISTICS = ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


def network(affine: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(4, affine=affine, dtype=torch.float64)
    return nn.Sequential(linear(3, 4, seed=1), norm, nn.Tanh(), linear(4, 1, seed=2))


def local(rate: float = 0.1, **arguments: Any) -> ft.LocalSolver:
    return sgd(rate, network(), **{"steps": 2, "buffers": "local", **arguments})


def test_the_explicit_loop() -> None:
    """Ordinary modules, trained one after another by `torch.optim.SGD`; all but BatchNorm is averaged."""
    data, modules = linear_clients(SIZES), [network() for _ in range(K)]
    for round in ft.Run(ft.fedbn(local()), ft.InProcess(data), cohort=4, seed=1).rounds(4):
        ids = round.ids.tolist()
        trained = {}
        for k in ids:
            optimizer = torch.optim.SGD(modules[k].parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                mean_squared_error(modules[k](data[k][0]), data[k][1]).backward()
                optimizer.step()
            trained[k] = copy.deepcopy(modules[k].state_dict())
        total = sum(SIZES[k] for k in ids)
        shared = {n: sum(SIZES[k] / total * trained[k][n] for k in ids) for n in trained[ids[0]] if n[0] != "1"}
        for module in modules:
            module.load_state_dict({**module.state_dict(), **shared})
        assert distance(round.server, shared) < ROUNDING
        for k in range(K):
            assert distance(client_tensors(round.clients, round.server, k), dict(modules[k].state_dict())) < ROUNDING


def test_only_what_is_not_batch_normalisation_is_sent() -> None:
    round = ft.Run(ft.fedbn(local()), ft.InProcess(linear_clients(SIZES))).step()
    assert sorted(round.server) == ["0.bias", "0.weight", "3.bias", "3.weight"]
    one, two = (client_tensors(round.clients, round.server, k) for k in (0, 1))
    assert all(not torch.equal(one[name], two[name]) for name in [*OWN, *STATISTICS[1:]])


def test_it_is_personal_layers_by_name() -> None:
    data = ft.InProcess(linear_clients(SIZES))
    ours = ft.run(ft.fedbn(local(), mu=0.2, lr=0.5), data, cohort=3, rounds=3).last
    named = ft.run(ft.personal_layers(local(), "1.*", mu=0.2, lr=0.5), data, cohort=3, rounds=3).last
    assert same_bits(ours.server, named.server)
    assert same_bits(ours.clients.state_dict(), named.clients.state_dict())


def test_layers_are_found_wherever_they_are() -> None:
    block = nn.Sequential(linear(3, 4), nn.BatchNorm1d(4, dtype=torch.float64))
    deep = sgd(0.1, nn.Sequential(block, linear(4, 1)), buffers="local")
    assert sorted(ft.fedbn(deep).init(deep.parameters, 2)[0]) == ["0.0.bias", "0.0.weight", "1.bias", "1.weight"]
    without = sgd(0.1, network(affine=False), buffers="local")  # statistics only, which are the solver's state
    assert sorted(ft.fedbn(without).init(without.parameters, 2)[0]) == sorted(without.parameters)


def test_one_step_follows_the_gradient_of_the_joint_loss() -> None:
    """Shared parts move by −η Σ p_k ∇L_k, a client's own by −η ∇L_k."""
    data = linear_clients(SIZES)
    round = ft.Run(ft.fedbn(local(steps=1)), ft.InProcess(data)).step()
    start = dict(network().named_parameters())
    gradients = []
    for x, y in data:
        module = network()
        mean_squared_error(module(x), y).backward()
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    for name, leaf in start.items():
        if name in OWN:
            for k in range(K):
                found = client_tensors(round.clients, round.server, k)[name]
                assert distance(found, leaf.detach() - 0.1 * gradients[k][name]) < ROUNDING
        else:
            mean = sum(n / sum(SIZES) * g[name] for n, g in zip(SIZES, gradients))
            assert distance(round.server[name], leaf.detach() - 0.1 * mean) < ROUNDING


def test_the_order_of_the_clients_and_silent_ones_do_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([3, 5, 0, 1, 4])
    start = tree.map(lambda leaf: leaf + 0.5, local().parameters)
    silent = ft.Faults(after=lambda keys, ids: ids == 2)
    one = ft.run(ft.fedbn(local()), ft.InProcess(data), start, faults=silent, rounds=3).last
    two = ft.run(ft.fedbn(local()), ft.InProcess(data.select(order)), start, rounds=3).last
    assert distance(one.server, two.server) < ROUNDING
    for row, k in enumerate(order.tolist()):
        assert (
            distance(client_tensors(one.clients, one.server, k), client_tensors(two.clients, two.server, row))
            < ROUNDING
        )
    untouched = client_tensors(one.clients, one.server, 2)
    assert same_bits({name: untouched[name] for name in OWN}, {name: start[name] for name in OWN})


def test_what_is_not_fedbn_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a module with BatchNorm layers, but Linear has none"):
        ft.fedbn(sgd(0.1))
    with pytest.raises(ValueError, match=r"'1\.running_mean' is averaged; use gradient_descent"):
        ft.fedbn(local(buffers="average"))


def small() -> torch.nn.Module:
    """A module with batch normalisation."""
    return torch.nn.Sequential(linear(3, 2), torch.nn.BatchNorm1d(2, dtype=NUMBERS.get()), linear(2, 1, seed=1))


CASES: dict[str, Case] = {"fedbn": Case(lambda: ft.fedbn(sgd(0.1, small(), steps=2, buffers="local")))}
