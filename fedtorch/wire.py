"""The wire: trees as safetensors bytes with JSON metadata.

A payload is the safetensors format and nothing else: eight bytes that count the header (little endian), the
header (JSON: name, dtype, shape and place of every tensor), the numbers. Reading one runs no code of others.
What it may contain is known beforehand: `decode` compares the header with a tree of the expected structure,
shapes and dtypes before it allocates anything, and refuses the rest, naming client, round and field.

The header is written and read here, so that a tree's bytes do not depend on a library's version, that `size`
knows them without making them, and that what was checked is what is read. Any safetensors library reads them.

>>> import torch
>>> from fedtorch import wire
>>> delta = {"weight": torch.ones(2, 3)}
>>> payload = wire.encode(delta, {"rows": 12})
>>> wire.metadata(payload)
{'rows': 12}
>>> wire.decode(payload, like=delta)["weight"].sum()
tensor(6.)
>>> wire.decode(payload, like={"weight": torch.empty(2, 4)}, client="ward-7", round=3)
Traceback (most recent call last):
fedtorch.wire.PayloadError: payload of client 'ward-7' in round 3, field 'weight':
    expected shape (2, 4), but got (2, 3)

Reference: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.tree import Tree, flatten, unflatten

__all__ = ["PayloadError", "decode", "encode", "metadata", "row_size", "size"]

JSON = Any  # None, bool, int, float, str, list or dict of these

_METADATA_LIMIT = 2**20  # bytes that a header may have beyond what its tensors need
_LENGTH = 8  # bytes that count the header
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
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxstring = 2, 8, 8, 60


class PayloadError(ValueError):
    """A payload was refused; the message names client, round and field, what was expected and what came."""


class _Field(NamedTuple):
    """A leaf as the header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Sender(NamedTuple):
    """Whom a payload came from, for the messages."""

    client: str | int | None
    round: int | None

    def refuse(self, expected: str, got: object, field: str | None = None) -> PayloadError:
        of_client = "" if self.client is None else f" of client {self.client!r}"
        in_round = "" if self.round is None else f" in round {self.round}"
        at = "" if field is None else f", field {field!r}"
        return PayloadError(f"payload{of_client}{in_round}{at}: expected {expected}, but got {got}")


def encode(tree: Tree, metadata: Mapping[str, JSON] | None = None) -> bytes:
    """The safetensors bytes of a tree, the same for the same tree whatever the order of its keys.

    Args:
        tree: dense leaves on any device, views and shared memory included; `None` leaves no trace.
        metadata: JSON values to travel with the tensors.

    Returns:
        The payload; no bytes at all for a tree without leaves and without metadata.

    Raises:
        TypeError: a leaf is sparse or of a dtype that safetensors does not know, or the metadata is not JSON.
        ValueError: a leaf is called `__metadata__`, or the metadata has NaN or Inf or more than 2²⁰ bytes.
    """
    flat = flatten(tree)
    fields = _fields(flat)
    if not fields and not metadata:
        return b""
    header = _header(fields, _dumps(metadata))
    if len(header) > len(_header(fields)) + _METADATA_LIMIT:
        raise ValueError(f"Expected at most {_METADATA_LIMIT} bytes of metadata, but got more; send tensors instead")
    return b"".join([header, *(_to_bytes(flat[field.name]) for field in fields)])


def decode(
    payload: bytes,
    like: Tree,
    *,
    client: str | int | None = None,
    round: int | None = None,
    limit: int = 2**30,
    finite: bool = True,
) -> Tree:
    """The tree of a payload, checked against `like` before anything is allocated.

    Args:
        payload: what arrived.
        like: a tree of the expected structure, shapes and dtypes; meta tensors will do.
        client: who sent it, for the message.
        round: the communication round, for the message.
        limit: the largest payload that is read, in bytes.
        finite: refuse NaN and Inf.

    Returns:
        A tree in the structure of `like`, on the CPU, with memory of its own.

    Raises:
        PayloadError: the payload is not what was expected; the message says where and how.
    """
    sender = _Sender(client, round)
    fields = _fields(flatten(like))
    if isinstance(payload, bytes) and not payload and not fields:
        return unflatten({}, like)
    _check_bytes(payload, limit, sender)
    header, data = _read_header(payload, 2 * len(_header(fields)) + _METADATA_LIMIT, sender)
    places = _check_header(header, fields, len(data), sender)
    flat = {field.name: _from_bytes(data[places[field.name]], field, finite, sender) for field in fields}
    return unflatten(flat, like)


