r"""Structured federated variational inference, run in one autograd graph.

The bound of one draw is

.. math::
    \log p(y | s, e, \gamma) + \log\frac{p(\gamma)}{q(\gamma)} +
    \sum_j \Big[\log\frac{p(\theta_j)}{q(\theta_j)} + \log\frac{p(z_j | \theta_j)}{q(z_j | \theta_j)}\Big] ,

whose first terms belong to the server (in the power model, with z drawn by the parties, to the parties) and whose sum
over j belongs to the parties: `messages` computes the same numbers by exchanging values and gradients. Everything is
batched over folds × models × seeds; elements of the batch do not influence each other.

Source: Hassan et al., section 4, algorithms 1 and 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.vfl.guide import Guide, Noise, Parameters, draw_noise, draw_theta, fixed, initial
from fedtorch.vfl.model import Batch, VerticalData, VerticalModel, prepared
from fedtorch.vfl.predictors import Predictor

__all__ = ["Fit", "ascend", "bound", "cosine", "party_bound", "server_bound", "sfvi"]

_BLOCK = 2**18  # normal numbers drawn at a time
_START, _STEPS, _ROWS = 0, 1, 2  # purposes of the key

Schedule = Callable[[int], float]


class Fit(NamedTuple):
    """What `sfvi` found."""

    model: VerticalModel
    guide: Guide
    parameters: Parameters
    bounds: Tensor  # (steps // every, B) mean of the sampled bound over each `every` steps

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean `(B, D)` and covariance `(B, D, D)` of q(γ, θ_1, …, θ_J), all coordinates one after the other."""
        q, family = self.parameters, self.guide.theta
        if q.joint is not None:
            return q.joint["mean"], family.covariance(q.joint)
        blocks = [node["theta"] for node in (q.server, *q.parties)]
        covariances = [family.covariance(block) for block in blocks]
        whole = torch.stack([torch.block_diag(*(c[b] for c in covariances)) for b in range(len(covariances[0]))])
        return torch.cat([block["mean"] for block in blocks], -1), whole

    def sample(self, key: Tensor, draws: int) -> list[Tensor]:
        """Draws of γ, θ_1, …, θ_J from q, `(B, draws, d_j)` each."""
        like = tree.leaves(self.parameters)[0]
        noise = draw_noise(self.model, self.guide, key.reshape(-1).to(like.device), 0, draws, like.dtype)
        with torch.no_grad():
            return draw_theta(self.model, self.guide, self.parameters, noise.theta)[0]

    def weights(self) -> Tensor:
        """The learnt weights of the parties' likelihoods, `(B, J)`; `power` says why they do not rank the parties.

        Raises:
            ValueError: the model's weights are fixed.
        """
        if "weights" not in self.parameters.server:
            raise ValueError("Expected a power model with learnt weights, but got fixed ones; see concentration=")
        return self.parameters.server["weights"]["logits"].softmax(-1)


def party_bound(
    model: VerticalModel,
    guide: Guide,
    q: dict[str, dict[str, Tensor]],
    predictor: Predictor,
    x: Tensor,
    theta: Tensor,
    z: Tensor,
    batch: Batch,
) -> tuple[Tensor, Tensor, Tensor]:
    """A party's part without log q(θ): (what it sends, η, its terms of the bound `(B, M)`).

    Args:
        model: the model.
        guide: the family.
        q: the party's parameters.
        predictor: its predictor.
        x: its features, `(n, p)` or `(B, n, p)`.
        theta: θ_j, `(B, M, d_j)`.
        z: its noise for z, `(1 or B, M, C, n)`.
        batch: weights and rows, and the response where parties see it.
    """
    eta = predictor.forward(theta, x)
    own = predictor.log_prior(theta)
    if guide.auxiliary.party is None:
        return eta, eta, own
    value, ratio = guide.auxiliary.party(q["z"], fixed(guide, q["z"]), eta, z, batch, model)
    return value, eta, own + batch.weighted_sum(ratio)


