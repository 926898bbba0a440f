"""One node per organisation: halves of a protocol over `fedtorch.sites`, with bounded sizes and waits.

The server (or leader) has a hub, a party a link to it. Every node runs its own half with its own data, and nothing else
leaves it:

    over_hub(server_half(server, iterations), hub, ["clinic", "laboratory"])      # the server
    over_link(party_half(party, iterations), link)                                # a party

A half may be several, one after the other, so that rows are aligned and models of them trained on one stream:

    def half():
        rows = yield from following(Holder(identifiers, "clinic"), "leader")
        party = PartyNode(network.parties[0], VerticalData((x[rows],), unknown))
        yield from party_half(party, iterations)

Nothing is pickled, and a payload of another structure, shape or dtype than expected, or with NaN, is refused with its
sender's name. A party that is lost, late or refused ends the protocol at all nodes, and everybody hears its name:
a half cannot be begun in the middle; `resuming` has drivers that go on. When a half's driver returns, everything has
arrived, and the stream may be used for another protocol.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedtorch import expected
from fedtorch.protocol.halves import Half, Traffic, drive
from fedtorch.sites.streams.hub import Hub, Link
from fedtorch.sites.vertical._peers import Peer, check_names, drive_with, give_up, meet

SECONDS = 600.0


def over_hub(
    half: Half, hub: Hub, parties: Sequence[str], *, seconds: float = SECONDS, timeout: float = SECONDS
) -> tuple[Any, Traffic]:
    """Run the server's half; return its result, and the bytes of payloads.

    Args:
        half: of the server, or of the leader of an alignment.
        hub: where the parties connect; meanwhile it is used for nothing else with them.
        parties: the names under which they connect; in the protocol party j from 1 on, or by its name.
        seconds: the longest wait for a message.
        timeout: the longest wait for all parties to connect at first.

    Raises:
        ConnectionError: a party did not come, was lost or late, or may not be here any more.
        fedtorch.wire.PayloadError: a message that is not what was expected.
        ValueError: two parties of one name.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from fedtorch.sites.streams import memory
    >>> from fedtorch.vfl.rows.alignment import Holder, following, leading
    >>> hub = Hub()
    >>> link = memory.link(hub, "clinic")  # in another organisation: `transport.connect(address, identity)`
    >>> with ThreadPoolExecutor() as pool:
    ...     own = pool.submit(over_link, following(Holder(["ann", "bob"], "clinic"), "leader"), link)
    ...     rows, traffic = over_hub(leading(Holder(["bob", "cem"], "leader"), ["clinic"]), hub, ["clinic"])
    >>> rows, own.result()[0]
    (tensor([0]), tensor([1]))
    >>> traffic == own.result()[1]  # both count the same
    True
    """
    expected.positive(seconds=seconds, timeout=timeout)
    check_names(parties)
    try:
        peers = meet(hub, parties, seconds, timeout)
        result = drive_with(half, peers)
        for peer in peers.values():
            peer.hear_end()
        for peer in peers.values():
            peer.say_end()
    except BaseException as error:
        give_up(hub, parties, error)
        raise
    return result, Traffic(sum(peer.received for peer in peers.values()), sum(peer.sent for peer in peers.values()))


def over_link(half: Half, link: Link, *, seconds: float = SECONDS) -> tuple[Any, Traffic]:
    """Run a party's half; return its result, and the bytes of payloads.

    Args:
        half: of this party; all its messages are to and from the server.
        link: to the server; closed where the half fails.
        seconds: the longest wait for a message, which may be one for all other parties.

    Raises:
        ConnectionError: the server was lost or late, or has given up; why.
        fedtorch.wire.PayloadError: a message that is not what was expected.
    """
    expected.positive(seconds=seconds)
    server = Peer("the server", link, seconds)
    try:
        result = drive(half, server.send, server.receive)
        server.say_end()
        server.hear_end()
    except BaseException:
        link.close()
        raise
    return result, Traffic(server.sent, server.received)


def read_half(path: Path | str) -> Callable[[Any], Half]:
    """Return the function `half` of a party's own file: from a `fedtorch.protocol.journal.Journal` to the party's half.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no function `half`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Expected a file with the party's half, but {path} is not there")
    half = runpy.run_path(str(path)).get("half")
    if not callable(half):
        raise ValueError(f"Expected {path} to define a function half(journal); see fedtorch.protocol.journal")
    return half