def metadata(
    payload: bytes,
    limit: int = 4 * _METADATA_LIMIT,
    *,
    client: str | int | None = None,
    round: int | None = None,
) -> dict[str, JSON]:
    """The metadata of a payload, without its tensors.

    Args:
        payload: what arrived.
        limit: the longest header that is read, in bytes.
        client: who sent it, for the message.
        round: the communication round, for the message.

    Raises:
        PayloadError: there is no header, or its metadata is not a JSON object.
    """
    sender = _Sender(client, round)
    if isinstance(payload, bytes) and not payload:
        return {}
    _check_bytes(payload, len(payload), sender)
    header, _ = _read_header(payload, limit, sender)
    text = _texts(header, sender).get("fedtorch")
    return {} if text is None else _loads(text, "metadata", sender)


def size(tree: Tree) -> int:
    """The bytes of `encode(tree)`, from names, dtypes and shapes alone; 0 without leaves: nothing is sent."""
    return _size(tuple((name, leaf.dtype, leaf.shape) for name, leaf in flatten(tree).items()))


def row_size(tree: Tree) -> int:
    """The bytes of one client's tree, of a stacked tree whose leaves are `(K, ...)`; `K = 0` will do.

    Raises:
        ValueError: a leaf has no leading dimension.
    """
    flat = flatten(tree)
    for name, leaf in flat.items():
        if leaf.ndim == 0:
            raise ValueError(f"Expected a stacked tree with leaves (K, ...), but got a scalar in {name!r}")
    return _size(tuple((name, leaf.dtype, leaf.shape[1:]) for name, leaf in flat.items()))


