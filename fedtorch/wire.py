"""Encoding of trees as safetensors bytes with JSON metadata.

A payload is in the safetensors format: eight bytes with the header's length (little endian), the header (JSON: name,
dtype, shape and position of every tensor), the numbers. Reading one executes no code. The permitted content is known
beforehand: `decode` compares the header with a tree of the expected structure, shapes and dtypes before it allocates
anything, and refuses anything else with an error that names client, round and field.

safetensors has no complex128. A leaf of that dtype is written as pairs of real and imaginary parts, F64 `(..., 2)`; the
expected tree shows that the pairs are complex numbers.

The header is written here, so that a tree's bytes do not depend on a library's version and `size` can compute their
number without making them. Any safetensors library can read them; received payloads are read by the library after a
check of the header.

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
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedtorch._safetensors_header import (
    JSON,
    LENGTH,
    METADATA_LIMIT,
    Field,
    Opened as Opened,
    Refuse,
    check_header,
    fields_of,
    loads,
    make_header,
    open_header,
    texts,
)
from fedtorch.tree import Layout, Tree, flatten, layout, unflatten

_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))
_NUMPY = {torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool}  # those that NumPy has, too


class PayloadError(ValueError):
    """A payload was refused; the message names client, round and field, the expectation and the content.

    Example:
        >>> import torch
        >>> from fedtorch import wire
        >>> try:
        ...     wire.decode(wire.encode({"weight": torch.ones(2)}), like={"weight": torch.ones(3)}, client="ward-7")
        ... except wire.PayloadError as error:
        ...     print(error)
        payload of client 'ward-7', field 'weight': expected shape (3,), but got (2,)
    """


def encode(tree: Tree, metadata: Mapping[str, JSON] | None = None) -> bytes:
    """Return the safetensors bytes of a tree, which do not depend on the order of its keys.

    Args:
        tree: dense leaves on any device, views and shared memory included; `None` leaves no trace.
        metadata: JSON values to travel with the tensors.

    Returns:
        The payload; no bytes at all for a tree without leaves and without metadata.

    Raises:
        TypeError: a leaf is sparse or of a dtype that safetensors lacks, or the metadata is not JSON.
        ValueError: a leaf is called `__metadata__`, or the metadata has NaN or Inf or more than 2²⁰ bytes.
    """
    flat = flatten(tree)
    header, order = write_header(flat, metadata)
    return b"".join([header, *(to_bytes(flat[name]) for name in order)]) if flat or metadata else b""


def write_header(flat: Mapping[str, Tensor], metadata: Mapping[str, JSON] | None = None) -> tuple[bytes, list[str]]:
    """Return (the header of a payload of tensors by path, the order in which they follow it); raises as `encode`.

    >>> header, order = write_header({"few": torch.ones(1), "wide": torch.ones(1, dtype=torch.float64)})
    >>> order, len(header) % 8
    (['wide', 'few'], 0)
    """
    fields = fields_of(_layout(flat))
    header = make_header(fields, _dumps(metadata))
    if len(header) > METADATA_LIMIT and len(header) > len(make_header(fields)) + METADATA_LIMIT:
        raise ValueError(f"Expected at most {METADATA_LIMIT} bytes of metadata, but got more; send tensors instead")
    return header, [field.name for field in fields.order]


def decode(
    payload: bytes,
    like: Tree,
    *,
    client: str | int | None = None,
    round: int | None = None,
    limit: int = 2**30,
    finite: bool = True,
    opened: Opened | None = None,
) -> Tree:
    """Return the tree of a payload, checked against `like` before anything is allocated.

    Args:
        payload: received bytes.
        like: a tree of the expected structure, shapes and dtypes; meta tensors suffice; or a `Template` of it.
        client: the sender, for the message.
        round: the communication round, for the message.
        limit: the largest payload that is read, in bytes.
        finite: refuse NaN and Inf.
        opened: the same payload as `open_payload` has returned it, whose header is not read again.

    Returns:
        A tree in the structure of `like`, on the CPU, with separate memory.

    Raises:
        PayloadError: the payload is not the expected one; the message names the field and the difference.
    """
    refuse = partial(_refused, client, round)
    known = isinstance(like, Template)
    fields, build = (like.fields, like.build) if known else (fields_of(layout(like)), partial(unflatten, like=like))
    if isinstance(payload, bytes) and not payload and not fields.order:
        return build({})
    _check_bytes(payload, limit, refuse)
    longest, length = METADATA_LIMIT, int.from_bytes(payload[:LENGTH], "little")
    if length > longest:
        longest += 2 * len(make_header(fields))
    if opened is None or length > longest:
        opened = open_header(payload, longest, refuse)
    check_header(opened, fields.order, refuse)
    try:
        flat = safetensors.torch.load(payload)
    except SafetensorError as error:
        raise refuse("a payload of safetensors", error) from None
    return build({field.name: _checked(flat[field.name], field, finite, refuse) for field in fields.order})


def metadata(
    payload: bytes,
    limit: int = 4 * METADATA_LIMIT,
    *,
    client: str | int | None = None,
    round: int | None = None,
) -> dict[str, JSON]:
    """Return the metadata of a payload, without its tensors.

    Args:
        payload: received bytes.
        limit: the longest header that is read, in bytes.
        client: the sender, for the message.
        round: the communication round, for the message.

    Raises:
        PayloadError: there is no header, or its metadata is not a JSON object.
    """
    return open_payload(payload, limit, client=client, round=round)[0]


def open_payload(
    payload: bytes,
    limit: int = 4 * METADATA_LIMIT,
    *,
    client: str | int | None = None,
    round: int | None = None,
) -> tuple[dict[str, JSON], Opened | None]:
    """Return (the metadata of a payload, its parsed header for `decode`); arguments as for `metadata`."""
    refuse = partial(_refused, client, round)
    if isinstance(payload, bytes) and not payload:
        return {}, None
    _check_bytes(payload, len(payload), refuse)
    opened = open_header(payload, limit, refuse)
    text = texts(opened.header, refuse).get("fedtorch")
    return {} if text is None else loads(text, "metadata", refuse), opened


class Template:
    """The form of a tree, so that payloads can be read without traversing it again.

    Args:
        like: a tree of the expected structure, shapes and dtypes; meta tensors will do.

    Attributes:
        fields: expected entries of a payload's header.
        build: returns the tree of leaves by path.

    Example:
        >>> import torch
        >>> from fedtorch import wire
        >>> template = wire.Template({"weight": torch.empty(2)})
        >>> wire.decode(wire.encode({"weight": torch.ones(2)}), like=template)
        {'weight': tensor([1., 1.])}
    """

    def __init__(self, like: Tree) -> None:
        self.fields, self.build = fields_of(layout(like)), builder(like)


def builder(like: Tree, prefix: str = "") -> Callable[[Mapping[str, Tensor]], Tree]:
    """Return `tree.unflatten` for trees of one structure, without traversing it again; no leaf of `like` is stored.

    Example:
        >>> build = builder({"layer": {"w": torch.ones(2)}})
        >>> build({"layer.w": torch.tensor([1.0, 2.0])})
        {'layer': {'w': tensor([1., 2.])}}
    """
    if like is None:
        return lambda flat: None
    if isinstance(like, Tensor):
        return lambda flat: flat[prefix]
    kind, names = type(like), like if isinstance(like, dict) else getattr(like, "_fields", range(len(like)))
    paths = [f"{prefix}.{name}" if prefix else str(name) for name in names]
    parts = [builder(child, path) for child, path in zip(like.values() if isinstance(like, dict) else like, paths)]
    if isinstance(like, dict):
        named = list(zip(like, parts))
        return lambda flat: {name: part(flat) for name, part in named}
    if hasattr(like, "_fields"):
        return lambda flat: kind(*[part(flat) for part in parts])
    return lambda flat: tuple([part(flat) for part in parts])


def size(tree: Tree) -> int:
    """Return the bytes of `encode(tree)`, from names, dtypes and shapes alone; 0 without leaves: nothing is sent."""
    return size_of(layout(tree))


@lru_cache(maxsize=1024)
def size_of(layout: Layout) -> int:
    """Return the bytes of a tree of this layout, such as `tree.row_layout` of stacked clients; counted once for each.

    >>> from fedtorch import tree
    >>> stacked = {"weight": torch.zeros(50, 2, 3)}  # of 50 clients
    >>> size_of(tree.row_layout(stacked)) == size({"weight": torch.zeros(2, 3)})  # of one
    True
    """
    fields = fields_of(layout)
    return len(make_header(fields)) + fields.nbytes if fields.order else 0


def _refused(
    client: str | int | None, round: int | None, expected: str, got: object, field: str | None = None
) -> PayloadError:
    """Return the error to raise."""
    of_client = "" if client is None else f" of client {client!r}"
    in_round = "" if round is None else f" in round {round}"
    at = "" if field is None else f", field {field!r}"
    return PayloadError(f"payload{of_client}{in_round}{at}: expected {expected}, but got {got}")


def _layout(flat: Mapping[str, Tensor]) -> Layout:
    return tuple((name, leaf.dtype, leaf.shape) for name, leaf in flat.items())


def _dumps(metadata: Mapping[str, JSON] | None) -> str | None:
    if not metadata:
        return None
    return _ENCODER.encode(dict(metadata))


def to_bytes(leaf: Tensor) -> bytes:
    """Return the numbers of a leaf as a payload has them; raises TypeError for a sparse one."""
    if leaf.dtype in _NUMPY and leaf.layout == torch.strided:
        return leaf.numpy(force=True).tobytes()
    return as_bytes(leaf).tobytes()


def as_bytes(leaf: Tensor) -> memoryview:
    """Return the bytes of a leaf's numbers, as a view if they are stored as in a payload."""
    if leaf.layout != torch.strided:
        raise TypeError(f"Expected dense tensors, but got layout {leaf.layout}; call .to_dense() first")
    dense = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single number is contiguous for any strides
    return flat.view(torch.uint8).numpy().data


