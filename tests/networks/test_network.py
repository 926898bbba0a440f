"""Networks against dense linear algebra, networkx and the probabilities of the random ones."""

import math

import networkx
import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import haversine_distances

import fedtorch as ft
from fedtorch.networks import _edge_list as edge_list, network as network_module

PLACES = ft.random.uniform(ft.random.key(9), (30, 2), torch.float64)


def weighted(nodes=30, p=0.2, seed=0):
    plain = ft.Network.erdos_renyi(nodes, p, seed=seed)
    weights = ft.random.exponential(ft.random.fold_in(ft.random.key(seed), 1), (len(plain.edges),), torch.float64)
    return ft.Network(plain.edges, weights, nodes)


def dense(network):
    matrix = torch.zeros(len(network), len(network), dtype=torch.float64)
    i, j = network.edges.T
    matrix[i, j] = network.weights
    return matrix + matrix.T


def test_edges_are_canonical_whatever_their_order():
    given = weighted()
    key = ft.random.key(5)
    order = ft.random.permutation(key, len(given.edges))
    flipped = given.edges[order].flip(1)
    again = ft.Network(flipped, given.weights[order], len(given))
    assert torch.equal(again.edges, given.edges)
    assert torch.equal(again.weights, given.weights)
    both = ft.Network(torch.cat((given.edges, flipped)), torch.cat((given.weights, given.weights[order])), len(given))
    assert torch.equal(both.edges, given.edges)
    assert torch.equal(both.weights, given.weights)


@pytest.mark.parametrize("network", [weighted(), ft.Network([], nodes=3), ft.Network([], nodes=0), ft.Network.star(1)])
def test_matrices_against_dense(network):
    matrix = dense(network)
    assert torch.equal(network.adjacency().to_dense(), matrix)
    torch.testing.assert_close(network.degrees, matrix.sum(1), rtol=1e-14, atol=0)
    assert torch.equal(network.neighbour_counts, (matrix > 0).sum(1))
    torch.testing.assert_close(network.laplacian().to_dense(), matrix.sum(1).diag() - matrix, rtol=0, atol=1e-14)
    assert network.adjacency(torch.float32).dtype == torch.float32
    assert network.adjacency(torch.float32) is network.adjacency(torch.float32)


def test_columns_of_the_adjacency_are_sorted():
    columns = weighted().adjacency().col_indices().split(weighted().neighbour_counts.tolist())
    assert all(bool((part.diff() > 0).all()) for part in columns)


