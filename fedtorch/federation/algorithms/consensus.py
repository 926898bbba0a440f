r"""Federations without a server: every node holds its own copy of the server, from sums by consensus.

Neighbours of a connected network average their values until all have the mean of the whole network. With the Laplacian
L and its extreme positive eigenvalues λ₂ ≤ λ_n, the values after k exchanges between neighbours are T̃_k(L) x, where

.. math:: \tilde T_k(\lambda) = \frac{T_k(c - \lambda / r)}{T_k(c)},\quad c = \frac{\lambda_n + \lambda_2}
    {\lambda_n - \lambda_2},\quad r = \frac{\lambda_n - \lambda_2}{2},

T_k is the Chebyshev polynomial. The polynomial preserves the mean, and none of degree k reduces the deviations from it
further: their norm shrinks to at most 1/T_k(c). Plain averaging needs of the order of λ_n/λ₂ exchanges per digit, this
method the square root of that.

`without_server` accepts any algorithm over a `star`. Gibbs sampling sends whole numbers (`fedtorch.exact`): a sum that
is accurate to less than one half is exact after rounding, so all copies are the same to the bit, and the same as with a
server. Copies draw with the round's key, which all nodes share.

Source: the third future direction of Kidd, Wang, Xu and Ni (2023), "Federated learning for sparse Bayesian models",
section 4; Jung, "Federated learning: from theory to practice", chapter 3, for networks; Muthukrishnan, Ghosh and
Schultz, "First- and second-order diffusive methods for rapid, coarse, distributed load balancing", Theory of Computing
Systems 31, 1998, section 4, and Montijano, Montijano and Sagüés, "Chebyshev polynomials in distributed consensus
applications", IEEE Transactions on Signal Processing 61, 2013, for the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, check_algorithm
from fedtorch.federation.exchanges.exchange import Exchange, Mean, Sum
from fedtorch.federation.exchanges.graph import graph
from fedtorch.networks.network import Network
from fedtorch.tree import Tree

_LARGEST = 2.0**37  # bound on whole numbers in a message: sums of a few limbs, and their differences
_MARGIN = 1e-6  # relative error allowed in the eigenvalues


class Averaging:
    """Average the values of a network's nodes by exchanges between neighbours.

    Args:
        network: connected.
        reduction: largest remaining deviation from the mean, relative, in norm over all nodes.

    Attributes:
        exchanges: k, number of exchanges between neighbours.

    Raises:
        ValueError: the network is not connected, or the reduction not between 0 and 1.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.consensus import Averaging
        >>> average = Averaging(ft.Network.ring(4), 1e-9)
        >>> average.exchanges
        13
        >>> average(torch.tensor([[1.0], [2.0], [3.0], [6.0]], dtype=torch.float64)).flatten().round(decimals=6)
        tensor([3., 3., 3., 3.], dtype=torch.float64)
    """

    def __init__(self, network: Network, reduction: float) -> None:
        if not 0 < reduction < 1:
            raise ValueError(f"Expected a reduction between 0 and 1, but got {reduction}")
        if network.components.number > 1:
            raise ValueError(
                f"Expected a connected network, but got one of {network.components.number} components; add edges"
            )
        self.network, self.exchanges = network, 0
        if network.nodes > 1:
            low, high = network.extreme_eigenvalues
            low, high = low * (1 - _MARGIN), high * (1 + _MARGIN)
            self._centre, self._radius = (high + low) / (high - low), (high - low) / 2
            self.exchanges = math.ceil(math.acosh(1 / reduction) / math.acosh(self._centre))

    def __call__(self, values: Tensor) -> Tensor:
        """Return each node's approximation of the mean, `(n, D)` float64 -> `(n, D)`."""
        if not self.exchanges:
            return values
        laplacian = self.network.laplacian(torch.float64, values.device)
        step = lambda x: self._centre * x - (laplacian @ x) / self._radius
        ratio = 1 / self._centre  # T_k(c) / T_{k+1}(c)
        before, now = values, step(values) * ratio
        for _ in range(self.exchanges - 1):
            following = 1 / (2 * self._centre - ratio)
            before, now = now, 2 * following * step(now) - ratio * following * before
            ratio = following
        return now


