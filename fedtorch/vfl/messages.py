r"""The same inference as messages: values go up, gradients come down.

A `PartyNode` holds one party's features and parameters, a `ServerNode` the response and the shared parameters; nothing
but the messages below passes between them, and the numbers are those of `sfvi` in one graph.

- *Response at the server* (augmented model): up z_j (or η_j with `sums`), down ∂L₀/∂s, the same for everybody.
- *Response with the parties* (augmented model, `ServerNode(..., response_shared=True)`): up z_j, down the predictor
  b + o + Σ z and the likelihood's shared parameters; every party finds the gradient itself, and can do so again for
  further local steps with the others' z held.
- *Power model*, two exchanges: up z_j; down b + o + Σ_{k≠j} z_k and the shared parameters; up ∂L_{0,j}/∂ of these; down
  Σ_{k≠j} ∂L_{0,k}/∂z_j. The source sends all of z and J − 1 gradients; the sums are enough and are smaller.

With `sums` the server must only ever learn Σ_j η_j, which carries no noise of ρ: put a secure sum there.

A joint q(γ, θ) adds one short message per party and iteration, of as many numbers as there are coordinates before its
own, in the order of the parties from last to first: the gradient of log q by back substitution of L.

Several local steps per exchange keep the iteration's draws: with the response at the server the party moves along the
gradient that it was told (first order), with the response shared it computes it anew.

Source: Hassan et al., algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree, wire
from fedtorch.vfl.gaussians import cholesky, full_covariance
from fedtorch.vfl.guide import Guide, Noise, Parameters, fixed
from fedtorch.vfl.model import Batch, VerticalModel
from fedtorch.vfl.predictors import Predictor
from fedtorch.vfl.sfvi import centred, party_bound, server_bound, shared_terms

__all__ = ["Backward", "Gradient", "PartyNode", "ServerNode", "Share", "Traffic", "Value", "bounded_delay", "exchange"]


class Value(NamedTuple):
    """Up: what a party contributes to the predictor."""

    value: Tensor  # (B, M, C, n) z_j, or η_j with `sums`


class Gradient(NamedTuple):
    """Down: the gradient of the others' terms with respect to what the party sent."""

    gradient: Tensor  # (B, M, C, n)


class Share(NamedTuple):
    """Down, to a party that evaluates the likelihood; and up, the gradients with respect to it."""

    predictor: Tensor  # (B, M, C, n) intercept + offset + Σ z, in the power model of the others
    shared: Tensor  # (B, M, S)
    weight: Tensor | None  # (B,) of the party's likelihood, where weights are learnt


class Backward(NamedTuple):
    """Along the chain of nodes where q(γ, θ) is joint: part of L⁻ᵀε for the nodes before."""

    told: Tensor  # (B, M, coordinates up to the receiver's last)


class Traffic(NamedTuple):
    """Bytes of an exchange, as `fedtorch.wire` would send them."""

    up: int
    down: int


