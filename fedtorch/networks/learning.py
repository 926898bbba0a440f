r"""Learning the network (Jung, "Federated learning: from theory to practice", chapter 7).

Given discrepancies D(i, j) ≥ 0 of the nodes' data sets, choose weights A that make

.. math:: \sum_{i, j} A_{ij} D(i, j), \quad A_{ij} = A_{ji} \in [0, 1], \quad A_{ii} = 0

small (7.4), under one condition more: `nearest` gives every node its k nearest, `regular` fixes every node's degree
(7.6), `edge_budget` the number of edges (7.7). `nearest_of_random` compares every node with a few others only, for
millions of nodes. Networks that spread values fast at few edges a node, whatever the data, are `random_regular` and
`greedy_connected`.

>>> import torch
>>> from fedtorch.networks import learning
>>> D = torch.tensor([[0.0, 1.0, 4.0, 2.0], [1.0, 0.0, 3.0, 5.0], [4.0, 3.0, 0.0, 1.5], [2.0, 5.0, 1.5, 0.0]])
>>> learning.edge_budget(D, 3).edges.tolist()
[[0, 1], [0, 3], [2, 3]]
>>> learning.regular(D, 2).edges.tolist()
[[0, 1], [0, 3], [1, 2], [2, 3]]
>>> learning.regular_by_projection(D, 2).edges.tolist()
[[0, 1], [0, 3], [1, 2], [2, 3]]
>>> learning.nearest(D, 1).edges.tolist()
[[0, 1], [2, 3]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedtorch import random
from fedtorch.networks import _random_edges as random_edges
from fedtorch.networks.network import Network
from fedtorch.progress import Progress, tracked

__all__ = ["edge_budget", "nearest", "regular", "regular_by_projection"]

_BLOCK = 2**22  # candidates' coordinates that are compared at a time
_TITLE = "Learning the network"
_WEIGHTLESS = 1e-7  # weights of linear programming and of projection below this are rounding


def nearest(discrepancy: Tensor, k: int, names: Sequence[str] | None = None) -> Network:
    """An edge of weight one between two nodes when either is among the k nearest of the other.

    For vectors, `Network.k_nearest` does so without all pairs.

    Args:
        discrepancy: D, `(n, n)` symmetric, not negative; the diagonal does not matter.
        k: from 1 to n − 1.
        names: one per node.
    """
    found = _check(discrepancy)
    n = len(found)
    if not 1 <= k < n:
        raise ValueError(f"Expected k from 1 to {n - 1}, one less than the nodes, but got {k}")
    chosen = found.clone().fill_diagonal_(math.inf).topk(k, largest=False).indices
    starts = torch.arange(n).repeat_interleave(k)
    return Network(torch.stack((starts, chosen.flatten()), 1), nodes=n, names=names)


def edge_budget(discrepancy: Tensor, edges: int, names: Sequence[str] | None = None) -> Network:
    """(7.7) in closed form: edges of weight one where the discrepancies are smallest.

    Args:
        discrepancy: D, `(n, n)` symmetric, not negative; the diagonal does not matter.
        edges: how many; the book's E_max counts each from both ends, and is twice as large.
        names: one per node.
    """
    found = _check(discrepancy)
    pairs = torch.combinations(torch.arange(len(found)))
    if not 0 <= edges <= len(pairs):
        raise ValueError(f"Expected from 0 to {len(pairs)} edges, as many as there are pairs, but got {edges}")
    order = found[pairs[:, 0], pairs[:, 1]].argsort(stable=True)[:edges]
    return Network(pairs[order], nodes=len(found), names=names)


def regular(
    discrepancy: Tensor, degree: float, names: Sequence[str] | None = None, *, candidates: Tensor | None = None
) -> Network:
    """(7.6) as a linear program, solved exactly: every node has the given weighted degree.

    Weights are multiples of one half when the degree is a whole number; edges of weight zero are left out.

    Args:
        discrepancy: D, `(n, n)` symmetric, not negative; the diagonal does not matter.
        degree: Σ_j A_ij of every node, above 0, at most n − 1.
        names: one per node.
        candidates: the pairs `(E, 2)` that may have an edge, such as `nearest(...).edges` with more neighbours;
            default: all n(n − 1)/2 of them.

    Raises:
        ValueError: a degree that the candidates cannot give every node, or wrong dimensions.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    found = _check(discrepancy)
    n = len(found)
    _check_degree(n, degree)
    pairs = torch.combinations(torch.arange(n)) if candidates is None else Network(candidates, nodes=n).edges
    count = len(pairs)
    ends = pairs.numpy().T.reshape(-1), np.tile(np.arange(count), 2)
    incidence = csr_matrix((np.ones(2 * count), ends), shape=(n, count))
    cost = found[pairs[:, 0], pairs[:, 1]].numpy()
    solved = linprog(cost, A_eq=incidence, b_eq=np.full(n, float(degree)), bounds=(0, 1), method="highs")
    if not solved.success:
        raise ValueError(
            f"Expected candidates with which every node can have degree {degree}, but got none: {solved.message}; "
            "allow more pairs"
        )
    return _network(pairs, torch.from_numpy(solved.x), n, names)


