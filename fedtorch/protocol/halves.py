"""Protocols between parties: each node's half is a generator of `Send` and `Receive`, written once for every driver.

A half is a generator that yields its sends and receives, gets the received messages, and returns its result; it is
independent of processes and bytes. A *driver* moves the values: `together` runs all halves in one process and counts
the bytes, `drive` runs one half over any two functions that send and receive: `fedtorch.protocol.ranks` has such a pair
for `torchrun`, and `fedtorch.sites.vertical.remote` for parties that connect to a server. Private alignment
(`alignment`) and training (`iteration`, of any vertical model) are halves, and so are a federation's round over sites
and the secure sums in it (`fedtorch.sites.rounds.server` and `site`), whose driver is `fedtorch.sites.rounds.sites`.

>>> import torch
>>> def server():
...     total = (yield Receive(1, torch.zeros(2))) + (yield Receive(2, torch.zeros(2)))
...     for j in (1, 2):
...         yield Send(j, total)
>>> def party(value):
...     yield Send(0, value)
...     return (yield Receive(0, torch.zeros(2))) - value
>>> found, traffic = together({0: server(), 1: party(torch.ones(2)), 2: party(torch.tensor([3.0, 4.0]))})
>>> found[1], traffic.up == traffic.down == 2 * wire.size(torch.ones(2))
(tensor([3., 4.]), True)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch._representation import without_rows
from fedtorch.tree import Tree

Name = int | str


@without_rows
class Send(NamedTuple):
    """A half's request to send a message to another node; the half continues at once."""

    to: Name
    message: Tree  # bytes travel unchanged
    rows: bool = False  # whether the payload defines its tensors' number of rows, which the receiver cannot know
    sequence: int = 0  # of a request, by which a driver over unreliable streams recognises its answer
    summed: bool = False  # whether it may leave this process only as part of a secure sum
    bound: bytes = b""  # digest of the sender's instructions, to which masks around the message are bound
    start: bytes = b""  # digest of the sender's initial parameters, whatever its rows


@without_rows
class Receive(NamedTuple):
    """A half's request for the next message of another node, which becomes the value of the `yield`.

    With a tuple of senders the value is `Heard`, the next messages of all that send one.

    >>> def server():
    ...     heard: Heard = yield Receive((1, 2, 3), torch.zeros(1), least=2)
    ...     return sum(heard.messages.values()), heard.missing
    >>> def party(value):
    ...     yield Send(0, torch.tensor([value]))
    >>> def gone():
    ...     return None
    ...     yield
    >>> together({0: server(), 1: party(1.0), 2: gone(), 3: party(2.0)})[0][0]
    (tensor([3.]), {2: 'it has said nothing'})
    """

    sender: Any  # a name, or a tuple of names
    like: Any  # structure, shapes and dtypes, or for bytes a function of sender and payload; other messages are refused
    rows: bool = False  # whether the payload defines the number of rows, in place of `like`
    most: int = 10_000_000  # most rows, if the payload defines their number
    least: int = 0  # with several senders, least number to wait for even if they are not connected
    seconds: float | None = None  # the longest wait; None for the driver's own
    likes: tuple[Any, ...] = ()  # `like` of each of several senders, if their messages differ in form

    def of(self, sender: Name, seconds: float | None = None) -> Receive:
        """Return the request for one of several senders, with a timeout of `seconds`."""
        like = self.likes[self.sender.index(sender)] if self.likes else self.like
        return self._replace(sender=sender, like=like, likes=(), seconds=self.seconds if seconds is None else seconds)


@without_rows
class Heard(NamedTuple):
    """The messages of several nodes; see `Receive`."""

    messages: dict[Any, Tree]  # by sender
    missing: dict[Any, str]  # reasons why the others sent nothing


def hear(heard: Heard, sender: Any, read: Callable[[], Tree]) -> None:
    """Add a sender's message, or the reason for its refusal."""
    try:
        heard.messages[sender] = read()
    except wire.PayloadError as error:
        heard.missing[sender] = str(error)


