"""Totals over all clients of a part of their state: control variates, EP sites, neighbours' models."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from fedtorch.learns import UNDECLARED, Learns
from fedtorch.tree import Tree


class Averages(Enum):
    """Which averages may replace the mean over clients, for robust rules and noise.

    Example:
        >>> import torch, fedtorch as ft
        >>> ft.scaffold(ft.least_squares(torch.nn.Linear(2, 1), steps=1, lr=0.1)).told.averages
        <Averages.COORDINATEWISE: 'any average of each number on its own'>
    """

    NONE = "none: only the exact sum has a meaning"  # parts of exact sums
    CONVEX = "convex combinations of whole messages"  # matrices that have to stay positive definite
    COORDINATEWISE = "any average of each number on its own"


class Told(NamedTuple):
    """A part of each client's state that the server sums over all clients and keeps between rounds.

    The server's state has a field `total`, which `Algorithm.init` leaves None. It is the exchange's sum of `of` over
    *all* clients, in float64, whoever answers; clients that have not been asked yet count with their initial state.
    Messages carry only changes of `of`, and the total is up to date when `Algorithm.server` is called.

    Attributes:
        of: state `(K, ...)` -> the client's contribution `(K, ...)`.
        averages: which averages may replace the mean of the contributions.
        counts: names of the leaves that only count clients or sum their weights.
        anew: whether a run may recompute the total from the contributions, without accumulated rounding.
        learns: the most that a contribution discloses.

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
