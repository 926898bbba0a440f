"""Server and parties: each with its part of the model, its own data and optimiser, and nothing of the others'.

Messages are `NamedTuple`s of tensors; who sends which to whom and when is in `iteration`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import tree
from fedtorch.vfl.fit.adam import RestartingAdam
from fedtorch.vfl.fit.bound import ascend, party_bound, server_bound, shared_terms
from fedtorch.vfl.fit.draws import draw_own, fixed
from fedtorch.vfl.fit.gaussians import Shares, cholesky
from fedtorch.vfl.fit.noise import Noise
from fedtorch.vfl.fit.part import Part
from fedtorch.vfl.model.checks import check_response, check_rows
from fedtorch.vfl.model.vertical import summed
from fedtorch.vfl.rows.data import VerticalData

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Iteration(NamedTuple):
    """What every node knows of an iteration before it begins."""

    noise: Noise | None = None  # by default each node draws its own for the step, from the key of its part
    rate: float | None = None  # learning rate; the optimisers' own by default
    rows: Tensor | None = None  # (m,) of a minibatch; all by default
    active: Sequence[bool] | None = None  # which parties take part; all by default
    step: int = 0

    def taking_part(self, heard: Sequence[bool]) -> list[bool]:
        """Which parties take part, of which the server has `heard` before or not.

        Raises:
            ValueError: an idle party that was never heard, or idle parties with minibatches, whose rows would differ.
        """
        here = [True] * len(heard) if self.active is None else list(self.active)
        if not all(here) and (self.rows is not None or not all(h or known for h, known in zip(here, heard))):
            raise ValueError("Expected all parties in the first iteration and with minibatches, but got idle ones")
        return here


class Value(NamedTuple):
    """Up: what a party contributes to the predictor."""

    value: Tensor  # (B, M, C, n) z_j, or η_j with `sums` and in plain networks


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


class Pooled(NamedTuple):
    """Where q(γ, θ) is joint and of low rank: up a node's part of WᵀD⁻²W and WᵀD⁻²(θ − μ), down the sum over nodes."""

    gram: Tensor  # (B, rank, rank)
    moment: Tensor  # (B, M, rank)


class _Node:
    """A part with data and an optimiser of its own: the server is node 0, the parties 1 to J."""

    def __init__(
        self,
        part: Part,
        data: VerticalData,
        *,
        response_shared: bool = False,
        optimizer: Optimizers = RestartingAdam,
        per_row: bool = False,
    ) -> None:
        self.part, self.index, self.model, self.guide = part, part.index, part.model, part.guide
        self.response_shared, self.per_row = response_shared, per_row
        self.q = part.q
        self.rows = self.q.get("joint")
        # A joint family either has sums that all nodes need, or is a factor by rows with a chain from node to node.
        self.pooled = self.guide.joint and self.guide.theta.shares is not None
        self.chained = self.guide.joint and self.guide.sticking and not self.pooled
        self.apart = self.guide.auxiliary.party is not None  # whether every party draws its z
        self.check(data)
        self.data = data.to_dtype(tree.leaves(self.q)[0].dtype)
        stop = sum(self.model.sizes[: self.index + 1])
        self.own = slice(stop - self.model.sizes[self.index], stop)
        self.optimizer = optimizer(part.parameters())
        parties = len(self.model.predictors)
        self.values: list[Value | None] = [None] * parties  # what was last sent, at the server by each party
        self.pools: list[Pooled | None] = [None] * parties
        self.answers: list[Share | None] = [None] * parties

    def begin(self, iteration: Iteration) -> None:
        """Takes an iteration's rows, and draws its noise and θ (or γ)."""
        dims = self.model.row_dims[self.index - 1 : self.index] if self.index else []
        self.now = self.data if iteration.rows is None else self.data.take(iteration.rows, dims)
        count = self.now.response.shape[-1]
        self.noise = iteration.noise or self.part.draw_noise(iteration.step, count)
        self.pull: Tensor | None = None
        self.theta = self.draw()

    def draw(self) -> Tensor:
        """θ of this node; where q is joint, from the noise of all nodes up to it."""
        noise = self.noise.theta
        if self.rows is None:
            return draw_own(self.model, self.guide, self.index, self.q["theta"], noise[self.index])
        if self.pooled:
            mine = noise[self.index][..., : self.own.stop - self.own.start]
            common = noise[0][..., self.model.sizes[0] :]
            return self.guide.theta.draw(self.rows, torch.cat([mine, common], -1))
        before = torch.cat(list(noise[: self.index + 1]), -1)
        return self.rows["mean"].unsqueeze(1) + before @ self._factor().mT

    def _factor(self) -> Tensor:
        """This node's rows of L, `(B, d, coordinates up to its last)`."""
        assert self.rows is not None
        left, own = self.rows["lower"][..., : self.own.start], self.rows["lower"][..., self.own]
        scale = self.rows["log_sd"].exp().unsqueeze(-1)
        return torch.cat([scale * left, cholesky({"lower": own, "log_sd": self.rows["log_sd"]})], -1)

    def minus_log_q(self) -> Tensor:
        """−log q(θ) as far as its gradient goes at this node, `(B, M)`."""
        if self.rows is None:
            family = self.guide.family(self.index)
            return self.model.masked(-family.log_density(fixed(self.guide, self.q["theta"]), self.theta), 0.0)
        if self.pooled:
            shares = self._shares(fixed(self.guide, self.rows))
            return -Shares(shares.alone, shares.gram + self.rest.gram, shares.moment + self.rest.moment).log_density()
        if self.pull is None:
            return self.rows["log_sd"].sum(-1, True).expand(self.theta.shape[:2])
        return (self.pull * self.theta).sum(-1)

    def _shares(self, q: dict[str, Tensor]) -> Shares:
        assert self.guide.theta.shares is not None
        return self.guide.theta.shares(q, self.theta)

    def pool(self) -> Pooled:
        """This node's part of the sums that log q of a low rank needs."""
        assert self.rows is not None
        shares = self._shares(self.rows)
        self.mine = Pooled(shares.gram.detach(), shares.moment.detach())
        return self.mine

    def hear(self, sums: Pooled) -> None:
        """Keeps the other nodes' part of these sums over all."""
        self.rest = Pooled(sums.gram - self.mine.gram, sums.moment - self.mine.moment)

    def back_substitute(self, backward: Backward | None) -> Backward:
        """Finds this node's coordinates of L⁻ᵀε, and says what the nodes before it have to know."""
        factor, noise = self._factor().detach(), self.noise.theta[self.index]
        right = noise if backward is None else noise - backward.told[..., self.own]
        right = right.expand(len(factor), *right.shape[1:])
        self.pull = torch.linalg.solve_triangular(factor[..., self.own].mT, right.mT, upper=True).mT
        told = self.pull @ factor[..., : self.own.start]
        return Backward(told if backward is None else told + backward.told[..., : self.own.start])

    def check(self, data: VerticalData) -> None:
        """Raises `ValueError` unless the data are what this node needs."""
        raise NotImplementedError

    def scaled(self, objective: Tensor) -> Tensor:
        """The objective, or what there is of it for every row that counts, where that is what is raised."""
        return objective / self.now.total.to(objective).reshape(-1, 1) if self.per_row else objective


