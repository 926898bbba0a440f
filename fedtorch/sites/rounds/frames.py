"""Frames between server and sites: payloads of `fedtorch.wire`, whose metadata give their kind.

A site sends `hello` once connected, and when the server asks `who` it is. A site outside the run gets `wait`. The
server's `begin` names the algorithm. Its requests `round`, `total`, `evaluate` and, after a fit, `ask` get an `answer`
with the request's number. `over` ends the site's part. A site answers with a `refusal`, and a reason for people, what
it cannot or does not want to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange, client_count, indices
from fedtorch.sites.rounds import _frame_header as header
from fedtorch.tree import Rows, Tree
from fedtorch.wire import PayloadError

_INBOX = "inbox"
_PREFIX = f"{_INBOX}."
EVERYBODY = "everybody"  # in the metadata: replaces the ids, if these are all clients of the site
PROTOCOL = 6  # version; another version may not understand these frames
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_RUN = re.compile(r"[0-9a-f]{32}")
_DEEPEST, _MOST_FIELDS, _LARGEST_ROW = 8, 1000, 2**31


class Frame(NamedTuple):
    """A payload with its metadata."""

    kind: str
    about: Mapping[str, Any]
    payload: bytes
    sender: str
    header: header.Header  # one object for all frames with this header, while it is cached
    opened: wire.Opened | None  # the payload with its header parsed

    def integer(self, name: str, least: int = 0, most: int = 2**63 - 1) -> int:
        """Return a whole number of the metadata.

        Raises:
            PayloadError: it is missing, something else, or out of range.
        """
        value = self.about.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.refused(f"{name} between {least} and {most}", value)
        return value

    def text(self, name: str) -> str:
        """Return a text of the metadata; raises `PayloadError` for anything else."""
        value = self.about.get(name)
        if not isinstance(value, str):
            raise self.refused(f"{name} as a text", value)
        return value

    def texts(self, name: str) -> list[str]:
        """Return distinct texts of the metadata; raises `PayloadError` for anything else."""
        value = self.about.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refused(f"{name} as texts", value)
        if len(set(value)) != len(value):
            raise self.refused(f"{name} that differ", value)
        return value

    def integers(self, name: str) -> list[int]:
        """Return non-negative integers of the metadata; raises `PayloadError` for anything else."""
        value = self.about.get(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
            raise self.refused(f"{name} as whole numbers", value)
        return value

    def names(self, name: str) -> dict[str, Any]:
        """Return a dict of the metadata; raises `PayloadError` for anything else."""
        value = self.about.get(name)
        if not isinstance(value, dict):
            raise self.refused(f"{name} by name", value)
        return value

    def tree(self, like: Tree, finite: bool = True) -> Tree:
        """Return the tensors in the structure of `like`; raises `PayloadError` if they do not have it."""
        limit = max(len(self.payload), 1)
        return wire.decode(self.payload, like, client=self.sender, limit=limit, finite=finite, opened=self.opened)

    def room(self) -> dict[str, Tensor]:
        """Return the structure of bytes by name, see `coded`; raises `PayloadError` for invalid sizes."""
        sizes = self.names("sizes")
        if not all(type(size) is int and 0 <= size <= len(self.payload) for size in sizes.values()):
            raise self.refused("sizes of what is in it", sizes)
        return {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}

    def blobs(self) -> dict[str, bytes]:
        """Return the bytes by name of a frame without other tensors; raises `PayloadError` if it has some."""
        return plain(self.tree(self.room()))

    def blob(self, name: str) -> bytes:
        """Return the bytes called `name` of a frame without other content; raises `PayloadError` otherwise."""
        blobs = self.blobs()
        if blobs.keys() != {name}:
            raise self.refused(f"bytes called {name!r}", sorted(blobs))
        return blobs[name]

    def refused(self, expected: str, got: object) -> PayloadError:
        """Return a PayloadError for malformed content."""
        return PayloadError(f"{self.kind} of {self.sender!r}: expected {expected}, but got {str(got)[:100]!r}")


def encode(kind: str, tensors: Tree = None, **about: Any) -> bytes:
    """Return the bytes of a frame."""
    return header.write(tensors, {"kind": kind, **about})


def encode_blobs(kind: str, blobs: Mapping[str, bytes], **about: Any) -> bytes:
    """Return a frame that contains only bytes by name."""
    tensors, sizes = coded(blobs)
    return encode(kind, tensors, sizes=sizes, **about)


def coded(blobs: Mapping[str, bytes]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return (bytes by name as tensors, their sizes for a frame's `sizes=`)."""
    tensors = {name: torch.frombuffer(bytearray(part + b"0"), dtype=torch.uint8)[:-1] for name, part in blobs.items()}
    return tensors, {name: len(part) for name, part in blobs.items()}


