r"""Training a vertical model among its nodes: values go up, gradients come down; the numbers are those of one graph.

`party_half` and `server_half` are the two ends; any driver runs them: `exchange` runs one iteration in one process and
`fedtorch.protocol.ranks.over_ranks` a node's half on its own rank, where all know every `Iteration` beforehand. The
same halves train `augmented` and `power` models and split networks, plain and hierarchical Bayes. An iteration begins
with every party's z_j (or η_j with `sums`) going up, and goes on by one of three protocols:

- *Values and gradients*, of a response at the server: down ∂L₀/∂z_j, with a sum at the cut layer the same for
  everybody.
- *A shared response* (augmented model, `response_shared=True`): down the predictor b + o + Σ z and the likelihood's
  shared parameters; every party finds the gradient itself, and can do so again for further local steps with the
  others' z held.
- *Power*, two exchanges: down b + o + Σ_{k≠j} z_k and the shared parameters; up ∂L_{0,j}/∂ of these; down Σ_{k≠j}
  ∂L_{0,k}/∂z_j. The source sends all of z and J − 1 gradients; the sums are enough and are smaller.

With `sums` the server must only ever learn Σ_j η_j, which carries no noise of ρ. So η_j leaves a party's process as a
summand of a secure sum only: `fedtorch.sites.secure.masked_party` goes around a party's half and `masked_server` around
the server's, and without them the first message is refused, unless the party says `accept_disclosure=True`. Masks need
all parties in every iteration, so that idle parties and clocks take that word. They are bound to `PartyNode.history`,
all that the party has been told since it was made, and cancel only among parties that have been told the same; parties
therefore have one `delay`. A joint q(γ, θ) is fitted in one graph
of one process that holds all parties' columns, by `fedtorch.vfl.sfvi`; no protocol among nodes does it.

Several local steps per exchange keep the iteration's draws: with the response at the server the party moves along the
gradient that it received (first order), with the response shared it computes it anew. (Plain networks can do it, too,
but nothing then holds z_j near what was sent.)

*Bounded delay.* A party waits for the gradient of what it sent before it goes on: over a line of 50 ms, 100 ms an
iteration. With `delay=s` it sends its values of up to s iterations more before it takes the first gradient, so that s
+ 1 round trips are under way at once, and an iteration takes the time of one over s + 1, or that of its computation
if that is longer. In iteration t the party's parameters then have had the gradients up to iteration t − s − 1. The
gradient with respect to what it sent, :math:`\partial L_0 / \partial z_j^{(t)}`, comes s iterations later; it is
taken through the party's network as that is now, with the rows and noise of iteration t, whose contribution is
computed once more. So this is asynchronous: for s > 0 its numbers are its own, the same whatever the lines' speed,
since it is the numbering of iterations that says what is late, and no clock. It has the same stationary points; a
step that is near the largest for s = 0 has to be smaller, for a quadratic of curvature L below :math:`2 \sin(\pi /
(4s + 2)) / L` in place of :math:`2 / L`. The link's `Limits.ahead` frames that wait in each direction are room for s
of twice as many.

*Idle parties.* `Iteration.active` says who takes part, and all know it beforehand (`bounded_delay` is a function of
its key). An idle party sends nothing, and the server goes on with what it last heard.

*By the clock.* With `tick=` seconds at the server and `clocked=True` at the parties, the server goes on when a tick is
over, whoever has answered, or as soon as all have; who is late, by whatever delay, is answered in the tick in which its
value comes. The numbers then depend on the machines' load: they are those of `fedtorch.vfl.nodes.clock` with the delays
that there were, and the result of the server's half says which. One who never comes back ends the protocol after the
last tick, by its driver's longest wait, with its name; a stream that ends does so at once.

Noise and dropout are functions of keys and steps. Who knows a key knows its noise: as long as all share the keys, it
hides nothing of z_j from the other nodes. Who does not know it sees g_j with other noise in every step, and the mean
over T steps has 1/√T of it: the noise ρ of `amortised` is part of a model, and no protection. Nor is there noise drawn
at the party that is accounted for: a party's parameters are made of all its rows, so that one row is in the values of
all others too, and noise of a row's own size bounds nothing; each of its steps would need noise as well. Gradients go
the other way: that of a row has the sign of its residual, so that parties of a plain split network are as good as told
the labels.

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
    """The course of an iteration once the parties' values are at the server, at both ends."""

    party: Callable[[PartyNode, Proposal, float | None, int], Half]  # node, what it sent, learning rate, local steps
    server: Callable[[ServerNode, Drawn, Sequence[int], float | None], Half]  # node, draws, who takes part, rate


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
    """Evaluate the likelihood at the server: move γ, and return the gradient of what each party sent."""
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
    """Run the power model's two exchanges: each party hears of the others alone, in predictors and in gradients."""
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
            # A weight has no draws: its gradient is the sum over them.
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
    """Return the shapes of a `Share` for this party."""
    value, model = proposal.sent, party.model
    weight = None if model.concentration is None else value[:, 0, 0, 0]
    return Share(value, value.new_zeros(*value.shape[:2], len(model.likelihood.shared)), weight)