class PartyNode(_Node):
    """One party: its features and its part.

    Args:
        part: its part of a model, which it trains in place.
        data: what the party may know: its own features as the only ones, the rows' weights and, as the only column of
            `present`, which it has; the response where the party has to know it, otherwise NaN.
        response_shared: whether the parties find the likelihood's gradient themselves; as at the server.
        optimizer: from parameters to an optimiser.
        per_row: whether the bound is divided by the weights' sum; as at the server.

    Raises:
        ValueError: features that do not fit the model or its weights, or a response that is needed and not given.

    >>> import torch, fedtorch as ft
    >>> flat = ft.vfl.model.predictors.flat_prior()
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(1.0), [ft.vfl.linear(1, flat)], rho=1.0)
    >>> guide, key = ft.vfl.Guide(ft.vfl.noiseless(), ft.vfl.fit.gaussians.point()), ft.random.key(0)
    >>> from fedtorch.vfl.fit.part import parts
    >>> part = parts(model, guide, ft.vfl.fit.guide.initial(model, guide, 3, 1, key), key=key)[1]
    >>> data = VerticalData((torch.tensor([[1.0], [0.0], [1.0]]),), torch.full((3,), torch.nan))
    >>> party = PartyNode(part, data, optimizer=lambda leaves: torch.optim.SGD(leaves, lr=0.1))
    >>> party.propose(Iteration()).value  # x θ, at θ = 0
    tensor([[[[0., 0., 0.]]]])
    >>> party.update(Gradient(torch.tensor([[[[1.0, 2.0, 3.0]]]])), None, rate=None)
    >>> part.q["theta"]["mean"].data  # 0.1 times 1 + 3
    tensor([[0.4000]])
    """

    def check(self, data: VerticalData) -> None:
        """Raises `ValueError` unless the data are what this party needs."""
        data.check_known()
        check_rows(self.model.predictors[self.index - 1], data.features[0], data.response.shape[-1], self.part.name)
        needed = self.response_shared or self.guide.auxiliary.sees_response or (self.model.power and self.apart)
        if needed and bool(data.response.isnan().all()):
            raise ValueError("Expected the response at the party, which its likelihood or encoder needs, but got NaN")

    def propose(self, iteration: Iteration) -> Value:
        """Draws θ_j and z_j and says what this party contributes."""
        self.begin(iteration)
        self.now = self.now.of_party(0)
        self._contribute()
        self.told = self.sent.detach()
        value = Value(self.told)
        self.values[self.index - 1] = value
        return value

    def recall(self, iteration: Iteration, value: Value) -> None:
        """Goes back to an iteration in which it sent this value, with its parameters as they are now."""
        self.begin(iteration)
        self.now = self.now.of_party(0)
        self._contribute()
        self.told = value.value

    def share_like(self) -> Share:
        """What a `Share` for this party looks like."""
        value = self.told
        weight = None if self.model.concentration is None else value[:, 0, 0, 0]
        return Share(value, value.new_zeros(*value.shape[:2], len(self.model.likelihood.shared)), weight)

    def _contribute(self) -> None:
        found = party_bound(self.model, self.guide, self.index, self.q, self.theta, self.now, self.noise)
        self.sent, self.eta, self.terms = found

    def _likelihood(self, share: Share) -> Tensor:
        """This party's copy of the likelihood, `(B, M)`: in the power model with its own η, else with its own z."""
        own = self.eta if self.model.power else self.sent - self.told
        rows = self.model.likelihood.log_prob(self.now.y, share.predictor + own, share.shared)
        total = self.now.weighted_sum(rows)
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

    def update(self, gradient: Gradient | None, share: Share | None, rate: float | None, local_steps: int = 1) -> None:
        """Moves up the bound, once or several times with this iteration's draws."""
        for step in range(local_steps):
            if step:
                self.theta = self.draw()
                self._contribute()
            objective = self.terms + self.minus_log_q()
            objective = self.scaled(objective if share is None else objective + self._likelihood(share))
            if gradient is not None:
                objective = objective + (self.sent * gradient.gradient).sum((-2, -1))
            ascend(self.optimizer, objective, rate)