class _Node:
    """Parameters with an Adam of their own: the server is node 0, the parties 1 to J."""

    def __init__(self, model: VerticalModel, guide: Guide, parameters: Parameters, index: int) -> None:
        if guide.joint and guide.theta.init.__qualname__ != full_covariance().init.__qualname__:
            raise ValueError("Expected a full covariance for a joint q(γ, θ) among parties, but got another family")
        self.model, self.guide, self.index = model, guide, index
        stop = sum(model.sizes[: index + 1])
        self.own = slice(stop - model.sizes[index], stop)
        joint, q = parameters.joint, (parameters.server, *parameters.parties)[index]
        rows = None if joint is None else {name: value[:, self.own] for name, value in joint.items()}
        if rows is not None:
            rows["lower"] = rows["lower"][..., :stop]
        leaf = lambda value: value.detach().clone().requires_grad_()
        self.q, self.rows = tree.map(leaf, q), tree.map(leaf, rows)
        self.leaves = tree.leaves((self.q, self.rows))
        self.optimizer = torch.optim.Adam(self.leaves, lr=1.0, fused=True)

    def draw(self, noise: Sequence[Tensor]) -> Tensor:
        """θ of this node; where q is joint, from the noise of all nodes up to it."""
        if self.rows is None:
            return self.guide.theta.draw(self.q["theta"], noise[self.index])
        before = torch.cat(list(noise[: self.index + 1]), -1)
        return self.rows["mean"].unsqueeze(1) + before @ self._factor().mT

    def _factor(self) -> Tensor:
        """This node's rows of L, `(B, d, coordinates up to its last)`."""
        assert self.rows is not None
        left, own = self.rows["lower"][..., : self.own.start], self.rows["lower"][..., self.own]
        scale = self.rows["log_sd"].exp().unsqueeze(-1)
        return torch.cat([scale * left, cholesky({"lower": own, "log_sd": self.rows["log_sd"]})], -1)

    def minus_log_q(self, theta: Tensor, pull: Tensor | None) -> Tensor:
        """−log q(θ) as far as its gradient goes at this node, `(B, M)`."""
        if self.rows is None:
            return -self.guide.theta.log_density(fixed(self.guide, self.q["theta"]), theta)
        if pull is None:
            return self.rows["log_sd"].sum(-1, True).expand(theta.shape[:2])
        return (pull * theta).sum(-1)

    def back_substitute(self, noise: Sequence[Tensor], backward: Backward | None) -> tuple[Tensor, Backward]:
        """This node's coordinates of L⁻ᵀε, `(B, M, d)`, and what the nodes before it have to know."""
        factor = self._factor().detach()
        right = noise[self.index] if backward is None else noise[self.index] - backward.told[..., self.own]
        right = right.expand(len(factor), *right.shape[1:])
        pull = torch.linalg.solve_triangular(factor[..., self.own].mT, right.mT, upper=True).mT
        told = pull @ factor[..., : self.own.start]
        return pull, Backward(told if backward is None else told + backward.told[..., : self.own.start])

    def move(self, objective: Tensor, rate: float, also: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """One step of Adam up the objective `(B, M)`, averaged over draws; returns its gradients by `also`."""
        gradients = torch.autograd.grad(objective.sum(), [*self.leaves, *also], allow_unused=True)
        for leaf, gradient in zip(self.leaves, gradients):
            leaf.grad = None if gradient is None else -gradient / objective.shape[1]
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return tuple(g if g is not None else torch.zeros_like(a) for g, a in zip(gradients[len(self.leaves) :], also))


class PartyNode(_Node):
    """One party: its features and its parameters.

    Args:
        model: the model; of the predictors it uses its own.
        guide: the family.
        parameters: to start from; it keeps its own.
        index: from 0 on.
        x: its features, `(n, p)` or `(B, n, p)`.
        response: y, where the parties have to know it; None where it stays with the server.
        weight: the rows' weights, `(n,)` or `(B, n)`.
        response_shared: whether the parties find the likelihood's gradient themselves; as at the server.

    Raises:
        ValueError: the response is needed and not given, or a joint q that is not a full covariance.
    """

    def __init__(
        self,
        model: VerticalModel,
        guide: Guide,
        parameters: Parameters,
        index: int,
        x: Tensor,
        response: Tensor | None = None,
        weight: Tensor | None = None,
        response_shared: bool = False,
    ) -> None:
        super().__init__(model, guide, parameters, index + 1)
        self.response_shared = response_shared
        at_party = guide.auxiliary.party is not None
        needed = response_shared or guide.auxiliary.sees_response or (model.power and at_party)
        if response is None and needed:
            raise ValueError("Expected the response at the party, which its likelihood or encoder needs, but got None")
        rows = x.shape[-2]
        y = x.new_full((1, 1, rows), torch.nan) if response is None else response.to(x.dtype).reshape(-1, 1, rows)
        self.predictor: Predictor = model.predictors[index]
        self.data = Batch((x,), y, None, None if weight is None else weight.to(x.dtype).reshape(-1, 1, rows), None)

    def propose(self, noise: Noise, rows: Tensor | None = None) -> Value:
        """Draws θ_j and z_j and says what this party contributes."""
        self.noise, self.batch = noise, self.data if rows is None else self.data.take(rows)
        self.pull: Tensor | None = None
        self._draw()
        return Value(self.sent.detach())

    def _draw(self) -> None:
        self.theta = self.draw(self.noise.theta)
        x, z = self.batch.features[0], self.noise.z[self.index]
        model, guide = self.model, self.guide
        self.sent, self.eta, self.terms = party_bound(
            model, guide, self.q, self.predictor, x, self.theta, z, self.batch
        )

    def _rest(self) -> Tensor:
        return self.terms + self.minus_log_q(self.theta, self.pull)

    def _likelihood(self, share: Share) -> Tensor:
        """This party's copy of the likelihood, `(B, M)`: in the power model with its own η, else with its own z."""
        own = self.eta if self.model.power else self.sent - self.told
        rows = self.model.likelihood.log_prob(self.batch.y, share.predictor + own, share.shared)
        total = self.batch.weighted_sum(rows)
        if not self.model.power:
            return total
        return total / len(self.model.predictors) if share.weight is None else share.weight[:, None] * total

    def answer(self, share: Share) -> Share:
        """The power model's first half: the gradients of this party's likelihood with respect to its inputs."""
        leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), share)
        value = self._likelihood(leaves).sum()
        found = torch.autograd.grad(value, tree.leaves(leaves), retain_graph=True, allow_unused=True)
        zeros = [torch.zeros_like(leaf) for leaf in tree.leaves(leaves)]
        return tree.refill(share, [z if g is None else g for g, z in zip(found, zeros)])

    def update(self, gradient: Gradient | None, share: Share | None, rate: float, local_steps: int = 1) -> None:
        """Moves up the bound, once or several times with this iteration's draws."""
        self.told = self.sent.detach()
        for step in range(local_steps):
            if step:
                self._draw()
            objective = self._rest()
            if gradient is not None:
                objective = objective + (self.sent * gradient.gradient).sum((-2, -1))
            if share is not None:
                objective = objective + self._likelihood(share)
            self.move(objective, rate)


