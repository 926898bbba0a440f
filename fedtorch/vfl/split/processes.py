"""One process per party: the messages of `fedtorch.vfl.split.nodes` over a process group.

Start J + 1 processes with `torchrun`: rank 0 is the server, rank j party j − 1. Every process makes the same
`SplitNetwork` from its keys (of other nodes' modules only their number matters, and how many numbers a row they send),
takes its own part of it and its own data, and calls `run_node`:

    network = SplitNetwork(bottoms, likelihood, keys=keys)
    node = TopNode(network.server, VerticalData((), response)) if rank == 0 else BottomNode(
        network.parties[rank - 1], rank - 1, VerticalData((x,), torch.zeros(len(x))))
    run_node(node, ((step, None) for step in range(1000)))

Noise and dropout are functions of a node's key and the step, so that the numbers are those of one process. Who knows a
key knows its noise: as long as all share the keys, it hides nothing of z_j from the other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch import Tensor

from fedtorch.tree import Tree
from fedtorch.vfl.line import TIMEOUT, Line
from fedtorch.vfl.messages import Gradient, Traffic
from fedtorch.vfl.split.nodes import BottomNode, TopNode

__all__ = ["run_node", "run_party", "run_server"]

Iteration = tuple[int, Tensor | None]  # step, rows of the minibatch


def run_node(
    node: TopNode | BottomNode,
    iterations: Iterable[Iteration],
    *,
    local_steps: int = 1,
    timeout: timedelta = TIMEOUT,
) -> Traffic:
    """Runs this process's node; returns the bytes that went up and down through it.

    Args:
        node: the server on rank 0, party j − 1 on rank j; trained in place.
        iterations: step and minibatch of each iteration, the same on every rank.
        local_steps: steps that a party takes per exchange.
        timeout: the longest wait for another rank.

    Raises:
        RuntimeError: no process group, one of another size than the parties and a server, or a rank that does not
            answer in time.
        fedtorch.wire.PayloadError: a message that is not what was expected.
    """
    if isinstance(node, TopNode):
        line = Line(0, len(node.network.widths) + 1, timeout)
        run_server(node, iterations, line.send, line.receive)
        return Traffic(line.received, line.sent)
    line = Line(node.index + 1, node.network.parties + 1, timeout)
    run_party(node, iterations, line.send, line.receive, local_steps)
    return Traffic(line.sent, line.received)


def run_party(
    party: BottomNode,
    iterations: Iterable[Iteration],
    send: Callable[[Tree, int], None],
    receive: Callable[[Any, int], Any],
    local_steps: int = 1,
) -> None:
    """A party's side of every iteration; `send(message, to)` and `receive(like, source)` carry the messages."""
    for step, rows in iterations:
        value = party.propose(step, rows)
        send(value, 0)
        party.update(receive(Gradient(value.value), 0), local_steps)


def run_server(
    server: TopNode,
    iterations: Iterable[Iteration],
    send: Callable[[Tree, int], None],
    receive: Callable[[Any, int], Any],
) -> None:
    """The server's side of every iteration; see `run_party`."""
    for step, rows in iterations:
        values = [receive(like, rank) for rank, like in enumerate(server.expected(rows), start=1)]
        for rank, gradient in enumerate(server.evaluate(values, step, rows), start=1):
            send(gradient, rank)
