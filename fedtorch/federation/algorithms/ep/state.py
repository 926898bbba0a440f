"""What expectation propagation keeps, and what it sends."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedtorch.federation.exchange import Mean
from fedtorch.models.gaussian import Natural
from fedtorch.tree import Tree

__all__ = ["Message", "Outbox", "Server", "State", "Told"]


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
    stepped: Tensor  # version of q that its last step started from


class Server(NamedTuple):
    """What the server keeps."""

    prior: Natural  # the normal part of p(φ)
    factors: Natural  # sites of the other part, (F,) each
    share: Natural  # of the first estimate, of each client that waits
    posterior: Natural  # q(φ)
    trusted: Natural  # the last q that clients need not go back from
    version: Tensor  # rounds that have been aggregated
    good: Tensor  # the last version of q of which all cavities were densities
    back: Tensor  # whether clients must go back
    damping: Tensor
    change: Tensor  # (2,) of the last round: max |Δmean| / sd, max |Δsd| / sd
    pace: Tensor  # the greater of them, divided by the damping
    retreats: Tensor  # rounds gone back for the sake of a cavity
    improper: Tensor  # the share of clients whose cavity was no density
    population: Tensor  # number of clients
    total: Tree = None  # `Told`, the sum over all clients, float64


class Outbox(NamedTuple):
    """What the server sends out."""

    posterior: Natural
    share: Natural
    version: Tensor
    good: Tensor
    back: Tensor
    damping: Tensor


class Message(NamedTuple):
    """What a client tells the server of the round."""

    improper: Mean  # 1 if its cavity is no density
