r"""Robust rules for whole algorithms: `algorithm | robust.rule(robust.median())`.

Totals of persistent contributions are averaged by a rule over the table of all clients' last contributions.

A total is a sum over clients, or over a node's neighbours on a graph. It becomes the number of clients, or the node's
degree :math:`d_i = \sum_j A_{ij}`, times a robust average of their last contributions:

.. math:: M \cdot \mathrm{rule}(t_1, \dots, t_M), \qquad
    d_i \cdot \mathrm{rule}\big(t_j : j \in \mathcal{N}(i), \text{ with weights } A_{ij} / d_i\big).

For this the server stores all contributions `(K, ...)`, and on a graph every node stores its neighbours'. The rule
therefore cannot be combined with sums whose terms are hidden from the server. A client that has not been asked yet
counts with its initial state, as in a plain total.

Rules that treat every number separately do not keep a matrix positive definite. `Told.averages` declares which averages
an algorithm's totals allow.

Source: for neighbourhoods, Yang and Bajwa (2019), "ByRDiE: Byzantine-resilient distributed coordinate descent for
decentralized learning", and the model poisoning of Jung, "Federated learning: from theory to practice", section 10.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply, first_total
from fedtorch.federation.exchanges.carry import adds_up
from fedtorch.federation.exchanges.exchange import Exchange, RowsOf, Sum, in_dtypes_of
from fedtorch.federation.exchanges.messages import before_changes, kept, like, rows
from fedtorch.federation.exchanges.robust.exchange import credible, star
from fedtorch.federation.exchanges.robust.rules import Rule
from fedtorch.federation.told import Averages
from fedtorch.federation.turn import Turn
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.networks.network import Network
from fedtorch.tree import Tree

_NUMBERS = 2**24  # most numbers of neighbourhoods averaged at once


def rule(average: Rule, network: Network | None = None, *, spread: float = 1.0) -> Wrapper:
    """Build the wrapper that replaces a server's means, and totals of persistent contributions, by robust averages.

    On a graph every node takes the robust average of its neighbours. A server, or on a graph every node, then stores
    the table of all last contributions.

    Args:
        average: such as `median()` or `krum(3)`. A neighbourhood has fewer messages than a star: `krum(f)` needs 2f + 3
            neighbours.
        network: network of an algorithm over `graph(network)`; None for a star.
        spread: largest ratio of a `Mean`'s weight to the median weight, at least 1: 1 makes all equal, infinity trusts
            the clients' weights. Weights of a network's edges count unchanged.

    Raises:
        ValueError: a spread below 1. In wrapping: an exchange that is not a plain star, or not a graph with its
            network; totals that do not allow the rule's kind of average; a neighbourhood that is too small for the
            rule; a rule with a reference for totals. At the start of a run: a network that is not the algorithm's. In a
            round: too few messages.
        TypeError: in a round with `Sum`s.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import robust
        >>> network = ft.Network.from_matrix(1 - torch.eye(6))
        >>> rows = [(torch.ones(1, 1), torch.full((1,), y)) for y in (1.0, 1.0, 1.0, 1.0, 1.0, 1000.0)]
        >>> exact = ft.gtv(ft.least_squares(torch.nn.Linear(1, 1, bias=False)), network, alpha=1.0)
        >>> defended = exact | robust.rule(robust.median(), network)
        >>> run = ft.run(defended, ft.InProcess(ft.data.from_tensors(rows)), rounds=60)
        >>> run.tensors()["weight"].flatten()[:5].round(decimals=3)
        tensor([1., 1., 1., 1., 1.])
    """
    robust_star = star(average, spread=spread)

    def wrap(algorithm: Algorithm) -> Algorithm:
        exchange, again = before_changes(algorithm.exchange)
        if network is None and not adds_up(exchange):
            raise ValueError(
                "Expected an algorithm over a plain star, whose server may see every message, but got another exchange "
                "or noise that the server adds to sums; for an algorithm over a graph pass its network, and leave out "
                "the server's noise, because a robust rule needs the messages that the noise hides"
            )
        mean = robust_star._replace(scatter=exchange.scatter, traffic=exchange.traffic)
        plain = dataclasses.replace(algorithm, exchange=exchange)
        if algorithm.told is not None:
            wrapped = totals(plain, average, network, mean)
        elif network is not None:
            raise ValueError("Expected persistent contributions (`told`) over a network, but got fresh messages only")
        else:
            wrapped = dataclasses.replace(plain, exchange=mean)
        return dataclasses.replace(wrapped, exchange=again(wrapped.exchange))

    return Wrapper(Stage.ROBUST, "robust.rule", wrap, {"average": average.name, "spread": spread})


class Table(NamedTuple):
    """State of the server."""

    algorithm: Tree  # state of the wrapped algorithm, with its total
    told: Tree  # (K, ...) every client's last contribution


class _Said(NamedTuple):
    """A round's message of a client."""

    fresh: Tree  # the message of the algorithm itself
    told: Sum  # the whole contribution, whose rows the server stores


