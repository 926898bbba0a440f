"""Averages among neighbours against the mean, and federations without a server against those with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.oracles.closed_forms import distance, linear, linear_clients, same_bits, sgd

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.consensus import Averaging, at_node, consensus
from fedtorch.federation.algorithms.ep import correction
from fedtorch.federation.algorithms.ep.fitting import converged
from fedtorch.federation.runs import run as running
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.gibbs import graphical, sparse

K = 6
SIZES = [12, 5, 9, 30, 7, 16]
NETWORKS = {
    "ring": ft.Network.ring(K),
    "star": ft.Network.star(K),
    "complete": ft.Network.from_edges([(i, j) for i in range(K) for j in range(i)]),
    "path, weighted": ft.Network([(i, i + 1) for i in range(K - 1)], [1.0, 0.2, 3.0, 1.0, 0.5]),
}
networks = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())


def gibbs(sweeps: int = 2) -> ft.Algorithm:
    return ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=sweeps, chains=2)


@networks
@pytest.mark.parametrize("reduction", [0.5, 1e-3, 1e-10])
def test_averaging_keeps_its_promise(network: ft.Network, reduction: float) -> None:
    """For every vector: the matrix of the map, less the mean, has at most this norm. Rounding: 1e-14 a step."""
    average = Averaging(network, reduction)
    matrix = average(torch.eye(K, dtype=torch.float64))
    mean = torch.full((K, K), 1 / K, dtype=torch.float64)
    left = float(torch.linalg.matrix_norm(matrix - mean, ord=2))
    assert left <= reduction + 1e-14 * average.exchanges
    if average.exchanges > 1:  # and no fewer exchanges would do, by the bound that is the best for an interval
        low, high = network.extreme_eigenvalues
        centre = (high + low) / max(high - low, 1e-6)
        assert np.cosh((average.exchanges - 1) * np.arccosh(centre)) < 1.01 / reduction


def test_it_takes_the_square_root_of_plain_averaging() -> None:
    """On a long path: exchanges for a factor of 1e-6, beside those of x − 2/(λ₂ + λ_n) L x."""
    network = ft.Network.from_edges([(i, i + 1) for i in range(49)])
    low, high = network.extreme_eigenvalues
    plain = np.log(1e-6) / np.log((high - low) / (high + low))
    assert Averaging(network, 1e-6).exchanges < 2 * np.sqrt(plain) * np.sqrt(np.log(2e6))


@networks
def test_gibbs_sampling_without_a_server_is_that_with_one_to_the_bit(network: ft.Network) -> None:
    """At every node, also where some do not answer, and after running sums were made anew."""
    data = linear_clients(SIZES)
    faults = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.3))
    arguments: dict[str, Any] = {"rounds": 6, "seed": 4, "faults": faults}
    served = ft.run(gibbs(), ft.InProcess(data), torch.zeros(3), **arguments).last
    algorithm = ft.without_server(gibbs(), network)
    found = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), **arguments).last
    for node in range(K):
        assert same_bits(tree.map(lambda leaf, node=node: leaf[node], found.server), served.server)
    assert same_bits(found.clients.state_dict(), served.clients.state_dict())


def test_running_sums_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TOTAL_ANEW", 2)
    data, algorithm = linear_clients(SIZES), ft.without_server(gibbs(), NETWORKS["ring"])
    served = ft.run(gibbs(), ft.InProcess(data), torch.zeros(3), rounds=3).last
    found = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=3).last
    assert same_bits(tree.map(lambda leaf: leaf[0], found.server), served.server)


def test_a_markov_random_field_without_a_server() -> None:
    data = linear_clients(SIZES).map(lambda rows: rows[0])
    kernels = graphical.neighbourhoods(), graphical.every_response(sparse.hierarchy())
    served = ft.gibbs(*kernels, sweeps=2, chains=2)
    results = [
        ft.run(algorithm, ft.InProcess(data), graphical.start(3), rounds=3).last.server.variables.theta
        for algorithm in (served, ft.without_server(served, NETWORKS["path, weighted"]))
    ]
    assert all(torch.equal(copy, results[0]) for copy in results[1])


@networks
@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD"])
def test_deep_learning_without_a_server_to_a_tolerance(network: ft.Network, name: str) -> None:
    """Messages and parameters are below 10 in norm, and a round passes an error on at most tenfold."""
    made = {"FedAvg": lambda: ft.fedavg(sgd(0.05, steps=3)), "SCAFFOLD": lambda: ft.scaffold(sgd(0.05, steps=3))}[name]
    data, tolerance = linear_clients(SIZES), 1e-9
    served = ft.run(made(), ft.InProcess(data), cohort=4, rounds=4).last
    algorithm = ft.without_server(made(), network, tolerance)
    found = ft.run(algorithm, ft.InProcess(data), cohort=4, rounds=4).last
    for node in range(K):
        row = tree.map(lambda leaf, node=node: leaf[node], found.server)
        assert distance(row, served.server) < 1000 * tolerance


@networks
def test_expectation_propagation_without_a_server_is_that_with_one(network: ft.Network) -> None:
    """Its end, its posteriors, those of devices and the correction; at every node, and of their mean.

    A round passes an error on at most tenfold, and divides it by what is left of a precision of order one.
    """
    model, data, tolerance = hierarchical.linear(hierarchical.normal(3), noise=0.3), linear_clients(SIZES), 1e-9
    population, close = ft.InProcess(data), 1e-6
    served = ft.run(ft.ep(model), population, rounds=60, until=ep.settled())
    alone = ft.run(ft.without_server(ft.ep(model), network, tolerance), population, rounds=60, until=ep.settled())
    assert served.number < 60
    assert alone.number == served.number
    assert converged(alone)
    for name in ("mean_change", "sd_change", "damping", "improper"):
        assert np.allclose(alone.log[name], served.log[name], rtol=1e-5, atol=1e-5)
    q = ep.posterior(served)
    for node in (None, 0, K - 1):
        found = ep.posterior(alone, node=node)
        assert distance(found.mean, q.mean) < close
        assert distance(found.covariance_matrix, q.covariance_matrix) < close
    one, two = ep.devices(served), ep.devices(alone)
    assert distance(two, one) < close
    corrected = [correction.corrected(run, points=512) for run in (served, alone)]
    assert distance(corrected[1].posterior.mean, corrected[0].posterior.mean) < close
    assert corrected[1].effective == pytest.approx(corrected[0].effective, rel=1e-4)
    own = correction.corrected(alone, points=512, node=2)
    assert distance(own.posterior.stddev, corrected[0].posterior.stddev) < close
    one, two = ep.devices(served, given=corrected[0]).marginals(), ep.devices(alone, given=own).marginals()
    assert distance(two.mean, one.mean) < close


def test_every_node_has_its_own_copy() -> None:
    """With a coarse tolerance they differ, and each is asked by its number."""
    model, data = hierarchical.linear(hierarchical.normal(3), noise=0.3), linear_clients(SIZES)
    run = ft.run(ft.without_server(ft.ep(model), NETWORKS["ring"], 1e-3), ft.InProcess(data), rounds=4)
    copies = [ep.posterior(run, tolerance=float("inf"), node=node).mean for node in range(K)]
    assert all(not torch.equal(copies[0], copy) for copy in copies[1:])
    mean = ep.posterior(run, tolerance=float("inf")).mean
    expected = gaussian.moments(tree.map(lambda copies: copies.mean(0), run.server.posterior)).mean
    assert torch.equal(mean, expected)
    assert int(at_node(run.server).version) == 4
    with pytest.raises(ValueError, match=f"node of 0…{K - 1}, or None for the mean of all, but got {K}"):
        ep.posterior(run, node=K)
    served = ft.run(ft.ep(model), ft.InProcess(data), rounds=4)
    with pytest.raises(ValueError, match="without a server to ask node 0, but got one with; leave node= away"):
        ep.posterior(served, node=0)


def test_traffic_goes_over_the_edges() -> None:
    network = NETWORKS["star"]
    exchange = consensus(network, 1e-3)
    message, outbox = ft.Sum({"w": torch.zeros(K, 5, dtype=torch.float64)}), {"w": torch.zeros(K, 5)}
    exchanges = Averaging(network, 1e-3).exchanges
    assert exchange.traffic(outbox, message, slice(0, K)) == (exchanges * 2 * (K - 1) * 5 * 8, 0)
    assert exchange.traffic(outbox, tree.take(message, slice(0, 1)), slice(0, 1)) == (exchanges * (K - 1) * 5 * 8, 0)


def test_one_node() -> None:
    algorithm = ft.without_server(gibbs(), ft.Network([], nodes=1))
    data = ft.InProcess(linear_clients([9]))
    found, served = (ft.run(made, data, torch.zeros(3), rounds=2).last.server for made in (algorithm, gibbs()))
    assert same_bits(tree.map(lambda leaf: leaf[0], found), served)


def test_bad_input() -> None:
    data = ft.InProcess(linear_clients(SIZES))
    with pytest.raises(ValueError, match="Expected a connected network, but got one of 2 components"):
        consensus(ft.Network.from_edges([(0, 1), (2, 3)]))
    for reduction in (0.0, 1.0):
        with pytest.raises(ValueError, match="Expected a reduction between 0 and 1"):
            Averaging(NETWORKS["ring"], reduction)
    with pytest.raises(ValueError, match=r"as many nodes as there are clients, 6, but got 3 nodes"):
        ft.Run(ft.without_server(gibbs(), ft.Network.ring(3)), data, torch.zeros(3)).step()
    with pytest.raises(ValueError, match="Expected an algorithm whose messages are summed"):
        ft.without_server(ft.gtv(ft.least_squares(linear()), NETWORKS["ring"], 0.1), NETWORKS["ring"])
    with pytest.raises(ValueError, match="Expected messages of whole numbers"):
        ft.Run(ft.without_server(ft.fedavg(sgd(0.1)), NETWORKS["ring"]), data).step()
