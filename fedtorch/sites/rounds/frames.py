"""Encode what server and sites say to each other: payloads of `fedtorch.wire`, whose metadata say what they are.

A site says `hello` once connected, and when the server asks `who` it is; one that is not in the run hears that it may
`wait` for another. The server's `begin` names what to run;
`round`, `total`, `evaluate` and, after a fit, `ask` are for an answer, which has the number of what it answers; `over`
ends the site's part.
Whatever a site cannot or does not want to do it answers with a `refusal`, whose reason is for people.
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
EVERYBODY = "everybody"  # of the metadata, in the place of the ids of clients that are all of a site's
PROTOCOL = 6  # what is said may not be understood by another
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
    """A payload, and what its metadata say."""

    kind: str
    about: Mapping[str, Any]
    payload: bytes
    sender: str
    header: header.Header  # the same object in frames of one header, as long as that is kept
    opened: wire.Opened | None  # the payload with its header read

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
        """Return a text of the metadata; raises `PayloadError` if it is none."""
        value = self.about.get(name)
        if not isinstance(value, str):
            raise self.refused(f"{name} as a text", value)
        return value

    def texts(self, name: str) -> list[str]:
        """Return distinct texts of the metadata; raise `PayloadError` if they are none."""
        value = self.about.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refused(f"{name} as texts", value)
        if len(set(value)) != len(value):
            raise self.refused(f"{name} that differ", value)
        return value

    def integers(self, name: str) -> list[int]:
        """Return whole numbers of the metadata that are not negative; raises `PayloadError` if they are none."""
        value = self.about.get(name)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
            raise self.refused(f"{name} as whole numbers", value)
        return value

    def names(self, name: str) -> dict[str, Any]:
        """Return values by name of the metadata; raises `PayloadError` if they are none."""
        value = self.about.get(name)
        if not isinstance(value, dict):
            raise self.refused(f"{name} by name", value)
        return value

    def tree(self, like: Tree, finite: bool = True) -> Tree:
        """Return the tensors, in a structure that is known; raises `PayloadError` if they are others."""
        limit = max(len(self.payload), 1)
        return wire.decode(self.payload, like, client=self.sender, limit=limit, finite=finite, opened=self.opened)

    def room(self) -> dict[str, Tensor]:
        """Return a structure for bytes by name, see `coded`; raises `PayloadError` if their sizes are none."""
        sizes = self.names("sizes")
        if not all(type(size) is int and 0 <= size <= len(self.payload) for size in sizes.values()):
            raise self.refused("sizes of what is in it", sizes)
        return {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}

    def blobs(self) -> dict[str, bytes]:
        """Return the bytes by name of a frame that holds nothing else; raises `PayloadError` if it does."""
        return plain(self.tree(self.room()))

    def blob(self, name: str) -> bytes:
        """Return those of one name, which alone are there; raises `PayloadError` if they are not."""
        blobs = self.blobs()
        if blobs.keys() != {name}:
            raise self.refused(f"bytes called {name!r}", sorted(blobs))
        return blobs[name]

    def refused(self, expected: str, got: object) -> PayloadError:
        """Return the error for what is not as it should be."""
        return PayloadError(f"{self.kind} of {self.sender!r}: expected {expected}, but got {str(got)[:100]!r}")


def encode(kind: str, tensors: Tree = None, **about: Any) -> bytes:
    """Return the bytes of a frame."""
    return header.write(tensors, {"kind": kind, **about})


def encode_blobs(kind: str, blobs: Mapping[str, bytes], **about: Any) -> bytes:
    """Return the bytes of a frame that holds nothing but bytes by name."""
    tensors, sizes = coded(blobs)
    return encode(kind, tensors, sizes=sizes, **about)


def coded(blobs: Mapping[str, bytes]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return bytes by name as tensors, and what `sizes=` a frame says of them."""
    tensors = {name: torch.frombuffer(bytearray(part + b"0"), dtype=torch.uint8)[:-1] for name, part in blobs.items()}
    return tensors, {name: len(part) for name, part in blobs.items()}


