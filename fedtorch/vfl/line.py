"""Messages between processes: the bytes of `fedtorch.wire` over a gloo process group, counted, with bounded waits.

Nothing is pickled, and a payload of another structure, shape or dtype than expected, or with NaN, is refused with its
sender's name. Before each payload goes its length, 8 bytes that are not counted: gloo ends the whole process when more
comes than the receiver has room for, so that a longer payload has to be refused unread.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fedtorch import tree, wire
from fedtorch.tree import Tree

__all__ = ["TIMEOUT", "Line"]

TIMEOUT = timedelta(minutes=10)
Message = TypeVar("Message", bound=Tree)


class Line:
    """What one rank sends and receives.

    Args:
        rank: that this process has to be.
        ranks: how many processes there have to be.
        timeout: the longest wait for another rank.

    Attributes:
        sent: bytes of payloads so far.
        received: bytes of payloads so far.

    Raises:
        RuntimeError: no process group, or another rank or number of processes.
    """

    def __init__(self, rank: int, ranks: int, timeout: timedelta = TIMEOUT) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Expected a process group, but got none; start with torchrun and init_process_group")
        if (dist.get_rank(), dist.get_world_size()) != (rank, ranks):
            here = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            raise RuntimeError(f"Expected node {rank} to run on its own rank of {ranks}, but got {here}")
        self.timeout, self.sent, self.received = timeout, 0, 0

    def send(self, message: Tree, to: int) -> None:
        """Sends a message.

        Raises:
            RuntimeError: it was not taken in time.
        """
        payload = wire.encode(message)
        self._wait(dist.isend(torch.tensor([len(payload)]), to), to)
        if payload:
            self._wait(dist.isend(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to), to)
            self.sent += len(payload)

    def receive(self, like: Message, source: int) -> Message:
        """A message in the structure, shapes and dtypes of `like`, and on its device.

        Raises:
            RuntimeError: nothing came in time.
            fedtorch.wire.PayloadError: what came is something else.
        """
        length, expected = torch.empty(1, dtype=torch.int64), wire.size(like)
        self._wait(dist.irecv(length, source), source)
        if not 0 <= int(length) <= expected:
            raise wire.PayloadError(
                f"payload of rank {source}: expected {expected} bytes, but got {int(length)}; start all ranks with the "
                "same model, guide and number of rows"
            )
        payload = torch.empty(int(length), dtype=torch.uint8)
        if len(payload):
            self._wait(dist.irecv(payload, source), source)
            self.received += len(payload)
        decoded = wire.decode(payload.numpy().tobytes(), like, client=f"rank {source}")
        return tree.map(lambda value, own: value.to(own.device), decoded, like)

    def _wait(self, work: Any, rank: int) -> None:
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            waited = f"{self.timeout.total_seconds():g} s"
            raise RuntimeError(f"Expected rank {rank} to answer within {waited}, but got none: {error}") from error
