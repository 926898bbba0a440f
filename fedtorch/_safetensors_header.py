"""The header of a safetensors payload: built from the expected fields, and compared with them on arrival.

Headers are untrusted: one that differs from the expected header is refused.

Reference: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fedtorch.tree import Layout

JSON = Any  # None, bool, int, float, str, list or dict of these
Refuse = Callable[..., Exception]  # (expected, actual, the field if it is one) -> the error to raise

METADATA_LIMIT = 2**20  # bytes that a header may have beyond its tensors' entries
LENGTH = 8  # bytes that count the header
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COMPACT = (",", ":")
_METADATA = '{"__metadata__":'
_DIGEST = f'{_METADATA}{{"sha256":"'  # start of a file's header; the digits follow
DIGEST_AT = LENGTH + len(_DIGEST)  # the place of the digits in the file
_QUOTED = json.JSONEncoder(ensure_ascii=False).encode  # a text as JSON
_CACHED = 2**16  # most letters of names in a cached layout: names may come from a sender
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxstring = 2, 8, 8, 60


class Field(NamedTuple):
    """A leaf's entry in the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def written(self) -> tuple[str, tuple[int, ...]]:
        """Return the code of the dtype and the shape in the header.

        The format has no complex128: such a leaf is written as pairs of real and imaginary parts, F64 `(..., 2)`.
        """
        return ("F64", (*self.shape, 2)) if self.dtype == torch.complex128 else (_CODES[self.dtype], self.shape)


class Fields(NamedTuple):
    """The header entries of the leaves of one layout."""

    order: tuple[Field, ...]
    text: str  # the JSON of the header without braces
    nbytes: int


class Opened(NamedTuple):
    """A payload with a parsed header, of which only the metadata has been checked."""

    header: dict[str, JSON]
    available: int  # bytes after it


def fields_of(leaves: Layout) -> Fields:
    """Return the fields of a layout, made once for each."""
    short = sum(len(name) for name, _, _ in leaves) <= _CACHED
    return _fields_of(leaves) if short else _fields_of.__wrapped__(leaves)


@lru_cache(maxsize=128)
def _fields_of(leaves: Layout) -> Fields:
    order, start = tuple(ordered(leaves)), 0
    header: dict[str, JSON] = {}
    for field in order:
        place = [start, start + field.nbytes]
        code, shape = field.written
        header[field.name] = {"dtype": code, "shape": shape, "data_offsets": place}
        start += field.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=_COMPACT)[1:-1]
    return Fields(order, text, start)


def ordered(leaves: Sequence[tuple[str, torch.dtype, torch.Size]]) -> list[Field]:
    """Return the fields in the order of a payload: wide elements first, so that all are aligned."""
    for name, dtype, _ in leaves:
        if name == "__metadata__":
            raise ValueError("Expected leaf names other than '__metadata__', which safetensors keeps for itself")
        if dtype not in _CODES and dtype != torch.complex128:
            known = ", ".join(str(d).removeprefix("torch.") for d in _CODES)
            raise TypeError(
                f"Expected a dtype that safetensors knows ({known}) or complex128, but got {dtype} in {name!r}; "
                "convert the tensor with .to() first"
            )
    fields = [Field(name, dtype, tuple(shape)) for name, dtype, shape in leaves]
    return sorted(fields, key=lambda field: (-field.dtype.itemsize, field.name))


def make_header(fields: Fields, text: str | None = None) -> bytes:
    """Return the count and the header, padded with spaces to a multiple of eight bytes."""
    return _padded(
        f"{{{fields.text}}}" if text is None else f'{_METADATA}{{"fedtorch":{_QUOTED(text)}}}{_rest(fields)}'
    )


def make_file_header(fields: Fields, text: str | None, digits: str) -> bytes:
    """Return the header of a file, with the digits of a SHA-256 at `DIGEST_AT`, padded as that of a payload."""
    about = "" if text is None else f',"fedtorch":{_QUOTED(text)}'
    return _padded(f'{_DIGEST}{digits}"{about}}}{_rest(fields)}')


def _rest(fields: Fields) -> str:
    return f",{fields.text}}}" if fields.text else "}"


