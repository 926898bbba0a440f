"""Robust totals: per neighbourhood on a graph, over all clients on a star."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd
from support.oracles.gtv_problems import bare_linear_clients, dense_solution, weighted_network

import fedtorch as ft
from fedtorch import tree
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gibbs import sparse
from fedtorch.sites.secure.masked import masked
from fedtorch.trust import robust

N = 14
NETWORK = weighted_network(N, p=0.9)  # at least nine neighbours each
PLAIN = robust.trimmed_mean(0.0)


def relaxation(data: ft.data.FederatedData, network: ft.Network, alpha: float = 1.0) -> ft.Algorithm:
    return ft.gtv(ft.least_squares(linear(3, bias=False)), network, alpha)


def weights(run: ft.Run) -> torch.Tensor:
    return run.tensors()["weight"][:, 0]


def test_the_mean_gives_the_plain_algorithm() -> None:
    """A trimmed mean that trims nothing is the sum; with faults, cohorts and a start that is not zero."""
    data = bare_linear_clients([8] * N)
    algorithm = relaxation(data, NETWORK)
    settings = {"cohort": 6, "faults": ft.dropouts(0.2) | ft.lost_messages(after=0.2), "seed": 3, "rounds": 12}
    plain = ft.run(algorithm, ft.InProcess(data), **settings)
    defended = algorithm | robust.rule(PLAIN, NETWORK)
    for chunk in (None, 2):
        run = ft.run(defended, ft.InProcess(data, chunk), **settings)
        assert distance(run.server.algorithm.total, plain.server.total) < ROUNDING
        assert distance(run.tensors(), plain.tensors()) < ROUNDING


def test_the_mean_on_a_star_gives_the_plain_algorithm() -> None:
    data = linear_clients([6] * 5)
    for algorithm in (ft.scaffold(sgd(0.05, steps=3)), ft.feddyn(ft.least_squares(linear()), 3.0)):
        plain = ft.run(algorithm, ft.InProcess(data), rounds=6)
        run = ft.run(algorithm | robust.rule(PLAIN), ft.InProcess(data), rounds=6)
        assert distance(run.server.algorithm, plain.server) < ROUNDING


@pytest.mark.parametrize(
    "rule", [robust.median(), robust.krum(2), robust.geometric_median(), robust.centred_clipping(), robust.bulyan(1)]
)
def test_a_neighbourhood_is_averaged_as_a_star_would(rule: robust.Rule) -> None:
    data = bare_linear_clients([8] * N)
    run = ft.run(relaxation(data, NETWORK) | robust.rule(rule, NETWORK), ft.InProcess(data), rounds=2)
    adjacency, told = NETWORK.adjacency().to_dense(), run.server.told["weight"][:, 0]
    for node in range(N):
        near = adjacency[node].nonzero()[:, 0]
        share = adjacency[node, near] / NETWORK.degrees[node]
        expected = NETWORK.degrees[node] * rule.average(told[near], share)
        assert distance(run.server.algorithm.total["weight"][node, 0], expected) < 1e-9  # of the geometric median


def test_nodes_next_to_a_liar_stay_with_their_cluster() -> None:
    data = bare_linear_clients([20] * N)
    x, y = data[0]
    same = ft.data.from_tensors([(x, y)] * N)
    attacked = ft.data.from_tensors([(x, y)] * (N - 1) + [(x, 1e4 * y)])
    expected = dense_solution(same, NETWORK, 1.0)
    moved = ft.run(relaxation(attacked, NETWORK), ft.InProcess(attacked), rounds=100)
    assert float((weights(moved) - expected)[:-1].abs().min()) > 10
    for rule in (robust.median(), robust.krum(1)):
        defended = relaxation(attacked, NETWORK) | robust.rule(rule, NETWORK)
        found = ft.run(defended, ft.InProcess(attacked), rounds=100)
        assert distance(weights(found)[:-1], expected[:-1]) < 1e-3  # of the start 100 rounds leave so much


def test_what_is_not_credible_is_not_taken_into_the_table() -> None:
    data = bare_linear_clients([8] * N)
    defended = relaxation(data, NETWORK) | robust.rule(robust.median(), NETWORK)

    def lying(inbox, state, rows, turn):  # type: ignore[no-untyped-def]
        reply = defended.client(inbox, state, rows, turn)
        told = tree.map(lambda leaf: leaf.index_fill(0, torch.tensor([3]), 1e200), reply.message.told)  # a Sum
        return reply._replace(message=reply.message._replace(told=told))

    run = ft.run(dataclasses.replace(defended, client=lying), ft.InProcess(data), rounds=3)
    assert torch.equal(run.server.told["weight"][3], defended.start["weight"])
    assert bool(run.server.algorithm.total["weight"].abs().max() < 1e3)


def test_it_resumes_bit_for_bit() -> None:
    data = bare_linear_clients([8] * N)
    make = lambda: ft.Run(relaxation(data, NETWORK) | robust.rule(robust.median(), NETWORK), ft.InProcess(data))
    whole, first, second = make(), make(), make()
    for run, rounds in ((whole, 4), (first, 2)):
        for _ in run.rounds(rounds):
            pass
    second.load_state_dict(first.state_dict())
    for _ in second.rounds(4):
        pass
    assert torch.equal(weights(second), weights(whole))


def test_matrices_stay_positive_definite_or_the_rule_is_refused() -> None:
    """The units' precisions have rank one each: number by number their average is indefinite."""
    grid = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None]
    generator = torch.Generator().manual_seed(0)
    data = ft.data.from_tensors(
        [(torch.rand(9, 1, generator=generator).double(), torch.randn(9, generator=generator).double())] * 5
    )
    algorithm = ft.fedmgp(ConvolvedGP(grid), steps=1, accept_disclosure=True)
    for rule in (robust.geometric_median(), robust.krum(1)):
        run = ft.run(algorithm | robust.rule(rule), ft.InProcess(data), rounds=3)
        assert bool(run.server.algorithm.bound.isfinite())  # a factorisation of I + B that is not definite has none
    with pytest.raises(ValueError, match="Expected a rule on whole messages, but got median"):
        algorithm | robust.rule(robust.median())