class Traffic(NamedTuple):
    """Bytes of payloads, as `fedtorch.wire` sends them: up to the server (or leader) and down from it.

    >>> def server():
    ...     return (yield Receive(1, torch.zeros(100)))
    >>> def party():
    ...     yield Send(0, torch.zeros(100))
    >>> traffic = together({0: server(), 1: party()})[1]
    >>> traffic == Traffic(up=wire.size(torch.zeros(100)), down=0)
    True
    """

    up: int
    down: int


Half = Generator[Send | Receive, Any, Any]
BYTES = torch.zeros(0, dtype=torch.uint8)  # `Receive.like` of bytes, whose number the payload defines


def packed(data: bytes) -> Tensor:
    """Return bytes as a message."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else BYTES


def unpacked(message: Tensor) -> bytes:
    """Return the bytes of a message.

    >>> unpacked(packed(b"public key"))
    b'public key'
    """
    return message.numpy().tobytes()


def encode(step: Send) -> bytes:
    """Return the payload of a message.

    Raises:
        ValueError: it may leave only as part of a secure sum, and is not masked.

    >>> encode(Send(0, torch.ones(2), summed=True))
    Traceback (most recent call last):
    ValueError: Expected a secure sum around a half whose numbers may leave only as part of one, but got none; wrap it
    in fedtorch.sites.secure.masked_party and the server's half in masked_server, or pass accept_disclosure=True if the
    server may have this party's numbers of every row
    """
    if step.summed:
        raise ValueError(
            "Expected a secure sum around a half whose numbers may leave only as part of one, but got none; wrap it in "
            "fedtorch.sites.secure.masked_party and the server's half in masked_server, or pass accept_disclosure=True "
            "if the server may have this party's numbers of every row"
        )
    if isinstance(step.message, bytes):
        return step.message
    return wire.encode(step.message, {"rows": len(tree.leaves(step.message)[0])} if step.rows else None)


def decode(payload: bytes, step: Receive, sender: str) -> Tree:
    """Decode a message on the devices of `step.like`.

    Args:
        payload: received bytes.
        step: the expected message.
        sender: for error messages.

    Raises:
        fedtorch.wire.PayloadError: an unexpected message, or too many rows.
    """
    like = step.like
    if callable(like):
        return like(sender, payload)
    if step.rows:
        rows = wire.metadata(payload, client=sender).get("rows")
        if type(rows) is not int or not 0 <= rows <= step.most:
            raise wire.PayloadError(
                f"payload of client {sender!r}: expected a number of rows up to {step.most}, but got {rows!r}"
            )
        like = tree.map(partial(_with_rows, rows), like)
    return tree.map(
        lambda value, example: value.to(example.device), wire.decode(payload, like, client=sender), step.like
    )


def _with_rows(rows: int, leaf: Tensor) -> Tensor:
    """Return a leaf with this many rows, without memory, because the sender's number is not verified yet."""
    return torch.empty(rows, *leaf.shape[1:], dtype=leaf.dtype, device="meta")


def drive(
    half: Half,
    send: Callable[[Send], None],
    receive: Callable[[Receive], Tree],
    several: Callable[[Receive], Heard] | None = None,
) -> Any:
    """Run one half; return its result.

    Args:
        half: of this node.
        send: carries a message, usually by `encode`.
        receive: waits for one, usually by `decode`.
        several: waits for several senders; default: for all of them, one after the other.

    >>> def half():
    ...     yield Send(1, torch.arange(3))
    ...     return (yield Receive(1, torch.zeros(3, dtype=torch.int64)))
    >>> line = deque()  # to somebody who sends back what comes
    >>> drive(half(), lambda step: line.append(encode(step)), lambda step: decode(line.popleft(), step, "echo"))
    tensor([0, 1, 2])
    """

    def everybody(wanted: Receive) -> Heard:
        return Heard({name: receive(wanted.of(name)) for name in wanted.sender}, {})

    wanted, result = _advance(half, None, send)
    while wanted is not None:
        came = (several or everybody)(wanted) if isinstance(wanted.sender, tuple) else receive(wanted)
        wanted, result = _advance(half, came, send)
    return result


