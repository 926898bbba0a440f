"""GTV minimisation with a norm for any local solver: the exact solver's solution, exact ties, chunks, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, same_bits, sgd
from support.oracles.gtv_problems import bare_linear_clients, weighted_network
from torch import nn

import fedtorch as ft
from fedtorch.networks.solvers import linear_problem, norm1, norm2
from fedtorch.networks.solvers.admm import admm
from fedtorch.networks.solvers.penalties import equal, squared

SIZES = [7, 4, 9, 5, 12]
N = len(SIZES)
DATA, NETWORK = bare_linear_clients(SIZES), weighted_network(N)


def exact() -> ft.LocalSolver:
    return ft.least_squares(linear(bias=False))


@pytest.mark.parametrize(
    ("penalty", "alpha"), [(norm2, 0.3), (norm2, 3.0), (norm1, 0.3), (squared, 0.3), (equal, 1.0)], ids=str
)
def test_exact_local_solvers_reach_the_solution_of_admm(penalty: Any, alpha: float) -> None:
    run = ft.run(ft.gtv(exact(), NETWORK, alpha, penalty=penalty, rho=2.0), ft.InProcess(DATA), rounds=250)
    wanted = admm(linear_problem(DATA, NETWORK, alpha), penalty, tolerance=1e-10).parameters
    assert distance(run.tensors()["weight"][:, 0], wanted) < 1e-6
    assert float(run.history["clusters"].iloc[-1]) == len(wanted.round(decimals=6).unique(dim=0))


def test_gradient_steps_of_a_module_tie_nodes_exactly() -> None:
    """Two groups of nodes with one model each: bodies fall into two clusters, equal to the bit, heads stay personal."""
    two = linear_clients([30, 30], seed=3)
    data = ft.data.from_tensors([(x[i::3], y[i::3]) for x, y in two for i in range(3)])
    network = ft.Network.from_matrix(1 - torch.eye(6) * 1.0)
    module = nn.Sequential(linear(3, 2, seed=4), linear(2, 1, seed=5))
    local = sgd(0.1, module, steps=10)
    algorithm = ft.gtv(local, network, {"0.*": 0.02}, penalty=norm2, rho=0.3)
    run = ft.run(algorithm, ft.InProcess(data), rounds=150)
    body, head = run.tensors()["0.weight"], run.tensors()["1.weight"]
    assert len(body.unique(dim=0)) < 6
    assert len(head.unique(dim=0)) == 6
    labels = run.server.labels
    assert all(same_bits(body[i], body[j]) == bool(labels[i] == labels[j]) for i in range(6) for j in range(i))
    assert torch.equal(run.client_module(2)[0].weight, body[2])


def test_the_same_in_every_chunk_with_cohorts_and_permuted_nodes() -> None:
    algorithm = ft.gtv(exact(), NETWORK, 0.3, penalty=norm2)
    one, other = (ft.run(algorithm, ft.InProcess(DATA, chunk), cohort=3, rounds=8) for chunk in (None, 1))
    assert distance(one.server, other.server) < ROUNDING
    order = [3, 1, 4, 0, 2]
    place = {old: new for new, old in enumerate(order)}
    edges = [(place[int(i)], place[int(j)]) for i, j in NETWORK.edges]
    permuted = ft.gtv(exact(), ft.Network(edges, NETWORK.weights.tolist()), 0.3, penalty=norm2)
    whole = ft.run(algorithm, ft.InProcess(DATA), rounds=8)
    moved = ft.run(permuted, ft.InProcess(DATA.select(order)), rounds=8)
    assert distance(whole.tensors()["weight"][order], moved.tensors()["weight"]) < 100 * ROUNDING


@pytest.mark.slow
def test_cohorts_reach_the_same_solution() -> None:
    algorithm = ft.gtv(exact(), NETWORK, 0.3, penalty=norm2, rho=2.0)
    run = ft.run(algorithm, ft.InProcess(DATA), cohort=3, rounds=3000)
    wanted = admm(linear_problem(DATA, NETWORK, 0.3), norm2, tolerance=1e-10).parameters
    assert distance(run.tensors()["weight"][:, 0], wanted) < 1e-4


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a positive rho"):
        ft.gtv(exact(), NETWORK, 1.0, penalty=norm2, rho=0.0)
    with pytest.raises(TypeError, match="Expected a penalty, but got str; take"):
        ft.gtv(exact(), NETWORK, 1.0, penalty="norm2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected one strength of all coupled parameters"):
        ft.gtv(sgd(0.1), NETWORK, {"weight": 1.0, "bias": 0.5}, penalty=norm2)
    with pytest.raises(ValueError, match="as many nodes as there are clients, 5, but got 4"):
        ft.Run(ft.gtv(exact(), weighted_network(4), 1.0, penalty=norm2), ft.InProcess(DATA))
