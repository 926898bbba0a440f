"""One process per party: the messages of `fedtorch.vfl.messages` over a process group.

Start J + 1 processes with `torchrun`: rank 0 is the server, rank j party j − 1. Every process calls `run_node` with its
own data only; nothing else leaves it. The noise is a function of the key, so that a joint q(γ, θ) needs no exchange of
noise, and the numbers are those of `sfvi` and `exchange`.

What travels are the bytes of `fedtorch.wire`: no pickle, and a payload of another structure, shape or dtype than the
model's, or with NaN, is refused with the sender's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedtorch import wire
from fedtorch.tree import Tree
from fedtorch.vfl.guide import Noise
from fedtorch.vfl.messages import Backward, Gradient, Share, Traffic, Value
from fedtorch.vfl.nodes import PartyNode, ServerNode, pooled

__all__ = ["run_node", "run_party", "run_server"]

Iteration = tuple[Noise, float, Tensor | None]  # noise, learning rate, rows of the minibatch


def run_node(node: ServerNode | PartyNode, iterations: Iterable[Iteration], *, local_steps: int = 1) -> Traffic:
    """Runs this process's node; returns the bytes that it sent (up) and received (down), the other way at the server.

    Args:
        node: the server on rank 0, party j − 1 on rank j.
        iterations: noise, learning rate and rows of each iteration, the same on every rank.
        local_steps: steps that a party takes per exchange.

    Raises:
        RuntimeError: no process group, or one of another size than the model's parties and a server.
        fedtorch.wire.PayloadError: a message that is not what was expected.
    """
    if not dist.is_initialized():
        raise RuntimeError("Expected a process group, but got none; start with torchrun and init_process_group")
    ranks = len(node.model.predictors) + 1
    if dist.get_world_size() != ranks or dist.get_rank() != node.index:
        here = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        raise RuntimeError(f"Expected node {node.index} to run on its own rank of {ranks}, but got {here}")
    line = _Line()
    if isinstance(node, ServerNode):
        run_server(node, iterations, line.send, line.receive)
        return Traffic(line.received, line.sent)
    run_party(node, iterations, line.send, line.receive, local_steps)
    return Traffic(line.sent, line.received)


def run_party(
    party: PartyNode,
    iterations: Iterable[Iteration],
    send: Callable[[Tree, int], None],
    receive: Callable[[Any, int], Any],
    local_steps: int = 1,
) -> None:
    """A party's side of every iteration; `send(message, to)` and `receive(like, source)` carry the messages."""
    model, guide = party.model, party.guide
    at_party = guide.auxiliary.party is not None
    for noise, rate, rows in iterations:
        value = party.propose(noise, rows)
        send(value, 0)
        if party.pooled:
            mine = party.pool(party.theta)
            send(mine, 0)
            party.hear(receive(mine, 0))
        if party.chained:
            told = None
            if party.index < len(model.predictors):
                told = receive(Backward(_draws(value, sum(model.sizes[: party.index + 1]))), 0)
            party.pull, tell = party.back_substitute(noise.theta, told)
            send(tell, 0)
        share = None
        if at_party and (model.power or party.response_shared):
            shared = _draws(value, len(model.likelihood.shared))
            weight = None if model.concentration is None else value.value[:, 0, 0, 0]
            share = receive(Share(value.value, shared, weight), 0)
        if at_party and model.power:
            assert share is not None
            send(party.answer(share), 0)
        gradient = receive(Gradient(value.value), 0) if share is None or model.power else None
        party.update(gradient, share, rate, local_steps)


def run_server(
    server: ServerNode,
    iterations: Iterable[Iteration],
    send: Callable[[Tree, int], None],
    receive: Callable[[Any, int], Any],
) -> None:
    """The server's side of every iteration; see `run_party`."""
    model, guide = server.model, server.guide
    ranks = range(1, len(model.predictors) + 1)
    at_party = guide.auxiliary.party is not None
    for noise, rate, rows in iterations:
        server.begin(noise, rows)
        like = _value_like(server)
        values = [receive(like, rank) for rank in ranks]
        if server.pooled:
            mine = server.pool(server.gamma)
            sums = pooled([mine, *(receive(mine, rank) for rank in ranks)])
            for rank in ranks:
                send(sums, rank)
            server.hear(sums)
        if server.chained:
            told: Backward | None = None
            for rank in reversed(ranks):
                if told is not None:
                    send(told, rank)
                told = receive(Backward(_draws(like, sum(model.sizes[:rank]))), rank)
            server.pull, _ = server.back_substitute(noise.theta, told)
        if at_party and model.power:
            shares = server.share(values)
            for rank, share in zip(ranks, shares):
                send(share, rank)
            gradients = server.collect([receive(share, rank) for rank, share in zip(ranks, shares)], rate)
            for rank, gradient in zip(ranks, gradients):
                send(gradient, rank)
        elif at_party and server.response_shared:
            shares = server.share(values)
            server.evaluate(values, rate)
            for rank, share in zip(ranks, shares):
                send(share, rank)
        else:
            gradient = server.evaluate(values, rate)
            for rank in ranks:
                send(gradient, rank)


def _draws(value: Value, count: int) -> Tensor:
    """What a message `(B, M, count)` looks like."""
    return value.value.new_zeros(*value.value.shape[:2], count)


def _value_like(server: ServerNode) -> Value:
    """What a party's value looks like."""
    size, draws = server.gamma.shape[:2]
    rows = server.batch.y.shape[-1]
    return Value(server.gamma.new_zeros(size, draws, server.model.likelihood.outputs, rows))


class _Line:
    """Bytes between this rank and others, counted."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def send(self, message: Tree, to: int) -> None:
        payload = wire.encode(message)
        if payload:
            dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to)
            self.sent += len(payload)

    def receive(self, like: Any, source: int) -> Any:
        payload = torch.empty(wire.size(like), dtype=torch.uint8)
        if len(payload):
            dist.recv(payload, source)
            self.received += len(payload)
        return wire.decode(payload.numpy().tobytes(), like, client=f"rank {source}")