def plain(coded: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return bytes by name from the tensors of `coded`."""
    return {name: part.numpy().tobytes() for name, part in coded.items()}


def read(payload: bytes, sender: str) -> Frame:
    """Return a frame, whose tensors are not read yet.

    Raises:
        PayloadError: the payload is not a frame.
    """
    known, about, opened = header.read(payload, sender)
    kind = about.get("kind")
    if not isinstance(kind, str):
        raise PayloadError(f"payload of client {sender!r}: expected a kind of frame, but got none")
    return Frame(kind, about, payload, sender, known, opened)


def reading(read_answer: Callable[[str, Frame], Any]) -> Callable[[str, bytes | Frame], Any]:
    """Return a `Receive.like` that reads answers, from payloads or from frames that a driver has already read.

    Args:
        read_answer: (site, frame) -> the answer; raises `PayloadError` for anything else. Refusals raise it, too.
    """

    def like(sender: str, came: bytes | Frame) -> Any:
        frame = came if isinstance(came, Frame) else read(came, sender)
        if frame.kind == "refusal":
            raise PayloadError(frame.text("reason")[:1000])
        return read_answer(sender, frame)

    return like


def run_of(begin: Frame) -> str:
    """Return the identity of a frame's run; raises `PayloadError` if it is malformed."""
    if not _RUN.fullmatch(run := begin.text("run")):
        raise begin.refused("a run of 32 hexadecimal digits", run)
    return run


def described(rows: Tree) -> Any:
    """Return the structure of rows as JSON: names, dtypes, and the shape of one row."""
    if isinstance(rows, Tensor):
        return {"dtype": str(rows.dtype).removeprefix("torch."), "shape": list(rows.shape[1:])}
    if isinstance(rows, dict):
        return {"fields": {name: described(part) for name, part in rows.items()}}
    return None if rows is None else {"fields": [described(part) for part in rows]}


def no_rows(schema: Any, depth: int = 0) -> Tree:
    """Return rows `(0, ...)` of a structure that `described` has returned; a `NamedTuple` becomes a tuple.

    Raises:
        ValueError: the structure is malformed, too deep or too large.
    """
    fields = schema.get("fields") if isinstance(schema, dict) else None
    if depth > _DEEPEST or (isinstance(fields, (list, dict)) and len(fields) > _MOST_FIELDS):
        raise ValueError("Expected a structure of rows, but got one that is too deep or too large")
    if schema is None:
        return None
    if isinstance(fields, dict):
        return {str(name): no_rows(part, depth + 1) for name, part in fields.items()}
    if isinstance(fields, list):
        return tuple(no_rows(part, depth + 1) for part in fields)
    if not isinstance(schema, dict) or schema.keys() != {"dtype", "shape"} or str(schema["dtype"]) not in _DTYPES:
        raise ValueError(f"Expected dtype and shape of a field, but got {str(schema)[:100]}")
    shape = schema["shape"]
    whole = isinstance(shape, list) and len(shape) <= _DEEPEST and all(type(n) is int and n >= 0 for n in shape)
    if not whole or math.prod(max(n, 1) for n in shape) > _LARGEST_ROW:
        raise ValueError(f"Expected the shape of a row, but got {str(shape)[:100]}")
    return torch.empty(0, *shape, dtype=_DTYPES[str(schema["dtype"])])


class Inboxes(NamedTuple):
    """The inboxes of some clients of a site, which replace the server's outbox there."""

    ids: Tensor  # (K,) ascending
    inbox: Tree  # (K, ...)

    def of(self, ids: Rows) -> Tree:
        """Return the inboxes of some of these clients."""
        if client_count(ids) == len(self.ids):
            return self.inbox
        rows = torch.searchsorted(self.ids, indices(ids))
        return tree.map(lambda leaf: _rows(leaf, rows), self.inbox)


def consecutive(ids: Tensor) -> Rows:
    """Return ascending ids as a slice if they are consecutive, since slices index as views."""
    numbers = ids.numpy()
    first, last = int(numbers[0]), int(numbers[-1]) + 1
    return slice(first, last) if last - first == len(ids) else ids


def at_site(exchange: Exchange) -> Exchange:
    """Return an exchange whose outbox is `Inboxes`; the transport counts bytes."""
    return exchange._replace(scatter=lambda outbox, ids: outbox.of(ids), traffic=lambda outbox, messages, ids: (0, 0))


def encode_inboxes(kind: str, inboxes: Inboxes, more: Tree = None, everybody: bool = False, **about: Any) -> bytes:
    """Encode the inboxes of a site's clients, values that all share only once, and other tensors.

    Args:
        kind: kind of the frame.
        inboxes: inboxes of clients of the site.
        more: other tensors.
        everybody: whether these are all of the site's clients, whose ids are then not sent.
        about: the metadata.
    """
    flat, once = tree.flatten(inboxes.inbox, _INBOX), list[str]()
    for path, leaf in flat.items():
        if _is_shared(leaf):
            flat[path] = leaf[0]
            once.append(path.removeprefix(_INBOX).removeprefix("."))
    ids, about = (None, {**about, EVERYBODY: True}) if everybody else (inboxes.ids, about)
    return encode(kind, {"ids": ids, **flat, "more": more}, clients=len(inboxes.ids), once=once, **about)


class _Expected(NamedTuple):
    """The structure of a frame of inboxes."""

    template: wire.Template  # tensors by path
    everybody: bool  # whether all clients of the site are addressed
    clients: int  # number of clients that are addressed
    shared: list[str]  # paths of tensors that are sent once for all clients
    build: Callable[[Mapping[str, Tensor]], Tree]  # tensors by path -> inbox


Known = dict[header.Header, _Expected]  # a small cache of structures by header
_MOST_KNOWN = 8


def decode_inboxes(
    frame: Frame, like: Tree, own: Tensor, more: Tree = None, known: Known | None = None
) -> tuple[Inboxes, Tree]:
    """Return (the inboxes, the other tensors) of a frame of `encode_inboxes`.

    Args:
        frame: the server's frame.
        like: structure of one client's inbox.
        own: `(K,)` all clients of the site, consecutive; the same object is `Inboxes.ids` if all are addressed.
        more: structure of the other tensors, which must not depend on anything but the frame's header.
        known: cache of structures by header, for the same `like` and `own`.

    Raises:
        PayloadError: the frame has another structure.
    """
    expected = None if known is None else known.get(frame.header)
    if expected is None:
        expected = _expected(frame, like, len(own), more)
        if known is not None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[frame.header] = expected
    came = frame.tree(expected.template, finite=False)
    for path in expected.shared:
        came[path] = came[path].expand(expected.clients, *came[path].shape)
    ids = own if expected.everybody else _ids(frame, came["ids"], own)
    return Inboxes(ids, expected.build(came)), came["more"]


def _ids(frame: Frame, ids: Tensor, own: Tensor) -> Tensor:
    """Return `ids`; raise PayloadError unless they are ascending ids of the site's clients."""
    numbers = ids.numpy()
    if not (numbers[1:] > numbers[:-1]).all():
        raise frame.refused("ascending ids", ids.tolist())
    first, last = int(own[0]), int(own[-1])
    if len(numbers) and not (first <= numbers[0] and numbers[-1] <= last):
        raise frame.refused(f"clients from {first} to {last}", ids.tolist())
    return ids


def _expected(frame: Frame, like: Tree, most: int, more: Tree) -> _Expected:
    everybody = frame.about.get(EVERYBODY) is True
    count, once, one = frame.integer("clients", most if everybody else 0, most), frame.texts("once"), tree.flatten(like)
    if not set(once) <= one.keys():
        raise frame.refused(f"values among {sorted(one)}", sorted(set(once) - one.keys()))
    paths = {name: _PREFIX + name if name else _INBOX for name in one}
    rows = {paths[name]: leaf if name in once else leaf.expand(count, *leaf.shape) for name, leaf in one.items()}
    ids = None if everybody else torch.empty(count, dtype=torch.int64, device="meta")
    template, shared = wire.Template({"ids": ids, "more": more, **rows}), [paths[name] for name in one if name in once]
    return _Expected(template, everybody, count, shared, wire.builder(like, _INBOX))


def _is_shared(leaf: Tensor) -> bool:
    return leaf.shape[0] > 1 and leaf.stride(0) == 0


def _rows(leaf: Tensor, rows: Tensor) -> Tensor:
    return (
        leaf[:1].expand(len(rows), *leaf.shape[1:]) if _is_shared(leaf) else leaf.index_select(0, rows.to(leaf.device))
    )