def plain(coded: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the bytes by name that were `coded`."""
    return {name: part.numpy().tobytes() for name, part in coded.items()}


def read(payload: bytes, sender: str) -> Frame:
    """Return a frame, of which the tensors are not read yet.

    Raises:
        PayloadError: it is none.
    """
    known, about, opened = header.read(payload, sender)
    kind = about.get("kind")
    if not isinstance(kind, str):
        raise PayloadError(f"payload of client {sender!r}: expected a kind of frame, but got none")
    return Frame(kind, about, payload, sender, known, opened)


def reading(read_answer: Callable[[str, Frame], Any]) -> Callable[[str, bytes | Frame], Any]:
    """Return a `Receive.like` of answers: of a payload, or of the frame where a driver has read it already.

    Args:
        read_answer: (site, frame) -> the answer; raises `PayloadError` for something else, as is done for a refusal.
    """

    def like(sender: str, came: bytes | Frame) -> Any:
        frame = came if isinstance(came, Frame) else read(came, sender)
        if frame.kind == "refusal":
            raise PayloadError(frame.text("reason")[:1000])
        return read_answer(sender, frame)

    return like


def run_of(begin: Frame) -> str:
    """Return the identity of the run that a frame is about; raises `PayloadError` if it is none."""
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
    """Return rows `(0, ...)` of a structure that `described` has told; a `NamedTuple` comes back as a tuple.

    Raises:
        ValueError: it is no such structure.
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
    """Hold the inboxes of some clients of a site; it takes the place of the server's outbox there."""

    ids: Tensor  # (K,) ascending
    inbox: Tree  # (K, ...)

    def of(self, ids: Rows) -> Tree:
        """Return the inboxes of some of them."""
        if client_count(ids) == len(self.ids):
            return self.inbox
        rows = torch.searchsorted(self.ids, indices(ids))
        return tree.map(lambda leaf: _rows(leaf, rows), self.inbox)


def consecutive(ids: Tensor) -> Rows:
    """Return ascending ids as a slice, which is read as views, where it will do."""
    numbers = ids.numpy()
    first, last = int(numbers[0]), int(numbers[-1]) + 1
    return slice(first, last) if last - first == len(ids) else ids


def at_site(exchange: Exchange) -> Exchange:
    """Return an exchange whose outbox is `Inboxes`; bytes are counted where they travel."""
    return exchange._replace(scatter=lambda outbox, ids: outbox.of(ids), traffic=lambda outbox, messages, ids: (0, 0))


def encode_inboxes(kind: str, heard: Inboxes, more: Tree = None, everybody: bool = False, **about: Any) -> bytes:
    """Encode a site's inboxes, with what is the same for all clients once, and tensors beside them.

    Args:
        kind: of the frame.
        heard: by clients of the site.
        more: tensors beside it.
        everybody: whether these are all of the site's clients, whose ids are then not sent.
        about: the metadata.
    """
    flat, once = tree.flatten(heard.inbox, _INBOX), list[str]()
    for path, leaf in flat.items():
        if _is_shared(leaf):
            flat[path] = leaf[0]
            once.append(path.removeprefix(_INBOX).removeprefix("."))
    ids, about = (None, {**about, EVERYBODY: True}) if everybody else (heard.ids, about)
    return encode(kind, {"ids": ids, **flat, "more": more}, clients=len(heard.ids), once=once, **about)


class _Expected(NamedTuple):
    """How a frame of inboxes looks."""

    template: wire.Template  # of tensors by path
    everybody: bool  # whether it is to all clients
    clients: int  # that hear
    shared: list[str]  # the paths of those that are sent once
    build: Callable[[Mapping[str, Tensor]], Tree]  # the inbox, of tensors by path


Known = dict[header.Header, _Expected]  # frames of inboxes by their headers; of a few, the others are forgotten
_MOST_KNOWN = 8


def decode_inboxes(
    frame: Frame, like: Tree, own: Tensor, more: Tree = None, known: Known | None = None
) -> tuple[Inboxes, Tree]:
    """Return (the inboxes, the tensors beside them) of such a frame.

    Args:
        frame: of the server.
        like: what one client hears.
        own: `(K,)` all clients of the site, consecutive; the ids of the inboxes are this tensor where it is to all.
        more: the structure of the tensors beside it, which the frame's header alone may change.
        known: how frames of a header looked, of the same `like` and `own`.

    Raises:
        PayloadError: they are something else.
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
    """Return ascending ids of clients of a site; raise PayloadError for others."""
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