def consensus(network: Network, tolerance: float | None = None) -> Exchange:
    """Replace the sums of a `star` by consensus: each node computes the aggregate and keeps a row of the outbox.

    A node that does not answer in a round adds nothing, but relays its neighbours' messages. Traffic is counted over
    the edges: for each exchange, one message in float64 to every neighbour. Nothing is sent down.

    Args:
        network: connected, whose nodes are the clients, in their order.
        tolerance: largest remaining deviation of the messages from their mean, relative, in norm over all nodes; None
            if messages are `Sum`s of whole numbers, as for `ft.gibbs`, whose sums are then exact.

    Raises:
        ValueError: the network is not connected, or the tolerance not between 0 and 1; or, in a round, a message that
            is not of whole numbers where these are expected.
        ArithmeticError: sums of whole numbers are not known well enough to be rounded.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.consensus import consensus
        >>> exchange = consensus(ft.Network.ring(4))
        >>> message = ft.Sum(torch.tensor([1.0, 2.0, 3.0, 4.0]))  # of whole numbers, one of each node
        >>> exchange.finish(exchange.gather(message, slice(0, 4))).value
        tensor([10., 10., 10., 10.], dtype=torch.float64)
    """
    nodes = network.nodes
    average = Averaging(network, 1 / (8 * nodes**1.5 * _LARGEST) if tolerance is None else tolerance)
    joined, neighbours = graph(network), network.neighbour_counts

    def everywhere(ids: Tensor, values: Tree) -> Tree:
        leaves = tree.leaves(tree.as_real(values))
        if not leaves:
            return values
        columns = [leaf.to(torch.float64).reshape(len(leaf), -1) for leaf in leaves]
        rows = torch.cat(columns, 1)
        held = rows.new_zeros(nodes, rows.shape[1]).index_copy_(0, ids.to(rows.device), rows)
        total = average(held) * nodes
        if tolerance is None:
            total = _whole(rows, total)
        parts = total.split([part.shape[1] for part in columns], 1)
        shaped = [part.reshape(nodes, *leaf.shape[1:]) for part, leaf in zip(parts, leaves)]
        return tree.from_real(tree.refill(values, shaped), values)

    def hear(ids: Tensor, node: Mean | Sum) -> Mean | Sum:
        if isinstance(node, Sum):
            return Sum(everywhere(ids, node.value))
        weighted, weight = everywhere(ids, (tree.scale(tree.wide(node.value), node.weight.double()), node.weight))
        return Mean(tree.scale(weighted, 1 / weight), weight)

    return Exchange(
        scatter=tree.take,
        gather=joined.gather,
        merge=joined.merge,
        finish=lambda partial: tree.map(lambda node: hear(partial.ids, node), partial.message, is_leaf=(Mean, Sum)),
        traffic=lambda outbox, messages, ids: (
            average.exchanges
            * int(neighbours[ids].sum())
            * 8
            * sum(math.prod(x.shape[1:]) for x in tree.leaves(tree.as_real(messages))),
            0,
        ),
        additive=False,
        heard_by="its neighbours",
        network=network,
    )


def at_node(server: Tree, node: int | None = None) -> Tree:
    """Return a node's copy of the server's state of a run `without_server`, or the mean of all nodes' copies.

    The copies differ within the tolerance; those of `ft.gibbs` are equal. Whole numbers and flags, which have no mean,
    are the first node's.

    Args:
        server: `run.server`, with a row for every node, `(n, ...)`.
        node: index of the node; None for the mean.

    Raises:
        ValueError: there is no node with this index.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.consensus import at_node
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), value)) for value in (1.0, 2.0, 6.0)])
        >>> local = ft.least_squares(ft.LinearHead(1, intercept=False))
        >>> run = ft.run(ft.without_server(ft.fedavg(local), ft.Network.ring(3), 1e-9), ft.InProcess(data), rounds=1)
        >>> run.server["coefficients"].shape, at_node(run.server, 2)["coefficients"].round(decimals=4)
        (torch.Size([3, 1]), tensor([3.]))
    """
    nodes = len(tree.leaves(server)[0])
    if node is not None and not 0 <= node < nodes:
        raise ValueError(f"Expected a node of 0…{nodes - 1}, or None for the mean of all, but got {node}")

    def of(copies: Tensor) -> Tensor:
        has_mean = copies.is_floating_point() or copies.is_complex()
        return copies.mean(0) if node is None and has_mean else copies[node or 0]

    return tree.map(of, server)