def _checked(leaf: Tensor, field: Field, finite: bool, refuse: Refuse) -> Tensor:
    """Return a tensor of a payload in its field's form, after checks of its numbers."""
    if field.dtype == torch.complex128:
        leaf = torch.view_as_complex(leaf)
    if field.dtype == torch.bool and leaf.numel() and (most := int(leaf.view(torch.uint8).max())) > 1:
        raise refuse("booleans stored as 0 and 1", f"the byte {most}", field.name)
    if finite and (field.dtype.is_floating_point or field.dtype.is_complex):
        values = leaf.float() if field.dtype.itemsize == 1 else leaf  # torch has no isfinite for float8
        if not (is_finite := values.isfinite()).all():
            bad = leaf.numel() - int(is_finite.sum())
            raise refuse("finite numbers", f"{bad} NaN or Inf of {leaf.numel()}", field.name)
    return leaf


def _check_bytes(payload: object, limit: int, refuse: Refuse) -> None:
    if not isinstance(payload, bytes):
        raise refuse("bytes", type(payload).__name__)
    if len(payload) > limit:
        raise refuse(f"at most {limit} bytes", f"{len(payload)}; raise the limit if that is right")
    if len(payload) < LENGTH:
        raise refuse(f"{LENGTH} bytes that count the header", f"{len(payload)} bytes in all")