@lru_cache(maxsize=1024)
def _size(leaves: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    fields = _ordered(leaves)
    return len(_header(fields)) + sum(field.nbytes for field in fields) if fields else 0


def _fields(flat: Mapping[str, Tensor]) -> list[_Field]:
    return _ordered([(name, leaf.dtype, leaf.shape) for name, leaf in flat.items()])


def _ordered(leaves: Sequence[tuple[str, torch.dtype, torch.Size]]) -> list[_Field]:
    """The fields as they follow each other in a payload: wide elements first, so that all are aligned."""
    for name, dtype, _ in leaves:
        if name == "__metadata__":
            raise ValueError("Expected leaf names other than '__metadata__', which safetensors keeps for itself")
        if dtype not in _CODES:
            known = ", ".join(str(d).removeprefix("torch.") for d in _CODES)
            raise TypeError(f"Expected a dtype that safetensors knows ({known}), but got {dtype} in {name!r}")
    fields = [_Field(name, dtype, tuple(shape)) for name, dtype, shape in leaves]
    return sorted(fields, key=lambda field: (-field.dtype.itemsize, field.name))


def _header(fields: Sequence[_Field], text: str | None = None) -> bytes:
    """The count and the header, padded with spaces to a multiple of eight bytes."""
    header: dict[str, JSON] = {} if text is None else {"__metadata__": {"fedtorch": text}}
    start = 0
    for field in fields:
        place = [start, start + field.nbytes]
        header[field.name] = {"dtype": _CODES[field.dtype], "shape": field.shape, "data_offsets": place}
        start += field.nbytes
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(_LENGTH, "little") + encoded


def _dumps(metadata: Mapping[str, JSON] | None) -> str | None:
    if not metadata:
        return None
    return json.dumps(dict(metadata), allow_nan=False, sort_keys=True, separators=(",", ":"))


def _to_bytes(leaf: Tensor) -> bytes:
    if leaf.layout != torch.strided:
        raise TypeError(f"Expected dense tensors, but got layout {leaf.layout}; call .to_dense() first")
    dense = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _from_bytes(data: memoryview, field: _Field, finite: bool, sender: _Sender) -> Tensor:
    """A tensor with memory of its own, writable."""
    if not data:
        return torch.empty(field.shape, dtype=field.dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if field.dtype == torch.bool and (largest := int(raw.max())) > 1:
        raise sender.refuse("booleans stored as 0 and 1", f"the byte {largest}", field.name)
    leaf = raw.view(field.dtype).reshape(field.shape)
    if finite and (field.dtype.is_floating_point or field.dtype.is_complex):
        values = leaf.float() if field.dtype.itemsize == 1 else leaf  # torch has no isfinite for float8
        if not (is_finite := values.isfinite()).all():
            bad = leaf.numel() - int(is_finite.sum())
            raise sender.refuse("finite numbers", f"{bad} NaN or Inf of {leaf.numel()}", field.name)
    return leaf


def _check_bytes(payload: object, limit: int, sender: _Sender) -> None:
    if not isinstance(payload, bytes):
        raise sender.refuse("bytes", type(payload).__name__)
    if len(payload) > limit:
        raise sender.refuse(f"at most {limit} bytes", f"{len(payload)}; raise the limit if that is right")
    if len(payload) < _LENGTH:
        raise sender.refuse(f"{_LENGTH} bytes that count the header", f"{len(payload)} bytes in all")


def _read_header(payload: bytes, limit: int, sender: _Sender) -> tuple[dict[str, JSON], memoryview]:
    """The header as a JSON object, and the numbers after it."""
    length = int.from_bytes(payload[:_LENGTH], "little")
    longest = min(limit, len(payload) - _LENGTH)
    if length > longest:
        raise sender.refuse(f"a header of at most {longest} bytes", f"a header length of {length}")
    stop = _LENGTH + length
    try:
        text = payload[_LENGTH:stop].decode("utf-8")
    except UnicodeDecodeError as error:
        raise sender.refuse("a header in UTF-8", f"{error.reason} at byte {error.start}") from None
    return _loads(text, "header", sender), memoryview(payload)[stop:]


def _loads(text: str, what: str, sender: _Sender) -> dict[str, JSON]:
    """A JSON object; names that come twice and numbers outside JSON are errors, not choices."""

    def distinct(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
        names: dict[str, JSON] = {}
        for name, value in pairs:
            if name in names:
                raise ValueError(f"the name {_short(name)} twice")
            names[name] = value
        return names

    def constant(name: str) -> JSON:
        raise ValueError(f"the number {name}")

    try:
        value = json.loads(text, object_pairs_hook=distinct, parse_constant=constant)
    except RecursionError:
        raise sender.refuse(f"a {what} in JSON", "one nested too deeply") from None
    except ValueError as error:
        raise sender.refuse(f"a {what} in JSON", error) from None
    if not isinstance(value, dict):
        raise sender.refuse(f"a {what} that is a JSON object", _short(value))
    return value


def _texts(header: dict[str, JSON], sender: _Sender) -> dict[str, str]:
    """The `__metadata__` of the format: texts by name."""
    texts = header.get("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise sender.refuse("__metadata__ to map names to texts", _short(texts))
    return texts


def _check_header(
    header: dict[str, JSON], fields: Sequence[_Field], available: int, sender: _Sender
) -> dict[str, slice]:
    """Where each field lies in the data, once names, dtypes, shapes and offsets are the expected ones."""
    _texts(header, sender)
    got = header.keys() - {"__metadata__"}
    wanted = {field.name for field in fields}
    if got != wanted:
        differences = f"missing {_names(wanted - got)} and extra {_names(got - wanted)}"
        raise sender.refuse("the fields of the tree", differences)
    places = {field.name: _place(header[field.name], field, sender) for field in fields}
    stop = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if place.start != stop:
            raise sender.refuse(f"no gap or overlap before it, a start at {stop}", _short(place.start), name)
        stop = place.stop
    if stop != available:
        raise sender.refuse(f"{stop} bytes of numbers after the header", available)
    return places


def _place(entry: JSON, field: _Field, sender: _Sender) -> slice:
    """Where a field lies in the data, by a header's entry that is otherwise as expected."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise sender.refuse("dtype, shape and data_offsets", _short(entry), field.name)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if code != _CODES[field.dtype]:
        came = _DTYPES[code] if isinstance(code, str) and code in _DTYPES else _short(code)
        raise sender.refuse(f"dtype {field.dtype}", came, field.name)
    if not _is_integers(shape) or tuple(shape) != field.shape:
        came = _short(tuple(shape) if isinstance(shape, list) else shape)
        raise sender.refuse(f"shape {field.shape}", came, field.name)
    if not _is_integers(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != field.nbytes:
        raise sender.refuse(f"two offsets {field.nbytes} bytes apart", _short(offsets), field.name)
    return slice(*offsets)


def _is_integers(value: JSON) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # True and 2.0 are not


def _short(value: JSON) -> str:
    """A value of the sender for a message: escaped, and never long or deep."""
    return _REPR.repr(value)


def _names(names: set[str]) -> str:
    first = [_short(name) for name in sorted(names)[:3]]
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join(first + more) or "none"
