"""Point-to-point messages between ranks, for `ranks`."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from fedtorch import wire
from fedtorch.protocol.bounded_streams import Streams
from fedtorch.protocol.halves import Receive, Send, decode, encode
from fedtorch.tree import Tree

_LONGEST = 2**30  # most bytes of a payload whose number of rows only its sender knows


class RankLink:
    """Send and receive messages of one rank.

    Args:
        rank: required rank of this process.
        ranks: required number of processes.
        timeout: the longest wait for another rank.

    Attributes:
        sent: bytes of payloads so far.
        received: bytes of payloads so far.

    Raises:
        RuntimeError: no process group, or another rank or number of processes.
    """

    def __init__(self, rank: int, ranks: int, timeout: timedelta) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Expected a process group, but got none; start with torchrun and init_process_group")
        if (dist.get_rank(), dist.get_world_size()) != (rank, ranks):
            here = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            raise RuntimeError(f"Expected node {rank} to run on its own rank of {ranks}, but got {here}")
        self.sent = self.received = 0
        self.streams = Streams(rank, ranks, timeout)

    def send(self, step: Send) -> None:
        """Send a message.

        Raises:
            RuntimeError: it was not received in time.
        """
        payload = encode(step)
        self.streams.write(int(step.to), len(payload).to_bytes(8, "little") + payload)
        self.sent += len(payload)

    def receive(self, step: Receive) -> Tree:
        """Receive a message in the structure, shapes and dtypes of `step.like`, on its device.

        Raises:
            RuntimeError: nothing arrived in time.
            fedtorch.wire.PayloadError: an unexpected message arrived.
        """
        source = int(step.sender)
        length = int.from_bytes(self.streams.read(source, 8, step.seconds), "little")
        longest = _LONGEST if step.rows or callable(step.like) else wire.size(step.like)
        if length > longest:
            raise wire.PayloadError(
                f"payload of rank {source}: expected {longest} bytes, but got {length}; start all ranks with the "
                "same model, guide and number of rows"
            )
        self.received += length
        return decode(self.streams.read(source, length, step.seconds), step, f"rank {source}")

    def close(self) -> None:
        """End the streams."""
        self.streams.close()
