"""The courses of an iteration once the parties' values are at the server, at both ends; see `iteration`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.vfl.fit.bound import ascend, server_bound, shared_terms
from fedtorch.vfl.model.vertical import summed
from fedtorch.vfl.nodes.node import Drawn, Gradient, PartyNode, Proposal, ServerNode, Share


class Protocol(NamedTuple):
    """The course of an iteration once the parties' values are at the server, at both ends."""

    party: Callable[[PartyNode, Proposal, float | None, int], Half]  # node, what it sent, learning rate, local steps
    server: Callable[[ServerNode, Drawn, Sequence[int], float | None], Half]  # node, draws, who takes part, rate


def protocol_of(node: PartyNode | ServerNode) -> Protocol:
    """Return the protocol of a node's model and guide.

    >>> import torch, fedtorch as ft
    >>> keys = ft.random.key(0).reshape(1)
    >>> network = ft.vfl.SplitNetwork([torch.nn.Linear(1, 1)], ft.vfl.likelihoods.bernoulli(), keys=keys)
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
