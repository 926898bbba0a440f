"""Totals over all clients of a part of their state: a control variate, a site, a model on a graph."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from fedtorch.learns import UNDECLARED, Learns
from fedtorch.tree import Tree


class Averages(Enum):
    """Say which averages over clients may stand for their mean, as robust rules and noise need to know.

    Example:
        >>> import torch, fedtorch as ft
        >>> ft.scaffold(ft.least_squares(torch.nn.Linear(2, 1), steps=1, lr=0.1)).told.averages
        <Averages.COORDINATEWISE: 'any average of each number on its own'>
    """

    NONE = "none: only the exact sum has a meaning"  # parts of exact sums
    CONVEX = "convex combinations of whole messages"  # matrices that have to stay positive definite
    COORDINATEWISE = "any average of each number on its own"


class Told(NamedTuple):
    """Hold what clients tell for good.

    The server's state then has a field `total`, which `Algorithm.init` leaves None: what the exchange makes of `of`
    over *all* clients, in float64, whoever answers; who has not been asked yet counts with the initial state. Only
    changes travel, and the total is up to date when `Algorithm.server` is called.

    Attributes:
        of: state `(K, ...)` -> what a client tells `(K, ...)`.
        averages: which averages may stand for the mean of what clients tell.
        counts: names of those leaves that are no more than how many have been heard, or how heavy they are.
        anew: whether a run may make the total anew from what clients tell, without the rounding since.
        learns: what it tells at worst.

    Example:
        >>> import torch, fedtorch as ft
        >>> from typing import Any, NamedTuple
        >>> class Server(NamedTuple):
        ...     total: Any = None
        >>> counting = ft.Algorithm(  # how many rounds all clients have answered together
        ...     init=lambda parameters, clients: (Server(), torch.zeros((), dtype=torch.float64)),
        ...     outbox=lambda server: server.total,
        ...     client=lambda inbox, state, data, turn: ft.Reply(None, state + 1, {}),
        ...     server=lambda server, aggregate, key: server,
        ...     model=lambda inbox, state: {"rounds": inbox},
        ...     told=ft.Told(lambda state: state),
        ... )
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1))] * 4)
        >>> ft.run(counting, ft.InProcess(data), {}, rounds=5, cohort=2).server.total
        tensor(10., dtype=torch.float64)
    """

    of: Callable[[Tree], Tree]
    averages: Averages = Averages.NONE
    counts: tuple[str, ...] = ()
    anew: bool = True
    learns: Learns = UNDECLARED