def regular_by_projection(
    discrepancy: Tensor, degree: float, names: Sequence[str] | None = None, *, step: float = 1e4, iterations: int = 100
) -> Network:
    """(7.6) by projected gradient steps (4.17): A ← P(A − ηD).

    The objective is linear, so that a step is one of the proximal point method, which arrives after finitely many; it
    stops where a step changes nothing. Where there are several optima, their mean may come out, with weights that are
    not multiples of one half.

    Args:
        discrepancy: D, `(n, n)` symmetric, not negative; the diagonal does not matter.
        degree: Σ_j A_ij of every node, above 0, at most n − 1.
        names: one per node.
        step: η times the mean discrepancy.
        iterations: at most.
    """
    found = _check(discrepancy).fill_diagonal_(0.0)
    n = len(found)
    _check_degree(n, degree)
    weights = torch.full_like(found, degree / (n - 1)).fill_diagonal_(0.0)
    mean = float(found.mean())
    for _ in tracked(range(iterations if mean > 0 else 0), _TITLE):
        before, weights = weights, _project(weights - step / mean * found, degree)
        if float((weights - before).abs().max()) < _WEIGHTLESS / 10:
            break
    pairs = torch.combinations(torch.arange(n))
    return _network(pairs, weights[pairs[:, 0], pairs[:, 1]], n, names)


