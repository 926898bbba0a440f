r"""Sparse priors of a global parameter θ `(p,)` whose data are an estimate θ̂_j with precision h_j per coefficient.

In a hierarchy the sites' parameters are the data: θ̂_j = Σ_k θ_kj/λ_kj² / Σ_k 1/λ_kj² and h_j = Σ_k 1/(λ_kj² τ_j²).
Each prior is one Gibbs step that leaves p(θ, its own variables | θ̂, h) invariant, for several chains at once,
`(C, p)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch._lazy import only
from fedtorch.models.gibbs import _scales as scales
from fedtorch.models.gibbs.deviations import laplace
from fedtorch.programs import gibbs_server
from fedtorch.tree import Tree

__all__ = ["bayesian_lasso", "gaussian", "regularised_horseshoe", "spike_and_slab"]
__dir__ = only(__all__)


@dataclass(frozen=True)
class GlobalPrior:
    """A prior of the global parameter.

    Attributes:
        init: start of θ, `(C, p)` -> its variables, `(C, ...)`.
        update: (variables, θ̂ `(C, p)`, its precision h `(C, p)`, keys `(C,)`) -> (θ `(C, p)`, variables).
        precision: variables -> the precisions of θ given them, `(C, p)` or a number; θ is then normal with mean zero.
        normals: variables -> (shares, precisions) `(k, C, p)` of the k normal densities of mean zero whose mixture is
            θ's prior, with the variables that `update` redraws first integrated out; default: one, given all variables.

    A user-defined prior, θ_j ~ N(0, 1), which is `gaussian(1.0)`:

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models.gibbs import sparse
    >>> def update(variables, estimate, precision, keys):
    ...     z = ft.random.normal(keys, (estimate.shape[-1],), torch.float64)
    ...     return precision * estimate / (precision + 1) + z / (precision + 1).sqrt(), variables
    >>> prior = GlobalPrior(lambda start: {}, update, lambda variables: torch.tensor(1.0).double())
    >>> estimate, precision = torch.tensor([[2.0, -4.0]]).double(), torch.full((1, 2), 1e12).double()
    >>> prior.update({}, estimate, precision, ft.random.key(0)[None])[0].round(decimals=3)  # precise data win
    tensor([[ 2., -4.]], dtype=torch.float64)
    >>> shared = sparse.hierarchy(prior)
    """

    init: Callable[[Tensor], Tree]
    update: Callable[[Tree, Tensor, Tensor, Tensor], tuple[Tensor, Tree]]
    precision: Callable[[Tree], Tensor]
    normals: Callable[[Tree], tuple[Tensor, Tensor]] | None = None

    def evidence(self, variables: Tree, estimate: Tensor, variance: Tensor) -> Tensor:
        """Return log densities of estimates with given variances, `(..., C, p)`, θ integrated out, up to a constant."""
        return scales.evidence(self.components(variables), estimate, variance)

    def components(self, variables: Tree) -> scales.Components:
        """Return the normal densities whose mixture is θ's prior, for `_scales`."""
        if self.normals is None:
            precision = self.precision(variables)[None]
            return scales.Components(torch.ones_like(precision), precision)
        return scales.Components(*self.normals(variables))


class SpikeAndSlab(NamedTuple):
    """Variables of `spike_and_slab`; `(C, ...)`.

    >>> import torch, fedtorch as ft
    >>> prior, precise = spike_and_slab(), torch.full((50, 2), 1e6).double()  # 50 chains
    >>> estimate = torch.tensor([0.001, 5.0]).double().expand(50, 2)
    >>> variables = prior.init(torch.zeros(50, 2).double())
    >>> for key in ft.random.split(ft.random.key(0), 5):
    ...     theta, variables = prior.update(variables, estimate, precise, ft.random.fold_in(key, torch.arange(50)))
    >>> variables.included.mean(0).round(), variables.variance.shape, variables.inclusion.shape
    (tensor([0., 1.], dtype=torch.float64), torch.Size([50, 2]), torch.Size([50]))
    """

    included: Tensor  # (C, p) γ, 0 or 1
    variance: Tensor  # (C, p) η, or (C, 1) if shared
    inclusion: Tensor  # (C,) ρ


