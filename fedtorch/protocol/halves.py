"""Protocols between parties: each node's half is a generator of `Send` and `Receive`, written once for every driver.

A half yields what it wants done, is given what it receives, and returns its result; it knows nothing of processes and
bytes. A *driver* moves the values: `together` runs all halves in one process and counts the bytes, `drive` runs one
half over any two functions that send and receive: `fedtorch.protocol.ranks` has such a pair for `torchrun`, and
`fedtorch.sites.vertical.remote` for parties that connect to a server. Private alignment (`alignment`) and training
(`iteration`, of any vertical model) are halves.

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
from fedtorch.tree import Tree

Name = int | str


class Send(NamedTuple):
    """Wanted by a half: that a message goes to another node; the half goes on at once."""

    to: Name
    message: Tree
    rows: bool = False  # whether the payload says how many rows its tensors have, which the receiver cannot know


class Receive(NamedTuple):
    """Wanted by a half: the next message of another node, which it is given as the value of the `yield`."""

    sender: Name
    like: Tree  # its structure, shapes and dtypes; anything else is refused
    rows: bool = False  # whether the payload says how many rows there are in place of those of `like`
    most: int = 10_000_000  # so many rows at most, where the payload says it


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


def encode(step: Send) -> bytes:
    """The payload of a message."""
    return wire.encode(step.message, {"rows": len(tree.leaves(step.message)[0])} if step.rows else None)


def decode(payload: bytes, step: Receive, sender: str) -> Tree:
    """A message on the devices of `step.like`.

    Args:
        payload: what came.
        step: what was expected.
        sender: for error messages.

    Raises:
        fedtorch.wire.PayloadError: what came is something else, or more rows than are taken.
    """
    like = step.like
    if step.rows:
        rows = wire.metadata(payload, client=sender).get("rows")
        if type(rows) is not int or not 0 <= rows <= step.most:
            raise wire.PayloadError(
                f"payload of client {sender!r}: expected a number of rows up to {step.most}, but got {rows!r}"
            )
        like = tree.map(partial(_with_rows, rows), like)
    return tree.map(lambda value, own: value.to(own.device), wire.decode(payload, like, client=sender), step.like)


def _with_rows(rows: int, leaf: Tensor) -> Tensor:
    """What is expected of so many rows, without their memory: what the sender claims has not been checked yet."""
    return torch.empty(rows, *leaf.shape[1:], dtype=leaf.dtype, device="meta")


def drive(half: Half, send: Callable[[Send], None], receive: Callable[[Receive], Tree]) -> Any:
    """Runs one half; returns its result.

    Args:
        half: of this node.
        send: carries a message, usually by `encode`.
        receive: waits for one, usually by `decode`.

    >>> def half():
    ...     yield Send(1, torch.arange(3))
    ...     return (yield Receive(1, torch.zeros(3, dtype=torch.int64)))
    >>> line = deque()  # to somebody who sends back what comes
    >>> drive(half(), lambda step: line.append(encode(step)), lambda step: decode(line.popleft(), step, "echo"))
    tensor([0, 1, 2])
    """
    wanted, result = _advance(half, None, send)
    while wanted is not None:
        wanted, result = _advance(half, receive(wanted), send)
    return result


def wrapped(half: Half, around: Callable[[Send | Receive], Half]) -> Half:
    """A half that does what another wants done in a way of its own.

    Args:
        half: the other.
        around: from a step that it wants to a generator that takes it, by steps of its own, and returns the answer.

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


def together(halves: Mapping[Any, Half]) -> tuple[dict[Any, Any], Traffic]:
    """Runs all halves in this process, each until it waits for a message that is still to come.

    Args:
        halves: by the nodes' names; the first is that of the server (or leader).

    Returns:
        The halves' results by name, and the bytes that their messages would take.

    Raises:
        RuntimeError: all that are left wait for each other.
    """
    hub, counted = next(iter(halves)), [0, 0]
    boxes: defaultdict[tuple[Name, Name], deque[Tree]] = defaultdict(deque)

    def post(sender: Name, step: Send) -> None:
        boxes[sender, step.to].append(step.message)
        counted[sender == hub] += len(encode(step)) if step.rows else wire.size(step.message)

    results: dict[Any, Any] = {}
    waiting: dict[Any, Receive | None] = dict.fromkeys(halves)
    while waiting:
        able = [name for name, wanted in waiting.items() if wanted is None or boxes[wanted.sender, name]]
        if not able:
            raise RuntimeError(f"Expected messages for {list(waiting)}, but got none; the halves do not fit each other")
        for name in able:
            wanted = waiting.pop(name)
            message = None if wanted is None else boxes[wanted.sender, name].popleft()
            wanted, results[name] = _advance(halves[name], message, partial(post, name))
            if wanted is not None:
                waiting[name] = wanted
    return results, Traffic(*counted)


def _advance(half: Half, message: Tree, send: Callable[[Send], None]) -> tuple[Receive | None, Any]:
    """Runs a half until it wants to receive (what, None) or is done (None, its result)."""
    try:
        step = half.send(message)
        while isinstance(step, Send):
            send(step)
            step = half.send(None)
        return step, None
    except StopIteration as done:
        return None, done.value