def nearest_of_random(
    vectors: Tensor, k: int, candidates: int, key: Tensor, names: Sequence[str] | None = None
) -> Network:
    """Each node's k nearest among some other nodes that are drawn for it (problem 7.1), with time O(n · candidates).

    Args:
        vectors: z, `(n, m)`, which represent the nodes' data.
        k: neighbours each node chooses; an edge has weight one when either end chose it.
        candidates: different nodes that are drawn for each, every subset equally likely; from k to half of the others.
        key: of the draws.
        names: one per node.

    Raises:
        ValueError: numbers out of range, or vectors that are not finite.

    >>> import fedtorch as ft
    >>> network = nearest_of_random(torch.arange(9.0)[:, None], k=2, candidates=4, key=ft.random.key(0))
    >>> int(network.neighbour_counts.min())  # each has chosen two of four
    2
    """
    found = torch.as_tensor(vectors).detach()
    if found.ndim != 2 or not found.is_floating_point() or not bool(found.isfinite().all()):
        raise ValueError(f"Expected finite vectors (n, m), but got {found.dtype} of shape {tuple(found.shape)}")
    n = len(found)
    if not 1 <= k <= candidates <= (n - 1) // 2:
        raise ValueError(
            f"Expected 1 ≤ k ≤ candidates ≤ {(n - 1) // 2}, half of the other nodes, but got k = {k} and {candidates} "
            "candidates; Network.k_nearest compares with all"
        )
    step = max(1, _BLOCK // (candidates * found.shape[1]))
    edges = []
    for start in tracked(range(0, n, step), _TITLE, unit="block"):
        nodes = torch.arange(start, min(start + step, n))
        others = random_edges.distinct(random.fold_in(key, nodes), n - 1, candidates)
        others = others + (others >= nodes[:, None])  # a number among the others, not the node itself
        apart = (found[others] - found[nodes, None]).square().sum(2)
        chosen = others.gather(1, apart.topk(k, largest=False).indices)
        edges.append(torch.stack((nodes.repeat_interleave(k), chosen.flatten()), 1))
    return Network(torch.cat(edges), nodes=n, names=names)


def random_regular(nodes: int, degree: int, key: Tensor) -> Network:
    """A random network in which every node has `degree` neighbours: λ₂ is near d − 2√(d − 1), whatever n.

    That is the most that large networks of this degree can have (Alon and Boppana), and random ones nearly do
    (Friedman, 2008, "A proof of Alon's second eigenvalue conjecture"). Ends of edges are paired at random; then loops
    and repeated edges are exchanged with random edges until there are none, so that the draw is nearly, not exactly,
    uniform.

    Args:
        nodes: n.
        degree: from 1 to n/2; n · degree is even.
        key: of the draws.

    Raises:
        ValueError: degree out of range, or n · degree odd.

    >>> import fedtorch as ft
    >>> random_regular(nodes=8, degree=3, key=ft.random.key(0)).neighbour_counts
    tensor([3, 3, 3, 3, 3, 3, 3, 3])
    """
    if not 1 <= degree <= nodes / 2 or nodes * degree % 2:
        raise ValueError(f"Expected a degree from 1 to {nodes // 2} with an even n · degree, but got {degree}")
    ends = random.permutation(random.fold_in(key, 0), nodes * degree) % nodes
    edges = ends.reshape(-1, 2)
    attempt = 0
    while len(bad := random_edges.repeated(edges, nodes)):
        attempt += 1
        other = random.randint(random.fold_in(key, attempt), len(edges), (len(bad),))
        for first, second in zip(bad.tolist(), other.tolist()):
            edges[[first, second], [1, 1]] = edges[[second, first], [1, 1]]
    return Network(edges, nodes=nodes)


def greedy_connected(nodes: int, degree: int) -> Network:
    """A network of large λ₂ in which nobody has more than `degree` neighbours, grown from a ring.

    Each edge joins the two nodes, not yet neighbours and with room, that are furthest apart in the Fiedler vector v
    (the eigenvector of λ₂): the derivative of λ₂ by the weight of the edge is (v_i − v_j)². For some hundred nodes.

    Source: Ghosh and Boyd (2006), "Growing well-connected graphs", section IV.

    Args:
        nodes: n, at least 3.
        degree: from 2 to n − 1.

    >>> grown, ring = greedy_connected(nodes=8, degree=3), Network.ring(8)
    >>> int(grown.neighbour_counts.max()), grown.algebraic_connectivity > 2 * ring.algebraic_connectivity
    (3, True)
    """
    if nodes < 3 or not 2 <= degree < nodes:
        raise ValueError(f"Expected three nodes or more and a degree from 2 to n − 1, but got {nodes} and {degree}")
    weights = Network.ring(nodes).adjacency().to_dense()
    room = weights.sum(1) < degree
    with Progress(_TITLE, nodes * (degree - 2) // 2, unit="edge") as shown:
        while bool((allowed := (room[:, None] & room & (weights == 0)).fill_diagonal_(False)).any()):
            fiedler = torch.linalg.eigh(weights.sum(1).diag() - weights).eigenvectors[:, 1]
            apart = (fiedler[:, None] - fiedler).square().masked_fill(~allowed, -1.0)
            i, j = divmod(int(apart.argmax()), nodes)
            weights[i, j] = weights[j, i] = 1.0
            room = weights.sum(1) < degree
            shown.update()
    return Network.from_matrix(weights)


def connectivity_bound(network: Network) -> float:
    """(7.3): λ₂ is at most n/(n − 1) times the smallest weighted degree.

    >>> round(connectivity_bound(Network.ring(5)), 3), round(Network.ring(5).algebraic_connectivity, 3)
    (2.5, 1.382)
    """
    if network.nodes < 2:
        raise ValueError(f"Expected at least two nodes for λ₂, but got {network.nodes}")
    return network.nodes / (network.nodes - 1) * float(network.degrees.min())


def erdos_renyi_degree(nodes: int, p: float) -> float:
    """(7.1): the expected degree p(n − 1), which the largest is near to when it is well above log n.

    >>> erdos_renyi_degree(nodes=101, p=0.5)
    50.0
    """
    return p * (nodes - 1)


def erdos_renyi_connectivity(nodes: int, p: float) -> float:
    """(7.2): λ₂ of the expected Laplacian, n p; the network's own is less by some √(2 n p log n).

    >>> erdos_renyi_connectivity(nodes=100, p=0.5)
    50.0
    """
    return nodes * p


def _check(discrepancy: Tensor) -> Tensor:
    """A float64 copy."""
    found = torch.as_tensor(discrepancy).detach().cpu().to(torch.float64).clone()
    if found.ndim != 2 or found.shape[0] != found.shape[1] or len(found) < 2:
        raise ValueError(f"Expected discrepancies (n, n) of two nodes or more, but got shape {tuple(found.shape)}")
    apart = found.clone().fill_diagonal_(0.0)
    if not bool(apart.isfinite().all()) or float(apart.min()) < 0:
        raise ValueError("Expected finite discrepancies that are not negative, but got others")
    if not torch.equal(apart, apart.T):
        raise ValueError("Expected symmetric discrepancies, but got D(i, j) ≠ D(j, i); take (D + D.T) / 2")
    return found


def _check_degree(nodes: int, degree: float) -> None:
    if not 0 < degree <= nodes - 1:
        raise ValueError(
            f"Expected a degree above 0 and at most {nodes - 1}, one less than the nodes, but got {degree}"
        )


def _network(pairs: Tensor, weights: Tensor, nodes: int, names: Sequence[str] | None) -> Network:
    kept = weights > _WEIGHTLESS
    rounded = torch.where((weights - 1).abs() < _WEIGHTLESS, 1.0, weights)
    return Network(pairs[kept], rounded[kept], nodes, names)


def _project(matrix: Tensor, degree: float, rounds: int = 200) -> Tensor:
    """The nearest symmetric matrix with weights in [0, 1], zero diagonal and this degree.

    It is clip(M + μ_i + μ_j) for the μ that give the degree, found by Newton steps on the dual: its gradient is how
    much the degrees lack, its curvature D + A of the pairs strictly inside [0, 1].
    """
    n = len(matrix)
    eye = torch.eye(n, dtype=matrix.dtype)
    shift = matrix.new_full((n,), -float(matrix.sum() / (n * (n - 1))) / 2 + degree / (2 * (n - 1)))

    def weights(shift: Tensor) -> Tensor:
        return (matrix + (shift[:, None] + shift)).clamp(0, 1).fill_diagonal_(0.0)

    def dual(shift: Tensor) -> float:
        inside = (matrix + (shift[:, None] + shift)).fill_diagonal_(0.0)
        outside = inside - inside.clamp(0, 1)
        return float((inside.square() - outside.square()).sum() / 4 - degree * shift.sum())

    for _ in range(rounds):
        current = weights(shift)
        lack = degree - current.sum(1)
        if float(lack.abs().max()) < 1e-12 * n:
            break
        free = ((current > 0) & (current < 1)).to(matrix.dtype)
        curvature = free.sum(1).diag() + free + 1e-9 * float(lack.abs().max()) * eye + 1e-12 * eye
        direction = torch.linalg.solve(curvature, lack)
        size, value, slope = 1.0, dual(shift), float(lack @ direction)
        value += 1e-14 * abs(value)  # rounding
        while dual(shift + size * direction) > value - 1e-4 * size * slope and size > 1e-10:
            size /= 2
        shift = shift + size * direction
    return weights(shift)
