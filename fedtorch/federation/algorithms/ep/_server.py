"""The server's state of expectation propagation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedtorch.federation.algorithms.ep._damping import Moved, Pace
from fedtorch.models.gaussian import Natural
from fedtorch.tree import Tree


class EPServer(NamedTuple):
    """State of the server.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0)])
        >>> run = ft.run(ft.ep(hierarchical.linear(hierarchical.normal(1), noise=0.1)), ft.InProcess(data), rounds=3)
        >>> server = run.server
        >>> torch.allclose(server.posterior.shift, server.prior.shift + server.total.site.shift)  # prior and sites
        True
        >>> int(server.version), float(server.moved.improper), float(server.total.waiting)  # all have made a step
        (3, 0.0, 0.0)
    """

    prior: Natural  # the normal part of p(φ)
    prior_sites: Natural  # factors of the other part of the prior, (F,) each
    share: Natural  # each waiting client's share of the first estimate
    posterior: Natural  # q(φ)
    trusted: Natural  # the last q to which no retreat is needed
    version: Tensor  # rounds that have been aggregated
    pace: Pace  # settings of the next round
    moved: Moved  # change in the last round
    population: Tensor  # number of clients
    total: Tree = None  # `site`, `summary` and `waiting` of all clients, added up, float64
