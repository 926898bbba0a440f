r"""Parties that run ahead of the server, so that an iteration does not wait for a message there and back.

A party has to wait for the gradient of what it sent before it goes on: over a line of 50 ms, 100 ms an iteration. With
a bounded delay s it sends its values of up to s iterations more before it takes the first gradient, so that s + 1 round
trips are under way at once, and an iteration takes the time of one over s + 1, or that of its computation if that is
longer. The server's half is `iteration.server_half` as it is.

    half = ahead_half(party, iterations, delay=4)              # in place of party_half(party, iterations)

What it changes: in iteration t the party's parameters have had the gradients up to iteration t − s − 1. The gradient
with respect to what it sent then, :math:`\partial L_0 / \partial z_j^{(t)}`, comes s iterations later; it is taken
through the party's network as that is now, with the rows and noise of iteration t, whose contribution is computed once
more. So this is asynchronous: for s > 0 its numbers are not those of `party_half`, but its own, the same whatever the
lines' speed, since it is the numbering of iterations that says what is late, and no clock. It has the same stationary
points; a step that is near the largest for s = 0 has to be smaller, for a quadratic of curvature L below
:math:`2 \sin(\pi / (4s + 2)) / L` in place of :math:`2 / L`. With s = 0 it is `party_half`, bit by bit.

It runs wherever an iteration of the party is one message up and one down: split networks, plain and hierarchical Bayes,
and SFVI of augmented models, the response at the server or shared. A power model and a joint q(γ, θ) with the landing
stuck to need what all have said before anybody can go on.

The link's `Limits.ahead` frames that wait in each direction are room for s of twice as many.

Source: Chen, Jin, Sun, Yin, "VAFL: a method of vertical asynchronous federated learning", 2020, arXiv:2007.06081, whose
clients' delay is bounded; the largest step is that at which :math:`x_{t+1} = x_t - \eta L x_{t-s}` is still stable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fedtorch import expected
from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.vfl.nodes.node import Gradient, Iteration, PartyNode, Value


def ahead_half(party: PartyNode, iterations: Iterable[Iteration], delay: int, local_steps: int = 1) -> Half:
    """A party's side of every iteration, which runs ahead; see `iteration.party_half`.

    Args:
        party: the node, trained in place.
        iterations: the same at every node.
        delay: s, iterations by which a gradient is late at most; at the end all are taken.
        local_steps: steps that a party takes per gradient.

    Raises:
        ValueError: a negative delay, or a model of whose iterations one cannot begin before the last has ended.

    >>> import torch, fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1),), torch.tensor([0.0, 1.0, 1.0]))
    >>> keys = ft.random.key(0).reshape(1)
    >>> network = ft.vfl.SplitNetwork([torch.nn.Linear(1, 1)], ft.vfl.likelihoods.bernoulli(), keys=keys)
    >>> server, parties = network.nodes(data)
    >>> half = ahead_half(parties[0], [Iteration(step=step) for step in range(10)], delay=2)
    >>> [type(next(half)).__name__ for _ in range(4)]  # the values of three iterations go before the first gradient
    ['Send', 'Send', 'Send', 'Receive']
    """
    expected.not_negative(delay=delay)
    if party.model.power or party.pooled or party.chained:
        raise ValueError("Expected an iteration of one message up and one down, but got a power model or a joint q")
    late: deque[tuple[int, Iteration, Value]] = deque()
    for number, iteration in enumerate(iterations):
        known = [party.values[party.index - 1] is not None] * len(party.values)
        if iteration.taking_part(known)[party.index - 1]:
            value = party.propose(iteration)
            yield Send(0, value)
            late.append((number, iteration, value))
        while late and late[0][0] <= number - delay:
            yield from _catch_up(party, *late.popleft()[1:], bool(delay), local_steps)
    while late:
        yield from _catch_up(party, *late.popleft()[1:], bool(delay), local_steps)


def _catch_up(party: PartyNode, iteration: Iteration, value: Value, again: bool, local_steps: int) -> Half:
    """Takes the gradient of what was sent in an iteration, which is computed `again` where it is not the last."""
    if again:
        party.recall(iteration, value)
    shared = party.apart and party.response_shared
    answer = yield Receive(0, party.share_like() if shared else Gradient(value.value))
    gradient, share = (None, answer) if shared else (answer, None)
    party.update(gradient, share, iteration.rate, local_steps)
