r"""A sampler of directed graphs with feedback that moves all effects at once, with tempered chains in its batch.

The model is that of `fedtorch.models.gibbs.directed`. All sites are in one process: a step of the dynamics would be a
round of sums, some ten thousand of them. What it is for is to say whether the posterior can be sampled at all.

- The effects θ_k of each site, then θ and all θ_k together, move by Hamiltonian dynamics given all scales, in
  coordinates in which they would be independent standard normals if the errors were normal of the same information:
  with A_kj = Y'Y/b² + W = LL', W = diag(1/(λτ)²), row j of θ has precision P + Σ_k W A⁻¹ Y'Y/b², and θ_kj = A⁻¹ W θ_j +
  L⁻ᵀ v.
- Pairs of rows of every site are turned, as in `fedtorch.models.gibbs.directed`.
- Scales, indicators and 1/b are drawn as in the federated sampler.
- A chain at temperature t has the likelihood to the power of β_t. Neighbours exchange their temperatures with
  probability min(1, exp((β_s − β_t)(ℓ_t − ℓ_s))), even and odd pairs by turns (Okabe et al., "Replica-exchange Monte
  Carlo method for the isobaric–isothermal ensemble", Chemical Physics Letters 335, 2001, for the alternation).

Every draw is made of a key and the number of the step, so that a run that is taken up again is the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.models.gibbs import deviations, global_priors
from fedtorch.tree import Tree

MOST_PRECISE = 1e10  # of 1/(λτ)²
POINTS = 32  # of a lattice for τ
BOUND = 69.0  # of |log τ²|
WANTED = 0.7  # of the proposals are to be accepted
HORSESHOE, SPIKE_AND_SLAB = deviations.horseshoe(), global_priors.spike_and_slab()


class Chains(NamedTuple):
    """The variables of B chains; matrices are from column to row, with a diagonal that counts for nothing."""

    theta: Tensor  # (B, p, p)
    sites: Tensor  # (B, K, p, p) θ_k
    w: Tensor  # (B, K, p, p) 1/λ²
    u: Tensor  # (B, K, p, p) 1/ν
    precision: Tensor  # (B, p, p) 1/τ²
    noise: Tensor  # (B, K, p) 1/b
    prior: Tree  # of θ
    temperature: Tensor  # (B,) which power of the likelihood
    length: Tensor  # (2, T) of the dynamics' steps, of the sites alone and of all together
    accepted: Tensor  # (2, T) probabilities of the last proposals
    swapped: Tensor  # (T − 1,) shares of the last exchanges that were made, 0 of pairs whose turn it was not


class Posterior:
    """The posterior of effects and scales given rows `(K, N, p)`, padded with zeros; each site has `count` of them.

    Chains are `ladders` groups of one chain for each of the `powers` of the likelihood, the first of which is one.
    The dynamics take so many `steps`; all effects move `together`, or those of each site only.
    """

    def __init__(
        self, y: Tensor, count: Tensor, powers: Tensor, ladders: int, steps: int = 8, together: bool = True
    ) -> None:
        self.y, self.count, self.powers, self.ladders = y, count.double(), powers, ladders
        self.steps, self.together = steps, together
        self.gram, self.p = y.mT @ y, y.shape[-1]
        self.unit = torch.eye(self.p, dtype=y.dtype)
        self.off = 1 - self.unit
        self.places = self.off.flatten().nonzero()[:, 0]

    def start(self, theta: Tensor, length: float = 0.2) -> Chains:
        """Return chains that start at effects `(p, p)` or `(B, p, p)`."""
        temperatures, sites = len(self.powers), self.y.shape[-3]
        size = temperatures * self.ladders
        theta = theta.expand(size, self.p, self.p).clone()
        each = theta[:, None].expand(-1, sites, -1, -1).clone()
        ones = torch.ones_like(each)
        return Chains(
            theta,
            each,
            ones,
            ones,
            torch.ones_like(theta),
            ones[..., 0],
            SPIKE_AND_SLAB.init(self.entries(theta)),
            torch.arange(temperatures).repeat(self.ladders),
            torch.full((2, temperatures), length, dtype=theta.dtype),
            torch.zeros(2, temperatures, dtype=theta.dtype),
            torch.zeros(temperatures - 1, dtype=theta.dtype),
        )

    def step(self, chains: Chains, key: Tensor, number: int, adapt: bool = False) -> Chains:
        """Return the chains after one step, whose length is adapted to the acceptance only if asked to."""
        for_each = random.fold_in(random.fold_in(key, number), torch.arange(len(chains.theta)))
        for_sites, for_all, for_turns, for_scales, for_swaps = random.split(for_each, 5)
        chains = self.dynamics(chains, for_sites, False)
        if self.together:
            chains = self.dynamics(chains, for_all, True)
        if adapt:
            change = (0.1 * (chains.accepted - WANTED)).exp()
            chains = chains._replace(length=(chains.length * change).clamp(0.01, 0.6))
        chains = self.turns(chains, for_turns)
        return self.swaps(self.scales(chains, for_scales), for_swaps, number)

    def likelihood(self, sites: Tensor, noise: Tensor) -> Tensor:
        """Return log p(y | θ_k, b), less a constant, `(B, K)`."""
        determinant = torch.linalg.slogdet(self.unit - sites).logabsdet
        return self.count * (determinant + noise.log().sum(-1)) - (self.absolute(sites) * noise).sum(-1)

    def errors(self, sites: Tensor) -> Tensor:
        """Return e `(B, K, N, p)`."""
        return self.y @ (self.unit - sites).mT

    def absolute(self, sites: Tensor) -> Tensor:
        """Return Σ_i |e_i|, `(B, K, p)`."""
        return self.errors(sites).abs().sum(-2)

    def entries(self, values: Tensor) -> Tensor:
        """Return matrices without their diagonal, `(..., p, p)` -> `(..., q)`."""
        return values.flatten(-2)[..., self.places]

    def matrix(self, values: Tensor) -> Tensor:
        """Return `(..., q)` as matrices with a diagonal of zeros."""
        whole = values.new_zeros(*values.shape[:-1], self.p * self.p)
        whole[..., self.places] = values
        return whole.unflatten(-1, (self.p, self.p))

    def cold(self, chains: Chains) -> Tensor:
        """Return the numbers of the chains whose likelihood has the power of one, in the order of the ladders."""
        which = (chains.temperature.unflatten(0, (self.ladders, -1)) == 0).nonzero()[:, 1]
        return which + torch.arange(self.ladders) * len(self.powers)

    def dynamics(self, chains: Chains, keys: Tensor, together: bool) -> Chains:
        """Move all effects given the scales, or those of each site given θ as well."""
        given = _Given(self, chains)
        for_global, for_sites, for_length, for_choice = random.split(keys, 4)
        momentum = random.normal(for_global, (self.p, self.p), torch.float64) * self.off * together
        momenta = random.normal(for_sites, tuple(chains.sites.shape[1:]), torch.float64) * self.off
        x, v = given.coordinates(chains.theta, chains.sites)
        before = given.energy(chains.theta, chains.sites, momentum, momenta)
        length = chains.length[int(together), chains.temperature]
        length = (length * (0.6 + 0.8 * random.uniform(for_length, (), torch.float64)))[:, None, None]
        each = length[:, None]
        theta, sites, slope, slopes = chains.theta, chains.sites, *given.slopes(chains.theta, chains.sites)
        for _ in range(self.steps):
            momentum, momenta = momentum - length / 2 * slope * together, momenta - each / 2 * slopes
            x, v = x + length * momentum, v + each * momenta
            theta, sites = given.effects(x, v)
            slope, slopes = given.slopes(theta, sites)
            momentum, momenta = momentum - length / 2 * slope * together, momenta - each / 2 * slopes
        gain = before - given.energy(theta, sites, momentum, momenta)
        inside = stable(sites.nan_to_num(nan=1e9, posinf=1e9, neginf=-1e9))
        gain = torch.where(inside & gain.isfinite(), gain, -torch.inf)
        log = random.uniform(for_choice, gain.shape[1:], torch.float64).log()
        if together:
            gain, log = gain.sum(1, keepdim=True).expand_as(gain), log[:, :1]
        taken = log < gain
        rate = torch.zeros_like(chains.length[0]).index_add(0, chains.temperature, gain.clamp_max(0).exp().mean(1))
        accepted = chains.accepted.clone()
        accepted[int(together)] = rate / self.ladders
        return chains._replace(
            theta=torch.where(taken[:, :1, None], theta, chains.theta) if together else chains.theta,
            sites=torch.where(taken[..., None, None], sites, chains.sites),
            accepted=accepted,
        )

    def turns(self, chains: Chains, keys: Tensor) -> Chains:
        """Turn the rows of every site in pairs, which are drawn at random."""
        size, count, p = *chains.sites.shape[:2], self.p
        for_order, for_angle, for_choice = random.split(keys, 3)
        order = random.uniform(for_order, (count, p), torch.float64).argsort(-1)
        angles = 2 * math.pi * random.uniform(for_angle, (count, p // 2), torch.float64)
        logs = random.uniform(for_choice, (count, p // 2), torch.float64).log()
        pull, power = chains.w * chains.precision[:, None], self.powers[chains.temperature][:, None, None]
        centre = chains.theta[:, None].expand_as(chains.sites)
        sites, noise, errors = chains.sites, chains.noise, self.errors(chains.sites)
        for turn in range(p // 2):
            pair = order[..., 2 * turn : 2 * turn + 2]
            index, across = pair[..., None].expand(-1, -1, -1, p), pair[:, :, None].expand(-1, -1, errors.shape[2], -1)
            old, scale, residual = sites.gather(2, index), noise.gather(2, pair), errors.gather(3, across)
            cosine, sine = angles[..., turn].cos(), angles[..., turn].sin()
            rotation = torch.stack([cosine, -sine, sine, cosine], -1).unflatten(-1, (2, 2))
            whitened = rotation @ ((self.unit[pair] - old) * scale[..., None])
            diagonal = whitened.gather(3, pair[..., None])[..., 0]
            new, sharper = self.unit[pair] - whitened / diagonal[..., None], diagonal.abs()
            turned = (residual * scale[:, :, None]) @ rotation.mT
            gain = power * (residual.abs().sum(2) * scale - turned.abs().sum(2))
            gain = (gain + (1 - p) * (sharper / scale).log() - (sharper - scale)).sum(-1)
            middle = (old + new) / 2 - centre.gather(2, index)
            gain = gain + (pull.gather(2, index) * (old - new) * middle * (1 - self.unit[pair])).sum((-1, -2))
            candidate = sites.scatter(2, index, new)
            taken = torch.zeros(size, count, dtype=torch.bool)
            where = (logs[..., turn] < gain).nonzero(as_tuple=True)
            taken[where] = stable(candidate[where])
            sites = torch.where(taken[..., None, None], candidate, sites)
            noise = torch.where(taken[..., None], noise.scatter(2, pair, sharper), noise)
            moved = errors.scatter(3, across, turned / diagonal[:, :, None])
            errors = torch.where(taken[..., None, None], moved, errors)
        return chains._replace(sites=sites, noise=noise)

    def scales(self, chains: Chains, keys: Tensor) -> Chains:
        """Draw all but the θ_k, as `sparse.hierarchy` and `directed.regression` do."""
        for_mixing, for_scale, for_prior, for_noise = random.split(keys, 4)
        gap = chains.sites - chains.theta[:, None]
        noise = HORSESHOE.noise(for_mixing, tuple(gap.shape[1:]))
        w, u = HORSESHOE.update(chains.w, chains.u, gap.square() * chains.precision[:, None] / 2, noise)
        w = torch.minimum(w, MOST_PRECISE / chains.precision[:, None])
        each, sites, before = self.entries(w), self.entries(chains.sites), self.entries(chains.precision)
        weight = each.sum(1)
        estimate = (each * sites).sum(1) / weight
        scatter = (each * (sites - estimate[:, None]).square()).sum(1)
        evidence = lambda variance: SPIKE_AND_SLAB.evidence(chains.prior, estimate, variance / weight)
        precision = draw_scale(self.y.shape[-3], scatter, before, evidence, for_scale)
        theta, prior = SPIKE_AND_SLAB.update(chains.prior, estimate, weight * precision, for_prior)
        power = self.powers[chains.temperature][:, None, None]
        shape = (1 + power * self.count[:, None]).expand_as(chains.noise)
        gamma = random.gamma(for_noise, shape, tuple(shape.shape[1:]), torch.float64)
        return chains._replace(
            theta=self.matrix(theta),
            w=w,
            u=u,
            precision=self.matrix(precision) + self.unit,
            noise=gamma / (1 + power * self.absolute(chains.sites)),
            prior=prior,
        )

    def swaps(self, chains: Chains, keys: Tensor, number: int) -> Chains:
        """Exchange the temperatures of neighbours, the even pairs in even steps and the odd ones in odd steps."""
        each = self.likelihood(chains.sites, chains.noise).sum(-1).unflatten(0, (self.ladders, -1))
        temperature = chains.temperature.unflatten(0, (self.ladders, -1))
        logs = random.uniform(keys, (), torch.float64).log().unflatten(0, (self.ladders, -1))
        place = temperature.argsort(-1)  # of the chain at a temperature
        swapped = torch.zeros_like(chains.swapped)
        for low in range(number % 2, len(self.powers) - 1, 2):
            a, b = place[:, low].clone(), place[:, low + 1].clone()
            value = lambda chain: each.gather(1, chain[:, None])[:, 0]
            taken = logs[:, low] < (self.powers[low] - self.powers[low + 1]) * (value(b) - value(a))
            place[:, low], place[:, low + 1] = torch.where(taken, b, a), torch.where(taken, a, b)
            swapped[low] = taken.double().mean()
        return chains._replace(temperature=place.argsort(-1).flatten(), swapped=swapped)


class _Given:
    """The distribution of all effects given the scales, and the coordinates in which they move."""

    def __init__(self, posterior: Posterior, chains: Chains) -> None:
        self.of, off, unit = posterior, posterior.off, posterior.unit
        self.power = posterior.powers[chains.temperature]
        self.noise = chains.noise
        self.pull = chains.w * chains.precision[:, None] * off
        size = len(chains.theta)
        prior = SPIKE_AND_SLAB.precision(chains.prior).expand(size, len(posterior.places))
        self.prior = posterior.matrix(prior)
        known = posterior.gram.unsqueeze(-3) * (off[:, :, None] * off[:, None, :])
        known = known * (self.power[:, None, None] * chains.noise.square())[..., None, None]  # (B, K, p, p, p)
        self.factor = torch.linalg.cholesky(known + torch.diag_embed(self.pull + unit))
        self.root = torch.linalg.solve_triangular(self.factor, unit.expand_as(known), upper=False)
        shared = (self.pull[..., None] * (self.root.mT @ self.root) @ known).sum(1)
        shared = torch.diag_embed(self.prior + unit) + (shared + shared.mT) / 2
        self.shared_factor = torch.linalg.cholesky(shared)
        self.shared_root = torch.linalg.solve_triangular(self.shared_factor, unit.expand_as(shared), upper=False)

    def coordinates(self, theta: Tensor, sites: Tensor) -> tuple[Tensor, Tensor]:
        """Return x `(B, p, p)` and v `(B, K, p, p)`."""
        v = _times(self.factor.mT, sites) - _times(self.root, self.pull * theta[:, None])
        return _times(self.shared_factor.mT, theta), v * self.of.off

    def effects(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return θ and θ_k."""
        theta = _times(self.shared_root.mT, x) * self.of.off
        return theta, _times(self.root.mT, v + _times(self.root, self.pull * theta[:, None])) * self.of.off

    def energy(self, theta: Tensor, sites: Tensor, momentum: Tensor, momenta: Tensor) -> Tensor:
        """Return the negative log density of the effects and momenta, `(B, K)`, θ's part at the first site."""
        gap = self.pull * (sites - theta[:, None]).square() + momenta.square()
        each = gap.sum((2, 3)) / 2 - self.power[:, None] * self.of.likelihood(sites, self.noise)
        shared = (self.prior * theta.square() + momentum.square()).sum((1, 2)) / 2
        return torch.cat([each[:, :1] + shared[:, None], each[:, 1:]], 1)

    def slopes(self, theta: Tensor, sites: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of the energy by x and v."""
        power = self.power[:, None, None]
        slope = -(self.of.errors(sites).sign().mT @ self.of.y) * (power * self.noise)[..., None]
        inverse = torch.linalg.inv_ex(self.of.unit - sites).inverse
        gap = self.pull * (sites - theta[:, None])
        slope = (slope + (power * self.of.count[:, None])[..., None] * inverse.mT + gap) * self.of.off
        by_sites = _times(self.root, slope)
        by_theta = self.prior * theta - gap.sum(1) + (self.pull * _times(self.root.mT, by_sites)).sum(1)
        return _times(self.shared_root, by_theta * self.of.off), by_sites * self.of.off


def draw_scale(
    sites: int, scatter: Tensor, precision: Tensor, evidence: Callable[[Tensor], Tensor], keys: Tensor
) -> Tensor:
    """Return 1/τ² `(B, q)` after one that was `precision`, on a random lattice; see `fedtorch.models.gibbs._scales`.

    Args:
        sites: K.
        scatter: Σ_k (θ_k − θ̂)² / λ_k², `(B, q)`.
        precision: `(B, q)`.
        evidence: τ² -> log density of θ̂ with θ integrated out.
        keys: `(B,)`.
    """
    middle = (scatter / max(sites - 1, 1)).clamp_min(1e-300).log().clamp(-BOUND, BOUND)
    width = (2 / torch.tensor(sites).double()).sqrt()
    for_spacing, for_place, for_choice = random.uniform(keys, (3, scatter.shape[-1]), torch.float64).unbind(1)
    points = torch.arange(POINTS, dtype=torch.float64)[:, None, None]
    y = ((-precision.log() - middle) / width).asinh() + 0.2 * (1 + for_spacing) * (
        points - (POINTS * for_place).floor()
    )
    x = middle + width * y.sinh()
    inside = x.clamp(-BOUND, BOUND)
    variance = inside.exp()
    log = inside / 2 - variance.log1p() - ((sites - 1) * inside + scatter / variance) / 2 + evidence(variance)
    log = torch.where(inside == x, log, -torch.inf) + y.cosh().log()
    heights = (log - log.amax(0)).exp().cumsum(0)
    chosen = (heights <= for_choice * heights[-1]).sum(0, keepdim=True).clamp_max(POINTS - 1)
    return (-x.gather(0, chosen)[0]).exp()


def stable(sites: Tensor) -> Tensor:
    """Return which matrices `(..., p, p)` have a spectral radius below one."""
    power = sites
    for _ in range(6):
        power = power @ power
    inside = power.abs().sum(-1).amax(-1) < 1  # the norm of a power bounds that power of the radius
    doubtful = (~inside).nonzero(as_tuple=True)
    inside[doubtful] = torch.linalg.eigvals(sites[doubtful]).abs().amax(-1) < 1
    return inside


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[..., None])[..., 0]