def has_digest(start: bytes) -> bool:
    """Return whether a file has a digest; `start` is at least its first `DIGEST_AT` bytes.

    >>> has_digest(make_file_header(fields_of(()), None, 64 * "0")), has_digest(make_header(fields_of(()), "{}"))
    (True, False)
    """
    return start[LENGTH:DIGEST_AT] == _DIGEST.encode()


def _padded(text: str) -> bytes:
    encoded = text.encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(LENGTH, "little") + encoded


def open_header(payload: bytes, limit: int, refuse: Refuse) -> Opened:
    """Return a payload with its header read, which may have `limit` bytes."""
    length = int.from_bytes(payload[:LENGTH], "little")
    longest = min(limit, len(payload) - LENGTH)
    if length > longest:
        raise refuse(f"a header of at most {longest} bytes", f"a header length of {length}")
    header = read_header(payload[LENGTH : LENGTH + length], refuse)
    texts(header, refuse)
    return Opened(header, len(payload) - LENGTH - length)


def read_header(coded: bytes, refuse: Refuse) -> dict[str, JSON]:
    """Return the JSON of a header; refuse duplicate names, deep nesting and invalid JSON."""
    try:
        text = coded.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse("a header in UTF-8", f"{error.reason} at byte {error.start}") from None
    return loads(text, "header", refuse)


def _distinct(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    names = dict(pairs)
    if len(names) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {_short(twice)} twice")
    return names


def _constant(name: str) -> JSON:
    raise ValueError(f"the number {name}")


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_constant)


def loads(text: str, what: str, refuse: Refuse) -> dict[str, JSON]:
    """Read a JSON object; repeated names and numbers outside JSON are errors."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise refuse(f"a {what} in JSON", "one nested too deeply") from None
    except ValueError as error:
        raise refuse(f"a {what} in JSON", error) from None
    if not isinstance(value, dict):
        raise refuse(f"a {what} that is a JSON object", _short(value))
    return value


def texts(header: dict[str, JSON], refuse: Refuse) -> dict[str, str]:
    """Return the `__metadata__` of the format: texts by name."""
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise refuse("__metadata__ to map names to texts", _short(metadata))
    return metadata


def check_header(opened: Opened, fields: Sequence[Field], refuse: Refuse) -> None:
    """Refuse a payload unless the names, dtypes, shapes and offsets in its header are the expected ones."""
    got = opened.header.keys() - {"__metadata__"}
    wanted = {field.name for field in fields}
    if got != wanted:
        differences = f"missing {_names(wanted - got)} and extra {_names(got - wanted)}"
        raise refuse("the fields of the tree", differences)
    places = {field.name: _place(opened.header[field.name], field, refuse) for field in fields}
    stop = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if place.start != stop:
            raise refuse(f"no gap or overlap before it, a start at {stop}", _short(place.start), name)
        stop = place.stop
    if stop != opened.available:
        raise refuse(f"{stop} bytes of numbers after the header", opened.available)


def _place(entry: JSON, field: Field, refuse: Refuse) -> slice:
    """Return the position of a field in the data, by a header entry that is otherwise as expected."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("dtype, shape and data_offsets", _short(entry), field.name)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    wanted_code, wanted_shape = field.written
    if code != wanted_code:
        came = _DTYPES[code] if isinstance(code, str) and code in _DTYPES else _short(code)
        raise refuse(f"dtype {_DTYPES[wanted_code]}", came, field.name)
    if not _is_integers(shape) or tuple(shape) != wanted_shape:
        came = _short(tuple(shape) if isinstance(shape, list) else shape)
        raise refuse(f"shape {wanted_shape}", came, field.name)
    if not _is_integers(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != field.nbytes:
        raise refuse(f"two offsets {field.nbytes} bytes apart", _short(offsets), field.name)
    return slice(*offsets)


def _is_integers(value: JSON) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # True and 2.0 are not


def _short(value: JSON) -> str:
    """Return a sender's value for a message: escaped, and limited in length and depth."""
    return _REPR.repr(value)


def _names(names: set[str]) -> str:
    first = [_short(name) for name in sorted(names)[:3]]
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join(first + more) or "none"
