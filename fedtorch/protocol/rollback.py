"""Rollback to a common point: the server and its parties find the last point that all of them have stored.

The server makes the run's identity, by which a party finds its stored states. Each party sends its points, the server
replies with the last common one, and at the end everybody confirms that all states are stored. Each function is one end
of that, to be used between the two ends of a driver: `fedtorch.sites.vertical` has one over streams.

>>> from fedtorch.protocol.halves import together
>>> from fedtorch.protocol.journal import Journal
>>> journals = {name: Journal() for name in ("server", "clinic")}
>>> journals["server"].enter("0" * 32)
>>> def server(journal):
...     return (yield from agree_with_parties(journal, ["clinic"]))
>>> def clinic(journal):
...     yield from enter_run(journal, "server")
...     return (yield from agree_with_server(journal, "server"))
>>> found = together({"server": server(journals["server"]), "clinic": clinic(journals["clinic"])})[0]
>>> found, journals["clinic"].run == journals["server"].run  # nothing was done yet
({'server': 0, 'clinic': 0}, True)

Source: as `fedtorch.protocol.journal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.learns import Learns, tells
from fedtorch.protocol.halves import Half, Name, Receive, Send
from fedtorch.protocol.journal import Journal
from fedtorch.protocol.versions import FIRST
from fedtorch.wire import PayloadError

PROTOCOL = 1  # version of these messages
_MOST = 1000  # points that a party may have


_NOTHING = Learns("nothing of rows: which run it is, and how far a node has come")


@tells(_NOTHING)
class Entered(NamedTuple):
    """Message down: the run's identity and the protocol version."""

    run: Tensor  # (16,) uint8
    protocol: Tensor  # () int64


@tells(_NOTHING)
class Held(NamedTuple):
    """Message up: the points of the run from which a party can resume."""

    points: Tensor  # (m,) int64


@tells(_NOTHING)
class From(NamedTuple):
    """Message down: the point from which all resume."""

    point: Tensor  # () int64


@tells(_NOTHING)
class Done(NamedTuple):
    """Message up and down: all states are stored."""

    point: Tensor  # () int64


_NUMBER = torch.zeros((), dtype=torch.int64)
_ENTERED, _HELD = Entered(torch.zeros(16, dtype=torch.uint8), _NUMBER), Held(torch.zeros(0, dtype=torch.int64))
_FROM, _DONE = From(_NUMBER), Done(_NUMBER)


def enter_run(journal: Journal, server: Name = 0) -> Half:
    """Receive the run's identity from the server, and open its points, as a party.

    Raises:
        PayloadError: the server has another protocol version.
    """
    entered = yield Receive(server, _ENTERED)
    if (protocol := int(entered.protocol)) != PROTOCOL:
        raise PayloadError(
            f"Expected a server that speaks protocol {PROTOCOL}, but got one of {protocol}; install the same "
            "version of fedtorch on both sides"
        )
    journal.enter(bytes(entered.run.tolist()).hex())


def agree_with_server(journal: Journal, server: Name = 0) -> Half:
    """Send this party's points to the server, resume from its choice, and return that point."""
    yield Send(server, Held(torch.tensor(sorted(journal.versions.numbers))), rows=True)
    point = int((yield Receive(server, _FROM)).point)
    journal.begin(point)
    return point


def agree_with_parties(journal: Journal, parties: Sequence[Name]) -> Half:
    """Resume from the last point of the server and all parties, and return it."""
    run = torch.tensor(list(bytes.fromhex(journal.run)), dtype=torch.uint8)
    for name in parties:
        yield Send(name, Entered(run, torch.tensor(PROTOCOL)))
    common = journal.versions.numbers
    for name in parties:
        common &= set((yield Receive(name, _HELD, rows=True, most=_MOST)).points.tolist())
    point = max(common | {FIRST})
    for name in parties:
        yield Send(name, From(torch.tensor(point)))
    journal.begin(point)
    return point


def end_with_server(journal: Journal, server: Name = 0) -> Half:
    """Confirm that this party has stored everything; mark the run as over once the server confirms for all."""
    yield Send(server, _DONE)
    yield Receive(server, _DONE)
    journal.versions.finish()


def end_with_parties(journal: Journal, parties: Sequence[Name]) -> Half:
    """Wait until all parties have stored everything, mark the run as over, and confirm."""
    for name in parties:
        yield Receive(name, _DONE)
    journal.versions.finish()
    for name in parties:
        yield Send(name, _DONE)