def without_server(algorithm: Algorithm, network: Network, tolerance: float | None = None) -> Algorithm:
    """Run an algorithm over a `star` among the nodes of a network.

    Every node keeps a copy of the server's state, a row of the new server state `(n, ...)`, and takes the server's step
    itself, with its own sums and the round's key, which all share. `at_node` returns one node's copy, or their mean; a
    run's history, on which `until=` acts, is the mean's.

    Args:
        algorithm: one with an additive exchange, such as `ft.gibbs(...)` or `ft.fedavg(...)`.
        network: connected, whose nodes are the clients, in their order.
        tolerance: as for `consensus`; the default None is for `ft.gibbs`, whose copies are then equal to the bit.

    Raises:
        ValueError: the algorithm's exchange is not additive, or as for `consensus`; or, at the start of a run, the
            numbers of nodes and clients differ.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import sparse
        >>> x = ft.random.normal(ft.random.key(0), (4, 50, 3))
        >>> data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(4)])
        >>> served = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=5, chains=2)
        >>> alone = ft.without_server(served, ft.Network.ring(4))
        >>> results = []
        >>> for algorithm in (served, alone):
        ...     final = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=20)
        ...     results.append(final.server.variables.theta)
        >>> [bool((copy == results[0]).all()) for copy in results[1]]
        [True, True, True, True]
    """
    check_algorithm(algorithm)
    if not algorithm.exchange.additive:
        raise ValueError("Expected an algorithm whose messages are summed, as over a star, but got another exchange")

    report = algorithm.report

    def init(parameters: Tree, clients: int) -> tuple[Tree, Tree]:
        if clients != network.nodes:
            raise ValueError(
                f"Expected a network of as many nodes as there are clients, {clients}, but got {network.nodes} nodes"
            )
        server, state = algorithm.init(parameters, clients)
        return tree.expand(server, clients), state

    def at_every_node(function: Callable[..., Tree], *values: Tree) -> Tree:
        copies = [[tree.map(lambda leaf, i=i: leaf[i], value) for value in values] for i in range(network.nodes)]
        return tree.stack([function(*copy) for copy in copies])

    return replace(
        algorithm,
        init=init,
        outbox=lambda server: at_every_node(algorithm.outbox, server),
        server=lambda server, aggregate, key: at_every_node(
            lambda copy, sums: algorithm.server(copy, sums, key), server, aggregate
        ),
        exchange=consensus(network, tolerance),
        report=None if report is None else lambda server: report(at_node(server)),
        settings={**algorithm.settings, "edges": network.edges, "weights": network.weights, "tolerance": tolerance},
    )


def _whole(sums: Tensor, total: Tensor) -> Tensor:
    """Return the whole numbers nearest to sums of whole numbers."""
    rounded = total.round()
    error = (total - rounded).abs().amax() if total.numel() else total.new_zeros(())
    are_whole, known = torch.stack([((sums == sums.round()) & (sums.abs() <= _LARGEST)).all(), error < 0.25]).tolist()
    if not are_whole:
        raise ValueError(
            f"Expected messages of whole numbers up to {_LARGEST:.0f}, but got others; pass a tolerance of their means"
        )
    if not known:
        raise ArithmeticError(
            f"Expected sums of whole numbers to within 0.25, but got an error of {float(error):.2g}; the network has "
            "too many nodes, or too few edges, for numbers of 53 bits"
        )
    return rounded
