"""Edges, weights, names and positions of a `Network`: checked, converted from other forms, or drawn at random."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedtorch import random

if TYPE_CHECKING:
    import networkx
    from scipy.sparse import csr_matrix


_BLOCK = 2**20  # skips drawn at a time


def as_edges(edges: Any) -> Tensor:
    """Return pairs of nodes, `(E, 2)` int64."""
    pairs = torch.as_tensor(edges).detach().cpu()
    if pairs.numel() == 0 and pairs.ndim == 1:
        return torch.empty(0, 2, dtype=torch.int64)
    if pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool:
        raise TypeError(f"Expected edges as integers, but got {pairs.dtype}")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"Expected edges (E, 2), but got shape {tuple(pairs.shape)}")
    return pairs.to(torch.int64)


def as_weights(weights: Any, count: int) -> Tensor:
    """Return one positive weight per edge, `(count,)` float64; ones if none are given."""
    if weights is None:
        return torch.ones(count, dtype=torch.float64)
    try:
        given = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # strings, None or rows of several lengths
        raise ValueError(f"Expected numbers as weights of edges, but got others ({error}); convert them") from None
    if given.shape != (count,):
        raise ValueError(f"Expected one weight per edge, ({count},), but got shape {tuple(given.shape)}")
    bad = ~((given > 0) & given.isfinite())
    if bool(bad.any()):
        raise ValueError(
            f"Expected positive finite weights, but got {float(given[bad][0])} for edge {int(bad.nonzero()[0])}; "
            "leave out edges of weight zero"
        )
    return given


def node_count(edges: Tensor, nodes: int | None, names: Sequence[str] | None, positions: Any) -> int:
    """Return the number of nodes, from the argument or the edges; the edges must be within it."""
    if nodes is None:
        known = [len(given) for given in (names, positions) if given is not None]
        nodes = known[0] if known else int(edges.max()) + 1 if len(edges) else 0
    if nodes < 0:
        raise ValueError(f"Expected a number of nodes, but got {nodes}")
    if len(edges) and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
        raise ValueError(
            f"Expected nodes from 0 to {nodes - 1}, but got edges over {int(edges.min())}…{int(edges.max())}"
        )
    return nodes


def canonical(edges: Tensor, weights: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return each edge once as i < j, in order."""
    low, high = edges.amin(1), edges.amax(1)
    if bool((low == high).any()):
        node = int(low[low == high][0])
        raise ValueError(f"Expected edges between different nodes, but got a self-loop at node {node}; remove it")
    code = low * nodes + high
    if bool((code.diff() > 0).all()):
        return torch.stack((low, high), 1), weights.clone()
    order = torch.from_numpy(np.argsort(code.numpy(), kind="stable"))
    code, weights = code[order], weights[order]
    again = code.diff() == 0
    different = again & (weights.diff() != 0)
    if bool(different.any()):
        i, j = divmod(int(code[1:][different][0]), nodes)
        raise ValueError(
            f"Expected one weight for the edge ({i}, {j}), but got two different ones; weights are symmetric"
        )
    first = torch.cat((torch.ones(min(1, len(code)), dtype=torch.bool), ~again))
    code = code[first]
    return torch.stack((code // nodes, code % nodes), 1), weights[first]


def as_names(names: Sequence[str] | None, nodes: int) -> tuple[str, ...] | None:
    """Return one different name per node, if names are given."""
    if names is None:
        return None
    texts = tuple(map(str, names))
    if len(texts) != nodes or len(set(texts)) < nodes:
        raise ValueError(f"Expected {nodes} different names, but got {len(texts)}, {len(set(texts))} of them different")
    return texts


def as_positions(positions: Any, nodes: int) -> Tensor | None:
    """Return coordinates `(nodes, 2)` or more in float64, if positions are given."""
    if positions is None:
        return None
    places = torch.as_tensor(positions, dtype=torch.float64).detach().cpu().clone()
    if places.ndim != 2 or len(places) != nodes or places.shape[1] < 2:
        raise ValueError(f"Expected positions ({nodes}, 2) or more, but got shape {tuple(places.shape)}")
    return places


def places_of(ids: Any, nodes: int) -> tuple[Tensor, Tensor]:
    """Return different nodes as a tensor, and the position of each of `nodes` nodes among them, −1 for others."""
    chosen = torch.as_tensor(ids, dtype=torch.int64)
    if chosen.ndim != 1 or (len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < nodes):
        raise ValueError(f"Expected ids of nodes from 0 to {nodes - 1}, but got {chosen.tolist()[:9]}…")
    place = torch.full((nodes,), -1)
    place[chosen] = torch.arange(len(chosen))
    if int((place >= 0).sum()) < len(chosen):
        raise ValueError("Expected different nodes, but got one twice; remove the repetition")
    return chosen, place


def components_of(adjacency: csr_matrix) -> tuple[Tensor, int]:
    """Return the connected component of each node, numbered by their first nodes, and the number of components."""
    from scipy.sparse.csgraph import connected_components

    count, labels = connected_components(adjacency, directed=False)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return torch.from_numpy(order[inverse].astype(np.int64)), int(count)


def of_tuples(
    edges: Iterable[Sequence[Any]], names: Sequence[str] | None
) -> tuple[Tensor, list[float] | None, Sequence[str] | None]:
    """Return pairs `(E, 2)`, weights if any, and nodes' names of tuples (i, j) or (i, j, weight) of one length."""
    rows = [tuple(edge) for edge in edges]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1 or not lengths <= {2, 3}:
        raise ValueError(f"Expected edges (i, j), or all of them (i, j, weight), but got lengths {sorted(lengths)}")
    ends: list[Hashable] = [end for row in rows for end in row[:2]]
    if any(isinstance(end, str) for end in ends):
        known = tuple(dict.fromkeys(ends)) if names is None else tuple(names)
        number: dict[Hashable, int] = {name: i for i, name in enumerate(known)}
        unknown = [end for end in ends if end not in number]
        if unknown:
            raise ValueError(f"Expected nodes among names=, but got {unknown[0]!r}")
        ends, names = [number[end] for end in ends], [str(name) for name in known]
    pairs = torch.as_tensor(ends).reshape(-1, 2) if ends else torch.empty(0, 2, dtype=torch.int64)
    return pairs, [row[2] for row in rows] if lengths == {3} else None, names


def of_matrix(matrix: Any) -> tuple[Tensor, np.ndarray]:
    """Return pairs `(E, 2)` and weights of a symmetric matrix: a tensor (dense or sparse), array or SciPy matrix."""
    from scipy.sparse import coo_matrix

    if isinstance(matrix, Tensor) and matrix.layout != torch.strided:
        sparse = matrix.to_sparse_coo().coalesce()
        row, column = sparse.indices().cpu().numpy()
        matrix = coo_matrix((sparse.values().cpu().double().numpy(), (row, column)), tuple(matrix.shape))
    elif isinstance(matrix, Tensor):
        matrix = matrix.cpu().double().numpy()
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"Expected a square matrix, but got shape {tuple(matrix.shape)}")
    entries = coo_matrix(matrix, dtype=np.float64)
    entries.sum_duplicates()
    difference = entries - entries.T
    if difference.nnz and not np.abs(difference.data).max() == 0:
        raise ValueError("Expected a symmetric matrix, but got one that differs from its transpose; symmetrise it")
    upper = (entries.data != 0) & (entries.row <= entries.col)
    return torch.from_numpy(np.stack((entries.row[upper], entries.col[upper]), 1).astype(np.int64)), entries.data[upper]


def of_networkx(
    graph: networkx.Graph, weight: str, position: str
) -> tuple[Any, list[float], list[str], np.ndarray | None]:
    """Return pairs, weights, names and, where all nodes have them, positions of an undirected networkx graph."""
    if graph.is_directed() or graph.is_multigraph():
        several = ", of whose edges between two nodes one is kept" if graph.is_multigraph() else ""
        raise ValueError(
            f"Expected an undirected simple graph, but got {type(graph).__name__}; pass networkx.Graph(graph){several}"
        )
    number = {node: i for i, node in enumerate(graph)}
    edges = [(number[i], number[j]) for i, j in graph.edges]
    weights = [_as_weight(value, (i, j), weight) for i, j, value in graph.edges(data=weight, default=1.0)]
    names = [str(graph.nodes[node].get("name", node)) for node in graph]
    places = [graph.nodes[node].get(position) for node in graph]
    known = None if not places or any(place is None for place in places) else np.array(places, dtype=np.float64)
    return edges or torch.empty(0, 2, dtype=torch.int64), weights, names, known


def _as_weight(value: Any, edge: tuple[Hashable, Hashable], attribute: str) -> float:
    """Return the weight of an edge as a number."""
    if not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise ValueError(
        f"Expected numbers as the attribute {attribute!r} of edges, but got {value!r} of the edge {edge!r}; convert "
        "them, or name another attribute: weight=…"
    )


def of_neighbours(neighbours: Any) -> tuple[Tensor, int]:
    """Return pairs (node, chosen neighbour) of `(n, k)` choices, −1 for none, and the number of nodes."""
    chosen = torch.as_tensor(neighbours, dtype=torch.int64, device="cpu")
    if chosen.ndim != 2:
        raise ValueError(f"Expected a row of neighbours for each node, (n, k), but got shape {tuple(chosen.shape)}")
    starts = torch.arange(len(chosen))[:, None].expand_as(chosen)
    return torch.stack((starts, chosen), -1)[chosen >= 0], len(chosen)


def on_sphere(places: Tensor) -> Tensor:
    """Return the unit vectors `(n, 3)` of latitudes and longitudes in degrees, whose chords are ordered as great
    circles.
    """
    if places.ndim != 2 or places.shape[1] != 2 or bool((places[:, 0].abs() > 90).any()):
        raise ValueError(
            "Expected latitudes from −90 to 90 and longitudes in degrees, (n, 2), but got shape "
            f"{tuple(places.shape)} or other latitudes; the latitude comes first"
        )
    latitude, longitude = places.deg2rad().unbind(1)
    flat = latitude.cos()
    return torch.stack((flat * longitude.cos(), flat * longitude.sin(), latitude.sin()), 1)


def nearest(points: Tensor, k: int) -> Tensor:
    """Return the k nearest others of each of the points `(n, dimensions)`, `(n, k)` int64."""
    from sklearn.neighbors import NearestNeighbors

    if points.ndim != 2 or not bool(points.isfinite().all()):
        raise ValueError(f"Expected finite points (n, dimensions), but got shape {tuple(points.shape)} or NaN or inf")
    if not 1 <= k < len(points):
        raise ValueError(f"Expected k from 1 to {len(points) - 1}, one less than the points, but got {k}")
    neighbours = NearestNeighbors(n_neighbors=k).fit(points.numpy()).kneighbors(return_distance=False)
    return torch.from_numpy(neighbours.astype(np.int64))


def as_torch(matrix: csr_matrix, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return a matrix of SciPy as a sparse tensor."""
    index = torch.int32 if max(matrix.nnz, matrix.shape[0]) < 2**31 else torch.int64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support", UserWarning)
        return torch.sparse_csr_tensor(
            torch.as_tensor(matrix.indptr, dtype=index, device=device),
            torch.as_tensor(matrix.indices, dtype=index, device=device),
            torch.as_tensor(matrix.data, dtype=dtype, device=device),
            matrix.shape,
            check_invariants=False,
        )


def independent_pairs(nodes: int, p: float, key: Tensor) -> Tensor:
    """Draw pairs i < j of `nodes` independently with probability p, `(E, 2)` in lexicographic order.

    The number of pairs between two edges is geometric, so the time grows with the number of edges and not with that of
    pairs.

    Source: Batagelj and Brandes (2005), "Efficient generation of large random networks".

    >>> independent_pairs(4, 1.0, random.key(0)).tolist()
    [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    """
    _check_probability("p", p)
    return pair(_skips(nodes * (nodes - 1) // 2, p, key), nodes)


def stochastic_blocks(sizes: Sequence[int], within: float | Sequence[float], between: float, key: Tensor) -> Tensor:
    """Draw edges `(E, 2)` within and between blocks of consecutive nodes; see `Network.stochastic_blocks`."""
    counts = torch.as_tensor(sizes, dtype=torch.int64)
    inside = torch.as_tensor(within, dtype=torch.float64).expand(counts.shape)
    if counts.ndim != 1 or not len(counts) or int(counts.min()) < 1:
        raise ValueError(f"Expected sizes of at least one node each, but got {sizes}")
    for p in (float(inside.min()), float(inside.max())):
        _check_probability("within", p)
    _check_probability("between", between)
    block = torch.arange(len(counts)).repeat_interleave(counts)
    across = independent_pairs(int(counts.sum()), between, random.fold_in(key, 0))
    across = across[block[across[:, 0]] != block[across[:, 1]]]
    return torch.cat((across, _within_blocks(counts, inside, random.fold_in(key, 1))))


def _within_blocks(sizes: Tensor, probabilities: Tensor, key: Tensor) -> Tensor:
    """Draw edges within blocks with the largest probability, and keep them in proportion to their own."""
    pairs = sizes * (sizes - 1) // 2
    ends = pairs.cumsum(0)
    most = float(probabilities.max())
    number = _skips(int(ends[-1]), most, random.fold_in(key, 0))
    block = torch.searchsorted(ends, number, right=True)
    if not bool((probabilities == most).all()):
        coins = random.uniform(random.fold_in(key, 1), (len(number),), torch.float64)
        drawn = coins * most < probabilities[block]
        number, block = number[drawn], block[drawn]
    first = (sizes.cumsum(0) - sizes)[block]
    return first[:, None] + pair(number - (ends - pairs)[block], sizes[block])


def check_count(nodes: int) -> None:
    """Raise a ValueError unless there are nodes."""
    if nodes < 1:
        raise ValueError(f"Expected at least one node, but got {nodes}")


def _check_probability(name: str, p: float) -> None:
    """Raise a ValueError that names a number which is no probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"Expected {name} as a probability between 0 and 1, but got {p}")


def _skips(total: int, p: float, key: Tensor) -> Tensor:
    """Draw the numbers below `total` that coins of probability p choose, in ascending order."""
    if p == 0 or total == 0:
        return torch.empty(0, dtype=torch.int64)
    rate = -math.log1p(-p) if p < 1 else math.inf
    blocks, last, block = [], -1, 0
    while last < total:
        expected = (total - last) * p
        count = min(_BLOCK, int(expected + 6 * math.sqrt(expected)) + 10)
        waits = random.exponential(random.fold_in(key, block), (count,), torch.float64)
        steps = (waits / rate).clamp(max=float(total)).to(torch.int64) + 1
        blocks.append(last + steps.cumsum(0))
        last, block = int(blocks[-1][-1]), block + 1
    numbers = torch.cat(blocks)
    return numbers[numbers < total]


def pair(number: Tensor, nodes: int | Tensor) -> Tensor:
    """Return the pairs i < j of `nodes` with these numbers in lexicographic order, `(..., 2)`."""
    size = torch.as_tensor(nodes)
    before = lambda i: i * (2 * size - i - 1) // 2  # pairs whose first node is less than i
    root = ((2 * size - 1).double() ** 2 - 8 * number.double()).clamp(min=0).sqrt()
    i = (((2 * size - 1) - root) / 2).floor().to(torch.int64).clamp(min=0)
    i = i - (before(i) > number).to(torch.int64)
    i = i + (before(i + 1) <= number).to(torch.int64)
    return torch.stack((i, number - before(i) + i + 1), -1)