class Mixture(NamedTuple):
    """Variables of priors that are scale mixtures with one global scale; `(C, ...)`.

    >>> import torch, fedtorch as ft
    >>> prior, precise = regularised_horseshoe(), torch.full((50, 2), 1e12).double()  # 50 chains
    >>> estimate = torch.tensor([1e-4, 1.0]).double().expand(50, 2)
    >>> variables = prior.init(torch.zeros(50, 2).double())
    >>> for key in ft.random.split(ft.random.key(0), 5):
    ...     theta, variables = prior.update(variables, estimate, precise, ft.random.fold_in(key, torch.arange(50)))
    >>> small, large = (variables.precision * variables.scale).rsqrt().median(0).values  # λ τ of either coefficient
    >>> bool(small < 0.5 < large)
    True
    """

    precision: Tensor  # (C, p) 1/λ²
    auxiliary: Tensor  # (C, p) 1/ν
    scale: Tensor  # (C, 1) 1/τ²
    scale_auxiliary: Tensor  # (C, 1) 1/ξ


def spike_and_slab(
    *,
    spike: float = 0.01,
    variance: tuple[float, float] = (2.0, 0.5),
    inclusion: tuple[float, float] = (1.0, 1.0),
    shared_variance: bool = False,
    groups: Sequence[int] | Tensor | None = None,
) -> GlobalPrior:
    r"""Build the spike-and-slab prior: coefficients are either effects or nearly zero.

    .. math::
        \theta_j \mid \gamma_j \sim N(0, c_0^{1-\gamma_j} \eta_j),\quad \gamma_j \sim \text{Bernoulli}(\rho),\quad
        \rho \sim \text{Beta}(a_\rho, b_\rho),\quad \eta_j \sim IG(a_\eta, b_\eta)

    γ_j is drawn twice: given ρ with θ integrated out (of groups: one after another with ρ integrated out), for
    coefficients about which the data have little information; then, after θ, one after another with η and ρ integrated
    out, for well-determined ones, whose η would fix γ: θ_j is then Student's t with 2 a_η degrees of freedom. Then η_j
    ~ IG(a_η + ½, b_η + ½ θ_j²/c₀^{1−γ_j}), and ρ. (Kidd et al. 2023, section 2.2.2; their Algorithm 3 draws γ_j given
    θ_j, η and ρ, and mixes far worse.)

    Args:
        spike: c₀, the variance of coefficients that count as zero, relative to that of an effect.
        variance: (a_η, b_η).
        inclusion: (a_ρ, b_ρ).
        shared_variance: one η for all coefficients, IG(a_η + p/2, b_η + ½ Σ_j θ_j²/c₀^{1−γ_j}), as in the source's
            Algorithm 3; default one per coefficient, as in its prior.
        groups: `(p,)`, the block of each coefficient, 0, 1, …: a block has one γ, as for a spline basis.

    Raises:
        ValueError: a hyperparameter out of range, or groups that leave out a number.

    >>> import torch
    >>> prior = spike_and_slab()
    >>> variables = prior.init(torch.zeros(1, 3))
    >>> variables.included.shape, variables.inclusion
    (torch.Size([1, 3]), tensor([0.5000]))
    """
    if not 0 < spike < 1:
        raise ValueError(f"Expected a spike between 0 and 1, but got {spike}")
    for name, pair in (("variance", variance), ("inclusion", inclusion)):
        if not min(pair) > 0:
            raise ValueError(f"Expected two positive numbers for {name}, but got {pair}")
    blocks = None if groups is None else _check_groups(groups)

    def init(start: Tensor) -> SpikeAndSlab:
        if blocks is not None and len(blocks) != start.shape[-1]:
            raise ValueError(f"Expected a group for each of {start.shape[-1]} coefficients, but got {len(blocks)}")
        ones = torch.ones_like(start)
        return SpikeAndSlab(ones, ones[:, :1] if shared_variance else ones, torch.full_like(ones[:, 0], 0.5))

    def update(state: SpikeAndSlab, estimate: Tensor, precision: Tensor, keys: Tensor) -> tuple[Tensor, SpikeAndSlab]:
        p, numbers = estimate.shape[-1], (state.variance, state.inclusion, estimate, precision)
        given = (spike, *variance, *inclusion), shared_variance, keys, numbers
        if blocks is None and (drawn := gibbs_server.spike_and_slab(*given)):
            return drawn[0], SpikeAndSlab(*drawn[1:])
        for_flips, for_theta, for_variance, for_inclusion, for_more_flips = random.split(keys, 5)
        index = torch.arange(p) if blocks is None else blocks
        count, index = int(index.max()) + 1, index.to(estimate.device)

        def flip_blocks(each: Tensor, evidence: Tensor, for_uniform: Tensor) -> Tensor:
            total = evidence.new_zeros(len(keys), count).index_add_(1, index, evidence)
            return flip(each, total, random.uniform(for_uniform, (count,), torch.float64), *inclusion)

        evidence = _log_density(estimate, state.variance + 1 / precision)
        evidence = evidence - _log_density(estimate, spike * state.variance + 1 / precision)
        if blocks is None:
            coins = random.uniform(for_flips, (p,), torch.float64)
            each = (coins.logit() < evidence + state.inclusion.logit()[:, None]).to(evidence.dtype)
        else:
            first = torch.stack([(index == g).nonzero()[0, 0] for g in range(count)])  # of each block
            each = flip_blocks(state.included[:, first], evidence, for_flips)
        posterior = precision + 1 / (_factor(each, spike)[:, index] * state.variance)
        theta = _normal(estimate, precision, posterior, for_theta)
        if not shared_variance:
            each = flip_blocks(each, slab_evidence(theta.square() / 2, spike, *variance), for_more_flips)
        energy = theta.square() / _factor(each, spike)[:, index] / 2
        (shape, rate), (a, b) = variance, inclusion
        if shared_variance:
            gamma = random.gamma(for_variance, shape + p / 2, (1,), torch.float64)
            eta = (rate + energy.sum(-1, keepdim=True)) / gamma
        else:
            eta = (rate + energy) / random.gamma(for_variance, shape + 0.5, (p,), torch.float64)
        slabs = each.sum(-1)
        rho = random.beta(for_inclusion, a + slabs, b + count - slabs, (), torch.float64)
        return theta, SpikeAndSlab(each[:, index], eta, rho)

    def normals(state: SpikeAndSlab) -> tuple[Tensor, Tensor]:
        slab, precision = state.inclusion[:, None] if blocks is None else state.included, 1 / state.variance
        return torch.stack((slab, 1 - slab)), torch.stack((precision, precision / spike))

    return GlobalPrior(init, update, lambda state: 1 / (_factor(state.included, spike) * state.variance), normals)


