"""Going back to a common point: the server and its parties find the last point that all of them have, and begin there.

The server makes the run's identity, by which a party finds its own states again. Each party sends the points that it
has, the server sends back the last one that all have, and at the end everybody says that everything is kept. Each
function is one end of that, to be used between the two ends of a driver: `fedtorch.sites.vertical` has one over
streams.

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

PROTOCOL = 1  # what is said may not be understood by another
_MOST = 1000  # points that a party may have


_NOTHING = Learns("nothing of rows: which run it is, and how far a node has come")


@tells(_NOTHING)
class Entered(NamedTuple):
    """Down: which run it is, and how nodes speak about it."""

    run: Tensor  # (16,) uint8
    protocol: Tensor  # () int64


@tells(_NOTHING)
class Held(NamedTuple):
    """Up: the points of the run that a party can go on from."""

    points: Tensor  # (m,) int64


@tells(_NOTHING)
class From(NamedTuple):
    """Down: the point from which all go on."""

    point: Tensor  # () int64


@tells(_NOTHING)
class Done(NamedTuple):
    """Up and down: that everything is kept."""

    point: Tensor  # () int64


_NUMBER = torch.zeros((), dtype=torch.int64)
_ENTERED, _HELD = Entered(torch.zeros(16, dtype=torch.uint8), _NUMBER), Held(torch.zeros(0, dtype=torch.int64))
_FROM, _DONE = From(_NUMBER), Done(_NUMBER)


def enter_run(journal: Journal, server: Name = 0) -> Half:
    """Hear from the server which run it is, and go to the points of it, as a party.

    Raises:
        PayloadError: the server speaks another protocol.
    """
    entered = yield Receive(server, _ENTERED)
    if (protocol := int(entered.protocol)) != PROTOCOL:
        raise PayloadError(
            f"Expected a server that speaks protocol {PROTOCOL}, but got one of {protocol}; install the same "
            "version of fedtorch on both sides"
        )
    journal.enter(bytes(entered.run.tolist()).hex())


def agree_with_server(journal: Journal, server: Name = 0) -> Half:
    """Tell the server the points of this party, begin from the one that it names, and return that."""
    yield Send(server, Held(torch.tensor(sorted(journal.versions.numbers))), rows=True)
    point = int((yield Receive(server, _FROM)).point)
    journal.begin(point)
    return point


def agree_with_parties(journal: Journal, parties: Sequence[Name]) -> Half:
    """Begin from the last point that the server and all parties have, and return that."""
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
    """Say that this party has kept everything, and note that the run is over once the server says that all have."""
    yield Send(server, _DONE)
    yield Receive(server, _DONE)
    journal.versions.finish()


def end_with_parties(journal: Journal, parties: Sequence[Name]) -> Half:
    """Wait until all parties have kept everything, note that the run is over, and only then say so."""
    for name in parties:
        yield Receive(name, _DONE)
    journal.versions.finish()
    for name in parties:
        yield Send(name, _DONE)
