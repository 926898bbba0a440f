"""Server and parties: each with its own data, parameters and optimiser, and nothing of the others'.

What passes between them is in `messages`; who calls what and when, in `iteration` (one process) and `processes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.vfl.gaussians import Shares, cholesky
from fedtorch.vfl.guide import Guide, Noise, Parameters, fixed
from fedtorch.vfl.messages import Backward, Gradient, Pooled, Share, Value
from fedtorch.vfl.model import Batch, VerticalModel
from fedtorch.vfl.predictors import Predictor
from fedtorch.vfl.sfvi import ascend, centred, party_bound, server_bound, shared_terms

__all__ = ["PartyNode", "ServerNode"]


class _Node:
    """Parameters with an Adam of their own: the server is node 0, the parties 1 to J."""

    def __init__(self, model: VerticalModel, guide: Guide, parameters: Parameters, index: int) -> None:
        # A joint family either has sums that all nodes need, or is a factor by rows with a chain from node to node.
        self.pooled = guide.joint and guide.theta.shares is not None
        self.chained = guide.joint and guide.sticking and not self.pooled
        self.model, self.guide, self.index = model, guide, index
        stop = sum(model.sizes[: index + 1])
        self.own = slice(stop - model.sizes[index], stop)
        joint, q = parameters.joint, (parameters.server, *parameters.parties)[index]
        rows = None if joint is None else {name: value[:, self.own] for name, value in joint.items()}
        if rows is not None and not self.pooled:
            if "lower" not in rows:
                raise ValueError("Expected a full covariance or a low rank of a joint q(γ, θ), but got another family")
            rows["lower"] = rows["lower"][..., :stop]
        leaf = lambda value: value.detach().clone().requires_grad_()
        self.q, self.rows = tree.map(leaf, q), tree.map(leaf, rows)
        self.leaves = tree.leaves((self.q, self.rows))
        self.optimizer = torch.optim.Adam(self.leaves, lr=1.0, fused=True)
        self.pull: Tensor | None = None

    def draw(self, noise: Sequence[Tensor]) -> Tensor:
        """θ of this node; where q is joint, from the noise of all nodes up to it."""
        if self.rows is None:
            return self.guide.theta.draw(self.q["theta"], noise[self.index])
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

    def minus_log_q(self, theta: Tensor, pull: Tensor | None) -> Tensor:
        """−log q(θ) as far as its gradient goes at this node, `(B, M)`."""
        if self.rows is None:
            return -self.guide.theta.log_density(fixed(self.guide, self.q["theta"]), theta)
        if self.pooled:
            shares = self._shares(fixed(self.guide, self.rows), theta)
            return -Shares(shares.alone, shares.gram + self.rest.gram, shares.moment + self.rest.moment).log_density()
        if pull is None:
            return self.rows["log_sd"].sum(-1, True).expand(theta.shape[:2])
        return (pull * theta).sum(-1)

    def _shares(self, q: dict[str, Tensor], theta: Tensor) -> Shares:
        assert self.guide.theta.shares is not None
        return self.guide.theta.shares(q, theta)

    def pool(self, theta: Tensor) -> Pooled:
        """This node's part of the sums that log q of a low rank needs."""
        assert self.rows is not None
        shares = self._shares(self.rows, theta)
        self.mine = Pooled(shares.gram.detach(), shares.moment.detach())
        return self.mine

    def hear(self, sums: Pooled) -> None:
        """Keeps the other nodes' part of these sums over all."""
        self.rest = Pooled(sums.gram - self.mine.gram, sums.moment - self.mine.moment)

    def back_substitute(self, noise: Sequence[Tensor], backward: Backward | None) -> tuple[Tensor, Backward]:
        """This node's coordinates of L⁻ᵀε, `(B, M, d)`, and what the nodes before it have to know."""
        factor = self._factor().detach()
        right = noise[self.index] if backward is None else noise[self.index] - backward.told[..., self.own]
        right = right.expand(len(factor), *right.shape[1:])
        pull = torch.linalg.solve_triangular(factor[..., self.own].mT, right.mT, upper=True).mT
        told = pull @ factor[..., : self.own.start]
        return pull, Backward(told if backward is None else told + backward.told[..., : self.own.start])


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
        ValueError: the response is needed and not given, or a joint q that is neither full nor of low rank.
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
        self.heard = False
        self.data = Batch((x,), y, None, None if weight is None else weight.to(x.dtype).reshape(-1, 1, rows), None)

    def propose(self, noise: Noise, rows: Tensor | None = None) -> Value:
        """Draws θ_j and z_j and says what this party contributes."""
        self.noise, self.batch = noise, self.data if rows is None else self.data.take(rows)
        self.pull, self.heard = None, True
        self._draw()
        self.value = Value(self.sent.detach())
        return self.value

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
        self.reply: Share = tree.refill(share, [z if g is None else g for g, z in zip(found, zeros)])
        return self.reply

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
            ascend(self.optimizer, objective, rate)


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
        return Gradient(*ascend(self.optimizer, objective, rate, [total]))

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
        ascend(self.optimizer, objective, rate)
        return [Gradient(whole - answer.predictor) for answer in answers]


def pooled(parts: Sequence[Pooled]) -> Pooled:
    """The sum of all nodes' parts, in their order."""
    return Pooled(*(_sum(values) for values in zip(*parts)))


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0) if len(values) > 2 else sum(values[1:], values[0]) + 0
