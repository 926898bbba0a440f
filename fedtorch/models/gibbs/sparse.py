r"""Sparse regression of several sites that share most of their coefficients.

.. math::
    Y_{ki} = X_{ki}' \theta_k + \epsilon_{ki},\quad \epsilon_{ki} \sim N(0, \sigma_k^2),\qquad
    \theta_{kj} \sim N(\theta_j, \lambda_{kj}^2 \tau_j^2),\quad \lambda_{kj}, \tau_j \sim C^+(0, 1),\quad
    \sigma_k^2 \sim IG(a_\sigma, b_\sigma)

and a sparse prior of the global θ_j (`global_priors`). `regression()` is the clients' half of a Gibbs
sampler and `hierarchy()` the server's; `ft.gibbs` runs them. The conditionals:

- θ_k ~ N(A⁻¹(X'y/σ² + D⁻¹θ), A⁻¹), A = X'X/σ² + D⁻¹, D = diag(λ_k² τ²), drawn as a deviation from θ
- λ_kj² as in `fedtorch.models.gibbs.deviations`, 1/σ_k² ~ Gamma(a_σ + n_k/2, b_σ + ½ RSS_k)
- τ_j with θ_j integrated out and θ_j given τ_j, from Σ_k 1/λ_kj², Σ_k (θ_kj − θ_j)/λ_kj² and Σ_k (θ_kj − θ_j)²/λ_kj² of
  the M clients that have answered: see `fedtorch.models.gibbs._scales`
- before that θ with all θ_k − θ held fixed, from the sites' likelihoods: see `fedtorch.models.gibbs._interweaving`
- and τ_j with the level of the λ_kj and that of the ν_kj, from Σ_k 1/(ν_kj λ_kj²) and Σ_k 1/ν_kj: see
  `fedtorch.models.gibbs._levels`

Source: Kidd, Wang, Xu and Ni (2023), "Federated learning for sparse Bayesian models", section 2.2. Their Algorithm 2 is
missing from the text and Algorithm 3 lacks the factors ½ of the conditionals of τ_j² and η.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import exact, random
from fedtorch._lazy import only
from fedtorch.models.gibbs import _interweaving as interweaving, _levels as levels, _scales as scales, gibbs_sweeps
from fedtorch.models.gibbs._gaussian_conditional import (
    SIDE_BY_SIDE,
    Design,
    columns,
    from_columns,
    gaussian_conditional,
    least_norm,
)
from fedtorch.models.gibbs.deviations import Deviation, horseshoe
from fedtorch.models.gibbs.global_priors import GlobalPrior, spike_and_slab
from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel, Newcomer, Sums, check_start
from fedtorch.models.hierarchical.families import GAUSSIAN
from fedtorch.models.linear import (
    SufficientStatistics,
    least_norm as summed_least_norm,
    residual_sum,
    sufficient_statistics,
)
from fedtorch.models.rows import client_by_client, regression_rows
from fedtorch.tree import Tree

__all__ = ["hierarchy", "regression"]
__dir__ = only(__all__)

MOST_PRECISE = 1e24  # λ is kept above 1e-12 τ, which the prior violates with a probability of 6e-13
INTERWEAVE = 32  # most coefficients for which the sites send their information matrices


class GlobalVariables(NamedTuple):
    """The global variables as clients receive them; `(K, C, ...)`, at the server `(C, ...)`."""

    theta: Tensor  # (..., p) the global parameter
    centre: Tensor  # (..., p) θ less all moves that every θ_k has made with it
    precision: Tensor  # (..., p) 1/τ²
    noise: Tensor  # (...) b_σ
    factors: Tensor  # (..., 2, p) common factors of every site's 1/λ² and 1/ν


class RegressionSite(NamedTuple):
    """A client's variables; `(K, C, ...)`."""

    theta: Tensor  # (..., p) θ_k
    place: Tensor  # (..., p) θ_k less all moves that every θ_k has made together
    precision: Tensor  # (..., p) 1/λ² without the common factors of all sites
    auxiliary: Tensor  # (..., p) 1/ν likewise
    noise: Tensor  # (...) 1/σ²
    likelihood: Tree  # of joint moves; {} if it is not sent


