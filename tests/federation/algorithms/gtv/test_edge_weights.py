"""Weights of edges by messages: those of the program that has all discrepancies, whoever is silent meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.algorithm_cases import CLIENTS, Case
from support.oracles.closed_forms import same_bits
from torch import Tensor

import fedtorch as ft
from fedtorch.networks import discrepancy, learning

N, WIDTH = 12, 2
VECTORS = ft.random.normal(ft.random.key(1), (N, WIDTH), torch.float64)
ROWS = ft.data.FederatedData((VECTORS[:, :1], VECTORS[:, 1]), torch.ones(N, dtype=torch.int64))  # two fields
NETWORK = ft.Network.k_nearest(VECTORS, 4)
APART = discrepancy.distances(VECTORS)
DEGREE, EDGES = 3, 15


def regular(degree: float = DEGREE, network: ft.Network = NETWORK, width: int = WIDTH) -> ft.Algorithm:
    return ft.edge_weights(network, width, degree=degree)


def budget(edges: float = EDGES, network: ft.Network = NETWORK) -> ft.Algorithm:
    return ft.edge_weights(network, WIDTH, edges=edges)


def in_one_place(degree: float) -> Tensor:
    """The linear program of (7.6), by a place that has all discrepancies."""
    return learning.regular(APART, degree, candidates=NETWORK.edges).adjacency().to_dense()


def cheapest(edges: int) -> Tensor:
    """The closed form of (7.7)."""
    some = NETWORK.edges[APART[NETWORK.edges[:, 0], NETWORK.edges[:, 1]].argsort()[:edges]]
    return ft.Network(some, nodes=N).adjacency().to_dense()


def weights(algorithm: ft.Algorithm, rounds: int, **settings: object) -> Tensor:
    return ft.run(algorithm, ft.InProcess(ROWS), rounds=rounds, **settings).tensors()["weights"]


def test_a_degree_of_every_node_is_the_linear_program_of_all_discrepancies() -> None:
    torch.testing.assert_close(weights(regular(), 60), in_one_place(DEGREE), rtol=0, atol=1e-9)


def test_a_budget_is_spent_on_the_smallest_discrepancies() -> None:
    torch.testing.assert_close(weights(budget(), 60), cheapest(EDGES), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_weights_that_are_halves_and_degrees_that_are_no_whole_numbers() -> None:
    assert set(in_one_place(2.5).flatten().tolist()) - {0.0, 1.0}
    torch.testing.assert_close(weights(regular(2.5), 2000), in_one_place(2.5), rtol=0, atol=1e-9)


def test_the_first_steps_written_out_for_all_edges_at_once() -> None:
    """The same steps of matrices (n, n), by a place that has all discrepancies."""
    for algorithm, trades in ((regular(), 0.0), (budget(), 1.0)):
        near = NETWORK.adjacency().to_dense() > 0
        apart, scale = APART * near, (APART * near).sum(1) / near.sum(1)
        target = DEGREE if not trades else 2 * EDGES / N
        pace = 10 * near / ((scale[:, None] + scale) / 2)
        price, a, y = scale / 2, torch.zeros(N, N).double(), torch.zeros(N, N).double()
        for _ in range(20):
            new = (a - pace / 2 * (apart - price[:, None] - price)).clamp(0, 1) * near
            trade = y + trades * pace / 2 * (price[:, None] - price)
            price = price + (target - (2 * new - a + 2 * trade - y).sum(1)) / pace.sum(1) / (1 + trades)
            a, y = new, trade
        torch.testing.assert_close(weights(algorithm, 22), a, rtol=0, atol=1e-10)


def test_both_ends_of_an_edge_say_the_same_and_units_do_not_matter() -> None:
    found = weights(regular(), 60)
    torch.testing.assert_close(found, found.mT, rtol=0, atol=1e-12)
    larger = ft.data.FederatedData((1000 * VECTORS[:, :1], 1000 * VECTORS[:, 1]), ROWS.counts)
    again = ft.run(regular(), ft.InProcess(larger), rounds=60).tensors()["weights"]
    torch.testing.assert_close(again, found, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [regular, pytest.param(budget, marks=pytest.mark.slow)])
def test_who_is_silent_holds_up_others_and_changes_nothing(make: Callable[[], ft.Algorithm]) -> None:
    """Half of the nodes in a round; some messages lost or late: after as many steps, a node says the same."""
    wanted = ft.run(make(), ft.InProcess(ROWS), rounds=6).tensors()
    lossy = make() | ft.unreliable_edges(ft.Network(NETWORK.edges, nodes=N), loss=0.2, delay=2)
    for algorithm, cohort in ((make(), N // 2), (lossy, None)):
        run, said = ft.Run(algorithm, ft.InProcess(ROWS), cohort=cohort), torch.full((N, N), torch.nan).double()
        for _ in run.rounds(200):
            now = run.tensors()
            said[now["steps"] == 6] = now["weights"][now["steps"] == 6]
            if bool((now["steps"] > 6).all()):
                break
        torch.testing.assert_close(said, wanted["weights"], rtol=0, atol=1e-12)


def test_choices_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = ft.run(regular(), ft.InProcess(ROWS), rounds=9, cohort=9, seed=1)
    begun = ft.run(regular(), ft.InProcess(ROWS), rounds=4, cohort=9, seed=1)
    begun.save(tmp_path / "run")
    resumed = ft.Run(regular(), ft.InProcess(ROWS), cohort=9, seed=1)
    resumed.load(tmp_path / "run")
    for _ in resumed.rounds(9):
        pass
    assert same_bits(whole.tensors(), resumed.tensors())


def test_what_is_refused() -> None:
    fewest = int(NETWORK.neighbour_counts.min())
    for given, message in (
        ({}, "a degree or a number of edges, but got None and None"),
        ({"degree": 2, "edges": 9}, "leave one of them out"),
        ({"degree": fewest + 1}, f"at most {fewest}, the fewest neighbours"),
        ({"edges": len(NETWORK.edges) + 1}, f"at most {len(NETWORK.edges)}, the network's"),
    ):
        with pytest.raises(ValueError, match=message):
            ft.edge_weights(NETWORK, WIDTH, **given)
    with pytest.raises(ValueError, match=r"connected network.*one of 2 components"):
        ft.edge_weights(ft.Network([[0, 1], [2, 3]]), WIDTH, edges=1)
    with pytest.raises(TypeError, match="Expected a network"):
        ft.edge_weights(NETWORK.edges, WIDTH, degree=1)
    with pytest.raises(ValueError, match="rows of 3 numbers, the width of the search, but got 2"):
        ft.run(regular(width=3), ft.InProcess(ROWS), rounds=1)
    with pytest.raises(ValueError, match="as many nodes as there are clients, 12, but got 5"):
        ft.Run(ft.edge_weights(ft.Network.ring(5), WIDTH, degree=1), ft.InProcess(ROWS))


CASES: dict[str, Case] = {"edge_weights": Case(lambda: ft.edge_weights(ft.Network.ring(CLIENTS), width=4, degree=1))}