class ServerNode(_Node):
    """The server: the response, the offset and the shared parameters.

    Args:
        part: its part of a model, which it trains in place.
        data: response, offset and weights; its features are not looked at.
        response_shared: whether the parties know y and find the likelihood's gradient themselves.
        optimizer: from parameters to an optimiser.
        per_row: whether the bound is divided by the weights' sum.

    Raises:
        ValueError: a response that the likelihood does not have.

    >>> import torch, fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(1.0), [ft.vfl.linear(1)], rho=1.0)
    >>> guide, key = ft.vfl.Guide(ft.vfl.noiseless(), ft.vfl.fit.gaussians.point()), ft.random.key(0)
    >>> from fedtorch.vfl.fit.part import parts
    >>> part = parts(model, guide, ft.vfl.fit.guide.initial(model, guide, 3, 1, key), key=key)[0]
    >>> server = ServerNode(part, VerticalData((), torch.tensor([1.0, 2.0, 3.0])))
    >>> server.begin(Iteration())
    >>> server.values = [Value(torch.ones(1, 1, 1, 3))]  # what the party has sent
    >>> server.evaluate(rate=0.1)[0].gradient  # residuals: whoever is told them knows the response
    tensor([[[[0., 1., 2.]]]])
    """

    def check(self, data: VerticalData) -> None:
        """Raises `ValueError` unless the likelihood has the response."""
        check_response(self.model.likelihood, data)

    def expected(self, party: int) -> Value:
        """What the value of a party, from 0 on, looks like."""
        outputs, rows = self.model.outputs[party + 1], self.now.response.shape[-1]
        return Value(self.theta.new_zeros(*self.theta.shape[:2], outputs, rows))

    def evaluate(self, rate: float | None) -> list[Gradient]:
        """The likelihood at the server: moves γ, and says every party the gradient of what it sent."""
        values = [value.value.detach().requires_grad_() for value in self.values if value is not None]
        own = server_bound(self.model, self.guide, self.q, self.theta, values, None, self.now, self.noise)
        objective = self.scaled(own + self.minus_log_q())
        return [Gradient(found) for found in ascend(self.optimizer, objective, rate, values)]

    def share(self) -> list[Share]:
        """The predictor for parties that evaluate the likelihood; in the power model without their own z."""
        values = [value.value for value in self.values if value is not None]
        centre, shared = self.model.centre(self.theta, self.model.cut(values, *self.noise.keys[:1]), self.now.offset)
        self.terms, weights = shared_terms(self.model, self.q, self.theta, self.now)
        heard = [centre - value if self.model.power else centre for value in values]
        each = [None] * len(heard) if weights is None else list(weights.unbind(1))
        self.shares = [Share(predictor, shared, weight) for predictor, weight in zip(heard, each)]
        return [tree.map(torch.detach, share) for share in self.shares]

    def collect(self, rate: float | None) -> list[Gradient]:
        """The power model's second half: moves γ and the weights, and passes on the sums of the others' gradients."""
        answers = [answer for answer in self.answers if answer is not None]
        whole = summed([answer.predictor for answer in answers])
        objective = self.terms + self.minus_log_q()
        for share, answer in zip(self.shares, answers):
            for value, gradient in zip(tree.leaves(share), tree.leaves(answer)):
                # A weight has no draws: its gradient is the sum over them.
                inner = (value * gradient).flatten(2).sum(2) if value.ndim > 1 else (value * gradient)[:, None]
                objective = objective + (inner if value.ndim > 1 else inner / objective.shape[1])
        ascend(self.optimizer, self.scaled(objective), rate)
        return [Gradient(whole - answer.predictor) for answer in answers]

    def pooled_over(self) -> Pooled:
        """The sums over all nodes' parts, in their order."""
        return Pooled(*(summed(parts) for parts in zip(self.mine, *(part for part in self.pools if part is not None))))