def server_bound(
    model: VerticalModel,
    guide: Guide,
    q: dict[str, dict[str, Tensor]],
    gamma: Tensor,
    z: Tensor,
    total: Tensor,
    deviations: Tensor | None,
    batch: Batch,
) -> Tensor:
    """The server's part without log q(γ): the likelihood and the prior of γ, `(B, M)`.

    Args:
        model: the model.
        guide: the family.
        q: the server's parameters.
        gamma: γ, `(B, M, S)`.
        z: its noise for z, `(1 or B, M, noises · C, n)`.
        total: Σ_j of what the parties send, `(B, M, C, n)`.
        deviations: e_j of the parties, `(J, B, M, C, n)`, where the power model's parties draw z.
        batch: the data.
    """
    centre, shared = centred(model, gamma, total, batch)
    own, weights = shared_terms(model, q, gamma, batch)
    if guide.auxiliary.server is not None:
        centre, deviations, ratio = guide.auxiliary.server(q["z"], fixed(guide, q["z"]), centre, z, batch, model)
        own = own if ratio is None else own + batch.weighted_sum(ratio)
    return own + batch.weighted_sum(model.log_likelihood(batch.y, centre, shared, deviations, weights))


def centred(model: VerticalModel, gamma: Tensor, total: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Intercept + offset + `total`, `(B, M, C, n)`, and the likelihood's own parameters."""
    intercept, shared = model.split_shared(gamma)
    centre = total if intercept is None else total + intercept
    return (centre if batch.offset is None else centre + batch.offset), shared


def shared_terms(
    model: VerticalModel, q: dict[str, dict[str, Tensor]], gamma: Tensor, batch: Batch
) -> tuple[Tensor, Tensor | None]:
    """The prior of γ and of learnt weights, `(B, M)`, and these weights `(B, J)`."""
    own = model.shared_prior(gamma)
    if model.concentration is None:
        return own, None
    logits = q["weights"]["logits"].log_softmax(-1)
    rows = batch.weighted_sum(torch.ones_like(batch.y))
    return own + model.concentration * rows * logits.mean(-1, True), logits.exp()


def bound(model: VerticalModel, guide: Guide, parameters: Parameters, batch: Batch, noise: Noise) -> Tensor:
    """The bound of each draw, `(B, M)`, with a graph to all parameters."""
    thetas, log_q = draw_theta(model, guide, parameters, noise.theta)
    sent, etas, own = [], [], []
    for j, q in enumerate(parameters.parties):
        predictor, x = model.predictors[j], batch.features[j]
        value, eta, terms = party_bound(model, guide, q, predictor, x, thetas[j + 1], noise.z[j + 1], batch)
        sent.append(value)
        etas.append(eta)
        own.append(terms)
    total = torch.stack(sent).sum(0) if len(sent) > 2 else sum(sent[1:], sent[0])
    deviations = None
    if model.power and guide.auxiliary.party is not None:
        deviations = torch.stack(sent) - torch.stack(etas)
    server = server_bound(model, guide, parameters.server, thetas[0], noise.z[0], total, deviations, batch)
    return server + sum(own[1:], own[0]) - log_q


def ascend(
    optimizer: torch.optim.Optimizer, objective: Tensor, rate: float, also: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """One step of an optimiser up an objective `(B, M)`, averaged over draws; returns its gradients by `also`."""
    (group,) = optimizer.param_groups
    leaves = group["params"]
    gradients = torch.autograd.grad(objective.sum(), [*leaves, *also], allow_unused=True)
    for leaf, gradient in zip(leaves, gradients):
        # Contiguous like the leaves: torch's fused Adam does not look at the strides of gradients.
        leaf.grad = None if gradient is None else (gradient / -objective.shape[1]).contiguous()
    group["lr"] = rate
    optimizer.step()
    return tuple(g if g is not None else torch.zeros_like(a) for g, a in zip(gradients[len(leaves) :], also))


def cosine(rate: float, steps: int, floor: float = 0.0) -> Schedule:
    """A learning rate that falls from `rate` to `floor · rate` along half a cosine."""
    return lambda step: rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))))


