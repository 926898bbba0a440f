r"""Training a vertical model among its nodes: values go up, gradients come down, with the numbers of one graph.

`party_half` and `server_half` are the two ends, for any driver: `exchange` runs one iteration in one process, and
`fedtorch.protocol.ranks.over_ranks` runs each node's half on its own rank, where all nodes know every `Iteration`
beforehand. The same halves train `augmented` and `power` models and split networks, plain and hierarchical Bayes. In
an iteration every party first sends z_j (or η_j with `sums`) up. One of three protocols follows:

- *Values and gradients*, for a response at the server: down ∂L₀/∂z_j, which is the same for all parties if the cut
  layer is a sum.
- *A shared response* (augmented model, `response_shared=True`): down the predictor b + o + Σ z and the likelihood's
  shared parameters. Every party computes the gradient itself, and can compute it anew for further local steps, with
  the others' z fixed.
- *Power*, two exchanges: down b + o + Σ_{k≠j} z_k and the shared parameters; up ∂L_{0,j}/∂ of these; down Σ_{k≠j}
  ∂L_{0,k}/∂z_j. The source sends all of z and J − 1 gradients; the sums are enough and are smaller.

With `sums` the server must learn no more than Σ_j η_j, which has no noise of ρ. So η_j leaves a party's process only
as a summand of a secure sum: wrap a party's half in `fedtorch.sites.secure.masked_party` and the server's in
`masked_server`. Without them the first message is refused, unless the party sets `accept_disclosure=True`. Masks need
all parties in every iteration, so that idle parties and clocks require this argument. Masks are bound to
`PartyNode.history`, a digest of all messages received since the node was made, and cancel only among parties that have
received the same messages; parties therefore have one `delay`. A joint q(γ, θ) has no protocol among nodes:
`fedtorch.vfl.sfvi` fits it in one graph, in one process that holds all parties' columns.

Several local steps per exchange use the same draws. With the response at the server the party moves along the gradient
that it received (first order); with the response shared it computes the gradient anew. (Plain networks can take local
steps, too, but then nothing holds z_j near the value sent.)

*Bounded delay.* Without a delay, a party waits for the gradient of its value before its next iteration: over a
connection with a latency of 50 ms, an iteration takes 100 ms. With `delay=s` it sends the values of up to s more
iterations before it takes the first gradient. Then s + 1 round trips are under way at once, and an iteration takes
1/(s + 1) of a round trip, or the time of its computation if that is longer. In iteration t the party's parameters have
the gradients up to iteration t − s − 1. The gradient with respect to its value, :math:`\partial L_0 / \partial
z_j^{(t)}`, comes s iterations later. The party then computes its contribution once more, with its present network and
the rows and noise of iteration t, and backpropagates the gradient through that. So training is asynchronous. For s > 0
the result differs from that of s = 0, but does not depend on the speed of connections, since delays are counted in
iterations and not by a clock. The stationary points are the same. A step size near the largest for s = 0 has to be
smaller: for a quadratic of curvature L, below :math:`2 \sin(\pi / (4s + 2)) / L` in place of :math:`2 / L`. The
`Limits.ahead` frames that wait in each direction of a link allow an s of twice as many.

*Idle parties.* `Iteration.active` says which parties take part, and all know it beforehand (`bounded_delay` is a
function of its key). An idle party sends nothing, and the server uses the last value that it received.

*By the clock.* With `tick=` seconds at the server and `clocked=True` at the parties, a tick ends after these seconds
or as soon as all parties have answered. A late party is answered in the tick in which its value arrives, however late.
The result then depends on the machines' load: it is that of `fedtorch.vfl.nodes.clock` with the delays that occurred,
which the server's half returns. If a party never answers again, the protocol ends after the last tick, when the driver
has waited its longest, with an error that names the party; a stream that ends does so at once.

Noise and dropout are functions of keys and steps. Whoever knows a key knows its noise: while all nodes share the keys,
the noise hides nothing of z_j from them. A node without the key sees g_j with new noise in every step, and the mean
over T steps has 1/√T of it: the noise ρ of `amortised` is part of a model, and no protection. Nor does any privacy
accountant cover noise drawn at a party. A party's parameters depend on all its rows, so that a row affects the values
of all other rows too, and noise on the scale of one row's value bounds nothing; each step of the parameters would need
noise as well. The labels leak through the gradients: that of a row has the sign of its residual, which practically
reveals the labels to the parties of a plain split network.

Sources: Hassan et al., algorithms 1 and 2. Chen, Jin, Sun, Yin, "VAFL: a method of vertical asynchronous federated
learning", 2020, arXiv:2007.06081, whose clients' delay is bounded; the largest step is that at which
:math:`x_{t+1} = x_t - \eta L x_{t-s}` is still stable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, random, tree
from fedtorch._representation import without_rows
from fedtorch.learns import Learns, tells
from fedtorch.progress import tracked
from fedtorch.protocol.halves import Half, Receive, Send, Traffic, together, wrapped
from fedtorch.vfl.fit.bound import ascend, server_bound, shared_terms
from fedtorch.vfl.model.vertical import summed
from fedtorch.vfl.nodes.node import Drawn, Gradient, Iteration, PartyNode, Proposal, ServerNode, Share, Summand, Value


class Protocol(NamedTuple):
    """The rest of an iteration at both ends, after the parties' values have arrived at the server."""

    party: Callable[[PartyNode, Proposal, float | None, int], Half]  # node, its proposal, learning rate, local steps
    server: Callable[
        [ServerNode, Drawn, Sequence[int], float | None], Half
    ]  # node, draws, parties that take part, rate


