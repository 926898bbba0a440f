"""Acyclic directed graphs over sites: one round of sums, from which every probability follows exactly.

Sites send the evidence of each variable's possible sets of causes in their rows (see `fedtorch.models.gibbs.acyclic`);
the server adds it up and computes the posterior of graphs. There is no chain, no burn-in, and only one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.exchange import Sum
from fedtorch.federation.turn import Turn
from fedtorch.models.gibbs import acyclic, graphical
from fedtorch.models.gibbs.kernels import check_start
from fedtorch.models.rows import client_by_client, refuse


def acyclic_graphs(
    parents: int = 3,
    *,
    spreads: Sequence[float] = (0.05, 0.2, 0.8),
    variance: float = 0.5,
    names: Sequence[str] | None = None,
) -> Algorithm:
    r"""Build the search for causes among at most 20 variables of sites, without feedback: a posterior of graphs.

    Rows are y `(p,)`, centred, of comparable scales. Errors are Laplace, so that directions are identified. Run it from
    `graphical.start(p)` for one round; the server's state is the posterior, with `inclusion()`, `effects()` and
    `draws(key, count)`. Graphs that agree with many orders of the variables have a larger prior probability. A site's
    message is summed with the others' and grows with the number of sets of causes.

    Args:
        parents: the most causes that a variable has.
        spreads: standard deviations of the sites' effects around the global ones, equally probable for each variable.
        variance: prior variance of the global effects.
        names: the variables' names, for messages.

    Raises:
        ValueError: an argument out of range, more than 20 variables, or too few variables for so many causes; or, when
            a population is bound, rows of another form, NaN, or a variable that is constant in a client's rows, or a
            linear function of others.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import graphical
        >>> e = ft.random.exponential(ft.random.key(0), (5, 60, 3), torch.float64)
        >>> y = e - ft.random.exponential(ft.random.key(1), (5, 60, 3), torch.float64)
        >>> y[..., 1] += y[..., 0]  # 0 causes 1
        >>> data = ft.data.from_tensors(list(y))
        >>> posterior = ft.run(ft.acyclic_graphs(2), ft.InProcess(data), graphical.start(3), rounds=1).server
        >>> graphical.edges(posterior.inclusion(), fdr=0.1).nonzero().tolist()  # effect and cause
        [[1, 0]]
        >>> posterior.draws(ft.random.key(2), 1000)[:, 1, 0].double().mean().round(decimals=1)
        tensor(1., dtype=torch.float64)
    """
    if parents < 1 or not spreads or not min(spreads) > 0 or not variance > 0:
        raise ValueError(
            "Expected at least one cause, and positive spreads and variance, but got "
            f"parents={parents}, spreads={tuple(spreads)}, variance={variance}"
        )

    def init(parameters: Tensor, clients: int) -> tuple[acyclic.Graphs, Any]:
        p = graphical.variables(len(parameters))
        if not parents < p <= acyclic.MOST:
            raise ValueError(f"Expected {parents + 1} to {acyclic.MOST} variables for {parents=}, but got {p}")
        sets = acyclic.causes(p, parents)[0]
        zeros = torch.zeros(sets.shape, dtype=torch.float64)
        return acyclic.Graphs(zeros[..., 0], zeros), ()

    def prepare(data: Any) -> Any:
        y = graphical.rows(data, names)
        evidence = partial(acyclic.evidence, parents=parents, spreads=tuple(spreads), variance=variance)
        messages = client_by_client(evidence, data.count, y)
        refuse(
            ~messages.constant.flatten(1).isfinite().all(1),
            "Expected variables with errors of their own, but got a linear function of others; leave it out",
        )
        return messages

    return Algorithm(
        settings={"algorithm": "acyclic_graphs", "parents": parents, "spreads": tuple(spreads), "variance": variance},
        init=init,
        outbox=lambda server: server.score[:, 0],
        client=_client,
        server=lambda state, aggregate, key: acyclic.joined(aggregate.value, variance),
        model=lambda inbox, state: inbox,
        prepare=prepare,
    )


def _client(inbox: Tensor, state: Any, data: acyclic.Messages, turn: Turn) -> Reply:
    started, p = inbox.shape[-1], data.constant.shape[1]
    check_start(started * (started - 1), p * (p - 1))
    return Reply(Sum(data), state, {})
