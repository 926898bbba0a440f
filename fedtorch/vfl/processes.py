"""One process per party: the messages of `fedtorch.vfl.messages` over a process group.

Start J + 1 processes with `torchrun`: rank 0 is the server, rank j party j − 1. Every process calls `run_node` with its
own data only; nothing else leaves it. The noise is a function of the key, so that a joint q(γ, θ) needs no exchange of
noise, and the numbers are those of `sfvi` and `exchange`.

Who is idle is part of an `Iteration`: all know it beforehand (`bounded_delay` is a function of its key). An idle party
sends nothing, but for its link in the chain of a joint q, and the server goes on with what it last heard. The server
does not decide by the clock whom it goes on without, since numbers would depend on the machines' load; a party that
should answer and does not ends the run after `timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch import Tensor

from fedtorch.tree import Tree
from fedtorch.vfl.iteration import Iteration, taking_part
from fedtorch.vfl.line import TIMEOUT, Line
from fedtorch.vfl.messages import Backward, Gradient, Pooled, Share, Traffic, Value
from fedtorch.vfl.nodes import PartyNode, ServerNode, pooled

__all__ = ["run_node", "run_party", "run_server"]


def run_node(
    node: ServerNode | PartyNode,
    iterations: Iterable[Iteration],
    *,
    local_steps: int = 1,
    timeout: timedelta = TIMEOUT,
) -> Traffic:
    """Runs this process's node; returns the bytes that it sent (up) and received (down), the other way at the server.

    Args:
        node: the server on rank 0, party j − 1 on rank j.
        iterations: the same on every rank.
        local_steps: steps that a party takes per exchange.
        timeout: the longest wait for another rank.

    Raises:
        RuntimeError: no process group, one of another size than the model's parties and a server, or a rank that does
            not answer in time.
        ValueError: an idle party in the first iteration or with minibatches.
        fedtorch.wire.PayloadError: a message that is not what was expected.
    """
    line = Line(node.index, len(node.model.predictors) + 1, timeout)
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
    for iteration in iterations:
        here = taking_part(iteration, [party.heard] * len(model.predictors))[party.index - 1]
        if here:
            send(party.propose(iteration.noise, iteration.rows), 0)
        value = party.value
        if here and party.pooled:
            mine = party.pool(party.theta)
            send(mine, 0)
            party.hear(receive(mine, 0))
        if party.chained:
            told = None
            if party.index < len(model.predictors):
                told = receive(Backward(_draws(value, sum(model.sizes[: party.index + 1]))), 0)
            party.pull, tell = party.back_substitute(iteration.noise.theta, told)
            send(tell, 0)
        if not here:
            continue
        share = None
        if at_party and (model.power or party.response_shared):
            shared = _draws(value, len(model.likelihood.shared))
            weight = None if model.concentration is None else value.value[:, 0, 0, 0]
            share = receive(Share(value.value, shared, weight), 0)
        if at_party and model.power:
            assert share is not None
            send(party.answer(share), 0)
        gradient = receive(Gradient(value.value), 0) if share is None or model.power else None
        party.update(gradient, share, iteration.rate, local_steps)


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
    values: dict[int, Value] = {}  # what was last heard
    pools: dict[int, Pooled] = {}
    answers: dict[int, Share] = {}
    for iteration in iterations:
        here = taking_part(iteration, [rank in values for rank in ranks])
        awake = [rank for rank, takes_part in zip(ranks, here) if takes_part]
        server.begin(iteration.noise, iteration.rows)
        like = _value_like(server)
        values.update({rank: receive(like, rank) for rank in awake})
        heard = [values[rank] for rank in ranks]
        if server.pooled:
            mine = server.pool(server.gamma)
            pools.update({rank: receive(mine, rank) for rank in awake})
            sums = pooled([mine, *(pools[rank] for rank in ranks)])
            for rank in awake:
                send(sums, rank)
            server.hear(sums)
        if server.chained:
            told: Backward | None = None
            for rank in reversed(ranks):
                if told is not None:
                    send(told, rank)
                told = receive(Backward(_draws(like, sum(model.sizes[:rank]))), rank)
            server.pull, _ = server.back_substitute(iteration.noise.theta, told)
        if at_party and model.power:
            shares = server.share(heard)
            for rank in awake:
                send(shares[rank - 1], rank)
            answers.update({rank: receive(shares[rank - 1], rank) for rank in awake})
            gradients = server.collect([answers[rank] for rank in ranks], iteration.rate)
            for rank in awake:
                send(gradients[rank - 1], rank)
        elif at_party and server.response_shared:
            shares = server.share(heard)
            server.evaluate(heard, iteration.rate)
            for rank in awake:
                send(shares[rank - 1], rank)
        else:
            gradient = server.evaluate(heard, iteration.rate)
            for rank in awake:
                send(gradient, rank)


def _draws(value: Value, count: int) -> Tensor:
    """What a message `(B, M, count)` looks like."""
    return value.value.new_zeros(*value.value.shape[:2], count)


def _value_like(server: ServerNode) -> Value:
    """What a party's value looks like."""
    size, draws = server.gamma.shape[:2]
    rows = server.batch.y.shape[-1]
    return Value(server.gamma.new_zeros(size, draws, server.model.likelihood.outputs, rows))