def regularised_horseshoe(*, slab: float = 2.0) -> GlobalPrior:
    r"""Return a horseshoe whose far tails are those of a normal of standard deviation `slab`.

    .. math:: p(\theta, \lambda, \tau) \propto N(\theta; 0, \lambda^2 \tau^2)\, C^+(\lambda)\, C^+(\tau)
        \prod_j \exp(-\theta_j^2 / (2 s^2))

    The form of Piironen and Vehtari ("Sparsity information and regularization in the horseshoe and other shrinkage
    priors", EJS 11, 2017, equation 2.8) whose scales keep the horseshoe's own conditionals (Nishimura and Suchard,
    "Shrinkage with shrunken shoulders", Bayesian Analysis 18, 2023, section 2.2). One τ for all coefficients.

    Args:
        slab: s; infinity gives the horseshoe.

    >>> import torch
    >>> prior = regularised_horseshoe(slab=2.0)
    >>> prior.precision(prior.init(torch.zeros(1, 2)))  # 1/(λ² τ²) + 1/s², with λ = τ = 1 at the start
    tensor([[1.2500, 1.2500]])
    """
    if not slab > 0:
        raise ValueError(f"Expected a positive slab, but got {slab}")

    def mix(state: Mixture, energy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (random.exponential(key, energy.shape[-1:], torch.float64) for key in random.split(keys, 2))
        precision = first / (state.auxiliary + energy)
        return precision, second / (1 + precision)

    return _scale_mixture(mix, 1 / slab**2)


def bayesian_lasso() -> GlobalPrior:
    """Return the prior θ_j Laplace of scale τ, τ half-Cauchy (Park and Casella, "The Bayesian lasso", JASA 103, 2008).

    >>> import torch
    >>> prior = bayesian_lasso()
    >>> variables = prior.init(torch.zeros(1, 2))
    >>> prior.precision(variables._replace(scale=torch.tensor([[4.0]])))  # 1/(λ² τ²) of λ = 1, τ = ½
    tensor([[4., 4.]])
    """
    prior = laplace()

    def mix(state: Mixture, energy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return prior.update(state.precision, state.auxiliary, energy, prior.noise(keys, (energy.shape[-1],)))

    return _scale_mixture(mix, 0.0)


def gaussian(scale: float = 1.0) -> GlobalPrior:
    """Return the prior θ_j ~ N(0, scale²), without variables of its own: the conjugate case.

    >>> import torch, fedtorch as ft
    >>> estimate, precision = torch.full((1, 10_000), 4.0).double(), torch.full((1, 10_000), 0.25).double()
    >>> theta, _ = gaussian(scale=2.0).update({}, estimate, precision, ft.random.key(0)[None])
    >>> round(float(theta.mean()), 1), round(float(theta.var()), 1)  # as precise as the prior: halfway
    (2.0, 2.0)
    """
    if not scale > 0:
        raise ValueError(f"Expected a positive scale, but got {scale}")

    def update(state: Tree, estimate: Tensor, precision: Tensor, keys: Tensor) -> tuple[Tensor, Tree]:
        return _normal(estimate, precision, precision + 1 / scale**2, keys), state

    return GlobalPrior(lambda start: {}, update, lambda state: torch.tensor(1 / scale**2, dtype=torch.float64))


def _scale_mixture(mix: Callable[[Mixture, Tensor, Tensor], tuple[Tensor, Tensor]], slab: float) -> GlobalPrior:
    """Return the prior θ_j ~ N(0, λ_j² τ²), τ half-Cauchy; `mix` draws 1/λ² and its auxiliary given θ²/(2τ²)."""

    def init(start: Tensor) -> Mixture:
        ones = torch.ones_like(start)
        return Mixture(ones, ones, ones[:, :1], ones[:, :1])

    def update(state: Mixture, estimate: Tensor, precision: Tensor, keys: Tensor) -> tuple[Tensor, Mixture]:
        p = estimate.shape[-1]
        for_theta, for_mixing, for_scale, for_auxiliary = random.split(keys, 4)
        theta = _normal(estimate, precision, precision + state.precision * state.scale + slab, for_theta)
        half = theta.square() / 2
        local, auxiliary = mix(state, half * state.scale, for_mixing)
        gamma = random.gamma(for_scale, (p + 1) / 2, (1,), torch.float64)
        scale = gamma / (state.scale_auxiliary + (half * local).sum(-1, keepdim=True))
        exponential = random.exponential(for_auxiliary, (1,), torch.float64)
        return theta, Mixture(local, auxiliary, scale, exponential / (1 + scale))

    return GlobalPrior(init, update, lambda state: state.precision * state.scale + slab)


def _normal(estimate: Tensor, precision: Tensor, posterior: Tensor, keys: Tensor) -> Tensor:
    z = random.normal(keys, (estimate.shape[-1],), torch.float64)
    return precision * estimate / posterior + z / posterior.sqrt()


def _log_density(x: Tensor, variance: Tensor) -> Tensor:
    """Return log N(x; 0, variance) up to a constant."""
    return -0.5 * (variance.log() + x.square() / variance)


def slab_evidence(energy: Tensor, spike: float, shape: float, rate: float, power: float = 1.0) -> Tensor:
    r"""Return the log ratio of slab to spike of coefficients θ_j, variances η_j ~ IG(shape, rate) integrated out.

    .. math:: \log \frac{\int N(\theta; 0, \eta)^r\, IG(\eta)\, d\eta}{\int N(\theta; 0, c_0 \eta)^r\, IG(\eta)\, d\eta}
        = \tfrac r2 \log c_0 + (a + \tfrac r2) \log \frac{b + e / c_0}{b + e}, \qquad e = r \theta^2 / 2

    Args:
        energy: e.
        spike: c₀.
        shape: a.
        rate: b.
        power: r.

    >>> import torch
    >>> slab_evidence(torch.tensor([0.0, 1e9]), spike=0.01, shape=2.0, rate=0.5)  # ½ log c₀, and −a log c₀ far out
    tensor([-2.3026,  9.2103])
    """
    return 0.5 * power * math.log(spike) + (shape + power / 2) * ((rate + energy / spike) / (rate + energy)).log()


def _factor(included: Tensor, spike: float) -> Tensor:
    """Return c₀ to the power of 1 − γ."""
    return included + spike * (1 - included)


def flip(included: Tensor, evidence: Tensor, uniform: Tensor, a: float, b: float) -> Tensor:
    """Draw each block's γ given the others', with ρ ~ Beta(a, b) integrated out.

    Args:
        included: γ before, `(C, G)`.
        evidence: the log ratios of slab to spike, `(C, G)`.
        uniform: random numbers, `(C, G)`.
        a, b: parameters of ρ's prior.

    >>> import torch
    >>> flip(torch.zeros(1, 2), torch.tensor([[9.0, -9.0]]), torch.full((1, 2), 0.5), a=1.0, b=1.0)
    tensor([[1., 0.]])
    """
    blocks = included.shape[1]
    result, count = included.clone(), included.sum(-1)
    threshold = torch.logit(uniform)
    for g in range(blocks):
        others = count - result[:, g]
        odds = evidence[:, g] + ((a + others) / (b + blocks - 1 - others)).log()
        new = (threshold[:, g] < odds).to(result.dtype)
        result[:, g], count = new, others + new
    return result


def _check_groups(groups: Sequence[int] | Tensor) -> Tensor:
    index = torch.as_tensor(groups, dtype=torch.int64)
    if index.ndim != 1 or not torch.equal(index.unique(), torch.arange(len(index.unique()))):
        raise ValueError(f"Expected a block 0, 1, … for every coefficient, but got {index.tolist()}")
    return index
