r"""Training a vertical model among its nodes: values go up, gradients come down; the numbers are those of one graph.

`party_half` and `server_half` are the protocol; any driver runs them: `exchange` runs one iteration in one process and
`fedtorch.protocol.ranks.over_ranks` a node's half on its own rank, where all know every `Iteration` beforehand. The
same halves train `augmented` and `power` models and split networks, plain and hierarchical Bayes.

- *Response at the server* (augmented model): up z_j (or η_j with `sums`), down ∂L₀/∂z_j, with a sum at the cut layer
  the same for everybody.
- *Response with the parties* (augmented model, `response_shared=True`): up z_j, down the predictor b + o + Σ z and the
  likelihood's shared parameters; every party finds the gradient itself, and can do so again for further local steps
  with the others' z held.
- *Power model*, two exchanges: up z_j; down b + o + Σ_{k≠j} z_k and the shared parameters; up ∂L_{0,j}/∂ of these; down
  Σ_{k≠j} ∂L_{0,k}/∂z_j. The source sends all of z and J − 1 gradients; the sums are enough and are smaller.

With `sums` the server must only ever learn Σ_j η_j, which carries no noise of ρ: put a secure sum there.

A joint q(γ, θ) of full covariance adds one short message per party and iteration, of as many numbers as there are
coordinates before its own, in the order of the parties from last to first: the gradient of log q by back substitution
of L. One of low rank adds two, up and down, of r² + Mr numbers: each node has its rows of (μ, D, W) and all draw the
same noise of the factor, so that log q needs sums over the nodes only, by Woodbury's identity.

Several local steps per exchange keep the iteration's draws: with the response at the server the party moves along the
gradient that it was told (first order), with the response shared it computes it anew. (Plain networks can do it, too,
but nothing then holds z_j near what was sent.)

A party need not wait for the server in every iteration: `ahead` has halves of a bounded delay.

Who is idle is part of an `Iteration`: all know it beforehand (`bounded_delay` is a function of its key). An idle party
sends nothing, but for its link in the chain of a joint q, and the server goes on with what it last heard. The server
does not decide by the clock whom it goes on without, since numbers would depend on the machines' load.

Noise and dropout are functions of keys and steps. Who knows a key knows its noise: as long as all share the keys, it
hides nothing of z_j from the other nodes. Who does not know it sees g_j with other noise in every step, and the mean
over T steps has 1/√T of it: ρ hides little from who keeps what it was sent. Gradients go the other way: that of a row
has the sign of its residual, so that parties of a plain split network are as good as told the labels.

What a server makes of the messages of a power model and of a joint q(γ, θ), full and of low rank:

>>> import fedtorch as ft
>>> from fedtorch.vfl.nodes.node import Pooled, Share, Value
>>> from fedtorch.vfl.fit.part import parts
>>> def begun(make, guide):
...     key, model = random.key(0), make(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(1), ft.vfl.linear(1)], rho=1.0)
...     part = parts(model, guide, ft.vfl.fit.guide.initial(model, guide, 3, 1, key))[0]
...     server = ServerNode(part, ft.vfl.VerticalData((), torch.tensor([0.0, 1.0, 1.0])))
...     server.begin(Iteration(noise=ft.vfl.fit.noise.draw_noise(model, guide, key.reshape(1), rows=3, draws=1)))
...     return server
>>> server, rows = begun(ft.vfl.power, ft.vfl.Guide()), torch.ones(1, 1, 1, 3)
>>> server.values = [Value(rows), Value(rows)]
>>> asked = server.share()  # the parties answer with gradients, of 1 and of 2 in every row
>>> server.answers = [Share(each * rows, torch.zeros(1, 1, 0), None) for each in (1, 2)]
>>> [told.gradient.flatten().tolist() for told in server.collect(rate=0.1)]  # each the others'
[[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
>>> server = begun(ft.vfl.augmented, ft.vfl.Guide(ft.vfl.noiseless(), joint=True, sd=0.5))
>>> nobody_before = server.back_substitute(Backward(server.noise.theta[0] - 1))
>>> server.pull.round()  # (ε − what it was told) / L, with L = 0.5
tensor([[[2.]]])
>>> from fedtorch.vfl.fit.gaussians import low_rank
>>> server = begun(ft.vfl.augmented, ft.vfl.Guide(ft.vfl.noiseless(), low_rank(1), joint=True))
>>> own = server.pool()
>>> server.hear(Pooled(own.gram + 3, own.moment))  # the sums over all nodes
>>> server.rest.gram.round()  # of the parties
tensor([[[3.]]])

Source: Hassan et al., algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.progress import tracked
from fedtorch.protocol.halves import Half, Receive, Send, Traffic, together
from fedtorch.vfl.nodes.node import Backward, Gradient, Iteration, PartyNode, ServerNode


def party_half(party: PartyNode, iterations: Iterable[Iteration], local_steps: int = 1) -> Half:
    """A party's side of every iteration.

    Args:
        party: the node, trained in place.
        iterations: the same at every node.
        local_steps: steps that a party takes per exchange.

    Raises:
        ValueError: an idle party in the first iteration or with minibatches, whose rows would differ.

    >>> import torch, fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
    >>> bottoms, keys = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)], ft.random.key(0).reshape(1)
    >>> network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli(), keys=keys)
    >>> before = network.losses(data, 0)
    >>> server, parties = network.nodes(data, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    >>> iterations = [Iteration(step=step) for step in range(3)]
    >>> halves = {0: server_half(server, iterations)}
    >>> results, traffic = together(halves | {party.index: party_half(party, iterations) for party in parties})
    >>> bool(network.losses(data, 0) < before), traffic.up == traffic.down  # as many gradients as values
    (True, True)
    """
    model, own = party.model, party.index - 1
    for iteration in iterations:
        here = iteration.taking_part([party.values[own] is not None] * len(party.values))[own]
        if here:
            yield Send(0, party.propose(iteration))
        value = party.values[own].value  # type: ignore[union-attr]
        if here and party.pooled:
            yield Send(0, party.pool())
            party.hear((yield Receive(0, party.mine)))
        if party.chained:
            # The noise of this iteration, also where the rest is that of the last one.
            party.noise = iteration.noise or party.noise
            last = party.index == len(model.predictors)
            told = None if last else (yield Receive(0, _backward(value, sum(model.sizes[: party.index + 1]))))
            yield Send(0, party.back_substitute(told))
        if not here:
            continue
        share = None
        if party.apart and (model.power or party.response_shared):
            share = yield Receive(0, party.share_like())
        if share is not None and model.power:
            yield Send(0, party.answer(share))
        gradient = (yield Receive(0, Gradient(value))) if share is None or model.power else None
        party.update(gradient, share, iteration.rate, local_steps)


def server_half(server: ServerNode, iterations: Iterable[Iteration]) -> Half:
    """The server's side of every iteration; see `party_half`."""
    model, ranks = server.model, range(1, len(server.model.predictors) + 1)
    for iteration in tracked(iterations, "Vertical training", unit="iteration"):
        here = iteration.taking_part([value is not None for value in server.values])
        awake = [rank for rank, takes_part in zip(ranks, here) if takes_part]
        server.begin(iteration)
        for rank in awake:
            server.values[rank - 1] = yield Receive(rank, server.expected(rank - 1))
        if server.pooled:
            mine = server.pool()
            for rank in awake:
                server.pools[rank - 1] = yield Receive(rank, mine)
            sums = server.pooled_over()
            server.hear(sums)
            for rank in awake:
                yield Send(rank, sums)
        if server.chained:
            told: Backward | None = None
            for rank in reversed(ranks):
                if told is not None:
                    yield Send(rank, told)
                told = yield Receive(rank, _backward(server.theta, sum(model.sizes[:rank])))
            server.back_substitute(told)
        shares = server.share() if server.apart and (model.power or server.response_shared) else []
        for rank in awake if shares else ():
            yield Send(rank, shares[rank - 1])
        if shares and model.power:
            for rank in awake:
                server.answers[rank - 1] = yield Receive(rank, shares[rank - 1])
            gradients = server.collect(iteration.rate)
        else:
            gradients = server.evaluate(iteration.rate)
        for rank in awake if model.power or not shares else ():
            yield Send(rank, gradients[rank - 1])


def exchange(
    server: ServerNode, parties: Sequence[PartyNode], iteration: Iteration, *, local_steps: int = 1
) -> Traffic:
    """One iteration among nodes in one process; returns the bytes that it would send.

    Args:
        server: the server.
        parties: all parties.
        iteration: what all know of it; the server goes on with what it last heard of idle parties.
        local_steps: steps that a party takes per exchange.

    Raises:
        ValueError: an idle party that was never heard, or idle parties with minibatches, whose rows would differ.
    """
    if any(party.response_shared != server.response_shared for party in parties):
        raise ValueError("Expected one answer to response_shared from server and parties, but got different ones")
    halves = {0: server_half(server, [iteration])}
    halves |= {party.index: party_half(party, [iteration], local_steps) for party in parties}
    return together(halves)[1]


def bounded_delay(parties: int, delay: int, probability: float, key: Tensor) -> Iterator[list[bool]]:
    """Which parties take part in each iteration: at random, but nobody is away more than `delay` times running.

    Args:
        parties: J.
        delay: the largest age of what the server knows of a party, in iterations.
        probability: with which a party takes part.
        key: of the draws.

    Raises:
        ValueError: a negative delay, or a probability outside [0, 1].

    >>> from itertools import islice
    >>> never = bounded_delay(2, delay=1, probability=0.0, key=random.key(0))
    >>> list(islice(never, 4))  # who never wants to come, comes every other time
    [[True, True], [False, False], [True, True], [False, False]]
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


def _backward(like: Tensor, count: int) -> Backward:
    """What a message of the chain looks like, `(B, M, count)`."""
    return Backward(like.new_zeros(*like.shape[:2], count))
