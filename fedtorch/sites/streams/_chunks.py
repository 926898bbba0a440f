"""Frames in chunks, so that a receiver knows the length of a frame before it stores any of it.

A frame is sent as its length, eight bytes, and its content in chunks of 1 MiB, the first together with the length. The
receiver makes room for the whole frame, or refuses it, after the first chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import islice

from fedtorch.sites.streams._pipe import Pipe

CHUNK = 2**20  # bytes of a frame in a chunk
HEAD = struct.Struct(">Q")


def split(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Return the chunks of frames."""
    for frame in frames:
        yield HEAD.pack(len(frame)) + frame[:CHUNK]
        for start in range(CHUNK, len(frame), CHUNK):
            yield frame[start : start + CHUNK]
        del frame  # otherwise it stays in memory until the next one comes


def join(chunks: Iterator[bytes], pipe: Pipe, most: int) -> None:
    """Assemble frames from chunks, and put them into a pipe, until the chunks end.

    Raises:
        ValueError: a frame is longer than `most` bytes, or a chunk has a wrong length.
        OSError: the pipe has ended or refuses the frame; the message gives the reason.
    """
    for first in chunks:
        size = HEAD.unpack_from(first)[0] if len(first) >= HEAD.size else -1
        if not 0 <= size <= most:
            raise ValueError(
                f"Expected a frame of at most {most} bytes, but got one of {size}; raise `frame` in limits"
            )
        if len(first) == HEAD.size + size:  # most frames are one chunk
            pipe.put(first[HEAD.size :])
            del first
            continue
        pipe.reserve(size)
        frame, rest = BytesIO(), memoryview(first)[HEAD.size :]
        for part in _and(rest, islice(chunks, max(0, -(-size // CHUNK) - 1))):
            if len(part) != min(CHUNK, size - frame.tell()):
                raise ValueError(f"Expected {min(CHUNK, size - frame.tell())} bytes of a frame, but got {len(part)}")
            frame.write(part)
            pipe.note_part()
        if frame.tell() < size:
            return  # the stream has ended
        pipe.fill(frame.getvalue())
        del frame, first, part, rest  # otherwise they stay in memory until the next frame comes


def _and(first: memoryview, others: Iterator[bytes]) -> Iterator[bytes | memoryview]:
    yield first
    yield from others