class _Ring(NamedTuple):
    """Nodes with the same number of neighbours."""

    nodes: Tensor  # (B,)
    neighbours: Tensor  # (B, c)
    weights: Tensor  # (B, c) A_ij / d_i
    degrees: Tensor  # (B,) d_i


def totals(algorithm: Algorithm, rule: Rule, network: Network | None, mean: Exchange) -> Algorithm:
    """Return an algorithm whose totals, and on a star also its `Mean`s, are robust.

    Args:
        algorithm: has persistent contributions (`told`).
        rule: the average.
        network: network of an algorithm over `graph(network)`; None for a star.
        mean: a star with the rule.

    Shapes: server state is `Table`; all else as in `algorithm`.

    Raises:
        ValueError: totals that do not allow the rule's kind of average; a neighbourhood that is too small for the rule;
            a rule with a reference; or, at the start of a run, a network that is not the algorithm's.
        TypeError: in a round, the exchange has been replaced.
    """
    _check(algorithm, rule)
    rings = None if network is None else list(_rings(network, rule))
    inner = algorithm.exchange if network is not None else mean
    return dataclasses.replace(
        algorithm,
        init=partial(_init, algorithm, rule, rings),
        outbox=lambda table: algorithm.outbox(table.algorithm),
        client=partial(_client, algorithm),
        server=partial(_server, algorithm, inner, rule, rings),
        exchange=kept(inner, lambda batch: batch),
        told=None,
        report=None if algorithm.report is None else partial(_report, algorithm),
    )


def _check(algorithm: Algorithm, rule: Rule) -> None:
    assert algorithm.told is not None
    if rule.reference is not None:
        raise ValueError(
            f"Expected a rule without a reference for totals, but got {rule.name}; use it where all messages are fresh"
        )
    if algorithm.told.averages is Averages.NONE:
        raise ValueError(
            f"Expected totals that an average may replace, but those of {algorithm.settings.get('algorithm')} are "
            "sums and nothing else (Told.averages); no robust rule can replace them"
        )
    if algorithm.told.averages is Averages.CONVEX and not rule.convex:
        raise ValueError(
            f"Expected a rule on whole messages, but got {rule.name}, under which matrices need not stay positive "
            "definite; use robust.geometric_median() or robust.krum(f)"
        )


def _rings(network: Network, rule: Rule) -> Iterator[_Ring]:
    """Group the nodes of a network by their number of neighbours, without isolated nodes."""
    counts = network.neighbour_counts
    small = ((counts > 0) & (counts < rule.least)).nonzero()[:, 0].tolist()
    if small:
        raise ValueError(
            f"Expected neighbourhoods of at least {rule.least} nodes for {rule.name}, but {len(small)} nodes have "
            f"fewer, {network.names[small[0]]!r} only {int(counts[small[0]])}; add edges, or defend against fewer"
        )
    matrix = network.adjacency()
    starts, columns, weights = matrix.crow_indices().long(), matrix.col_indices().long(), matrix.values()
    for count in counts.unique().tolist():
        nodes = (counts == count).nonzero()[:, 0]
        entries = starts[nodes, None] + torch.arange(count)
        if count:
            degrees = network.degrees[nodes]
            yield _Ring(nodes, columns[entries], weights[entries] / degrees[:, None], degrees)


