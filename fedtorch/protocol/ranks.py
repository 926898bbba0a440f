"""One node per process: a half of a protocol over the ranks of a gloo process group, with bounded sizes and waits.

Start J + 1 processes with `torchrun`: rank 0 is the server, rank j party j − 1. Every process runs its own half with
its own data, and only messages leave it:

    dist.init_process_group("gloo")
    over_ranks(node.half(iterations), node.index, parties + 1)

Nothing is pickled, and a payload of another structure, shape or dtype than expected, or with NaN, is refused with its
sender's name. Payloads use separate streams (`fedtorch.protocol.bounded_streams`), each preceded by its length, 8 bytes
that are not counted: a payload that is too long is refused unread, and bytes beyond the announced length are refused at
the next message. gloo would end the whole process.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fedtorch.protocol._rank_link import RankLink
from fedtorch.protocol.halves import Half, Traffic, drive

TIMEOUT = timedelta(minutes=10)


def over_ranks(half: Half, rank: int, ranks: int, timeout: timedelta = TIMEOUT) -> tuple[Any, Traffic]:
    """Run this process's half; return its result, and the bytes that it moved.

    Args:
        half: of the node on this rank; the nodes' names are the ranks.
        rank: required rank of this process; 0 is the server.
        ranks: required number of processes.
        timeout: the longest wait for another rank.

    Raises:
        RuntimeError: no process group, another rank or number of processes, or a rank that has gone or is late.
        fedtorch.wire.PayloadError: an unexpected message.
    """
    link = RankLink(rank, ranks, timeout)
    try:
        result = drive(half, link.send, link.receive)
    finally:
        link.close()
    return result, Traffic(link.sent, link.received) if rank else Traffic(link.received, link.sent)
