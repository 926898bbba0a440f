"""The bytes of frames: headers that are the same in every round, which are written and parsed once.

A frame is a payload of `fedtorch.wire`. The numbers that change from frame to frame, its counters, are the last of its
tensors, whole numbers of eight bytes, and the metadata say under `counters` how many there are by name. So all of the
header is the same text in every round. A text is known by all of its bytes and by nothing else: no two ends have to
remember the same, also where one of them begins anew.
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

COUNTERS = "counters"  # of the metadata: pairs of a name and how many numbers it has, None for one that is no list
_FIELD = "__counters__"
_COUNTED = frozenset({"keep", "kept", "round", "sequence"})
_LEAST, _MOST = -(2**63), 2**63 - 1
_MOST_COUNTERS = 2**16
_LONGEST = 2**14  # bytes of a header that is kept
_MOST_KEPT = 128  # headers
_LENGTH = 8  # bytes that count the header


class Header:
    """What a frame's header says; of headers that are kept, one for each.

    Args:
        about: the metadata, without counters.
        counted: how many numbers there are of each counter, in their order; None for one that is no list.
        stop: where the header ends.
        opened: the payload's header without counters.
    """

    __slots__ = ("about", "counted", "numbers", "opened", "stop")

    def __init__(
        self, about: dict[str, Any], counted: dict[str, int | None], stop: int, opened: wire.Opened | None
    ) -> None:
        self.about, self.counted, self.stop, self.opened = about, counted, stop, opened
        self.numbers = struct.Struct(f"<{_total(counted)}q")


_WRITTEN: dict[Any, tuple[bytes, list[str]]] = {}  # headers by what they say, and the order of the tensors
_READ: dict[bytes, Header] = {}


def write(tensors: Tree, about: Mapping[str, Any]) -> bytes:
    """Return the bytes of a frame.

    >>> import torch
    >>> frame = write({"x": torch.ones(1)}, {"kind": "answer", "sequence": 7})
    >>> header, about, opened = read(frame, "ward 7")
    >>> about, header.about
    ({'kind': 'answer', 'sequence': 7}, {'kind': 'answer'})
    """
    flat, said, numbers = tree.flatten(tensors), dict[str, Any](), list[int]()
    counters: dict[str, int | None] = {}
    for name, value in about.items():
        if name not in _COUNTED:
            said[name] = value
        elif type(value) is int and _LEAST <= value <= _MOST:
            counters[name] = None
            numbers.append(value)
        elif _are_numbers(value):
            counters[name] = len(value)
            numbers += value
        else:
            said[name] = value
    key = (repr(said), repr(counters), *((name, leaf.dtype, leaf.shape) for name, leaf in flat.items()))
    known = _WRITTEN.get(key)
    if known is None:
        known = _written(flat, said, counters)
        _keep(_WRITTEN, key, known, len(known[0]))
    header, order = known
    leaves = [wire.to_bytes(flat[name]) for name in order]
    return b"".join([header, *leaves, struct.pack(f"<{len(numbers)}q", *numbers)])


def _written(
    flat: Mapping[str, Tensor], said: dict[str, Any], counters: dict[str, int | None]
) -> tuple[bytes, list[str]]:
    """Return (a header, the order of the tensors that follow it)."""
    if not counters:
        return wire.write_header(flat, said)
    if _FIELD in flat:
        raise ValueError(f"Expected tensors of other names than {_FIELD!r}, which frames keep for themselves")
    header, order = wire.write_header(flat, {**said, COUNTERS: list(counters.items())})
    start = sum(leaf.numel() * leaf.element_size() for leaf in flat.values())
    text = header[_LENGTH:].rstrip(b" ")[:-1] + _entry(start, _total(counters)).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text, order


def _entry(start: int, count: int) -> str:
    """Return the end of a header whose tensors have so many bytes, and so many counters behind them."""
    return f',"{_FIELD}":{{"dtype":"I64","shape":[{count}],"data_offsets":[{start},{start + 8 * count}]}}}}'


def _total(counted: Mapping[str, int | None]) -> int:
    return sum(1 if count is None else count for count in counted.values())


def read(payload: bytes, sender: str) -> tuple[Header, dict[str, Any], wire.Opened | None]:
    """Return (the header of a frame, its metadata with counters, the payload opened).

    Raises:
        PayloadError: it is none.
    """
    stop = _LENGTH + int.from_bytes(payload[:_LENGTH], "little")
    start = payload[:stop] if stop <= _LONGEST else b""
    header = _READ.get(start)
    if header is None:
        header = _parsed(payload, stop, sender)
        if start:
            _keep(_READ, start, header, stop)
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
    """Return what the header of a frame says; of the tensors that `Frame.tree` compares with others, as it is."""
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
    """Take what the metadata say of the counters out of them."""
    said, counted = about.pop(COUNTERS, []), dict[str, int | None]()
    for each in said if isinstance(said, list) else [said]:
        name, count = each if isinstance(each, list) and len(each) == 2 else (None, None)
        many = count is None or (type(count) is int and 0 <= count <= _MOST_COUNTERS)
        if not isinstance(name, str) or name not in _COUNTED or name in counted or name in about or not many:
            raise PayloadError(f"payload of client {sender!r}: expected counters by name, but got {str(said)[:100]!r}")
        counted[name] = count
    return counted


def _are_numbers(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_COUNTERS
        and all(type(each) is int and _LEAST <= each <= _MOST for each in value)
    )


def _keep(kept: dict[Any, Any], key: Any, value: Any, size: int) -> None:
    """Keep a header, among few and none that is long."""
    if size <= _LONGEST:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        kept[key] = value
