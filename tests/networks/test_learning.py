"""Learnt networks against exhaustive and independent solutions, and λ₂ against theory."""

import math
import os
from pathlib import Path

import pytest
import torch

import fedtorch as ft
from fedtorch.networks import discrepancy, learning


def random_discrepancy(nodes, seed=0):
    return discrepancy.distances(ft.random.normal(ft.random.key(seed), (nodes, 3), torch.float64))


def cost(network, matrix):
    return float((network.weights * matrix[network.edges[:, 0], network.edges[:, 1]]).sum())


def test_nearest_is_k_nearest_of_the_vectors():
    vectors = ft.random.normal(ft.random.key(1), (40, 3), torch.float64)
    learnt = learning.nearest(discrepancy.distances(vectors), 3)
    assert torch.equal(learnt.edges, ft.Network.k_nearest(vectors, 3).edges)
    order = ft.random.permutation(ft.random.key(2), 40)
    moved = learning.nearest(discrepancy.distances(vectors[order]), 3)
    assert torch.equal(moved.adjacency().to_dense(), learnt.adjacency().to_dense()[order][:, order])


def test_the_edge_budget_takes_the_smallest_discrepancies():
    matrix = random_discrepancy(12)
    values = matrix[*torch.combinations(torch.arange(12)).T].sort().values
    for edges in (0, 1, 17, 66):
        learnt = learning.edge_budget(matrix, edges)
        assert len(learnt.edges) == edges
        assert cost(learnt, matrix) == pytest.approx(float(values[:edges].sum()), rel=1e-12)


def perfect_matchings(nodes):
    if not nodes:
        yield []
        return
    for partner in nodes[1:]:
        for rest in perfect_matchings([node for node in nodes[1:] if node != partner]):
            yield [(nodes[0], partner), *rest]


def test_a_regular_network_is_no_worse_than_any_matching_and_is_dual_optimal():
    matrix = random_discrepancy(8)
    best = min(sum(float(matrix[i, j]) for i, j in pairs) for pairs in perfect_matchings(list(range(8))))
    learnt = learning.regular(matrix, 1)
    assert cost(learnt, matrix) <= best * (1 + 1e-9)
    assert bool(((2 * learnt.weights).round() - 2 * learnt.weights == 0).all())  # half-integral
    # Doubling the nodes makes the relaxation a bipartite matching, which the Hungarian method solves exactly.
    from scipy.optimize import linear_sum_assignment

    row, column = linear_sum_assignment(matrix.clone().fill_diagonal_(1e6).numpy())
    assert cost(learnt, matrix) == pytest.approx(float(matrix[row, column].sum()) / 2, rel=1e-9)


@pytest.mark.parametrize(("nodes", "degree"), [(8, 1), (9, 2), (14, 3.5), (6, 5)])
def test_projected_gradient_reaches_the_linear_program(nodes, degree):
    matrix = random_discrepancy(nodes, seed=nodes)
    exact, found = learning.regular(matrix, degree), learning.regular(matrix, degree, projected=True)
    for network in (exact, found):
        torch.testing.assert_close(network.degrees, torch.full((nodes,), float(degree)).double(), rtol=1e-6, atol=0)
        assert float(network.weights.max()) <= 1
    assert cost(found, matrix) == pytest.approx(cost(exact, matrix), rel=1e-7)  # the projection's accuracy


def test_the_projection_is_the_nearest_point():
    matrix = ft.random.normal(ft.random.key(4), (7, 7), torch.float64)
    matrix = (matrix + matrix.T).fill_diagonal_(0.0)
    projected = learning._project(matrix, 2.5)
    torch.testing.assert_close(projected.sum(1), torch.full((7,), 2.5).double(), rtol=0, atol=1e-11)
    assert torch.equal(projected, projected.T)
    for seed in range(50):  # the variational inequality ⟨M − P, A − P⟩ ≤ 0 for other points of the set
        other = ft.random.normal(ft.random.key(seed), (7, 7), torch.float64)
        feasible = learning._project((other + other.T).fill_diagonal_(0.0), 2.5)
        assert float(((matrix - projected) * (feasible - projected)).sum()) <= 1e-9


def test_candidates_restrict_the_linear_program():
    matrix = random_discrepancy(20)
    candidates = learning.nearest(matrix, 8).edges
    learnt = learning.regular(matrix, 3, candidates=candidates)
    allowed = {tuple(pair) for pair in candidates.tolist()}
    assert all(tuple(pair) in allowed for pair in learnt.edges.tolist())
    assert cost(learnt, matrix) >= cost(learning.regular(matrix, 3), matrix) * (1 - 1e-9)
    with pytest.raises(ValueError, match="candidates with which every node"):
        learning.regular(matrix, 3, candidates=ft.Network.ring(20).edges)


def test_the_degree_bounds_the_connectivity():
    """(7.3): λ₂ is at most n/(n − 1) times the smallest degree."""
    bound = lambda network: len(network) / (len(network) - 1) * float(network.degrees.min())
    for seed in range(10):
        network = ft.Network.erdos_renyi(15, 0.5, seed=seed)
        assert network.algebraic_connectivity <= bound(network)
    complete = ft.Network.erdos_renyi(15, 1.0, seed=0)
    assert complete.algebraic_connectivity == pytest.approx(bound(complete))  # tight


def test_the_estimates_of_erdos_renyi_networks():
    """(7.1) and (7.2): the largest degree is near p (n − 1), and λ₂ near n p."""
    nodes, p = 1500, 0.4
    network = ft.Network.erdos_renyi(nodes, p, seed=0)
    wide = 1.5 * math.sqrt(2 * nodes * p * (1 - p) * math.log(nodes))  # extremes of n nearly normal degrees
    assert abs(float(network.degrees.max()) - p * (nodes - 1)) < wide
    assert abs(network.algebraic_connectivity - nodes * p) < wide
    assert wide < 0.2 * nodes * p


def test_the_weather_stations_have_three_components():
    given = os.environ.get("FEDTORCH_DATA_DIR")
    if not given or not (Path(given) / "fmi_weather").is_dir():
        pytest.skip("needs the folder fmi_weather in FEDTORCH_DATA_DIR")
    coordinates = ft.data.fmi_coordinates()
    network = ft.Network.k_nearest(coordinates, 3)
    assert len(network) == 207
    assert network.components.number == 3


def test_bad_input():
    matrix = random_discrepancy(6)
    with pytest.raises(ValueError, match=r"discrepancies \(n, n\)"):
        learning.nearest(matrix[:3], 1)
    with pytest.raises(ValueError, match="not negative"):
        learning.edge_budget(-matrix, 2)
    with pytest.raises(ValueError, match="symmetric discrepancies"):
        learning.edge_budget(matrix.triu(), 2)
    with pytest.raises(ValueError, match="k from 1 to 5"):
        learning.nearest(matrix, 6)
    with pytest.raises(ValueError, match="from 0 to 15 edges"):
        learning.edge_budget(matrix, 16)
    for projected in (False, True):
        with pytest.raises(ValueError, match="degree above 0"):
            learning.regular(matrix, 6, projected=projected)
    with pytest.raises(ValueError, match="among all pairs, but got candidates"):
        learning.regular(matrix, 2, candidates=torch.tensor([[0, 1]]), projected=True)