def protocol_of(node: PartyNode | ServerNode) -> Protocol:
    """Return the protocol of a node's model and guide.

    >>> import torch, fedtorch as ft
    >>> network = ft.vfl.SplitNetwork([torch.nn.Linear(1, 1)], ft.vfl.likelihoods.bernoulli())
    >>> server, _ = network.nodes(ft.vfl.VerticalData((torch.ones(2, 1),), torch.ones(2)))
    >>> protocol_of(server) is VALUES_AND_GRADIENTS
    True
    """
    if node.guide.auxiliary.party is None:  # the server evaluates the whole likelihood
        return VALUES_AND_GRADIENTS
    if node.model.power:
        return POWER
    return SHARED_RESPONSE if node.response_shared else VALUES_AND_GRADIENTS


def _take_gradient(party: PartyNode, proposal: Proposal, rate: float | None, local_steps: int) -> Half:
    answer = yield Receive(0, Gradient(proposal.sent))
    party.climb(proposal, gradient=answer.gradient, rate=rate, local_steps=local_steps)


def _send_gradients(server: ServerNode, drawn: Drawn, ranks: Sequence[int], rate: float | None) -> Half:
    gradients = _evaluated(server, drawn, rate)
    for rank in ranks:
        yield Send(rank, gradients[rank - 1])


def _evaluated(server: ServerNode, drawn: Drawn, rate: float | None) -> list[Gradient]:
    """Evaluate the likelihood at the server and move γ; return the gradients with respect to the parties' values."""
    values = [value.detach().requires_grad_() for value in server.last_values()]
    bound = server_bound(server.model, server.guide, server.q, drawn.theta, values, None, drawn.rows, drawn.noise)
    objective = server.scaled(bound + server.minus_log_q(drawn.theta))
    server.terms = objective.detach()
    return [Gradient(gradient) for gradient in ascend(server.optimizer, objective, rate, values)]


def _take_share(party: PartyNode, proposal: Proposal, rate: float | None, local_steps: int) -> Half:
    share = yield Receive(0, _share_like(party, proposal))
    # The predictor includes the z_j that was sent.
    likelihood = lambda now: _likelihood(party, now, share, now.value - now.sent)
    party.climb(proposal, likelihood=likelihood, rate=rate, local_steps=local_steps)


def _send_shares(server: ServerNode, drawn: Drawn, ranks: Sequence[int], rate: float | None) -> Half:
    centre, shared = _centre(server, drawn)
    for rank in ranks:
        yield Send(rank, Share(centre.detach(), shared.detach(), None))
    _evaluated(server, drawn, rate)


def _take_share_and_gradient(party: PartyNode, proposal: Proposal, rate: float | None, local_steps: int) -> Half:
    share = yield Receive(0, _share_like(party, proposal))
    likelihood = lambda now, share=share: _weighted(party, _likelihood(party, now, share, now.eta), share)
    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), share)
    value = likelihood(proposal, leaves).sum()
    gradients = torch.autograd.grad(value, tree.leaves(leaves), retain_graph=True, allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in tree.leaves(leaves)]
    yield Send(0, tree.refill(share, [zero if g is None else g for g, zero in zip(gradients, zeros)]))
    answer = yield Receive(0, Gradient(proposal.sent))
    party.climb(proposal, gradient=answer.gradient, likelihood=likelihood, rate=rate, local_steps=local_steps)


