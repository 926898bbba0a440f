r"""Structured federated variational inference, run in one autograd graph.

Adam climbs the bound of `fedtorch.vfl.fit.bound` along sampled gradients; `fedtorch.vfl.nodes.iteration` does the same
by exchanging values and gradients.

Source: Hassan et al., section 4, algorithms 1 and 2.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.progress import Progress
from fedtorch.vfl.fit.adam import Drift, RestartingAdam
from fedtorch.vfl.fit.bound import ascend, bound, climb
from fedtorch.vfl.fit.captured import CapturedBound
from fedtorch.vfl.fit.guide import Guide, Parameters, draw_theta, initial
from fedtorch.vfl.fit.noise import draw_noise, iterations
from fedtorch.vfl.model.checks import prepared
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData

_START = 0  # purpose of the key
_TAIL = 8  # the last eighth of the steps, in which a learning rate that falls to zero has all but done so

Schedule = Callable[[int], float]


class VariationalFit(NamedTuple):
    """What `sfvi` found.

    >>> import torch, fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(1), ft.vfl.linear(2)], rho=1.0)
    >>> fit = sfvi(model, Guide(ft.vfl.noiseless()), data, key=random.key(0), steps=4, every=2)
    >>> fit.bounds.shape, [part.shape for part in fit.moments()]  # of an intercept and three coefficients
    (torch.Size([2, 1]), [torch.Size([1, 4]), torch.Size([1, 4, 4])])
    >>> [theta.shape for theta in fit.sample(random.key(1), draws=100)]
    [torch.Size([1, 100, 1]), torch.Size([1, 100, 1]), torch.Size([1, 100, 2])]
    >>> fit.converged()  # four steps cannot tell
    tensor([False])
    """

    model: VerticalModel  # with the networks of its predictors, if any, as they were trained
    guide: Guide
    parameters: Parameters
    bounds: Tensor  # (steps // every, B) mean of the sampled bound over each `every` steps
    drift: Tensor  # (B,) the largest mean gradient of a parameter over the last steps, in standard errors

    def converged(self, tolerance: float = 5.0) -> Tensor:
        """Whether no parameter still has somewhere to go, `(B,)`.

        A bound that looks flat does not say so: gradients of counts, or a noise ρ far above the likelihood's, may hold
        the optimiser up. This asks whether the gradients of the last eighth of the steps are zero but for their noise.

        Args:
            tolerance: on `drift`; the largest of some hundreds of parameters at their optimum is about 4.
        """
        return self.drift <= tolerance

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean `(B, D)` and covariance `(B, D, D)` of q(γ, θ_1, …, θ_J), all coordinates one after the other."""
        q, family = self.parameters, self.guide.theta
        if q.joint is not None:
            return q.joint["mean"], family.covariance(q.joint)
        blocks = [node["theta"] for node in (q.server, *q.parties)]
        covariances = [self.guide.family(j).covariance(block) for j, block in enumerate(blocks)]
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


def cosine(rate: float, steps: int, floor: float = 0.0) -> Schedule:
    """A learning rate that falls from `rate` to `floor · rate` along half a cosine.

    >>> rate = cosine(0.1, steps=4)
    >>> [round(rate(step), 3) for step in range(5)]
    [0.1, 0.085, 0.05, 0.015, 0.0]
    """
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
    compile: bool = False,
    progress: bool = True,
) -> VariationalFit:
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
        start: parameters to start from.
        compile: True captures an iteration's operations once per shape and replays them, on a CUDA device as one graph;
            networks that draw random numbers are not captured.
        progress: whether it is shown how far a fit is that takes longer than two seconds; see `fedtorch.progress`.

    Ask the fit whether it has `converged`: a bound that looks flat does not say so.

    Raises:
        ValueError: data that do not fit the model, or fewer than one step or draw.
        FloatingPointError: the bound is not finite.
    """
    if steps < 1 or draws < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"Expected positive steps, draws and batch_size, but got {steps}, {draws} and {batch_size}")
    if key.ndim > 1 or (key.ndim == 1 and len(key) not in (1, size)):
        raise ValueError(f"Expected one key or one for each of {size} problems, but got shape {tuple(key.shape)}")
    batch = prepared(model, data)
    if any(True for predictor in model.predictors for _ in predictor.parameters()):
        model = copy.deepcopy(model)  # whose networks are trained
    like = batch.features[0]
    key = key.to(like.device)
    schedule = lr if callable(lr) else cosine(lr, steps)
    begin = start or initial(model, guide, batch.y.shape[-1], size, random.fold_in(key, _START), like.dtype)
    parameters = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), begin)
    networks = [weight for predictor in model.predictors for weight in predictor.parameters()]
    leaves = [*tree.leaves(parameters), *networks]
    optimizer, drift = RestartingAdam(leaves), Drift(leaves)
    placed = dataclasses.replace(model, rho=model.rho.to(like))  # once, not in every iteration
    means, recent = [], torch.zeros(size, dtype=torch.float64, device=like.device)
    captured, share = CapturedBound(placed, guide, parameters) if compile else None, like.new_tensor(1 / draws)
    drawn = iterations(model, guide, key, like, batch.y.shape[-1], steps, draws, batch_size)
    with Progress("SFVI", steps, unit="step", shown=progress) as shown:
        for step, (rows, noise) in enumerate(drawn):
            here = batch if rows is None else batch.take(rows, model.row_dims)
            if captured is None:
                sampled = bound(placed, guide, parameters, here, noise)
                ascend(optimizer, sampled, schedule(step))
            else:
                sampled = captured.backward(here, noise, share)
                climb(optimizer, schedule(step))
            if step >= steps - max(steps // _TAIL, 1):
                drift.add()
            recent += sampled.detach().mean(1)
            if (step + 1) % every == 0 or step + 1 == steps:
                means.append(recent / ((step % every) + 1))
                recent = torch.zeros_like(recent)
                if not bool(means[-1].isfinite().all()):
                    raise FloatingPointError(
                        f"Expected a finite bound, but got {means[-1].tolist()} by step {step + 1}"
                    )
            shown.update(tell=partial(_bound_of, means))
    return VariationalFit(model, guide, tree.map(torch.detach, parameters), torch.stack(means), drift.largest(size))


def _bound_of(means: list[Tensor]) -> dict[str, str]:
    """What progress shows: the last mean bound, over the batch."""
    return {"bound": f"{float(means[-1].mean()):.5g}"} if means else {}
