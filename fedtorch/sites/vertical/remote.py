"""One node per organisation: halves of a protocol over `fedtorch.sites`, with bounded sizes and waits.

The server (or leader) has a hub, a party a link to it. Every node runs its own half with its own data, and nothing else
leaves it:

    over_hub(server_half(server, iterations), hub, ["clinic", "laboratory"])      # the server
    over_link(party_half(party, iterations), link)                                # a party

A half may be several, one after the other, so that rows are aligned and models of them trained on one stream:

    def half():
        rows = yield from Holder(identifiers, "clinic").following("leader")
        party = PartyNode(network.parties[0], VerticalData((x[rows],), unknown))
        yield from party_half(party, iterations)

Nothing is pickled, and a payload of another structure, shape or dtype than expected, or with NaN, is refused with its
sender's name. A party that is lost, late or refused ends the protocol at all nodes, and everybody hears its name:
a half cannot be begun in the middle. A function that makes it of a `Journal` can be begun again, and then the run goes
on (`_resuming`). When a half's driver returns, everything has arrived, and the stream may be used for another protocol.
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
    """Run the server's half to its end; return its result, and the bytes of payloads.

    Args:
        half: of the server, or of the leader of an alignment. A function that makes it of a `Journal` lets the run
            outlive cut connections and nodes that are killed; see
            `_resuming`.
        hub: where the parties connect; meanwhile it is used for nothing else with them.
        parties: the names under which they connect; in the protocol party j from 1 on, or by its name.
        folder: of this run alone, from which a server that was killed goes on; None for one that is not killed.
        seconds: the longest wait for a message.
        timeout: the longest wait for parties to connect, at first and after they were lost.

    Raises:
        ConnectionError: a party did not come, was lost or late, or may not be here any more.
        fedtorch.wire.PayloadError: a message that is not what was expected.
        FileExistsError: another process works in the folder.
        TypeError: a folder, and a half that cannot be begun again.
        ValueError: two parties of one name, or a folder of several runs.

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

    With functions of a journal, and a way to connect again:

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
        raise TypeError("Expected half= as a function of a Journal where a run goes on from a folder, but got a half")
    return once.serve(half, hub, parties, seconds, timeout)


def over_link(
    half: Half | Begin,
    link: Link | Callable[[], Link],
    folder: Path | str | None = None,
    *,
    seconds: float = SECONDS,
    timeout: float = SECONDS,
) -> tuple[Any, Traffic]:
    """Run a party's half to its end; return its result, and the bytes of payloads since this process began.

    Args:
        half: of this party; all its messages are to and from the server. Or a function that makes it of a `Journal`,
            where the server's is one.
        link: to the server; closed where the half fails. With a function of a journal it is a function as well, which
            connects: `lambda: connect("server.example:9443", identity)`.
        folder: where states are kept, of all runs that this party takes part in; None keeps them in memory.
        seconds: the longest wait for a message, which may be one for all other parties, also for them to come back.
        timeout: the longest time without a server, for a party that connects again.

    Raises:
        ConnectionError: the server was lost or late, or has given up; why.
        TimeoutError: there was no server for longer than the timeout.
        fedtorch.wire.PayloadError: a message that is not what was expected.
        FileExistsError: another process works in the folder.
        TypeError: a half that cannot be begun again with a folder or a way to connect again, or the other way round.
    """
    expected.positive(seconds=seconds, timeout=timeout)
    if callable(half) and callable(link):
        return resuming.take_part(half, link, folder, seconds, timeout)
    if callable(half) or callable(link) or folder is not None:
        raise TypeError(
            "Expected a half and a link, or functions that make them of a Journal and of nothing, but got one of each; "
            "a run that goes on needs over_link(lambda journal: …, lambda: connect(…), folder)"
        )
    return once.take_part(half, link, seconds)


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