def _send_shares_and_gradients(server: ServerNode, drawn: Drawn, ranks: Sequence[int], rate: float | None) -> Half:
    """Run the power model's two exchanges: each party receives sums over the others, of predictors and of gradients."""
    centre, shared = _centre(server, drawn)
    terms, weights = shared_terms(server.model, server.q, drawn.theta, drawn.rows)
    values = server.last_values()
    each = [None] * len(values) if weights is None else list(weights.unbind(1))
    shares = [Share(centre - value, shared, weight) for value, weight in zip(values, each)]
    for rank in ranks:
        yield Send(rank, tree.map(torch.detach, shares[rank - 1]))
    for rank in ranks:
        server.answers[rank - 1] = yield Receive(rank, shares[rank - 1])
    answers = [answer for answer in server.answers if answer is not None]
    objective = terms + server.minus_log_q(drawn.theta)
    for share, answer in zip(shares, answers):
        for value, gradient in zip(tree.leaves(share), tree.leaves(answer)):
            # A weight is the same for all draws: its gradient is the sum over them.
            inner = (value * gradient).flatten(2).sum(2) if value.ndim > 1 else (value * gradient)[:, None]
            objective = objective + (inner if value.ndim > 1 else inner / objective.shape[1])
    ascend(server.optimizer, server.scaled(objective), rate)
    total = summed([answer.predictor for answer in answers])
    for rank in ranks:
        yield Send(rank, Gradient(total - answers[rank - 1].predictor))


