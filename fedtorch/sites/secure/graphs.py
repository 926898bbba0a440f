r"""Secure sums over the neighbourhoods of a network: node i learns Σ_j A_ij v_j and nothing of its parts.

In every round each node is the server of a sum over its neighbours, who mask A_ij v_j for one another. *Rounds are
synchronous:* if a node is silent, nothing is summed at all, because the difference of this round's sums and another's
could be one node's value. *Collusion:* one node, or two that combine their sums with what they learn as parties of
their neighbours' sums, learn no combination of fewer than `minimum` others' values. Two nodes can subtract sums: if all
but one of their neighbours are common, the difference is that one's value. Networks in which this is possible are
refused. Three or more nodes that collude are not covered, nor are guesses from many rounds of slowly changing values.

Everything here runs in one process, which shows costs and sums and protects nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import hears_neighbours
from fedtorch.federation.exchanges.exchange import Mean, RowsOf, Sum
from fedtorch.federation.exchanges.messages import as_sums, in_order, kept, like, rows
from fedtorch.random.entropy import Entropy, from_system
from fedtorch.sites.secure.grid import Grid
from fedtorch.sites.secure.messages import Aborted
from fedtorch.sites.secure.neighbours import Neighbourhoods
from fedtorch.sites.secure.simulation import secure_sum
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.networks.network import Network

_DIGITS = 9  # significant digits in which equal ratios of weights agree


@dataclass(frozen=True)
class MaskedGraph:
    """A transport of messages in sums over neighbourhoods, in one process; see `masked_graph`.

    Example:
        >>> import fedtorch as ft
        >>> from fedtorch.trust import secure
        >>> everybody = ft.Network([[i, j] for i in range(5) for j in range(i)])
        >>> secure.masked_graph(everybody).check(clients=5)
        Traceback (most recent call last):
        ...
        ValueError: Expected a transport between sites, but got secure.masked_graph, which runs in one process; ...
    """

    over: Network
    grid: Grid
    minimum: int
    entropy: Entropy = field(repr=False, compare=False)
    masks: None = field(default=None, repr=False)
    network: None = field(default=None, repr=False)
    _attempts: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    @property
    def step(self) -> float:
        """Return the step of the grid."""
        return 2.0**-self.grid.bits

    def __str__(self) -> str:
        return f"sums over neighbourhoods under masks on {self.grid}, of at least {self.minimum} nodes"

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Return `algorithm` with nodes that receive only sums.

        Raises:
            ValueError: they need more than plain sums over their neighbours in the network.
        """
        if not hears_neighbours(algorithm.exchange, self.over):
            raise ValueError(
                "Expected an algorithm whose nodes receive sums over their neighbours in the network of masked_graph, "
                "such as ft.gtv, but got another exchange or network; over a star use sites.masked"
            )
        finish = partial(_finish, _parts(self.over), self.grid, self.entropy, self._attempts)
        return replace(algorithm, exchange=kept(algorithm.exchange, finish))

    def check(self, clients: int, sites: int | None = None) -> None:
        """Raise ValueError, because there is no such protocol between organisations."""
        raise ValueError(
            "Expected a transport between sites, but got secure.masked_graph, which runs in one process; between sites "
            "use sites.sealed"
        )


def masked_graph(
    network: Network,
    grid: Grid = Grid(),  # noqa: B008
    *,
    minimum: int = 3,
    collusion: int = 1,
    entropy: Entropy | None = None,
) -> MaskedGraph:
    """Return a transport of messages over `network`, by which nodes receive only sums, on the grid.

    Args:
        network: network of the algorithm, whose nodes are the clients, in order.
        grid: grid of all nodes' numbers.
        minimum: least nodes of every sum and of every combination of sums, at least 2.
        collusion: number of nodes that may combine what they know, 1 or 2.
        entropy: source of all secrets; default: the operating system's.

    Raises:
        ValueError: a minimum or collusion out of range, or a network in which so many nodes could subtract sums.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import secure
        >>> network = ft.Network.from_edges([(i, (i + step) % 6) for i in range(6) for step in (1, 2)])
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=6, seed=0)
        >>> algorithm = ft.gtv(ft.least_squares(torch.nn.Linear(10, 1)), network, alpha=0.1)
        >>> ways = (secure.masked_graph(network), ft.sites.plain())
        >>> one, two = (ft.run(algorithm, ft.InProcess(data, carry=carry), rounds=2).tensors() for carry in ways)
        >>> torch.allclose(one["bias"], two["bias"], atol=1e-3)
        True
    """
    if minimum < 2 or collusion not in (1, 2):
        raise ValueError(f"Expected a minimum of at least 2 and a collusion of 1 or 2, but got {minimum}, {collusion}")
    check_neighbourhoods(network, minimum, collusion)
    grid.check(network.nodes)
    return MaskedGraph(network, grid, minimum, from_system() if entropy is None else entropy)