class Global(NamedTuple):
    """The server's variables; `(C, ...)`."""

    theta: Tensor  # (C, p)
    centre: Tensor  # (C, p) θ less all moves that every θ_k has made with it
    precision: Tensor  # (C, p) 1/τ²
    noise: Tensor  # (C,) b_σ
    prior: Tree  # state of the global prior
    factors: Tensor  # (C, 2, p) common factors of every site's 1/λ² and 1/ν

    def quantities(self) -> dict[str, Tree]:
        """Return the model's quantities by name: all except centre and factors, the common moves of all sites."""
        return {name: value for name, value in self._asdict().items() if name not in ("centre", "factors")}


def regression(
    *,
    deviation: Deviation | None = None,
    noise_shape: float = 1.0,
    intercept: bool = False,
    interweave: int = INTERWEAVE,
    statistics: Callable[[Any], SufficientStatistics] | None = None,
) -> LocalKernel:
    """Return the clients' half: linear regression with coefficients that deviate from the global ones.

    Clients may have any number of rows, fewer than coefficients too, and collinear or constant columns: the prior
    determines what the data do not. Rows are (x `(d,)`, y `()`).

    Args:
        deviation: the prior of θ_kj − θ_j; default `horseshoe()`.
        noise_shape: a_σ.
        intercept: whether every site has its own intercept under a flat prior, which is integrated out.
        interweave: most coefficients p for which the sites send p (p + 3) / 2 numbers more, so that the server can move
            θ with all θ_k; chains then mix many times faster. 0: never.
        statistics: a block's rows -> their sums, the only use of the rows, for sums other than the plain ones; then
            without an intercept.

    Raises:
        ValueError: `noise_shape` is not positive, or `statistics` with an intercept; rows of another form, or NaN in
            them (when a population is bound); a start with another number of coefficients than the rows (in the first
            round).
    """
    if not noise_shape > 0:
        raise ValueError(f"Expected a positive noise_shape, but got {noise_shape}")
    if intercept and statistics is not None:
        raise ValueError("Expected no intercept with statistics=, which have no mean; add a column of ones to x")
    known, deviation = deviation is None, horseshoe() if deviation is None else deviation

    def init(start: Tensor) -> RegressionSite:
        ones, nothing = torch.ones_like(start), torch.zeros_like(start)
        likelihood = interweaving.nothing(start) if start.shape[-1] <= interweave else {}
        return RegressionSite(start, start, ones, ones, nothing[:, 0], likelihood)

    def sweep(
        received: GlobalVariables, site: RegressionSite, data: Design, keys: Tensor, sweeps: int
    ) -> RegressionSite:
        clients, chains, p = site.theta.shape
        check_start(p, data.estimate.shape[-1])
        w, u = scaled(received, site.precision, site.auxiliary)
        begun = torch.where(site.noise > 0, site.noise, noise_shape / received.noise)  # the prior's mean at first
        site = site._replace(precision=w, auxiliary=u, noise=begun)
        if known and data.x is None and gibbs_sweeps.knows(keys, p):
            delta, w, u, noise = _by_program(received, site, data, noise_shape, keys, sweeps)
            return ended(received, data, delta, w, u, noise)
        for_normals, for_noise, for_mixing, for_draw = random.split(keys, 4)
        normals = columns(random.normal(for_normals, (sweeps, p), torch.float64))
        degrees = noise_shape + data.degrees[:, None, None] / 2
        gammas = columns(random.gamma(for_noise, degrees, (sweeps,), torch.float64))
        mixing = [columns(part) for part in deviation.noise(for_mixing, (sweeps, p))]
        draw = gaussian_conditional(data, received.theta, for_draw)
        shared = columns(received.precision)
        half, scale = shared / 2, received.noise.reshape(-1)
        w, u, noise = columns(site.precision), columns(site.auxiliary), site.noise.reshape(-1)
        delta = torch.zeros_like(w)
        for s in range(sweeps):
            delta, rss = draw(noise, w * shared, normals[s])
            w, u = deviation.update(w, u, delta * delta * half, tuple(part[s] for part in mixing))
            noise = gammas[s] / (scale + rss / 2)
        rows = partial(from_columns, clients=clients, chains=chains)
        return ended(received, data, *map(rows, (delta, w, u, noise)))

    def ended(
        received: GlobalVariables, data: Design, delta: Tensor, w: Tensor, u: Tensor, noise: Tensor
    ) -> RegressionSite:
        theta, place = received.theta + delta, received.centre + delta
        likelihood = interweaving.linear(data, place, noise) if delta.shape[-1] <= interweave else {}
        return RegressionSite(theta, place, *less_factors(received, w, u), noise, likelihood)

    def prepare(data: Any) -> Design:
        return design(data, intercept) if statistics is None else _designed(statistics(data))

    def newcomer(draws: dict[str, Tensor], key: Tensor) -> Newcomer:
        mean, variance, for_noise = deviating(deviation, draws, key)
        gamma = random.gamma(for_noise, noise_shape, mean.shape[:1], torch.float64)
        return Newcomer(mean, variance, draws["noise"] / gamma)

    known_of_others = None if intercept or deviation.prior is None else newcomer
    summary = partial(report, half_cauchy=deviation.half_cauchy)
    return LocalKernel(init, prepare, sweep, summary, None if intercept else GAUSSIAN, known_of_others)


