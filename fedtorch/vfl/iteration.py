"""Iterations among nodes in one process, with the bytes that they would send; parties may be away for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, wire
from fedtorch.vfl.guide import Noise
from fedtorch.vfl.messages import Backward, Traffic, Value
from fedtorch.vfl.nodes import PartyNode, ServerNode, pooled

__all__ = ["Iteration", "bounded_delay", "exchange", "taking_part"]


class Iteration(NamedTuple):
    """What every node knows of an iteration before it begins."""

    noise: Noise
    rate: float  # Adam's learning rate
    rows: Tensor | None = None  # (m,) of a minibatch; all by default
    active: Sequence[bool] | None = None  # which parties take part; all by default


def taking_part(iteration: Iteration, heard: Sequence[bool]) -> list[bool]:
    """Which parties take part, of which the server has `heard` before or not.

    Raises:
        ValueError: an idle party that was never heard, or idle parties with minibatches, whose rows would differ.
    """
    here = [True] * len(heard) if iteration.active is None else list(iteration.active)
    if not all(here) and (iteration.rows is not None or not all(h or known for h, known in zip(here, heard))):
        raise ValueError("Expected all parties in the first iteration and with minibatches, but got idle ones")
    return here


def exchange(
    server: ServerNode,
    parties: Sequence[PartyNode],
    noise: Noise,
    rate: float,
    *,
    rows: Tensor | None = None,
    local_steps: int = 1,
    active: Sequence[bool] | None = None,
) -> Traffic:
    """One iteration among nodes in one process, with the bytes that it would send.

    Args:
        server: the server.
        parties: all parties.
        noise: of the iteration.
        rate: Adam's learning rate.
        rows: of a minibatch.
        local_steps: steps that a party takes per exchange.
        active: which parties take part; the server goes on with what it last heard of the others, see `bounded_delay`.

    Raises:
        ValueError: an idle party that was never heard, or idle parties with minibatches, whose rows would differ.
    """
    if any(party.response_shared != server.response_shared for party in parties):
        raise ValueError("Expected one answer to response_shared from server and parties, but got different ones")
    here = taking_part(Iteration(noise, rate, rows, active), [party.heard for party in parties])
    server.begin(noise, rows)
    awake = [party for party, takes_part in zip(parties, here) if takes_part]
    up = [wire.size(party.propose(noise, rows)) for party in awake]
    joint = _pool(server, parties, awake) if server.pooled else Traffic(0, 0)
    if server.chained:
        joint = _back_substitute(server, parties, noise)
    values = [party.value for party in parties]
    at_party = server.guide.auxiliary.party is not None
    if at_party and server.model.power:
        told = _twice(server, parties, awake, values, rate, local_steps)
    elif at_party and server.response_shared:
        shares = server.share(values)
        server.evaluate(values, rate)
        for party in awake:
            party.update(None, shares[party.index - 1], rate, local_steps)
        told = Traffic(0, sum(wire.size(shares[party.index - 1]) for party in awake))
    else:
        gradient = server.evaluate(values, rate)
        for party in awake:
            party.update(gradient, None, rate, local_steps)
        told = Traffic(0, wire.size(gradient) * len(awake))
    return Traffic(sum(up) + joint.up + told.up, joint.down + told.down)


def _back_substitute(server: ServerNode, parties: Sequence[PartyNode], noise: Noise) -> Traffic:
    """L⁻ᵀε of a joint q, from the last party to the server, through which the messages pass."""
    told: Backward | None = None
    up = down = 0
    for party in reversed(parties):
        down += 0 if told is None else wire.size(told)
        party.pull, told = party.back_substitute(noise.theta, told)
        up += wire.size(told)
    server.pull, _ = server.back_substitute(noise.theta, told)
    return Traffic(up, down)


def _pool(server: ServerNode, parties: Sequence[PartyNode], awake: Sequence[PartyNode]) -> Traffic:
    """The sums that a joint q of low rank needs; of idle parties what was last heard."""
    up = sum(wire.size(party.pool(party.theta)) for party in awake)
    server.pool(server.gamma)
    sums = pooled([node.mine for node in (server, *parties)])
    for node in (server, *awake):
        node.hear(sums)
    return Traffic(up, wire.size(sums) * len(awake))


def _twice(
    server: ServerNode,
    parties: Sequence[PartyNode],
    awake: Sequence[PartyNode],
    values: Sequence[Value],
    rate: float,
    local_steps: int,
) -> Traffic:
    """The power model's two exchanges after the values have come."""
    shares = server.share(values)
    up = down = 0
    for party in awake:
        share = shares[party.index - 1]
        down, up = down + wire.size(share), up + wire.size(party.answer(share))
    gradients = server.collect([party.reply for party in parties], rate)
    for party in awake:
        gradient = gradients[party.index - 1]
        down += wire.size(gradient)
        party.update(gradient, shares[party.index - 1], rate, local_steps)
    return Traffic(up, down)


def bounded_delay(parties: int, delay: int, probability: float, key: Tensor) -> Iterator[list[bool]]:
    """Which parties take part in each iteration: at random, but nobody is away more than `delay` times running.

    Args:
        parties: J.
        delay: the largest age of what the server knows of a party, in iterations.
        probability: with which a party takes part.
        key: of the draws.

    Raises:
        ValueError: a negative delay, or a probability outside [0, 1].
    """
    if delay < 0 or not 0 <= probability <= 1:
        raise ValueError(f"Expected delay ≥ 0 and a probability in [0, 1], but got {delay} and {probability}")
    away = torch.full((parties,), delay, device=key.device)
    step = 0
    while True:
        present = random.bernoulli(random.fold_in(key, step), probability, (parties,)) | (away >= delay)
        away = torch.where(present, 0, away + 1)
        step += 1
        yield present.tolist()
