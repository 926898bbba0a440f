"""Robust rules for whole algorithms: `algorithm | robust.rule(robust.median())`."""

from __future__ import annotations

import dataclasses

from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import adds_up
from fedtorch.federation.exchanges.messages import before_changes
from fedtorch.federation.exchanges.robust._totals import totals
from fedtorch.federation.exchanges.robust.exchange import star
from fedtorch.federation.exchanges.robust.rules import Rule
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.networks.network import Network


def rule(average: Rule, network: Network | None = None, *, spread: float = 1.0) -> Wrapper:
    """Replace the means that a server takes, and totals of what is told for good, by robust averages.

    On a graph every node takes the robust average of its neighbours. A server, or on a graph every node, then keeps
    the table of what everybody last told.

    Args:
        average: such as `median()` or `krum(3)`. A neighbourhood has fewer messages than a star: `krum(f)` needs
            2f + 3 neighbours.
        network: of an algorithm over `graph(network)`; None for a star.
        spread: how far weights of `Mean`s count, at least 1: 1 takes all as equal, infinity believes what clients say.
            Weights of a network's edges count as they are.

    Raises:
        ValueError: a spread below 1. When it is joined: an exchange that is no plain star, or no graph with its
            network; totals that the rule's average could not stand for; a neighbourhood that is too small for the
            rule; a rule with a reference for totals. When a run begins: a network that is not the algorithm's. In a
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
                "Expected an algorithm over a plain star, of which the server may see every message, but got another "
                "exchange, or noise that the server adds to sums; for one over a graph pass the algorithm's network, "
                "and leave out the server's noise: a robust rule needs the messages that it hides"
            )
        mean = robust_star._replace(scatter=exchange.scatter, traffic=exchange.traffic)
        plain = dataclasses.replace(algorithm, exchange=exchange)
        if algorithm.told is not None:
            wrapped = totals(plain, average, network, mean)
        elif network is not None:
            raise ValueError("Expected totals (`told`) over a network, but got an algorithm of fresh messages only")
        else:
            wrapped = dataclasses.replace(plain, exchange=mean)
        return dataclasses.replace(wrapped, exchange=again(wrapped.exchange))

    return Wrapper(Stage.ROBUST, "robust.rule", wrap, {"average": average.name, "spread": spread})
