"""The bytes of frames, with a cache of headers, which are the same in every round.

A frame is a payload of `fedtorch.wire`. Its counters are numbers that change from frame to frame. They are the last
tensor, int64, and the metadata list their names and lengths under `counters`. So the header is the same text in every
round. The cache's key is this whole text: the two ends need not have the same cache, even after one restarts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedtorch import tree, wire
from fedtorch.tree import Tree
from fedtorch.wire import PayloadError

COUNTERS = "counters"  # in the metadata: pairs of a name and its number of values, None for a scalar
_FIELD = "__counters__"
_COUNTED = frozenset({"keep", "kept", "round", "sequence"})
_LEAST, _MOST = -(2**63), 2**63 - 1
_MOST_COUNTERS = 2**16
_LONGEST = 2**14  # bytes of the longest header in the cache
_MOST_CACHED = 128  # most headers in the cache
_LENGTH = 8  # bytes that give the header's length


class Header:
    """A parsed header; frames with the same cached header share one object.

    Args:
        about: the metadata, without counters.
        counted: number of values of each counter, in order; None for a scalar.
        stop: position of the header's end.
        opened: the payload's header without counters.
    """

    __slots__ = ("about", "counted", "numbers", "opened", "stop")

    def __init__(
        self, about: dict[str, Any], counted: dict[str, int | None], stop: int, opened: wire.Opened | None
    ) -> None:
        self.about, self.counted, self.stop, self.opened = about, counted, stop, opened
        self.numbers = struct.Struct(f"<{_total(counted)}q")


_WRITTEN: dict[Any, tuple[bytes, list[str]]] = {}  # (header, order of the tensors) by content
_READ: dict[bytes, Header] = {}


def write(tensors: Tree, about: Mapping[str, Any]) -> bytes:
    """Return the bytes of a frame.

    >>> import torch
    >>> frame = write({"x": torch.ones(1)}, {"kind": "answer", "sequence": 7})
    >>> header, about, opened = read(frame, "ward 7")
    >>> about, header.about
    ({'kind': 'answer', 'sequence': 7}, {'kind': 'answer'})
    """
    flat, constant, numbers = tree.flatten(tensors), dict[str, Any](), list[int]()
    counters: dict[str, int | None] = {}
    for name, value in about.items():
        if name not in _COUNTED:
            constant[name] = value
        elif type(value) is int and _LEAST <= value <= _MOST:
            counters[name] = None
            numbers.append(value)
        elif _are_numbers(value):
            counters[name] = len(value)
            numbers += value
        else:
            constant[name] = value
    key = (repr(constant), repr(counters), *((name, leaf.dtype, leaf.shape) for name, leaf in flat.items()))
    known = _WRITTEN.get(key)
    if known is None:
        known = _written(flat, constant, counters)
        _cache(_WRITTEN, key, known, len(known[0]))
    header, order = known
    leaves = [wire.to_bytes(flat[name]) for name in order]
    return b"".join([header, *leaves, struct.pack(f"<{len(numbers)}q", *numbers)])


def _written(
    flat: Mapping[str, Tensor], constant: dict[str, Any], counters: dict[str, int | None]
) -> tuple[bytes, list[str]]:
    """Return (a header, the order of the tensors that follow it)."""
    if not counters:
        return wire.write_header(flat, constant)
    if _FIELD in flat:
        raise ValueError(f"Expected tensors of other names than {_FIELD!r}, which frames reserve")
    header, order = wire.write_header(flat, {**constant, COUNTERS: list(counters.items())})
    start = sum(leaf.numel() * leaf.element_size() for leaf in flat.values())
    text = header[_LENGTH:].rstrip(b" ")[:-1] + _entry(start, _total(counters)).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text, order


def _entry(start: int, count: int) -> str:
    """Return the end of a header: the entry of `count` counters after `start` bytes of tensors."""
    return f',"{_FIELD}":{{"dtype":"I64","shape":[{count}],"data_offsets":[{start},{start + 8 * count}]}}}}'


def _total(counted: Mapping[str, int | None]) -> int:
    return sum(1 if count is None else count for count in counted.values())


def read(payload: bytes, sender: str) -> tuple[Header, dict[str, Any], wire.Opened | None]:
    """Return (a frame's header, its metadata with counters, the opened payload).

    Raises:
        PayloadError: the payload is not a frame.
    """
    stop = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
    start = payload[:stop] if stop <= _LONGEST else b""
    header = _READ.get(start)
    if header is None:
        header = _parsed(payload, stop, sender)
        if start:
            _cache(_READ, start, header, stop)
    end = len(payload) - header.numbers.size
    if end < header.stop:
        raise PayloadError(f"payload of client {sender!r}: expected its counters, but got {len(payload)} bytes in all")
    about, numbers, first = dict(header.about), header.numbers.unpack_from(payload, end), 0
    for name, count in header.counted.items():
        if count is None:
            about[name], first = numbers[first], first + 1
        else:
            about[name], first = list(numbers[first : first + count]), first + count
    opened = header.opened
    return header, about, opened and opened._replace(available=end - header.stop)


def _parsed(payload: bytes, stop: int, sender: str) -> Header:
    """Return a parsed header; its tensors are checked later, in `Frame.tree`."""
    about, opened = wire.open_payload(payload, client=sender)
    counted = _counted(about, sender)
    if opened is None or not counted:
        return Header(about, counted, stop, opened)
    header, count = dict(opened.header), _total(counted)
    first, last = next(iter(header)), next(reversed(header))
    end = "," + json.dumps({last: header.pop(last)}, separators=(",", ":"))[1:]
    if first != "__metadata__" or end != _entry(opened.available - 8 * count, count):
        raise PayloadError(
            f"payload of client {sender!r}: expected {count} counters at its end, behind its metadata, but got {last!r}"
        )
    return Header(about, counted, stop, wire.Opened(header, 0))


def _counted(about: dict[str, Any], sender: str) -> dict[str, int | None]:
    """Remove the counters' names and lengths from the metadata, and return them."""
    entries, counted = about.pop(COUNTERS, []), dict[str, int | None]()
    for each in entries if isinstance(entries, list) else [entries]:
        name, count = each if isinstance(each, list) and len(each) == 2 else (None, None)
        many = count is None or (type(count) is int and 0 <= count <= _MOST_COUNTERS)
        if not isinstance(name, str) or name not in _COUNTED or name in counted or name in about or not many:
            raise PayloadError(
                f"payload of client {sender!r}: expected counters by name, but got {str(entries)[:100]!r}"
            )
        counted[name] = count
    return counted


def _are_numbers(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_COUNTERS
        and all(type(each) is int and _LEAST <= each <= _MOST for each in value)
    )


def _cache(cache: dict[Any, Any], key: Any, value: Any, size: int) -> None:
    """Store a header in a cache of limited size, unless it is too long."""
    if size <= _LONGEST:
        if len(cache) >= _MOST_CACHED:
            cache.clear()
        cache[key] = value
