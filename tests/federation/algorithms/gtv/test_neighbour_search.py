"""Neighbours by messages: what all discrepancies say of those that a node can have heard of, and who sees what."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

import pytest
import torch
from support.algorithm_cases import CLIENTS, Case
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import same_bits
from support.oracles.gtv_problems import weighted_network
from support.sites import Carried, carry_of, offers
from torch import Tensor

import fedtorch as ft
from fedtorch.sites import Remote, sealed
from fedtorch.sites.rounds import sites as meeting

N, K, WIDTH = 24, 3, 2
NETWORK = ft.Network([(i, i + 1) for i in range(N) if i % 6 < 5] + [(i, i + 6) for i in range(18)])  # a 4 × 6 grid
VECTORS = ft.random.normal(ft.random.key(0), (N, WIDTH), torch.float64)
ROWS = ft.data.FederatedData((VECTORS[:, :1], VECTORS[:, 1]), torch.ones(N, dtype=torch.int64))  # two fields


def hops(network: ft.Network) -> Tensor:
    """How many edges two nodes are apart, by breadth-first search."""
    near = [set() for _ in range(network.nodes)]
    for i, j in network.edges.tolist():
        near[i].add(j), near[j].add(i)
    apart = torch.full((network.nodes, network.nodes), 10**6)
    for start in range(network.nodes):
        apart[start, start], waiting = 0, deque([start])
        while waiting:
            node = waiting.popleft()
            for other in near[node]:
                if apart[start, other] == 10**6:
                    apart[start, other] = apart[start, node] + 1
                    waiting.append(other)
    return apart


def nearest_within(reach: Tensor, k: int = K) -> tuple[Tensor, Tensor]:
    """The k nearest that stand in `reach` `(n, n)`, and their distances, from the matrix of all discrepancies."""
    distances = ft.networks.discrepancy.distances(VECTORS).masked_fill(~reach, math.inf).fill_diagonal_(math.inf)
    distances, order = distances.sort(dim=1, stable=True)
    return torch.where(distances.isfinite(), order, -1)[:, :k], distances[:, :k]


def search(**settings: object) -> ft.Algorithm:
    return ft.neighbour_search(NETWORK, K, WIDTH, **settings)


def test_the_network_is_one_where_the_checks_can_fail() -> None:
    apart = hops(NETWORK)
    assert (int(apart.max()), int(NETWORK.neighbour_counts.min())) == (8, K - 1)


@pytest.mark.parametrize(
    ("relay", "rounds", "reach"), [(0, 5, 1), (None, 1, 1), (None, 2, 2), (None, 3, 3), (None, 9, 9)]
)
def test_the_nearest_of_all_so_many_edges_away(relay: int | None, rounds: int, reach: int) -> None:
    found = ft.run(search(relay=relay), ft.InProcess(ROWS), rounds=rounds).tensors()
    neighbours, distances = nearest_within(hops(NETWORK) <= reach)
    assert torch.equal(found["neighbours"], neighbours)
    torch.testing.assert_close(found["distances"], distances, rtol=1e-12, atol=1e-12)


def test_a_relay_tells_of_the_nearest_and_hears_of_fewer_nodes() -> None:
    """What comes of it lies between neighbours alone and everybody; who tells of nobody knows its neighbours only."""
    best = nearest_within(torch.ones(N, N, dtype=torch.bool))[1].sum()
    totals, known = [], []
    for relay in (0, K, None):
        run = ft.run(search(relay=relay), ft.InProcess(ROWS), rounds=9)
        totals.append(float(run.tensors()["distances"].nan_to_num(posinf=100.0).sum()))
        known.append(run.last.info["known"])
    assert totals[0] > totals[1] > totals[2] == pytest.approx(float(best))
    assert torch.equal(known[0], NETWORK.neighbour_counts.double())
    assert bool((known[0] <= known[1]).all())
    assert bool((known[1] <= known[2]).all())
    assert float(known[1].mean()) < N - 1 == float(known[2].min())


def test_weights_of_the_network_lost_messages_and_silent_nodes_do_not_matter() -> None:
    weighted = ft.Network(NETWORK.edges, torch.linspace(1e-3, 50.0, len(NETWORK.edges)), N)
    wanted = nearest_within(torch.ones(N, N, dtype=torch.bool))[0]
    algorithm = ft.neighbour_search(weighted, K, WIDTH, relay=None)
    lossy = algorithm | ft.unreliable_edges(weighted, loss=0.3, delay=2)
    for each, cohort in ((algorithm, N // 2), (lossy, None)):
        run = ft.run(each, ft.InProcess(ROWS), rounds=40, cohort=cohort)
        assert torch.equal(run.tensors()["neighbours"], wanted)


def test_a_nodes_vector_is_the_mean_of_its_rows() -> None:
    counts = torch.tensor([3, 1, 4])
    rows = ft.random.normal(ft.random.key(1), (8, 2), torch.float64)
    means = torch.stack([part.mean(0) for part in rows.split(counts.tolist())])
    run = ft.run(
        ft.neighbour_search(weighted_network(3), 2, 2, relay=None),
        ft.InProcess(ft.data.FederatedData((rows,), counts)),
        rounds=3,
    )
    expected = ft.networks.discrepancy.distances(means).sort(dim=1).values[:, 1:]
    torch.testing.assert_close(run.tensors()["distances"], expected)


def test_a_node_that_lies_deceives_only_where_its_messages_go() -> None:
    """It says that it is where its neighbour is, and comes first there; two edges away nobody has heard of it."""
    liar, victim = 0, int(NETWORK.edges[NETWORK.edges[:, 0] == 0][0, 1])
    lies = VECTORS.clone()
    lies[liar] = VECTORS[victim]
    lying = ft.data.FederatedData((lies[:, :1], lies[:, 1]), ROWS.counts)
    honest, deceived = (ft.run(search(), ft.InProcess(data), rounds=3).tensors() for data in (ROWS, lying))
    assert int(honest["neighbours"][victim, 0]) != liar == int(deceived["neighbours"][victim, 0])
    far = hops(NETWORK)[liar] > 1
    assert torch.equal(honest["neighbours"][far], deceived["neighbours"][far])


def test_a_search_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = ft.run(search(relay=2), ft.InProcess(ROWS), rounds=5, cohort=9, seed=1)
    begun = ft.run(search(relay=2), ft.InProcess(ROWS), rounds=2, cohort=9, seed=1)
    begun.save(tmp_path / "run")
    resumed = ft.Run(search(relay=2), ft.InProcess(ROWS), cohort=9, seed=1)
    resumed.load(tmp_path / "run")
    for _ in resumed.rounds(5):
        pass
    assert same_bits(whole.tensors(), resumed.tensors())


@pytest.mark.slow
def test_the_server_between_sites_reads_no_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in any frame in either direction; without seals it reads them all."""
    monkeypatch.setattr(meeting, "time", Clock)
    for carry, seen in ((sealed(NETWORK), False), (None, True)):
        make = search if carry is None else Carried(search, carry)
        host = Loopback(offers(ROWS, make, {}, 3), None, certified().identities)
        frames: list[bytes] = []
        host.before = lambda name, frame, frames=frames: frames.append(frame) or True
        host.after = lambda name, reply, frames=frames: frames.append(reply) or reply
        settings = {"seconds": 0.2, "quorum": 1.0, "roster": certified().roster, "rows": ROWS.rows}
        population = Remote(host, list(host.brought), "it", carry=carry_of(make), **settings)
        run = ft.Run(make(), population, seed=3)
        run.step(), run.step()
        everything = b"".join(frames)
        assert any(number.numpy().tobytes() in everything for number in VECTORS.flatten()) is seen


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="k from 1 to 23"):
        ft.neighbour_search(NETWORK, N, WIDTH)
    with pytest.raises(ValueError, match="relay of at least 0"):
        ft.neighbour_search(NETWORK, K, WIDTH, relay=-1)
    with pytest.raises(TypeError, match="Expected a network"):
        ft.neighbour_search(NETWORK.edges, K, WIDTH)
    with pytest.raises(ValueError, match="rows of 3 numbers, the width of the search, but got 2"):
        ft.run(ft.neighbour_search(NETWORK, K, 3), ft.InProcess(ROWS), rounds=1)
    with pytest.raises(ValueError, match="as many nodes as there are clients, 24, but got 5"):
        ft.Run(ft.neighbour_search(ft.Network.ring(5), K, WIDTH), ft.InProcess(ROWS))
    empty = ft.data.FederatedData((torch.ones(3, 1),), torch.tensor([1, 0, 2]), allow_empty=True)
    with pytest.raises(ValueError, match="expected rows, the mean of which is the node's vector"):
        ft.run(ft.neighbour_search(ft.Network.ring(3), 1, 1), ft.InProcess(empty), rounds=1)


CASES: dict[str, Case] = {
    "neighbour_search": Case(lambda: ft.neighbour_search(ft.Network.ring(CLIENTS), k=3, width=4, relay=1))
}