def wrapped(half: Half, around: Callable[[Send | Receive], Half]) -> Half:
    """Return a half that handles another's steps in its own way.

    Args:
        half: the other.
        around: from a step of the other to a generator that handles it, by its own steps, and returns the answer.

    >>> def server():
    ...     return (yield Receive(1, torch.zeros(2)))
    >>> def party():
    ...     yield Send(0, torch.tensor([1.2, 3.4]))
    >>> def rounded(step):
    ...     return (yield step._replace(message=step.message.round()) if isinstance(step, Send) else step)
    >>> together({0: server(), 1: wrapped(party(), rounded)})[0][0]
    tensor([1., 3.])
    """
    answer: Tree = None
    while True:
        try:
            step = half.send(answer)
        except StopIteration as done:
            return done.value
        answer = yield from around(step)


def together(halves: Mapping[Any, Half], *, dropouts: bool = False) -> tuple[dict[Any, Any], Traffic]:
    """Run all halves in this process, each until it waits for a message that has not been sent yet.

    A node that waits for several senders continues without the silent ones once no other node can continue.

    Args:
        halves: by the nodes' names; the first is that of the server (or leader).
        dropouts: whether the server may end while others wait for it, as nodes do that it has left out.

    Returns:
        The halves' results by name, and the bytes that their messages would take.

    Raises:
        RuntimeError: all remaining nodes wait for each other.
    """
    hub, counted = next(iter(halves)), [0, 0]
    boxes: defaultdict[tuple[Name, Name], deque[Tree]] = defaultdict(deque)

    def post(sender: Name, step: Send) -> None:
        boxes[sender, step.to].append(step.message)
        whole = step.rows or isinstance(step.message, bytes)
        counted[sender == hub] += len(encode(step)) if whole else wire.size(step.message)

    def comes(name: Any, wanted: Receive | None) -> bool:
        senders = () if wanted is None else wanted.sender if isinstance(wanted.sender, tuple) else (wanted.sender,)
        return all(boxes[sender, name] for sender in senders)

    def take(name: Any, wanted: Receive | None) -> Tree:
        if wanted is None or not isinstance(wanted.sender, tuple):
            return None if wanted is None else _taken(wanted, wanted.sender, boxes[wanted.sender, name].popleft())
        heard = Heard({}, {sender: "it has said nothing" for sender in wanted.sender if not boxes[sender, name]})
        for sender in wanted.sender:
            if sender not in heard.missing:
                hear(heard, sender, partial(_taken, wanted, sender, boxes[sender, name].popleft()))
        return heard

    results: dict[Any, Any] = {}
    waiting: dict[Any, Receive | None] = dict.fromkeys(halves)
    while waiting and not (dropouts and hub not in waiting):
        able = [name for name, wanted in waiting.items() if comes(name, wanted)]
        if not able:
            able = [name for name, wanted in waiting.items() if wanted and isinstance(wanted.sender, tuple)]
        if not able:
            raise RuntimeError(f"Expected messages for {list(waiting)}, but got none; the halves do not fit each other")
        for name in able:
            wanted = waiting.pop(name)
            wanted, results[name] = _advance(halves[name], take(name, wanted), partial(post, name))
            if wanted is not None:
                waiting[name] = wanted
    return results, Traffic(*counted)


def _taken(wanted: Receive, sender: Name, message: Tree) -> Tree:
    """Return a message in the receiver's form; trees in one process already have it."""
    return wanted.like(sender, message) if callable(wanted.like) else message


def _advance(half: Half, message: Tree, send: Callable[[Send], None]) -> tuple[Receive | None, Any]:
    """Run a half until it waits to receive (request, None) or ends (None, its result)."""
    try:
        step = half.send(message)
        while isinstance(step, Send):
            send(step)
            step = half.send(None)
        return step, None
    except StopIteration as done:
        return None, done.value