class ServerNode(_Node):
    """The server: the response, the offset and the shared parameters.

    Args:
        model: the model.
        guide: the family.
        parameters: to start from; it keeps its own.
        batch: the data, whose features are not looked at.
        response_shared: whether the parties know y and find the likelihood's gradient themselves.
    """

    def __init__(
        self, model: VerticalModel, guide: Guide, parameters: Parameters, batch: Batch, response_shared: bool = False
    ) -> None:
        super().__init__(model, guide, parameters, 0)
        self.response_shared = response_shared
        self.data = batch._replace(features=())

    def begin(self, noise: Noise, rows: Tensor | None = None) -> None:
        """Draws γ for an iteration."""
        self.noise, self.batch = noise, self.data if rows is None else self.data.take(rows)
        self.gamma, self.pull = self.draw(noise.theta), None

    def evaluate(self, values: Sequence[Value], rate: float) -> Gradient:
        """The likelihood at the server: moves γ, and says the gradient with respect to any party's value."""
        total = _sum([value.value for value in values]).requires_grad_()
        z = self.noise.z[0]
        own = server_bound(self.model, self.guide, self.q, self.gamma, z, total, None, self.batch)
        objective = own + self.minus_log_q(self.gamma, self.pull)
        return Gradient(*self.move(objective, rate, [total]))

    def share(self, values: Sequence[Value]) -> list[Share]:
        """The predictor for parties that evaluate the likelihood; in the power model without their own z."""
        total = _sum([value.value for value in values])
        centre, shared = centred(self.model, self.gamma, total, self.batch)
        self.terms, weights = shared_terms(self.model, self.q, self.gamma, self.batch)
        own = [value.value if self.model.power else 0 for value in values]
        self.shares = [Share(centre - o, shared, None if weights is None else weights[:, j]) for j, o in enumerate(own)]
        return [tree.map(torch.detach, share) for share in self.shares]

    def collect(self, answers: Sequence[Share], rate: float) -> list[Gradient]:
        """The power model's second half: moves γ and the weights, and passes on the sums of the others' gradients."""
        whole = _sum([answer.predictor for answer in answers])
        objective = self.terms + self.minus_log_q(self.gamma, self.pull)
        for share, answer in zip(self.shares, answers):
            for value, gradient in zip(tree.leaves(share), tree.leaves(answer)):
                # A weight has no draws: its gradient is the sum over them.
                inner = (value * gradient).flatten(2).sum(2) if value.ndim > 1 else (value * gradient)[:, None]
                spread = inner if value.ndim > 1 else inner / objective.shape[1]
                objective = objective + spread
        self.move(objective, rate)
        return [Gradient(whole - answer.predictor) for answer in answers]


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
    taking_part = [True] * len(parties) if active is None else list(active)
    if not all(taking_part) and (rows is not None or any(not hasattr(p, "value") for p in parties)):
        raise ValueError("Expected all parties in the first iteration and with minibatches, but got idle ones")
    model, guide = server.model, server.guide
    up = down = 0
    server.begin(noise, rows)
    awake = [party for party, here in zip(parties, taking_part) if here]
    for party in awake:
        party.value = party.propose(noise, rows)
        up += wire.size(party.value)
    if guide.joint and guide.sticking:
        told: Backward | None = None
        for node in (*reversed(parties), server):
            if told is not None:
                down += wire.size(told)
                up += wire.size(told)  # through the server
            node.pull, told = node.back_substitute(noise.theta, told)
    values = [party.value for party in parties]
    if model.power and guide.auxiliary.party is not None:
        shares = server.share(values)
        for party, share, here in zip(parties, shares, taking_part):
            if here:
                party.share, party.reply = share, party.answer(share)
                down, up = down + wire.size(share), up + wire.size(party.reply)
        gradients = server.collect([party.reply for party in parties], rate)
        for party, gradient, here in zip(parties, gradients, taking_part):
            if here:
                down += wire.size(gradient)
                party.update(gradient, party.share, rate, local_steps)
        return Traffic(up, down)
    at_parties = guide.auxiliary.party is not None and server.response_shared
    shares = server.share(values) if at_parties else []
    gradient = server.evaluate(values, rate)
    for j, party in enumerate(parties):
        if not taking_part[j]:
            continue
        message = shares[j] if at_parties else gradient
        down += wire.size(message)
        party.update(None if at_parties else gradient, shares[j] if at_parties else None, rate, local_steps)
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
    away = torch.full((parties,), delay)
    step = 0
    while True:
        present = random.bernoulli(random.fold_in(key, step), probability, (parties,)) | (away >= delay)
        away = torch.where(present, 0, away + 1)
        step += 1
        yield present.tolist()


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0) if len(values) > 2 else sum(values[1:], values[0]) + 0