def sfvi(
    model: VerticalModel,
    guide: Guide,
    data: VerticalData,
    *,
    key: Tensor,
    steps: int,
    lr: float | Schedule = 1e-2,
    draws: int = 1,
    batch_size: int | None = None,
    size: int = 1,
    every: int = 100,
    start: Parameters | None = None,
) -> Fit:
    """Maximises the bound by Adam, for a batch of independent problems at once.

    Args:
        model: `augmented` or `power`.
        guide: the approximation.
        data: aligned rows; tensors with a leading `B` differ over the batch.
        key: `()`, where the batch shares its noise (which makes comparisons within it sharper), or `(B,)`.
        steps: iterations.
        lr: Adam's learning rate, or a function of the step; decays to zero by half a cosine by default if a number.
        draws: M, Monte Carlo draws per iteration.
        batch_size: rows per iteration, drawn uniformly with replacement; all rows by default.
        size: B.
        every: over how many steps a value of `bounds` is averaged.
        start: parameters to start from. To begin anew from a short run's also forgets the optimiser's moments, which
            the first gradients of counts fill for thousands of iterations.

    Raises:
        ValueError: data that do not fit the model, or fewer than one step or draw.
        FloatingPointError: the bound is not finite.
    """
    if steps < 1 or draws < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"Expected positive steps, draws and batch_size, but got {steps}, {draws} and {batch_size}")
    if key.ndim > 1 or (key.ndim == 1 and len(key) not in (1, size)):
        raise ValueError(f"Expected one key or one for each of {size} problems, but got shape {tuple(key.shape)}")
    batch = prepared(model, data)
    key = key.to(batch.y.device)
    schedule = lr if callable(lr) else cosine(lr, steps)
    begin = start or initial(model, guide, batch, size, random.fold_in(key, _START))
    parameters = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), begin)
    leaves = tree.leaves(parameters)
    optimizer = torch.optim.Adam(leaves, lr=1.0, fused=True)
    placed = dataclasses.replace(model, rho=model.rho.to(batch.y))  # once, not in every iteration
    means, recent = [], torch.zeros(size, dtype=torch.float64, device=leaves[0].device)
    for step, (rows, noise) in enumerate(_iterations(model, guide, batch, key, steps, draws, batch_size)):
        sampled = bound(placed, guide, parameters, batch if rows is None else batch.take(rows), noise)
        ascend(optimizer, sampled, schedule(step))
        recent += sampled.detach().mean(1)
        if (step + 1) % every == 0 or step + 1 == steps:
            means.append(recent / ((step % every) + 1))
            recent = torch.zeros_like(recent)
            if not bool(means[-1].isfinite().all()):
                raise FloatingPointError(f"Expected a finite bound, but got {means[-1].tolist()} by step {step + 1}")
    return Fit(model, guide, tree.map(torch.detach, parameters), torch.stack(means))


def _iterations(
    model: VerticalModel, guide: Guide, batch: Batch, key: Tensor, steps: int, draws: int, batch_size: int | None
) -> Iterator[tuple[Tensor | None, Noise]]:
    """Rows and noise of each iteration, drawn for a block of iterations at a time."""
    total = batch.y.shape[-1]
    rows = batch_size or total
    keys = key.reshape(-1)
    parties = len(model.predictors) if guide.auxiliary.party is not None or model.power else 1
    block = max(1, _BLOCK // (len(keys) * draws * rows * model.likelihood.outputs * parties))
    dtype = batch.features[0].dtype
    for start in range(0, steps, block):
        count = torch.arange(start, min(start + block, steps), device=key.device)[:, None]
        noise = draw_noise(model, guide, random.fold_in(random.fold_in(keys, _STEPS), count), rows, draws, dtype)
        each = [[part.unbind(0) for part in parts] for parts in noise]
        chosen = None
        if batch_size is not None:
            chosen = random.randint(random.fold_in(random.fold_in(keys[0], _ROWS), count[:, 0]), total, (rows,))
        for i in range(len(count)):
            of_step = Noise(*(tuple(part[i] for part in parts) for parts in each))
            yield (None if chosen is None else chosen[i]), of_step