def _likelihood(party: PartyNode, proposal: Proposal, share: Share, added: Tensor) -> Tensor:
    """Return the likelihood of a predictor with something `added` to it, `(B, M)`."""
    rows = proposal.drawn.rows
    return rows.weighted_sum(party.model.likelihood.log_prob(rows.y, share.predictor + added, share.shared))


def _weighted(party: PartyNode, total: Tensor, share: Share) -> Tensor:
    """Return a party's part of the power model's likelihood."""
    return total / len(party.model.predictors) if share.weight is None else share.weight[:, None] * total


VALUES_AND_GRADIENTS = Protocol(_take_gradient, _send_gradients)
SHARED_RESPONSE = Protocol(_take_share, _send_shares)
POWER = Protocol(_take_share_and_gradient, _send_shares_and_gradients)


@tells(Learns("nothing of rows"))
@without_rows
class More(NamedTuple):
    """Down by the clock: whether an answer follows, or it is over."""

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

    With `sums` what goes up is η_j as it is, which leaves this process under the masks of `sites.secure.masked_party`
    or not at all: any driver over ranks or streams refuses it.

    Args:
        party: the node, trained in place.
        iterations: the same at every node; by the clock the party's own, and more than it will come to.
        local_steps: steps that a party takes per exchange.
        delay: s, iterations by which a gradient is late at most; at the end all are taken. Under masks all parties
            have the same.
        clocked: whether the server goes on by its clock, `tick=` there, and says when it is over.
        accept_disclosure: whether η_j of `sums` may leave as it is, for a server that may have this party's predictor
            of every row in every iteration, and all that can be found from it.

    Raises:
        ValueError: an idle party in the first iteration or with minibatches, whose rows would differ; a negative delay,
            or a delay in the power model's protocol, where an iteration cannot begin before the last has ended; by the
            clock a delay, the power model's protocol, or what only nodes know that go on together; values that are not
            finite, with the party and the row.

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
    """Run a party's side without its history, which nothing in one process needs; see `party_half`."""
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

    What is added up is looked at by the server: under masks others would see that this party has refused.
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


def _hear(server: ServerNode, rank: int, value: Value | Summand, iteration: Iteration) -> None:
    """Store a party's value; raise ValueError, before any node has moved, if a summand is not finite."""
    if isinstance(value, Summand):
        _check_finite(value.value, f"number {rank}", iteration)
    server.values[rank - 1] = value


def _finish(
    party: PartyNode, protocol: Protocol, iteration: Iteration, proposal: Proposal, local_steps: int, late: bool
) -> Half:
    """Hear of the others and move, from the parameters as they are now where that is `late`."""
    if late:
        proposal = party.propose(iteration)._replace(sent=proposal.sent)
    yield from protocol.party(party, proposal, iteration.rate, local_steps)


def _by_the_clock(party: PartyNode, iterations: Iterable[Iteration], local_steps: int, summed: bool) -> Half:
    """Send values, each once the last is answered, until the server ends the protocol."""
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
        tick: seconds after which the server goes on by its clock, with the last value of who is late; None waits for
            all. The half then returns who was heard in each tick, lists of numbers of parties from 0 on.

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
    >>> results[0]  # nobody is late here
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
    here: set[int] = set()  # parties that wait for an answer
    answered_in: list[list[int]] = []
    for tick in ticks:
        _check_clocked(server, tick)
        drawn, away = server.draw(tick), tuple(rank for rank in every if rank not in here)
        likes = tuple(server.expected(rank - 1, drawn) for rank in away)
        came = yield Receive(away, None, likes=likes, seconds=seconds)
        for rank, value in came.messages.items():
            _hear(server, rank, value, tick)
        here.update(came.messages)
        complete = all(value is not None for value in server.values)
        answered = sorted(here) if complete else []
        answered_in.append([rank - 1 for rank in answered])
        if complete:
            for rank in answered:
                yield Send(rank, _MORE)
            yield from protocol_of(server).server(server, drawn, answered, tick.rate)
            here.clear()
    for rank in every:
        if rank not in here:  # its value comes to nothing
            yield Receive(rank, server.expected(rank - 1, server.draw(Iteration())))
        yield Send(rank, More(torch.zeros_like(_MORE.more)))
    return answered_in


def _check_clocked(node: ServerNode | PartyNode, iteration: Iteration) -> None:
    """Raise ValueError for what nodes know of an iteration only where they go on together."""
    if iteration.noise is not None or iteration.rows is not None or iteration.active is not None:
        raise ValueError(
            "Expected iterations of a step and a rate alone by the clock, where nodes do not go on together, but got "
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
        _hear(server, rank, (yield Receive(rank, server.expected(rank - 1, drawn))), iteration)
    yield from protocol_of(server).server(server, drawn, ranks, iteration.rate)


def exchange(
    server: ServerNode, parties: Sequence[PartyNode], iteration: Iteration, *, local_steps: int = 1
) -> Traffic:
    """Run one iteration among nodes in one process; return the bytes that it would send.

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
    halves = {0: _iterated(server, iteration)}
    halves |= {party.index: unbound_half(party, [iteration], local_steps) for party in parties}
    return together(halves)[1]


def bounded_delay(parties: int, delay: int, probability: float, key: Tensor) -> Iterator[list[bool]]:
    """Draw which parties take part in each iteration: at random, but nobody is away more than `delay` times running.

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
