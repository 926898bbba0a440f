"""Federated learning networks: undirected weighted graphs over nodes.

Notation follows Jung, "Federated learning: from theory to practice", chapter 3: weights A_ij = A_ji > 0 on the edges E,
weighted degrees d_i = Σ_j A_ij, Laplacian L = diag(d) − A with eigenvalues 0 = λ₁ ≤ λ₂ ≤ … ≤ λ_n. The second one, λ₂,
is positive for a connected network, and the larger it is, the faster values spread.

>>> import fedtorch as ft
>>> ring = ft.Network.ring(4)
>>> ring
Network(nodes=4, edges=4)
>>> ring.edges.tolist()
[[0, 1], [0, 3], [1, 2], [2, 3]]
>>> ring.laplacian().to_dense()[0]
tensor([ 2., -1.,  0., -1.], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedtorch import random
from fedtorch.networks import _edge_list as edge_list
from fedtorch.networks.spectrum import largest_eigenvalue, smallest_positive_eigenvalue

if TYPE_CHECKING:
    import networkx
    from scipy.sparse import csr_matrix

_DENSE = 400  # most nodes for a dense eigendecomposition


class Components(NamedTuple):
    """The connected components of a network.

    >>> Network([(0, 2), (1, 3)]).components
    Components(labels=tensor([0, 1, 0, 1]), number=2)
    """

    labels: Tensor  # (n,) int64, the component of each node, numbered by their first nodes
    number: int


class Network:
    r"""An undirected graph with positive weights and without loops; immutable.

    Args:
        edges: `(E, 2)` integers, the two nodes of each edge, in any order. An edge that is named twice with one weight
            counts once.
        weights: `(E,)` positive; default: ones.
        nodes: their number; default: up to the last node that has an edge.
        names: one per node; default: the numbers of the nodes.
        positions: `(n, 2)` or more coordinates, for pictures.

    Attributes:
        edges: `(E, 2)` int64, each edge once as (i, j) with i < j, in lexicographic order.
        weights: `(E,)` float64.
        nodes: the number of nodes n, also `len(network)`.
        positions: `(n, 2)` or more, float64, or None.

    Raises:
        TypeError: edges that are not integers.
        ValueError: a self-loop, a node out of range, an edge twice with different weights, a weight that is zero,
            negative or not finite, or wrong dimensions.

    Example:
        >>> import fedtorch as ft
        >>> ft.Network([[0, 1], [1, 2]], weights=[1.0, 0.5]).degrees
        tensor([1.0000, 1.5000, 0.5000], dtype=torch.float64)
    """

    edges: Tensor
    weights: Tensor
    nodes: int
    positions: Tensor | None

    def __init__(
        self,
        edges: Any,
        weights: Any = None,
        nodes: int | None = None,
        names: Sequence[str] | None = None,
        positions: Any = None,
    ) -> None:
        edges = edge_list.as_edges(edges)
        nodes = edge_list.node_count(edges, nodes, names, positions)
        ordered, merged = edge_list.canonical(edges, edge_list.as_weights(weights, len(edges)), nodes)
        values = {"edges": ordered, "weights": merged, "nodes": nodes, "_adjacencies": {}}
        values |= {"positions": edge_list.as_positions(positions, nodes), "_names": edge_list.as_names(names, nodes)}
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Expected no change of a network, but got a new {name}; make another Network")

    def __len__(self) -> int:
        return self.nodes

    def __repr__(self) -> str:
        return f"Network(nodes={self.nodes}, edges={len(self.edges)})"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return one name per node."""
        given: tuple[str, ...] | None = self.__dict__["_names"]
        return tuple(map(str, range(self.nodes))) if given is None else given

    @cached_property
    def degrees(self) -> Tensor:
        """Return weighted degrees d_i = Σ_j A_ij, `(n,)` float64."""
        weights = self.weights.repeat_interleave(2)
        return torch.bincount(self.edges.flatten(), weights, self.nodes).to(torch.float64)

    @cached_property
    def neighbour_counts(self) -> Tensor:
        """Return the number of neighbours of each node, `(n,)` int64."""
        return torch.bincount(self.edges.flatten(), minlength=self.nodes)

    def adjacency(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """Return the matrix A as sparse CSR `(n, n)` with sorted columns; made once per dtype and device.

        The indices are int32 if they fit, as required by the sparse products of MKL and cuSPARSE.
        """
        made: dict[tuple[torch.dtype, str], Tensor] = self.__dict__["_adjacencies"]
        which = (dtype, str(torch.device(device or "cpu")))
        if which not in made:
            made[which] = edge_list.as_torch(self.scipy_adjacency, dtype, device)
        return made[which]

    def laplacian(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """Return the matrix L = diag(d) − A as sparse CSR `(n, n)`."""
        return edge_list.as_torch(self.scipy_laplacian, dtype, device)

    @cached_property
    def scipy_adjacency(self) -> csr_matrix:
        """Return the matrix A as a SciPy CSR matrix of float64."""
        from scipy.sparse import coo_matrix

        # In this order, rows end up sorted: first a node's lower neighbours, then its higher ones.
        low, high = self.edges.numpy().T
        weights = self.weights.numpy()
        entries = np.concatenate((weights, weights)), (np.concatenate((high, low)), np.concatenate((low, high)))
        matrix = coo_matrix(entries, shape=(self.nodes, self.nodes))
        matrix.has_canonical_format = True
        return matrix.tocsr()

    @cached_property
    def scipy_laplacian(self) -> csr_matrix:
        """Return the matrix L as a SciPy CSR matrix of float64."""
        from scipy.sparse import diags

        return (diags(self.degrees.numpy(), format="csr") - self.scipy_adjacency).tocsr()

    @cached_property
    def components(self) -> Components:
        """Return the connected components, (labels `(n,)`, their number)."""
        return Components(*edge_list.components_of(self.scipy_adjacency))

    @cached_property
    def algebraic_connectivity(self) -> float:
        """Return λ₂ of the Laplacian; zero if there are several components.

        Raises:
            ValueError: a network of one node, which has no λ₂.
        """
        if self.nodes < 2:
            raise ValueError(f"Expected at least two nodes for λ₂, but got {self.nodes}")
        if self.components.number > 1:
            return 0.0
        if self.nodes <= _DENSE:
            return float(self._spectrum[1])
        top = 2 * float(self.degrees.max())  # upper bound of λ_n, (5.23)
        return smallest_positive_eigenvalue(self.scipy_laplacian, lambda x: x - x.mean(), top)

    @cached_property
    def extreme_eigenvalues(self) -> tuple[float, float]:
        """Return (λ₂, λ_n) of the Laplacian, between which all its eigenvalues but one zero lie."""
        second = self.algebraic_connectivity
        return second, float(self._spectrum[-1]) if self.nodes <= _DENSE else largest_eigenvalue(self.scipy_laplacian)

    @cached_property
    def _spectrum(self) -> Tensor:
        return torch.linalg.eigvalsh(self.laplacian().to_dense())

    def subnetwork(self, ids: Any) -> Network:
        """Return the given nodes, in that order, with the edges between them.

        Raises:
            ValueError: a node out of range or twice.
        """
        ids, place = edge_list.places_of(ids, self.nodes)
        edges = place[self.edges]
        inside = (edges >= 0).all(1)
        names = None if self.__dict__["_names"] is None else [self.names[i] for i in ids.tolist()]
        positions = None if self.positions is None else self.positions[ids]
        return Network(edges[inside], self.weights[inside], len(ids), names, positions)

    @classmethod
    def from_edges(
        cls,
        edges: Iterable[Sequence[Any]],
        *,
        nodes: int | None = None,
        names: Sequence[str] | None = None,
        positions: Any = None,
    ) -> Network:
        """Build a network from tuples (i, j) or (i, j, weight), whose nodes are numbers or names.

        Args:
            edges: tuples of one length.
            nodes: their number, if nodes are numbers and some have no edge.
            names: of all nodes; default for named nodes: in the order of their first appearance.
            positions: `(n, 2)` or more.

        Raises:
            ValueError: a name that is not in `names`, or tuples of another form.

        >>> Network.from_edges([("Helsinki", "Turku", 0.5), ("Turku", "Oulu", 1.0)]).names
        ('Helsinki', 'Turku', 'Oulu')
        """
        pairs, weights, names = edge_list.of_tuples(edges, names)
        return cls(pairs, weights, nodes, names, positions)

    @classmethod
    def from_matrix(cls, matrix: Any, names: Sequence[str] | None = None, positions: Any = None) -> Network:
        """Build a network from a symmetric matrix of weights with a zero diagonal: a tensor, an array or a SciPy
        matrix.

        Raises:
            ValueError: a matrix that is not square or not symmetric, or has a negative weight or a diagonal.
        """
        pairs, weights = edge_list.of_matrix(matrix)
        return cls(pairs, weights, matrix.shape[0], names, positions)

    @classmethod
    def from_networkx(cls, graph: networkx.Graph, weight: str = "weight", position: str = "pos") -> Network:
        """Build a network from an undirected networkx graph; edges without the attribute `weight` have weight one.

        Names are the attribute `name` of the nodes, else the nodes themselves as text; positions are the attribute
        `position`, where all nodes have it.

        Raises:
            ValueError: a directed graph or one with several edges between two nodes.
        """
        edges, weights, names, known = edge_list.of_networkx(graph, weight, position)
        return cls(edges, weights, len(graph), names, known)

    def to_networkx(self) -> networkx.Graph:
        """Return a networkx graph: nodes 0…n−1 with attributes `name` and, if known, `pos`; edges with `weight`."""
        import networkx

        graph = networkx.Graph()
        graph.add_nodes_from((i, {"name": name}) for i, name in enumerate(self.names))
        if self.positions is not None:
            networkx.set_node_attributes(graph, dict(enumerate(self.positions.tolist())), "pos")
        graph.add_weighted_edges_from(
            (i, j, weight) for (i, j), weight in zip(self.edges.tolist(), self.weights.tolist())
        )
        return graph

    @classmethod
    def k_nearest(
        cls, points: Any, k: int, names: Sequence[str] | None = None, *, great_circle: bool = False
    ) -> Network:
        """Join two points by an edge of weight one when either is among the k nearest of the other.

        Args:
            points: `(n, dimensions)`; two or three coordinates become the `positions`.
            k: neighbours of each point, from 1 to n − 1. Ties are broken arbitrarily.
            names: one per point.
            great_circle: whether points are latitudes and longitudes in degrees, `(n, 2)`, and distances are along the
                surface of the earth, across the date line and the poles too; the `positions` are then those of a map,
                (longitude, latitude). Otherwise distances are Euclidean.

        Raises:
            ValueError: points that are not finite or not a matrix, latitudes beyond ±90 degrees, or k out of range.

        Example:
            >>> import fedtorch as ft
            >>> places = [[-17.0, 179.0], [-17.0, -179.0], [-9.0, 179.0]]  # the first two lie 213 km apart
            >>> ft.Network.k_nearest(places, 1, great_circle=True).edges.tolist()
            [[0, 1], [0, 2]]
        """
        places = torch.as_tensor(points).detach().cpu().to(torch.float64)
        if great_circle:
            return cls.from_neighbours(edge_list.nearest(edge_list.on_sphere(places), k), names, places.flip(1))
        positions = places if places.ndim == 2 and places.shape[1] in (2, 3) else None
        return cls.from_neighbours(edge_list.nearest(places, k), names, positions)

    @classmethod
    def from_neighbours(cls, neighbours: Any, names: Sequence[str] | None = None, positions: Any = None) -> Network:
        """Join two nodes by an edge of weight one when either has chosen the other.

        Args:
            neighbours: `(n, k)` int64, the nodes that each node has chosen, as `ft.neighbour_search` returns; −1 where
                it has chosen fewer.
            names: one per node.
            positions: `(n, 2)` or more.

        >>> Network.from_neighbours([[1, 2], [0, -1], [-1, -1]]).edges.tolist()
        [[0, 1], [0, 2]]
        """
        pairs, nodes = edge_list.of_neighbours(neighbours)
        return cls(pairs, nodes=nodes, names=names, positions=positions)

    @classmethod
    def star(cls, nodes: int) -> Network:
        """Build a star, with an edge from node 0 to each of the others: a server and its clients."""
        edge_list.check_count(nodes)
        leaves = torch.arange(1, nodes)
        return cls(torch.stack((torch.zeros_like(leaves), leaves), 1), nodes=nodes)

    @classmethod
    def complete(cls, nodes: int) -> Network:
        """Build the complete graph, with an edge between any two nodes."""
        edge_list.check_count(nodes)
        return cls(torch.triu_indices(nodes, nodes, 1).mT, nodes=nodes)

    @classmethod
    def ring(cls, nodes: int) -> Network:
        """Build a ring, with edges between each node and the next one, and between the last and the first."""
        edge_list.check_count(nodes)
        node = torch.arange(nodes if nodes > 1 else 0)
        return cls(torch.stack((node, (node + 1) % nodes), 1), nodes=nodes)

    @classmethod
    def erdos_renyi(cls, nodes: int, p: float, *, seed: int = 0) -> Network:
        """Draw an edge for every pair of nodes with probability p, on its own, as Batagelj and Brandes (2005) do."""
        edge_list.check_count(nodes)
        return cls(edge_list.independent_pairs(nodes, p, random.key(seed)), nodes=nodes)

    @classmethod
    def stochastic_blocks(
        cls, sizes: Sequence[int], within: float | Sequence[float], between: float, *, seed: int = 0
    ) -> Network:
        """Draw blocks of consecutive nodes, with edges likelier (or rarer) within them than between them.

        Args:
            sizes: nodes of each block.
            within: the probability of an edge between two nodes of one block; one number or one per block.
            between: the probability of an edge between nodes of two blocks.
            seed: of the draws.

        Raises:
            ValueError: a size below one, a probability outside [0, 1], or numbers of probabilities and blocks that do
                not match.
        """
        return cls(edge_list.stochastic_blocks(sizes, within, between, random.key(seed)), nodes=int(sum(sizes)))
