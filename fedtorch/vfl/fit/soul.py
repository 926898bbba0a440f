r"""SOUL: maximum marginal likelihood of the auxiliary variables, by unadjusted Langevin draws of θ at the parties.

.. math:: \hat z = \arg\max_z \log \int p(y | z)\, p(z | \theta)\, p(\theta)\, d\theta .

In every iteration a party takes Langevin steps on its own θ_j given z,

.. math::
    \theta_j \leftarrow \theta_j + h \nabla_{\theta_j} [\log p(z_j | \theta_j) + \log p(\theta_j)] + \sqrt{2h}\,\xi ,

and z moves up :math:`\nabla_z [\log p(y | z) + \log p(z | \theta)]`, averaged over these draws, by decreasing steps. In
the power model the parties' likelihoods depend both on θ_j and on the others' z, and contribute to both gradients.
Messages are those of SFVI: z_j (or its gradient) up, the sum and gradients down.

The result is ẑ and draws of :math:`p(\theta | \hat z)`. It is an empirical Bayes estimate: its spread leaves out the
uncertainty of z and is not the posterior's. Intercept and shared parameters are maximised with z (appendix A.3).

Source: Hassan et al., appendix A. (18) prints minus signs in the exponent, and (19) minus signs, an exponential around
the gradient's argument and p where log p is meant; the formulas above follow from the definition. De Bortoli, Durmus,
Pereyra, Vidal, "Efficient stochastic optimisation by unadjusted Langevin Monte Carlo" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch._representation import without_rows
from fedtorch.progress import tracked
from fedtorch.vfl.fit.sfvi import Schedule
from fedtorch.vfl.model.checks import prepared
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData

_LANGEVIN = 0  # purpose of the key
_NUMBERS = 2**16  # normal numbers drawn at a time


@without_rows
class SoulFit(NamedTuple):
    """The maximum, and draws at it, as `soul` returns them."""

    gamma: Tensor  # (B, 1, S) intercepts and the likelihood's shared parameters, maximised
    z: tuple[Tensor, ...]  # (B, 1, C, n) ẑ, one per party
    theta: tuple[Tensor, ...]  # (B, draws, d_j) of p(θ_j | ẑ), one per party


def party_density(
    model: VerticalModel, batch: VerticalData, index: int, theta: Tensor, z: Sequence[Tensor], gamma: Tensor
) -> Tensor:
    """Return the terms of log p(y, z, θ | γ) that depend on θ_j of party `index`, `(B, M)`."""
    predictor = model.predictors[index]
    eta = predictor.forward(theta, batch.features[index])
    rho = model.noise_sd.to(eta)
    rows = -0.5 * ((z[index] - eta) / rho).square().sum(-2)
    if model.power:
        others = sum((each for k, each in enumerate(z) if k != index), torch.zeros_like(z[index]))
        centre, shared = model.centre(gamma, others + eta, batch.offset)
        rows = rows + model.likelihood.log_prob(batch.y, centre, shared) / len(z)
    return batch.weighted_sum(rows) + predictor.log_prior(theta)


def langevin(
    model: VerticalModel,
    batch: VerticalData,
    index: int,
    theta: Tensor,
    z: Sequence[Tensor],
    gamma: Tensor,
    step: float,
    noise: Tensor,
) -> Tensor:
    """Take one unadjusted Langevin step of party `index` on θ_j `(B, M, d)`, M chains at once.

    Args:
        model: the model.
        batch: the data.
        index: of the party.
        theta: states of the chains.
        z: of all parties; in the augmented model only the party's own matters.
        gamma: γ.
        step: h. The chain's stationary distribution has a relative error of O(h · the largest curvature).
        noise: standard normal, of the shape of `theta`.
    """
    theta = theta.detach().requires_grad_()
    density = party_density(model, batch, index, theta, [value.detach() for value in z], gamma.detach())
    (gradient,) = torch.autograd.grad(density.sum(), theta)
    return theta.detach() + step * gradient + math.sqrt(2 * step) * noise


def soul(
    model: VerticalModel,
    data: VerticalData,
    *,
    key: Tensor,
    steps: int,
    step: float,
    rate: Schedule,
    chains: int = 1,
    inner: int = 1,
    keep: int = 1000,
    size: int = 1,
    progress: bool = True,
) -> SoulFit:
    """Maximise the marginal likelihood over z and γ by averages over Langevin chains, then draw θ at the maximum.

    Args:
        model: `augmented` or `power`, with equal weights.
        data: aligned rows.
        key: `()` or `(B,)`.
        steps: iterations of z.
        step: h of the Langevin steps; below 1 over the largest curvature of the log-density of θ_j given z.
        rate: step size of z and γ (times ρ² for z) by iteration; for convergence its sum has to diverge and the sum of
            its squares to converge.
        chains: M, parallel chains over which a gradient is averaged.
        inner: Langevin steps per iteration.
        keep: draws of each chain at ẑ.
        size: B.
        progress: whether chains that take longer than two seconds show their progress; see `fedtorch.progress`.

    Raises:
        ValueError: steps that are not positive.
        FloatingPointError: the chains diverge; take a smaller `step`.
    """
    if min(steps, chains, inner, keep) < 1 or not step > 0:
        raise ValueError(f"Expected positive steps, chains, inner, keep and step, but got {steps}, …, {step}")
    batch = prepared(model, data)
    like, rows, outputs = batch.features[0], batch.y.shape[-1], model.likelihood.outputs
    z = [like.new_zeros(size, 1, outputs, rows) for _ in model.predictors]
    gamma = like.new_zeros(size, 1, model.sizes[0])
    thetas = [like.new_zeros(size, chains, d) for d in model.sizes[1:]]

    keys = random.fold_in(key.reshape(-1).to(like.device), _LANGEVIN)
    coming = _noise(keys, model.sizes[1:], chains, like.dtype, steps * inner + keep)

    def move(thetas: Sequence[Tensor]) -> list[Tensor]:
        each = enumerate(zip(thetas, next(coming)))
        return [langevin(model, batch, j, theta, z, gamma, step, noise) for j, (theta, noise) in each]

    for i in tracked(range(steps), "Langevin chains, to the maximum", shown=progress):
        for _ in range(inner):
            thetas = move(thetas)
        z, gamma = _ascend(model, batch, thetas, z, gamma, rate(i))
    draws_of_chain = []
    for _ in tracked(range(keep), "Langevin chains, draws", unit="draw", shown=progress):
        thetas = move(thetas)
        draws_of_chain.append(thetas)
    draws = tuple(torch.cat(chain, 1) for chain in zip(*draws_of_chain))
    if not all(bool(part.isfinite().all()) for part in (*draws, *z)):
        raise FloatingPointError(f"Expected finite draws, but the Langevin chains diverge; take step below {step}")
    return SoulFit(gamma, tuple(z), draws)


def _noise(
    keys: Tensor, sizes: Sequence[int], chains: int, dtype: torch.dtype, moves: int
) -> Iterator[tuple[Tensor, ...]]:
    """Return the standard normal numbers of each move by party, drawn for a block of moves at a time."""
    block = max(1, _NUMBERS // max(1, len(keys) * chains * sum(sizes)))
    for start in range(0, moves, block):
        of_block = random.fold_in(keys, torch.arange(start, min(start + block, moves), device=keys.device)[:, None])
        drawn = [random.normal(random.fold_in(of_block, j), (chains, size), dtype) for j, size in enumerate(sizes)]
        yield from zip(*(part.unbind(0) for part in drawn))


def _ascend(
    model: VerticalModel, batch: VerticalData, thetas: Sequence[Tensor], z: Sequence[Tensor], gamma: Tensor, rate: float
) -> tuple[list[Tensor], Tensor]:
    """Take one step of z and γ up the log-density, averaged over the chains."""
    leaves = [value.detach().requires_grad_() for value in (*z, gamma)]
    *moved, shared = leaves
    parts = [party_density(model, batch, j, theta, moved, shared).mean(1) for j, theta in enumerate(thetas)]
    if not model.power:
        centre, shape = model.centre(shared, torch.stack(moved).sum(0), batch.offset)
        parts.append(batch.weighted_sum(model.likelihood.log_prob(batch.y, centre, shape)).sum(1))
    parts.append(model.log_shared_prior(shared).sum(1))
    gradients = torch.autograd.grad(sum(parts[1:], parts[0]).sum(), leaves, allow_unused=True)
    rho = model.noise_sd.to(batch.y)
    steps = [rate * rho.square()] * len(z) + [rate / batch.y.shape[-1]]
    *new, gamma = [v.detach() if g is None else (v + s * g).detach() for v, g, s in zip(leaves, gradients, steps)]
    return new, gamma
