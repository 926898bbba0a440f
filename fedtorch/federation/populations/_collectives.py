"""Collectives of the ranks of a process group: over gloo or nccl, or through the memory of a machine that all are on.

Ranks on one machine write into a file of `/dev/shm` that all of them have mapped, a slot each, and read each other's.
A sum takes microseconds there, where gloo has to wake threads of its own on both sides. The numbers are added in the
order of the ranks, so that all of them have the same bits. Where memory is not shared, there is no compiler, tensors
are on a GPU, or ranks are so many that each had better not read all, the process group takes over.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import select
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fedtorch.dispatch import compiled
from fedtorch.protocol.bounded_streams import Streams

_SOURCE = Path(__file__).with_name("_shared_memory.c")
_FOLDER = Path("/dev/shm")
_LINE = 128  # bytes of a rank's counters
_PART = 2**18  # bytes of a slot
_MOST_RANKS = 8  # each of which reads what all others have written
_LOOK = 50_000  # microseconds of waiting between looks for ranks that have gone


class Collectives(Protocol):
    """What all ranks do together, of tensors of the same shapes and dtypes on all.

    Calls raise RuntimeError where a rank has gone, has given up, or does not come in time.
    """

    def all_reduce(self, tensor: Tensor) -> None:
        """Put the sum of all ranks' tensors in place of this one."""
        ...

    def all_gather(self, found: list[Tensor], tensor: Tensor) -> None:
        """Write the tensors of all ranks into a list of as many like them."""
        ...


class OverGroup:
    """Collectives of a process group; None is the default one."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def all_reduce(self, tensor: Tensor) -> None:
        """Put the sum of all ranks' tensors in place of this one."""
        dist.all_reduce(tensor, group=self.group)

    def all_gather(self, found: list[Tensor], tensor: Tensor) -> None:
        """Write the tensors of all ranks into a list of as many like them."""
        dist.all_gather(found, tensor, group=self.group)


class SharedMemory:
    """Collectives of ranks that have mapped one file.

    Every rank has two slots, for parts with even and odd numbers. It writes a part of a number n + 2 only after all
    have told of n + 1, and so have read n.

    Args:
        file: descriptor of the file, of `size_of(ranks)` bytes, at first zero.
        rank: of this process.
        streams: to the other ranks, on which something comes when one of them has gone or given up.
        timeout: the longest wait for another rank.
        library: the program.
    """

    def __init__(self, file: int, rank: int, streams: Streams, timeout: timedelta, library: ctypes.CDLL) -> None:
        self.rank, self.sockets, self.seconds = rank, list(streams.sockets.values()), timeout.total_seconds()
        self.ranks, self.number, self._library = len(self.sockets) + 1, 0, library
        whole = torch.frombuffer(mmap.mmap(file, size_of(self.ranks)), dtype=torch.uint8)
        lines, slots = whole.split([_LINE * self.ranks, 2 * self.ranks * _PART])
        self._lines, self._slots = lines, slots.view(2, self.ranks, _PART)

    def all_reduce(self, tensor: Tensor) -> None:
        """Put the sum of all ranks' tensors in place of this one, which is contiguous."""
        for mine, every in self._parts(tensor.view(-1)):
            torch.add(every[0], every[1], out=mine)
            for other in every[2:]:
                mine += other

    def all_gather(self, found: list[Tensor], tensor: Tensor) -> None:
        """Write the tensors of all ranks into a list of as many like them, all contiguous."""
        flat, done = [each.view(-1) for each in found], 0
        for mine, every in self._parts(tensor.view(-1)):
            for into, part in zip(flat, every):
                into[done : done + len(mine)] = part
            done += len(mine)

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """Return parts of a tensor, with those of all ranks, which hold until the next is asked for."""
        for mine in flat.split(_PART // flat.element_size()) if len(flat) else ():
            self.number += 1
            every = self._slots[self.number % 2].view(flat.dtype)[:, : len(mine)].unbind()
            every[self.rank].copy_(mine)
            self._meet(mine.nbytes)
            yield mine, every

    def _meet(self, size: int) -> None:
        """Tell that a part of so many bytes is written, and wait for the others."""
        lines, ends = self._lines.data_ptr(), time.monotonic() + self.seconds
        self._library.publish(lines, self.rank, self.number, size)
        while (missing := self._library.await_all(lines, self.ranks, self.number, size, _LOOK)) >= 0:
            told = bool(select.select(self.sockets, [], [], 0)[0])
            late = time.monotonic() > ends or int(self._lines.view(torch.int64)[missing * _LINE // 8]) < 0
            if not told and not late:
                continue
            if (missing := self._library.await_all(lines, self.ranks, self.number, size, 0)) < 0:
                break  # all have come, and one of them has ended since
            self._library.publish(lines, self.rank, -1, 0)
            raise RuntimeError(f"rank {missing} has not come")
        if missing < -1:
            self._library.publish(lines, self.rank, -1, 0)
            raise RuntimeError(f"rank {-2 - missing} has come with another number of bytes")


def size_of(ranks: int) -> int:
    """Return the bytes of a file for so many ranks."""
    return ranks * (_LINE + 2 * _PART)


def shared(rank: int, ranks: int, streams: Streams, timeout: timedelta, group: Any) -> SharedMemory | None:
    """Return collectives through memory if all ranks have it in common, None on each if not.

    Args:
        rank: of this process.
        ranks: how many there are.
        streams: to the other ranks.
        timeout: the longest wait for another rank.
        group: their process group, of tensors on the CPU, by which they find the file.
    """
    if ranks > _MOST_RANKS:
        return None
    library = _program()
    path = _FOLDER / f"fedtorch-{secrets.token_hex(16)}"
    file = _created(path, size_of(ranks)) if rank == 0 and library is not None else None
    try:
        name = torch.frombuffer(bytearray(path.name.encode()), dtype=torch.uint8)
        dist.broadcast(name, 0, group=group)
        if rank and library is not None:
            file = _opened(_FOLDER / name.numpy().tobytes().decode())
        everybody = torch.tensor(int(file is not None))
        dist.all_reduce(everybody, dist.ReduceOp.MIN, group=group)
        if file is None or library is None or not everybody:
            return None
        return SharedMemory(file, rank, streams, timeout, library)
    finally:
        if file is not None:
            os.close(file)
            if rank == 0:
                path.unlink()


def _program() -> ctypes.CDLL | None:
    """Return the library, None where there is none or no folder in memory, as on other systems than Linux."""
    library = compiled.library(_SOURCE) if _FOLDER.is_dir() else None
    if library is not None and library.await_all.argtypes is None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        library.publish.argtypes = (address, number, number, number)
        library.await_all.argtypes = (address, number, number, number, number)
        library.publish.restype, library.await_all.restype = None, number
    return library


def _created(path: Path, size: int) -> int | None:
    """Return a new file whose memory is there, so that writing to it cannot fail; None where there is no room."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            return file
        except OSError:
            os.close(file)
            path.unlink()
    return None


def _opened(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None