@pytest.mark.parametrize("nodes", [3, 8, 50, 1000])
def test_eigenvalues_in_closed_form(nodes):
    # Rounding: a few units of 1e-16 times λ_n times the conditioning of a symmetric eigenvalue, which is one.
    star, ring = ft.Network.star(nodes), ft.Network.ring(nodes)
    assert star.extreme_eigenvalues == pytest.approx((1, nodes), rel=1e-12, abs=1e-12 * nodes)
    second = 2 - 2 * math.cos(2 * math.pi / nodes)
    largest = 2 - 2 * math.cos(2 * math.pi * (nodes // 2) / nodes)
    assert ring.extreme_eigenvalues == pytest.approx((second, largest), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(
    "network",
    [
        ft.Network.k_nearest(ft.random.uniform(ft.random.key(3), (900, 2), torch.float64), 8),
        ft.Network.erdos_renyi(900, 0.02, seed=2),
    ],
)
def test_sparse_eigenvalues_are_those_of_the_whole_matrix(network):
    assert len(network) > network_module._DENSE
    values = torch.linalg.eigvalsh(network.laplacian().to_dense())
    expected = float(values[1]) if network.components.number == 1 else 0.0
    assert network.algebraic_connectivity == pytest.approx(expected, rel=1e-8)
    assert network.extreme_eigenvalues[1] == pytest.approx(float(values[-1]), rel=1e-10)


def test_components_are_numbered_by_their_first_nodes():
    network = ft.Network([(1, 4), (0, 3), (3, 5)], nodes=6)
    labels, number = network.components
    assert labels.tolist() == [0, 1, 2, 0, 1, 0]
    assert number == 3
    assert network.algebraic_connectivity == 0
    with pytest.raises(ValueError, match="at least two nodes"):
        _ = ft.Network.star(1).algebraic_connectivity


def test_a_subnetwork_is_a_block_of_the_matrix():
    network, ids = weighted(), torch.tensor([7, 2, 19, 11, 3, 8])
    network = ft.Network(network.edges, network.weights, 30, [f"n{i}" for i in range(30)], PLACES)
    part = network.subnetwork(ids)
    assert torch.equal(dense(part), dense(network)[ids][:, ids])
    assert part.names == tuple(f"n{i}" for i in ids.tolist())
    assert torch.equal(part.positions, network.positions[ids])


def test_networkx_and_back():
    network = weighted()
    network = ft.Network(network.edges, network.weights, 30, [f"n{i}" for i in range(30)], PLACES)
    graph = network.to_networkx()
    np.testing.assert_allclose(networkx.laplacian_matrix(graph).toarray(), network.laplacian().to_dense(), atol=1e-14)
    back = ft.Network.from_networkx(graph)
    assert torch.equal(back.edges, network.edges)
    assert torch.equal(back.weights, network.weights)
    assert torch.equal(back.positions, network.positions)
    assert back.names == network.names
    karate = networkx.karate_club_graph()
    expected = networkx.algebraic_connectivity(karate, method="lanczos", tol=1e-12)
    assert ft.Network.from_networkx(karate).algebraic_connectivity == pytest.approx(expected, rel=1e-6)


def test_from_matrix_of_every_kind():
    network = weighted()
    matrix = dense(network)
    for kind in (matrix, matrix.to_sparse(), network.adjacency(), matrix.numpy(), network.scipy_adjacency):
        again = ft.Network.from_matrix(kind)
        assert torch.equal(again.edges, network.edges)
        assert torch.equal(again.weights, network.weights)
    matrix[3, 5] += 1
    with pytest.raises(ValueError, match="symmetric"):
        ft.Network.from_matrix(matrix)
    with pytest.raises(ValueError, match="self-loop at node 1"):
        ft.Network.from_matrix(torch.eye(3)[[0, 1, 2]] * torch.tensor([0.0, 1, 0]))
    with pytest.raises(ValueError, match="square"):
        ft.Network.from_matrix(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="positive finite"):
        ft.Network.from_matrix(-torch.ones(2, 2) + torch.eye(2))


def test_from_edges_by_name_and_number():
    network = ft.Network.from_edges([("b", "a", 2.0), ("a", "c", 3.0)], names=["a", "b", "c", "d"])
    assert network.edges.tolist() == [[0, 1], [0, 2]]
    assert network.weights.tolist() == [2, 3]
    assert len(network) == 4
    assert ft.Network.from_edges([(0, 2)], nodes=5).names == ("0", "1", "2", "3", "4")
    assert len(ft.Network.from_edges([], nodes=2).edges) == 0
    with pytest.raises(ValueError, match="among names=, but got 'z'"):
        ft.Network.from_edges([("a", "z")], names=["a", "b"])
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        ft.Network.from_edges([(0, 1), (1, 2, 0.5)])


@pytest.mark.parametrize("dimensions", [1, 2, 3, 30])
def test_k_nearest_against_all_distances(dimensions):
    points = ft.random.normal(ft.random.key(0), (60, dimensions), torch.float64)
    distance = torch.cdist(points, points).fill_diagonal_(math.inf)
    chosen = torch.zeros(60, 60, dtype=torch.bool).scatter(1, distance.topk(4, largest=False).indices, True)
    network = ft.Network.k_nearest(points, 4)
    assert torch.equal(dense(network) > 0, chosen | chosen.T)
    assert (network.positions is not None) == (dimensions in (2, 3))


def test_great_circle_neighbours_against_haversine_distances():
    """Also across the date line, around a pole, and for equal places."""
    uniform = ft.random.uniform(ft.random.key(1), (80, 2), torch.float64)
    places = torch.stack((uniform[:, 0] * 180 - 90, uniform[:, 1] * 360 - 180), 1)
    places[:4] = torch.tensor([[90.0, 0.0], [89.9, 170.0], [10.0, 179.99], [10.0, -179.99]])
    places[4] = places[5]
    apart = torch.from_numpy(haversine_distances(places.deg2rad().numpy())).fill_diagonal_(math.inf)
    chosen = torch.zeros(80, 80, dtype=torch.bool).scatter(1, apart.topk(3, largest=False).indices, True)
    network = ft.Network.k_nearest(places, 3, great_circle=True)
    assert torch.equal(dense(network) > 0, chosen | chosen.T)
    assert (dense(network)[2, 3], dense(ft.Network.k_nearest(places, 3))[2, 3]) == (1, 0)
    assert torch.equal(network.positions, places.flip(1))  # of a map: to the east, to the north


def test_a_network_of_what_nodes_have_chosen():
    network = ft.Network.from_neighbours(torch.tensor([[2, 1], [0, -1], [3, -1], [-1, -1]]), list("abcd"))
    assert network.edges.tolist() == [[0, 1], [0, 2], [2, 3]]
    assert network.names == ("a", "b", "c", "d")
    with pytest.raises(ValueError, match=r"a row of neighbours for each node, \(n, k\), but got shape \(2,\)"):
        ft.Network.from_neighbours([1, 0])


def test_equal_points_do_not_become_their_own_neighbours():
    network = ft.Network.k_nearest(torch.zeros(6, 2), 2)
    assert int(network.neighbour_counts.min()) >= 2


def test_pairs_are_numbered_in_lexicographic_order():
    for nodes in (2, 3, 7, 40):
        pairs = torch.combinations(torch.arange(nodes))
        assert torch.equal(edge_list.pair(torch.arange(len(pairs)), nodes), pairs)
    nodes = 3_000_000  # rounding: the last pairs of a large triangle, and the first and last of its rows
    first = torch.tensor([0, 1, 77_777, 1_499_999, nodes - 3, nodes - 2])
    start = first * (2 * nodes - first - 1) // 2
    size = nodes - 1 - first
    assert torch.equal(edge_list.pair(start, nodes), torch.stack((first, first + 1), 1))
    assert torch.equal(edge_list.pair(start + size - 1, nodes), torch.stack((first, torch.full((6,), nodes - 1)), 1))


def test_every_pair_of_erdos_renyi_is_as_likely():
    runs, nodes, p = 1000, 6, 0.3
    count = torch.zeros(nodes, nodes)
    for run in range(runs):
        i, j = ft.Network.erdos_renyi(nodes, p, seed=run).edges.T
        count[i, j] += 1
    frequency = count[*torch.combinations(torch.arange(nodes)).T] / runs
    error = (frequency - p) / math.sqrt(p * (1 - p) / runs)
    assert float(error.abs().max()) < 4  # fifteen standard normals exceed it once in 1000 seeds
    assert 15 - 4 * math.sqrt(30) < float(error.square().sum()) < 15 + 4 * math.sqrt(30)  # chi-squared, 4 sd


@pytest.mark.parametrize(("p", "edges"), [(0.0, 0), (1.0, 4950), (1e-300, 0)])
def test_erdos_renyi_at_the_ends(p, edges):
    assert len(ft.Network.erdos_renyi(100, p, seed=0).edges) == edges


def test_edges_of_many_blocks_of_skips():
    nodes, p = 60_000, 1e-3  # 1.8 million edges: more than are drawn at a time
    network = ft.Network.erdos_renyi(nodes, p, seed=0)
    pairs = nodes * (nodes - 1) / 2
    assert abs(len(network.edges) - p * pairs) < 4 * math.sqrt(p * (1 - p) * pairs)
    half = (network.edges[:, 1] < nodes // 2).sum()
    inner = nodes / 2 * (nodes / 2 - 1) / 2
    assert abs(int(half) - p * inner) < 4 * math.sqrt(p * inner)


def test_blocks_have_their_own_probabilities():
    sizes, within, between = [300, 500, 200], [0.2, 0.05, 0.6], 0.01
    network = ft.Network.stochastic_blocks(sizes, within, between, seed=1)
    block = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    first, second = block[network.edges].T
    for b, size in enumerate(sizes):
        pairs = size * (size - 1) / 2
        found = int(((first == b) & (second == b)).sum())
        assert abs(found - within[b] * pairs) < 4 * math.sqrt(within[b] * (1 - within[b]) * pairs)
    pairs = 300 * 500 + 300 * 200 + 500 * 200
    assert abs(int((first != second).sum()) - between * pairs) < 4 * math.sqrt(between * (1 - between) * pairs)
    assert len(ft.Network.stochastic_blocks([4, 1, 3], 1.0, 0.0, seed=0).edges) == 6 + 0 + 3
    assert len(ft.Network.stochastic_blocks([4, 1, 3], 0.0, 1.0, seed=0).edges) == 4 + 12 + 3


def test_bad_input():
    with pytest.raises(ValueError, match="self-loop at node 2"):
        ft.Network([(0, 1), (2, 2)])
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive finite weights"):
            ft.Network([(0, 1), (1, 2)], [1.0, weight])
    with pytest.raises(ValueError, match=r"the edge \(0, 1\), but got two different"):
        ft.Network([(0, 1), (1, 0)], [1.0, 2.0])
    with pytest.raises(ValueError, match="nodes from 0 to 2"):
        ft.Network([(0, 3)], nodes=3)
    with pytest.raises(ValueError, match="nodes from 0 to"):
        ft.Network([(-1, 1)])
    with pytest.raises(ValueError, match=r"edges \(E, 2\)"):
        ft.Network([(0, 1, 2)])
    with pytest.raises(TypeError, match="integers"):
        ft.Network([(0.0, 1.0)])
    with pytest.raises(ValueError, match="one weight per edge"):
        ft.Network([(0, 1)], [1.0, 1.0])
    with pytest.raises(ValueError, match="3 different names"):
        ft.Network([(0, 1)], nodes=3, names=["a", "a", "b"])
    with pytest.raises(ValueError, match=r"positions \(3, 2\)"):
        ft.Network([(0, 1)], nodes=3, positions=torch.zeros(2, 2))
    with pytest.raises(AttributeError, match="no change of a network"):
        ft.Network([(0, 1)]).nodes = 4
    with pytest.raises(ValueError, match="ids of nodes"):
        ft.Network.ring(3).subnetwork([0, 3])
    with pytest.raises(ValueError, match="got one twice"):
        ft.Network.ring(3).subnetwork([0, 0])
    with pytest.raises(ValueError, match=r"undirected simple graph, but got DiGraph; pass networkx\.Graph\(graph\)$"):
        ft.Network.from_networkx(networkx.DiGraph())
    several = networkx.MultiGraph([("a", "b", {"weight": 2.0})])
    with pytest.raises(ValueError, match=r"but got MultiGraph; pass .*, of whose edges .* is kept"):
        ft.Network.from_networkx(several)
    assert ft.Network.from_networkx(networkx.Graph(several)).weights.tolist() == [2.0]
    for weights in (["heavy"], [None], np.array(["1.0"])):
        with pytest.raises(ValueError, match="Expected numbers as weights of edges"):
            ft.Network([(0, 1)], weights)
    with pytest.raises(ValueError, match="Expected numbers as weights of edges"):
        ft.Network.from_edges([("a", "b", "heavy")])
    for weight in ("heavy", "2.0", None, [1.0]):
        with pytest.raises(ValueError, match=r"attribute 'cost' of edges, but got .* of the edge \('a', 'b'\)"):
            ft.Network.from_networkx(networkx.Graph([("a", "b", {"cost": weight})]), weight="cost")
    with pytest.raises(ValueError, match="finite points"):
        ft.Network.k_nearest(torch.tensor([[0.0, math.nan]]), 1)
    with pytest.raises(ValueError, match="the latitude comes first"):
        ft.Network.k_nearest(torch.tensor([[25.0, 60.0], [170.0, 60.0]]), 1, great_circle=True)
    with pytest.raises(ValueError, match="the latitude comes first"):
        ft.Network.k_nearest(torch.eye(3), 1, great_circle=True)
    with pytest.raises(ValueError, match="k from 1 to 2"):
        ft.Network.k_nearest(torch.eye(3), 3)
    with pytest.raises(ValueError, match="p as a probability"):
        ft.Network.erdos_renyi(3, 1.1, seed=0)
    with pytest.raises(ValueError, match="within as a probability"):
        ft.Network.stochastic_blocks([2, 2], [0.5, 2.0], 0.1, seed=0)
    with pytest.raises(ValueError, match="at least one node"):
        ft.Network.stochastic_blocks([2, 0], 0.5, 0.1, seed=0)
    with pytest.raises(ValueError, match="at least one node"):
        ft.Network.star(0)


@pytest.mark.slow
def test_a_million_nodes_take_time_in_proportion_to_the_edges():
    network = ft.Network.erdos_renyi(10**6, 1e-5, seed=0)
    assert abs(len(network.edges) - 5e6) < 4 * math.sqrt(5e6)
    assert network.adjacency(torch.float32)._nnz() == 2 * len(network.edges)
    isolated = int((network.neighbour_counts == 0).sum())
    expected = 10**6 * math.exp(-10)  # Poisson with mean 10
    assert abs(isolated - expected) < 4 * math.sqrt(expected)


def test_a_complete_network_joins_every_two_nodes() -> None:
    complete = ft.Network.complete(5)
    assert torch.equal(complete.adjacency().to_dense(), 1 - torch.eye(5, dtype=torch.float64))
    assert complete.algebraic_connectivity == pytest.approx(5.0)
    assert len(ft.Network.complete(1).edges) == 0
