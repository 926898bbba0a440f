"""The ranks of a process group, as one of them communicates with the others: sums, rows, texts, and lost ranks.

Collectives use gloo, or nccl on a GPU. In addition every two ranks have a stream that carries nothing until a
collective fails. A rank whose process ends closes its streams; a rank that has only waited in vain first sends a notice
on them. The others can thus distinguish a lost rank from one that has noticed the loss.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedtorch import tree
from fedtorch._devices import is_cuda
from fedtorch.protocol.bounded_streams import Streams
from fedtorch.tree import Tree

_PATIENCE = 2.0  # seconds until all ranks see the end of a lost process


class Ranks:
    """All ranks, as seen from this one; the process group is started at the first collective if necessary.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        device: device of the tensors in collectives.
        timeout: the longest wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.world_size, self.device, self.timeout = rank, world_size, device, timeout
        self._streams: Streams | None = None
        self._group: Any = None

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors.

        Raises:
            RuntimeError: a rank has gone, or does not answer in time; the message names it.
        """
        if self.world_size == 1:
            return tensor
        moved = tensor.to(self.device, copy=True)
        self._together(dist.all_reduce, moved)
        return moved.to(tensor.device)

    def add(self, partial: Tree) -> Tree:
        """Return the sum of all ranks' partial aggregates, in one collective."""
        leaves = tree.leaves(tree.as_real(partial))
        if self.world_size == 1 or not leaves:
            return partial
        total = torch.cat([_widened(leaf, self.device) for leaf in leaves])
        self._together(dist.all_reduce, total)
        parts = zip(total.split([leaf.numel() for leaf in leaves]), leaves)
        same = lambda part, leaf: part if (leaf.dtype, leaf.device) == (part.dtype, part.device) else part.to(leaf)
        pairs = tree.refill(partial, [same(part.view(leaf.shape), leaf) for part, leaf in parts])
        return tree.from_real(pairs, partial)

    def gather(self, rows: Tree) -> Tree:
        """Return all ranks' rows `(M, ...)`, in the order of the ranks, in one collective on their bytes."""
        leaves = tree.leaves(rows)
        if self.world_size == 1 or not leaves:
            return rows
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(leaves[0])
        counts = self.sum(counts)
        columns_sent = [_as_bytes(leaf).to(self.device) for leaf in leaves]
        sent = torch.cat(columns_sent, 1)
        padded = sent.new_zeros(int(counts.max()), sent.shape[1])
        padded[: len(sent)] = sent
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._together(dist.all_gather, gathered, padded)
        every = torch.cat([part[:count] for part, count in zip(gathered, counts.tolist())])
        columns = every.split([part.shape[1] for part in columns_sent], 1)
        return tree.refill(rows, [_from_bytes(part, leaf) for part, leaf in zip(columns, leaves)])

    def texts(self, mine: Any) -> list[Any]:
        """Return the values of all ranks, which travel as JSON."""
        line = torch.tensor(list(json.dumps(mine).encode() + b"\n"), dtype=torch.uint8)
        return [json.loads(text) for text in bytes(self.gather(line).tolist()).splitlines()]

    def agree(self, about: Mapping[str, str]) -> None:
        """Raise an error if ranks run something else, which names the first setting in which one differs from most.

        Raises:
            ValueError: on every rank; the message names those that differ.
        """
        statements = self.texts(dict(about))
        for name in dict.fromkeys(name for each in statements for name in each):
            values = [each.get(name) for each in statements]
            (usual, _), *others = Counter(values).most_common()
            if others:
                odd = {rank: value for rank, value in enumerate(values) if value != usual}
                differing = ", ".join(f"rank {rank} with {value}" for rank, value in odd.items())
                raise ValueError(
                    f"Expected all ranks to run the same, with {name} {usual} as on rank {values.index(usual)}, but "
                    f"got {differing}; give every rank the same data, model, settings and seed"
                )

    def _together(self, collective: Any, *tensors: Any) -> None:
        """Call a collective; if it fails, raise an error that names the missing ranks."""
        self._meet()
        try:
            collective(*tensors, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(self._missing()) from error

    def _meet(self) -> None:
        """Start the process group, a group with this timeout and the streams, unless they are there."""
        if self._streams is not None:
            return
        nccl = backend(self.device) == "nccl"
        if not dist.is_initialized():
            device = self.device if nccl else None
            dist.init_process_group(backend(self.device), timeout=self.timeout, device_id=device)
        plain = dist.new_group(backend="gloo", timeout=self.timeout)
        self._streams = Streams(self.rank, self.world_size, self.timeout, plain)
        weakref.finalize(self, _part, self._streams, plain)
        self._group = None if nccl else plain

    def _missing(self) -> str:
        """Notify the others that this rank is alive, and return the ranks that are not."""
        assert self._streams is not None
        waiting, ends = dict(self._streams.sockets), time.monotonic() + _PATIENCE
        gone: list[int] = []
        for stream in waiting.values():
            _say(stream)
        while waiting and not gone and time.monotonic() < ends:
            ready = select.select(list(waiting.values()), [], [], max(0.0, ends - time.monotonic()))[0]
            for rank in [rank for rank, stream in waiting.items() if stream in ready]:
                if not _hears(waiting.pop(rank)):
                    gone.append(rank)
        if gone:
            return f"Expected all ranks to take part, but {_named(gone)} has gone; see what it says itself"
        if waiting:
            return (
                f"Expected all ranks within {self.timeout.total_seconds():g} s, but got nothing from "
                f"{_named(list(waiting))}; see whether it hangs, or pass a longer timeout="
            )
        return (
            f"Expected all ranks within {self.timeout.total_seconds():g} s, but got one later; pass a longer timeout="
        )


def backend(device: torch.device) -> str:
    """Return the name of the library for collectives between tensors of a device."""
    return "nccl" if is_cuda(device) else "gloo"


def _part(streams: Streams, group: Any) -> None:
    """Close the connections of one population."""
    streams.close()
    with contextlib.suppress(ValueError):  # the group has ended with all others
        if dist.is_initialized():
            dist.destroy_process_group(group)


def _say(stream: Any) -> None:
    with contextlib.suppress(OSError):  # the peer has gone, which reading will show
        stream.send(b"!")


def _hears(stream: Any) -> bool:
    try:
        return bool(stream.recv(1))
    except OSError:
        return False


def _named(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))


def _widened(leaf: Tensor, device: torch.device) -> Tensor:
    flat = leaf.reshape(-1)
    return flat if flat.dtype == torch.float64 and flat.device == device else flat.to(device, torch.float64)


def _as_bytes(leaf: Tensor) -> Tensor:
    """Return rows `(M, ...)` as bytes `(M, bytes of a row)`."""
    flat = leaf.detach().resolve_conj().reshape(len(leaf), math.prod(leaf.shape[1:])).contiguous()
    return flat.view(torch.uint8)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `_as_bytes`: rows in the shape, dtype and device of those of `like`."""
    values = rows.clone(memory_format=torch.contiguous_format).flatten().view(like.dtype)
    return values.reshape(len(rows), *like.shape[1:]).to(like.device)