def check_neighbourhoods(network: Network, minimum: int, collusion: int) -> None:
    """Raise ValueError if `collusion` nodes could work out a combination of fewer than `minimum` others' values.

    >>> import fedtorch as ft
    >>> everybody = ft.Network([[i, j] for i in range(4) for j in range(i)])
    >>> check_neighbourhoods(everybody, minimum=3, collusion=1)
    >>> check_neighbourhoods(everybody, minimum=3, collusion=2)  # nodes 0 and 1 know their own values
    Traceback (most recent call last):
    ...
    ValueError: Expected that no two nodes can work out fewer than 3 others' values, but nodes 0 and 1 ...
    """
    parts = _parts(network)
    for one, near in enumerate(parts):
        if 0 < len(near) < minimum:
            raise ValueError(
                f"Expected at least {minimum} neighbours of every node that has some, but node {one} has {len(near)}: "
                "its sum discloses too much of each; add edges"
            )
    for one, other in _pairs(parts) if collusion == 2 else ():
        few = _fewest(parts[one], parts[other], {one, other})
        if few < minimum:
            raise ValueError(
                f"Expected that no two nodes can work out fewer than {minimum} others' values, but nodes {one} and "
                f"{other} can work out those of {few} by subtracting sums; add edges, or use collusion=1"
            )


def _parts(network: Network) -> list[dict[int, float]]:
    """Return {neighbour: weight} of every node."""
    parts: list[dict[int, float]] = [{} for _ in range(network.nodes)]
    for (one, other), weight in zip(network.edges.tolist(), network.weights.tolist()):
        parts[one][other] = parts[other][one] = weight
    return parts


def _pairs(parts: list[dict[int, float]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of nodes that are neighbours or have a common one; other pairs cannot combine their sums."""
    for one, neighbours in enumerate(parts):
        near = {*neighbours, *(other for middle in neighbours for other in parts[middle])}
        yield from ((one, other) for other in sorted(near) if other > one)


def _fewest(one: dict[int, float], other: dict[int, float], known: set[int]) -> int:
    """Return the least number of unknown values in a nonzero combination of two sums."""
    one, other = ({node: w for node, w in part.items() if node not in known} for part in (one, other))
    everybody = len({*one, *other})
    ratios = Counter(float(f"{one[node] / other[node]:.{_DIGITS}g}") for node in one.keys() & other.keys())
    sizes = [len(one), len(other), everybody, *(everybody - same for same in ratios.values())]
    return min((number for number in sizes if number), default=everybody or 2**62)


def _finish(
    parts: list[dict[int, float]], grid: Grid, entropy: Entropy, attempts: Iterator[int], gathered: RowsOf
) -> Tree:
    """Return the sums of all nodes, `(n, ...)`."""
    if len(gathered.ids) != len(parts):
        raise Aborted(
            f"Expected messages of all {len(parts)} nodes, but got {len(gathered.ids)}: if nodes are silent, the "
            "difference from another round's sums would disclose single nodes' values; ask all nodes"
        )
    summed = tree.map(as_sums, in_order(gathered).message, is_leaf=(Mean, Sum))
    values, attempt = rows(summed), next(attempts)
    sums = torch.stack([_node_sum(values.cpu(), part, grid, entropy, i, attempt) for i, part in enumerate(parts)])
    return tree.map(_as_inbox, like(sums.to(values.device), summed), is_leaf=(Mean, Sum))


def _node_sum(values: Tensor, part: dict[int, float], grid: Grid, entropy: Entropy, node: int, attempt: int) -> Tensor:
    """Return one node's weighted sum `(D,)` of rows `(n, D)`."""
    near = sorted(part)
    if not near:
        return torch.zeros_like(values[0])
    weighted = values[near] * torch.tensor([part[other] for other in near], dtype=torch.float64)[:, None]
    others = len(near) - 1  # nobody may drop out, and fewer than all others recover nothing
    return secure_sum(
        weighted, grid, minimum=len(near), graph=Neighbourhoods(others, others), run=f"node {node}".encode(),
        attempt=attempt, clients=near, entropy=entropy,
    ).total  # fmt: skip


def _as_inbox(node: Mean | Sum) -> Mean | Sum:
    if isinstance(node, Sum):
        return node
    return Mean(tree.scale(node.value, torch.where(node.weight > 0, 1 / node.weight, 0.0)), node.weight)
