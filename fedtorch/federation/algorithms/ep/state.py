"""What expectation propagation keeps, and what it sends."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedtorch.federation.algorithms.ep._damping import Moved, Pace
from fedtorch.federation.exchange import Mean
from fedtorch.models.gaussian import Natural
from fedtorch.tree import Tree


class Told(NamedTuple):
    """All that a client has told, or the sum over clients."""

    site: Natural
    summary: Tree
    waiting: Tensor  # 1 while its site is its share of the first estimate


class State(NamedTuple):
    """A client's own; leaves `(K, ...)`."""

    told: Told
    before: Natural  # its site before its last step
    good: Natural  # its site in the last round known to be good
    stepped: Tensor  # version of q that its last step started from, −1 before the first


class Server(NamedTuple):
    """What the server keeps."""

    prior: Natural  # the normal part of p(φ)
    prior_sites: Natural  # of the other part, (F,) each
    share: Natural  # of the first estimate, of each client that waits
    posterior: Natural  # q(φ)
    trusted: Natural  # the last q that clients need not go back from
    version: Tensor  # rounds that have been aggregated
    pace: Pace  # of the next round
    moved: Moved  # by the last round
    population: Tensor  # number of clients
    total: Tree = None  # `Told`, the sum over all clients, float64


class Outbox(NamedTuple):
    """What the server sends out."""

    posterior: Natural
    share: Natural
    version: Tensor
    good: Tensor  # as in `Pace`, like the next two
    back: Tensor
    damping: Tensor


class Message(NamedTuple):
    """What a client tells the server of the round."""

    improper: Mean  # 1 if its cavity is no density
