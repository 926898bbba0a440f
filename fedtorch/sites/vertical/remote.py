"""Halves of a vertical protocol over `fedtorch.sites`, one node per organisation, with bounded sizes and waits.

The server (or leader) has a hub, a party a link to it. Every node runs its own half with its own data, and only the
half's messages leave it:

    over_hub(server_half(server, iterations), hub, ["clinic", "laboratory"])      # the server
    over_link(party_half(party, iterations), link)                                # a party

A half may consist of several in sequence, for example to align rows and then train a model of them on one stream:

    def half():
        rows = yield from Holder(identifiers, "clinic").following("leader")
        party = PartyNode(network.parties[0], VerticalData((x[rows],), unknown))
        yield from party_half(party, iterations)

Nothing is pickled. A payload with another structure, shape or dtype than expected, or with NaN, is refused, with its
sender's name. A party that is lost, late or refused ends the protocol at all nodes, which get its name, because a half
cannot be restarted in the middle. A function from a `Journal` to a half can be restarted, and then the run resumes
(`_resuming`). When a half's driver returns, all messages have arrived, and the stream may be used for another protocol.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedtorch import expected
from fedtorch.protocol.halves import Half, Traffic
from fedtorch.sites.streams.hub import Hub, Link
from fedtorch.sites.vertical import _once as once, _resuming as resuming
from fedtorch.sites.vertical._peers import check_names
from fedtorch.sites.vertical._resuming import Begin

SECONDS = 600.0


def over_hub(
    half: Half | Begin,
    hub: Hub,
    parties: Sequence[str],
    folder: Path | str | None = None,
    *,
    seconds: float = SECONDS,
    timeout: float = SECONDS,
) -> tuple[Any, Traffic]:
    """Run the server's half to its end; return (its result, the traffic of payloads in bytes).

    Args:
        half: half of the server, or of the leader of an alignment. With a function from a `Journal` to the half, the
            run survives cut connections and killed nodes; see `_resuming`.
        hub: the hub to which the parties connect, and which meanwhile serves no other protocol with them.
        parties: names under which the parties connect; in the protocol, party j from 1 on, or its name.
        folder: a folder for this run alone, from which a killed server resumes; None if it need not resume.
        seconds: longest wait for a message.
        timeout: longest wait for parties to connect, at first and after a loss.

    Raises:
        ConnectionError: a party did not connect, was lost or late, or is not admitted any more.
        fedtorch.wire.PayloadError: a message is not the expected one.
        FileExistsError: another process uses the folder.
        TypeError: a folder, and a half that cannot be restarted.
        ValueError: two parties with one name, or a folder with several runs.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from fedtorch.sites.streams import memory
    >>> from fedtorch.vfl.rows.alignment import Holder
    >>> hub = Hub()
    >>> link = memory.link(hub, "clinic")  # in another organisation: `ft.sites.connect(address, identity)`
    >>> with ThreadPoolExecutor() as pool:
    ...     clinic = pool.submit(over_link, Holder(["ann", "bob"], "clinic").following("leader"), link)
    ...     rows, traffic = over_hub(Holder(["bob", "cem"], "leader").leading(["clinic"]), hub, ["clinic"])
    >>> rows, clinic.result()[0]
    (tensor([0]), tensor([1]))
    >>> traffic == clinic.result()[1]  # both count the same
    True

    With functions of a journal, and a function that reconnects:

    >>> leader = lambda journal: journal.once(Holder(["bob", "cem"], "leader").leading(["clinic"]))
    >>> half = lambda journal: journal.once(Holder(["ann", "bob"], "clinic").following("leader"))
    >>> hub = Hub()
    >>> with ThreadPoolExecutor() as pool:
    ...     clinic = pool.submit(over_link, half, lambda: memory.link(hub, "clinic"))
    ...     rows, traffic = over_hub(leader, hub, ["clinic"])
    >>> rows, clinic.result()[0]
    (tensor([0]), tensor([1]))
    """
    expected.positive(seconds=seconds, timeout=timeout)
    check_names(parties)
    if callable(half):
        return resuming.serve(half, hub, parties, folder, seconds, timeout)
    if folder is not None:
        raise TypeError(
            "Expected half= as a function of a Journal, so that a run resumes from its folder, but got a half"
        )
    return once.serve(half, hub, parties, seconds, timeout)


def over_link(
    half: Half | Begin,
    link: Link | Callable[[], Link],
    folder: Path | str | None = None,
    *,
    seconds: float = SECONDS,
    timeout: float = SECONDS,
) -> tuple[Any, Traffic]:
    """Run a party's half to its end; return (its result, the traffic of payloads in bytes, of this process).

    Args:
        half: half of this party; all its messages are to and from the server. Or, as at the server, a function from a
            `Journal` to the half.
        link: link to the server, closed if the half fails. With a function of a journal, a function that connects, too:
            `lambda: connect("server.example:9443", identity)`.
        folder: stores states of all runs of this party; None to keep them in memory.
        seconds: longest wait for a message, which may include the server's wait for all other parties to return.
        timeout: longest time without a server, for a party that reconnects.

    Raises:
        ConnectionError: the server was lost or late, or has ended the protocol; the message gives the reason.
        TimeoutError: the server was unreachable for longer than the timeout.
        fedtorch.wire.PayloadError: a message is not the expected one.
        FileExistsError: another process uses the folder.
        TypeError: a half that cannot be restarted, with a folder or a function that connects; or the other way round.
    """
    expected.positive(seconds=seconds, timeout=timeout)
    if callable(half) and callable(link):
        return resuming.take_part(half, link, folder, seconds, timeout)
    if callable(half) or callable(link) or folder is not None:
        raise TypeError(
            "Expected either a half and a link, or a function of a Journal and a function that connects, but got a "
            "mixture; to resume a run use over_link(lambda journal: …, lambda: connect(…), folder)"
        )
    return once.take_part(half, link, seconds)


def read_half(path: Path | str) -> Callable[[Any], Half]:
    """Return the function `half` of a party's file: `fedtorch.protocol.journal.Journal` -> the party's half.

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