def _centre(server: ServerNode, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Return intercept + offset + Σ z, `(B, M, C, n)`, and the likelihood's own parameters."""
    combined = server.model.cut(server.last_values(), *drawn.noise.keys[:1])
    return server.model.centre(drawn.theta, combined, drawn.rows.offset)


def _share_like(party: PartyNode, proposal: Proposal) -> Share:
    """Return a `Share` of the shapes for this party."""
    value, model = proposal.sent, party.model
    weight = None if model.concentration is None else value[:, 0, 0, 0]
    return Share(value, value.new_zeros(*value.shape[:2], len(model.likelihood.shared)), weight)


def _likelihood(party: PartyNode, proposal: Proposal, share: Share, added: Tensor) -> Tensor:
    """Return the log-likelihood of the share's predictor plus `added`, `(B, M)`."""
    rows = proposal.drawn.rows
    return rows.weighted_sum(party.model.likelihood.log_prob(rows.y, share.predictor + added, share.shared))


def _weighted(party: PartyNode, total: Tensor, share: Share) -> Tensor:
    """Return a party's log-likelihood, times its weight in the power model."""
    return total / len(party.model.predictors) if share.weight is None else share.weight[:, None] * total


VALUES_AND_GRADIENTS = Protocol(_take_gradient, _send_gradients)
SHARED_RESPONSE = Protocol(_take_share, _send_shares)
POWER = Protocol(_take_share_and_gradient, _send_shares_and_gradients)


@tells(Learns("nothing of rows"))
@without_rows
class More(NamedTuple):
    """Down by the clock: whether an answer follows, or the protocol ends."""

    more: Tensor  # (1,) uint8


_MORE = More(torch.ones(1, dtype=torch.uint8))


def party_half(
    party: PartyNode,
    iterations: Iterable[Iteration],
    local_steps: int = 1,
    delay: int = 0,
    *,
    clocked: bool = False,
    accept_disclosure: bool = False,
) -> Half:
    """Run a party's side of every iteration.

    With `sums` the party sends η_j itself, which must leave this process under the masks of
    `sites.secure.masked_party`: a driver over ranks or streams refuses it without them.

    Args:
        party: the node, trained in place.
        iterations: the same at every node; by the clock the party's own, at least as many as it will need.
        local_steps: steps that a party takes per exchange.
        delay: s, iterations by which a gradient is late at most; at the end all are taken. Under masks all parties
            have the same.
        clocked: whether the server proceeds by its clock (`tick=` there) and sends the end of the protocol.
        accept_disclosure: whether η_j of `sums` may leave without masks, to a server that may learn this party's
            predictor of every row in every iteration, and all that can be inferred from it.

    Raises:
        ValueError: an idle party in the first iteration or with minibatches, whose rows would differ; a negative delay,
            or a delay in the power model's protocol, where an iteration cannot begin before the last has ended; by the
            clock a delay, the power model's protocol, or iterations with noise, rows or active parties; values that
            are not finite, with the party and the row.

    >>> import torch, fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
    >>> bottoms = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
    >>> network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli())
    >>> before = network.losses(data, 0)
    >>> server, parties = network.nodes(data, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    >>> iterations = [Iteration(step=step) for step in range(3)]
    >>> halves = {0: server_half(server, iterations)}
    >>> results, traffic = together(halves | {party.index: party_half(party, iterations) for party in parties})
    >>> bool(network.losses(data, 0) < before), traffic.up == traffic.down  # as many gradients as values
    (True, True)
    >>> half = party_half(parties[0], [Iteration(step=step) for step in range(3, 13)], delay=2)
    >>> [type(next(half)).__name__ for _ in range(4)]  # the values of three iterations go before the first gradient
    ['Send', 'Send', 'Send', 'Receive']
    """
    if delay < 0:
        raise ValueError(f"Expected delay of at least 0, but got {delay}")
    summed = party.guide.auxiliary.server is not None and not accept_disclosure
    if (delay or clocked) and protocol_of(party) is POWER:
        raise ValueError("Expected an iteration of one message up and one down, but got a power model")
    if clocked:
        if delay:
            raise ValueError(f"Expected no delay by the clock, where the server never waits, but got {delay}")
        return (yield from _by_the_clock(party, iterations, local_steps, summed))
    half = unbound_half(party, iterations, local_steps, delay, summed)
    return (yield from wrapped(half, partial(_bound, party, party.start())))


def _bound(party: PartyNode, start: bytes, step: Send | Receive) -> Half:
    """Take a step of a party's half, binding each message to the party's start and the history of what it received."""
    if isinstance(step, Send):
        return (yield step._replace(bound=party.history, start=start))
    message = yield step
    party.note(message)
    return message


def unbound_half(
    party: PartyNode, iterations: Iterable[Iteration], local_steps: int = 1, delay: int = 0, summed: bool = False
) -> Half:
    """Run a party's side without its history, which is not needed within one process; see `party_half`."""
    protocol = protocol_of(party)
    waiting: deque[tuple[int, Iteration, Proposal]] = deque()  # for their gradients
    for number, iteration in enumerate(iterations):
        if party.takes_part(iteration):
            proposal = party.propose(iteration)
            yield Send(0, _value(party, iteration, proposal), summed=summed)
            party.has_sent = True
            waiting.append((number, iteration, proposal))
        while waiting and waiting[0][0] <= number - delay:
            yield from _finish(party, protocol, *waiting.popleft()[1:], local_steps, bool(delay))
    while waiting:
        yield from _finish(party, protocol, *waiting.popleft()[1:], local_steps, bool(delay))


def _value(party: PartyNode, iteration: Iteration, proposal: Proposal) -> Value | Summand:
    """Return the party's message; raise ValueError, before any node has moved, if it is not finite.

    A summand is checked by the server: under masks, others would see that this party has refused.
    """
    if party.value is not Summand:
        _check_finite(proposal.sent, party.part.name, iteration)
    return party.value(proposal.sent)


def _check_finite(value: Tensor, name: str, iteration: Iteration) -> None:
    bad = ~value.isfinite()
    if bool(bad.any()):
        row = int(bad.flatten(end_dim=-2).any(0).nonzero()[0])
        row = row if iteration.rows is None else int(iteration.rows[row])
        raise ValueError(
            f"Expected finite values of party {name!r}, but got NaN or Inf for aligned row {row} in step "
            f"{iteration.step}; look at its features there, or train with smaller steps"
        )


def _store(server: ServerNode, rank: int, value: Value | Summand, iteration: Iteration) -> None:
    """Store a party's value; raise ValueError, before any node has moved, if a summand is not finite."""
    if isinstance(value, Summand):
        _check_finite(value.value, f"number {rank}", iteration)
    server.values[rank - 1] = value


def _finish(
    party: PartyNode, protocol: Protocol, iteration: Iteration, proposal: Proposal, local_steps: int, late: bool
) -> Half:
    """Receive the gradients and take the steps; a `late` proposal is made anew with the present parameters."""
    if late:
        proposal = party.propose(iteration)._replace(sent=proposal.sent)
    yield from protocol.party(party, proposal, iteration.rate, local_steps)


def _by_the_clock(party: PartyNode, iterations: Iterable[Iteration], local_steps: int, summed: bool) -> Half:
    """Send values, each after the last is answered, until the server ends the protocol."""
    for iteration in iterations:
        _check_clocked(party, iteration)
        proposal = party.propose(iteration)
        yield Send(0, _value(party, iteration, proposal), summed=summed)
        party.has_sent = True
        if not bool((yield Receive(0, _MORE)).more):
            return
        yield from protocol_of(party).party(party, proposal, iteration.rate, local_steps)
    raise RuntimeError(f"Expected more iterations than the server's ticks, but {party.part.name!r} has come to an end")


def server_half(server: ServerNode, iterations: Iterable[Iteration], *, tick: float | None = None) -> Half:
    """Run the server's side of every iteration; see `party_half`.

    Args:
        server: the node, trained in place.
        iterations: the same at every node; by the clock the ticks.
        tick: seconds after which the server proceeds by its clock, with the last values of late parties; None waits
            for all. With ticks, the half returns for each tick a list of the parties answered, from 0 on.

    Raises:
        ValueError: as `party_half` does; or a tick that is not positive.

    >>> import torch, itertools, fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
    >>> bottoms = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
    >>> network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli())
    >>> server, parties = network.nodes(data)
    >>> endless = lambda: (Iteration(step=step) for step in itertools.count())
    >>> halves = {0: server_half(server, [Iteration(step=step) for step in range(2)], tick=0.5)}
    >>> results, _ = together(halves | {party.index: party_half(party, endless(), clocked=True) for party in parties})
    >>> results[0]  # no party is late waiting
    [[0, 1], [0, 1]]
    """
    watched = tracked(iterations, "Vertical training", unit="iteration")
    if tick is not None:
        return (yield from _ticking(server, watched, tick))
    for iteration in watched:
        yield from _iterated(server, iteration)


def _ticking(server: ServerNode, ticks: Iterable[Iteration], seconds: float) -> Half:
    """Run the ticks; return the parties answered in each, and end the protocol at every party."""
    expected.positive(tick=seconds)
    if protocol_of(server) is POWER:
        raise ValueError("Expected an iteration of one message up and one down, but got a power model")
    every = range(1, len(server.values) + 1)
    waiting: set[int] = set()  # parties that wait for an answer
    answered_in: list[list[int]] = []
    for tick in ticks:
        _check_clocked(server, tick)
        drawn, away = server.draw(tick), tuple(rank for rank in every if rank not in waiting)
        likes = tuple(server.expected(rank - 1, drawn) for rank in away)
        came = yield Receive(away, None, likes=likes, seconds=seconds)
        for rank, value in came.messages.items():
            _store(server, rank, value, tick)
        waiting.update(came.messages)
        complete = all(value is not None for value in server.values)
        answered = sorted(waiting) if complete else []
        answered_in.append([rank - 1 for rank in answered])
        if complete:
            for rank in answered:
                yield Send(rank, _MORE)
            yield from protocol_of(server).server(server, drawn, answered, tick.rate)
            waiting.clear()
    for rank in every:
        if rank not in waiting:  # its value is received and not used
            yield Receive(rank, server.expected(rank - 1, server.draw(Iteration())))
        yield Send(rank, More(torch.zeros_like(_MORE.more)))
    return answered_in


def _check_clocked(node: ServerNode | PartyNode, iteration: Iteration) -> None:
    """Raise ValueError for noise, rows or active parties, which nodes share only in synchronous iterations."""
    if iteration.noise is not None or iteration.rows is not None or iteration.active is not None:
        raise ValueError(
            "Expected iterations of a step and a rate alone by the clock, where nodes are not synchronous, but got "
            "noise, rows or active parties"
        )
    if node.part.key is None:
        raise ValueError("Expected parts that draw their own noise, but got others; give vfl.parts(..., key=)")


def _iterated(server: ServerNode, iteration: Iteration) -> Half:
    """Run the server's side of one iteration."""
    active = iteration.taking_part([value is not None for value in server.values])
    ranks = [rank for rank, takes_part in enumerate(active, start=1) if takes_part]
    drawn = server.draw(iteration)
    for rank in ranks:
        _store(server, rank, (yield Receive(rank, server.expected(rank - 1, drawn))), iteration)
    yield from protocol_of(server).server(server, drawn, ranks, iteration.rate)


def exchange(
    server: ServerNode, parties: Sequence[PartyNode], iteration: Iteration, *, local_steps: int = 1
) -> Traffic:
    """Run one iteration among nodes in one process; return the bytes that it would send.

    Args:
        server: the server.
        parties: all parties.
        iteration: as all nodes know it; of idle parties the server uses the last values.
        local_steps: steps that a party takes per exchange.

    Raises:
        ValueError: an idle party that has sent no value yet, or idle parties with minibatches, whose rows would differ.
    """
    if any(party.response_shared != server.response_shared for party in parties):
        raise ValueError("Expected one answer to response_shared from server and parties, but got different ones")
    halves = {0: _iterated(server, iteration)}
    halves |= {party.index: unbound_half(party, [iteration], local_steps) for party in parties}
    return together(halves)[1]


def bounded_delay(parties: int, delay: int, probability: float, key: Tensor) -> Iterator[list[bool]]:
    """Draw which parties take part in each iteration, at random; none is idle more than `delay` times in a row.

    Args:
        parties: J.
        delay: the largest age of a party's value at the server, in iterations.
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