def test_secure_sums_are_refused() -> None:
    clients = ft.InProcess(linear_clients([5] * N), carry=masked())
    with pytest.raises(ValueError, match=r"more than the sum of messages, or changes it \(a robust rule"):
        ft.Run(ft.scaffold(sgd(0.1)) | robust.rule(robust.median()), clients)


def test_another_exchange_in_place_of_theirs_is_refused() -> None:
    algorithm = ft.scaffold(sgd(0.1)) | robust.rule(robust.median())
    later = dataclasses.replace(algorithm, exchange=ft.star())
    with pytest.raises(TypeError, match="Expected every client's message, but got the result of another exchange"):
        ft.Run(later, ft.InProcess(linear_clients([5] * N))).step()


def test_what_makes_no_sense_is_refused() -> None:
    data, ring = bare_linear_clients([8] * N), ft.Network.ring(N)
    algorithm = relaxation(data, NETWORK)
    with pytest.raises(ValueError, match="at least 5 nodes for krum, but 14 nodes have fewer, '0' only 2"):
        relaxation(data, ring) | robust.rule(robust.krum(1), ring)
    with pytest.raises(ValueError, match="neighbourhoods of at least 15 nodes for bulyan"):
        algorithm | robust.rule(robust.bulyan(3), NETWORK)
    with pytest.raises(ValueError, match="but got fresh messages only"):
        ft.fedavg(sgd(0.1)) | robust.rule(robust.median(), NETWORK)
    exact = ft.gibbs(sparse.regression(), sparse.hierarchy())
    with pytest.raises(ValueError, match="those of gibbs are sums and nothing else"):
        exact | robust.rule(robust.median())
    with pytest.raises(ValueError, match="Expected a rule without a reference"):
        algorithm | robust.rule(robust.fltrust(0), NETWORK)
    with pytest.raises(ValueError, match="pass the algorithm's network"):
        algorithm | robust.rule(robust.median())
    with pytest.raises(ValueError, match="pass the algorithm's network"):
        ft.Run(algorithm | robust.rule(robust.median(), ft.Network.ring(N + 1)), ft.InProcess(data))
    with pytest.raises(ValueError, match="Expected at least 17 clients for krum, but got 14"):
        ft.Run(ft.scaffold(sgd(0.1)) | robust.rule(robust.krum(7)), ft.InProcess(linear_clients([5] * N)))