def deviating(deviation: Deviation, draws: dict[str, Tensor], key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and variances `(S, p)` of θ_k given draws of θ and 1/τ², and a key for the rest."""
    assert deviation.prior is not None
    for_scale, rest = random.split(key, 2)
    theta = draws["theta"]
    return theta, deviation.prior(for_scale, tuple(theta.shape)) / draws["precision"], rest


def _by_program(
    received: GlobalVariables, site: RegressionSite, data: Design, noise_shape: float, keys: Tensor, sweeps: int
) -> gibbs_sweeps.Chains:
    """Return the sweeps of regressions under `horseshoe`."""
    rows = gibbs_sweeps.Rows(data.statistics.gram, data.estimate, data.rss, noise_shape + data.degrees / 2)
    given = gibbs_sweeps.SweepPrior(received.theta, received.precision, received.noise)
    chains = gibbs_sweeps.Chains(site.theta, site.precision, site.auxiliary, site.noise)
    return gibbs_sweeps.gibbs_sweeps(rows, given, chains, keys, sweeps)


def scaled(received: GlobalVariables, precision: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
    """Return a site's 1/λ² and 1/ν from those without the common factors."""
    of_precision, of_auxiliary = received.factors.unbind(-2)
    return precision * of_precision, auxiliary * of_auxiliary


def less_factors(received: GlobalVariables, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1/λ² and 1/ν without the common factors of all sites."""
    of_precision, of_auxiliary = received.factors.unbind(-2)
    return w.clamp_max(MOST_PRECISE) / of_precision, u / of_auxiliary


def report(site: RegressionSite, half_cauchy: bool = False) -> Sums:
    """Return the sums that the server needs: sites, Σ w, Σ w x, Σ w x² for places x, Σ 1/σ², likelihoods.

    With `half_cauchy` Σ u w and Σ u too.
    """
    first, second = exact.products(site.precision, site.place)
    of_levels = {"levels": (torch.stack((site.auxiliary * site.precision, site.auxiliary), -2),)}
    return {
        "clients": (torch.ones_like(site.noise),),
        "precision": (site.precision,),
        "first": first,
        "second": second,
        "noise": (site.noise,),
        **(interweaving.report(site.likelihood) if site.likelihood else {}),
        **(of_levels if half_cauchy else {}),
    }


def hierarchy(
    prior: GlobalPrior | None = None,
    *,
    scale: float | None = None,
    noise_scale: float = 1.0,
    noise_prior: tuple[float, float] | None = None,
    noise_shape: float = 1.0,
) -> GlobalKernel:
    """Return the server's half: the global θ, the scales τ_j of the deviations from it, and the scale of the noise.

    Args:
        prior: of θ; default `spike_and_slab()`.
        scale: a known τ_j; default: half-Cauchy τ_j.
        noise_scale: b_σ of σ_k² ~ IG(a_σ, b_σ); its start if it is sampled.
        noise_prior: shape and rate of a gamma prior of b_σ, so that sites learn of each other's noise; default: b_σ is
            fixed.
        noise_shape: a_σ as given to `regression`, needed only for sampling b_σ.

    Raises:
        ValueError: a scale, shape or rate is not positive.
    """
    prior = spike_and_slab() if prior is None else prior
    for name, number in (("scale", scale), ("noise_scale", noise_scale), ("noise_shape", noise_shape)):
        if number is not None and not number > 0:
            raise ValueError(f"Expected a positive {name}, but got {number}")
    if noise_prior is not None and not min(noise_prior) > 0:
        raise ValueError(f"Expected a positive shape and rate of noise_prior, but got {noise_prior}")

    def init(start: Tensor) -> Global:
        ones = torch.ones_like(start)
        precision = ones if scale is None else ones / scale**2
        return Global(
            start, start, precision, noise_scale * ones[:, 0], prior.init(start), torch.stack((ones, ones), -2)
        )

    def update(state: Global, sums: dict[str, Tensor], keys: Tensor) -> Global:
        for_scale, for_prior, for_noise, for_move, for_levels = random.split(keys, 5)
        *read, middle = exact.read(*sums.values(), exact.limbs(state.centre))
        known, before = dict(zip(sums, read)), state.theta
        clients = exact.value(known["clients"])
        if "score" in known:
            told_of = exact.value(known["score"]), exact.value(known["information"])
            before = interweaving.move(*told_of, before, state.centre, prior.precision(state.prior), for_move)
        weight, first, second = exact.about(known["precision"], known["first"], known["second"], middle)
        shift, precision, factors = first / weight, state.precision, state.factors
        if scale is None and "levels" in known:
            of_levels = levels.Levels(clients, second / 2, *exact.value(known["levels"]).unbind(-2))
            precision, factors = levels.move(of_levels, precision, factors, scales.BOUND, for_levels)
        weight = weight * factors[:, 0]
        if scale is None:
            scatter = (second - first * shift).clamp_min(0) * factors[:, 0]
            of_scales = scales.ScaleStatistics(clients[:, None], weight, before + shift, scatter)
            precision = scales.draw(of_scales, precision, prior.components(state.prior), for_scale)
        theta, variables = prior.update(state.prior, before + shift, weight * precision, for_prior)
        centre = theta + (state.centre - before)
        noise = state.noise
        if noise_prior is not None:
            shape, rate = noise_prior
            gamma = random.gamma(for_noise, shape + noise_shape * clients, (), torch.float64)
            noise = gamma / (rate + exact.value(known["noise"]))
        return Global(theta, centre, precision, noise, variables, factors)

    def send(state: Global) -> GlobalVariables:
        return GlobalVariables(state.theta, state.centre, state.precision, state.noise, state.factors)

    return GlobalKernel(init, send, update)


def design(data: Any, intercept: bool = False) -> Design:
    """Return the clients' rows as a regression needs them, each computed from the client's own rows only.

    Args:
        data: `ClientData` of rows (x, y).
        intercept: whether columns and response are centred.

    Raises:
        ValueError: rows of another form; `BadClients`: NaN or Inf in them.
    """
    x, y = regression_rows(data)
    design_of_one = partial(_one_design, intercept=intercept)
    statistics, estimate, rss = client_by_client(design_of_one, data.count, x, y)
    degrees = statistics.count - int(intercept)
    if x.shape[-1] <= SIDE_BY_SIDE:
        return Design(statistics, estimate, rss, degrees, None, None)
    if intercept:
        mask = data.mask[..., None]
        x = (x - x.sum(1, keepdim=True) / data.count[:, None, None]) * mask
        y = (y - y.sum(1, keepdim=True) / data.count[:, None]) * mask[..., 0]
    return Design(statistics, estimate, rss, degrees, x, y)


def _designed(statistics: SufficientStatistics) -> Design:
    """Return the statistics of a regression from sums alone."""
    fit = summed_least_norm(statistics)
    residual = residual_sum(statistics, fit.solution)
    return Design(statistics, fit.solution, residual, statistics.count, None, None)


def _one_design(x: Tensor, y: Tensor, intercept: bool) -> tuple[SufficientStatistics, Tensor, Tensor]:
    """Return (statistics, least squares estimate of least norm, residual sum of squares) of one client's rows."""
    if intercept:
        x, y = x - x.mean(0), y - y.mean()
    estimate = least_norm(x, y[:, None])[:, 0]
    return sufficient_statistics(x, y), estimate, (y - x @ estimate).square().sum()