def _init(
    algorithm: Algorithm, rule: Rule, rings: list[_Ring] | None, parameters: Tree, clients: int
) -> tuple[Table, Tree]:
    assert algorithm.told is not None
    server, state = algorithm.init(parameters, clients)
    if any(int(ring.nodes.max()) >= clients for ring in rings or ()):
        raise ValueError(f"Expected a network of {clients} nodes, but got more; pass the algorithm's network")
    initial = algorithm.told.of(tree.expand(state, 1))
    table = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape[1:]).clone(), initial)
    total, plain = _total(rule, rings, table), first_total(algorithm, state, clients)
    shapes = [[leaf.shape for leaf in tree.leaves(each)] for each in (total, plain)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"Expected totals of shapes {[tuple(shape) for shape in shapes[1]]}, but the rule makes "
            f"{[tuple(shape) for shape in shapes[0]]}; pass the algorithm's network, and none for a star"
        )
    return Table(server._replace(total=total), table), state


def _client(algorithm: Algorithm, inbox: Tree, state: Tree, data: Any, turn: Turn) -> Reply:
    assert algorithm.told is not None
    reply = algorithm.client(inbox, state, data, turn)
    return reply._replace(message=_Said(reply.message, Sum(algorithm.told.of(reply.state))))


def _server(
    algorithm: Algorithm,
    exchange: Exchange,
    rule: Rule,
    rings: list[_Ring] | None,
    table: Table,
    batch: RowsOf,
    key: Tensor,
) -> Table:
    if not isinstance(batch, RowsOf):
        raise TypeError(
            "Expected every client's message, but got the result of another exchange; do not replace the exchange of "
            "robust totals, not even by a secure sum"
        )
    fresh, told = batch.message.fresh, _written(table.told, batch)
    aggregate = in_dtypes_of(fresh, exchange.finish(exchange.gather(fresh, batch.ids)))
    inner = table.algorithm._replace(total=_total(rule, rings, told))
    return Table(algorithm.server(inner, aggregate, key), told)


def _report(algorithm: Algorithm, table: Table) -> Any:
    assert algorithm.report is not None
    return algorithm.report(table.algorithm)


def _written(table: Tree, batch: RowsOf) -> Tree:
    """Update the table after a round; a client whose numbers are not credible keeps its last row."""
    new = batch.message.told.value
    good = credible(rows(new))
    ids = batch.ids.to(good.device)[good]
    return tree.map(lambda old, leaf: old.index_copy(0, ids, leaf[good].to(old.dtype)), table, new)


def _total(rule: Rule, rings: list[_Ring] | None, table: Tree) -> Tree:
    """Return the robust total of a table, float64."""
    values = rows(table)
    if rings is None:
        count = len(values)
        if count < rule.least:
            raise ValueError(f"Expected at least {rule.least} clients for {rule.name}, but got {count}")
        equal = torch.full((count,), 1 / count, dtype=torch.float64, device=values.device)
        return like(count * rule.average(values, equal), table)
    total = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    for ring in rings:
        size = max(1, _NUMBERS // max(1, ring.neighbours.shape[1] * values.shape[1]))
        for rows_of in torch.arange(len(ring.nodes)).split(size):
            part = tree.to(tree.take(ring, rows_of), values.device)
            averages = rule.average(values[part.neighbours], part.weights)
            total[part.nodes] = averages.to(torch.float64) * part.degrees[:, None]
    return like(total, table)
