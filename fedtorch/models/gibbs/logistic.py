r"""Sparse logistic regression of several sites: the clients' half of its Gibbs sampler.

.. math:: y_{ki} \sim \text{Bernoulli}\{1 / (1 + e^{-\psi_{ki}})\},\quad \psi_{ki} = \beta_k + X_{ki}' \theta_k,\qquad
    \theta_{kj} \sim N(\theta_j, \lambda_{kj}^2 \tau_j^2)

Given Pólya–Gamma numbers ω_ki ~ PG(1, ψ_ki) the coefficients are normal with precision X'ΩX + D⁻¹ (Polson, Scott and
Windle, JASA 108, 2013, section 3.1). `fedtorch.models.gibbs.sparse.hierarchy` is the server's half.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random, tree
from fedtorch._lazy import only
from fedtorch.models.gibbs import _interweaving as interweaving, sparse
from fedtorch.models.gibbs.deviations import Deviation, horseshoe
from fedtorch.models.gibbs.kernels import LocalKernel, Newcomer, check_start
from fedtorch.models.gibbs.polya_gamma import polya_gamma
from fedtorch.models.hierarchical.families import LOGISTIC
from fedtorch.models.rows import refuse, regression_rows
from fedtorch.tree import Tree

__all__ = ["logistic_regression"]
__dir__ = only(__all__)


class LogisticSite(NamedTuple):
    """A client's variables; `(K, C, ...)`."""

    theta: Tensor  # (..., p) θ_k
    place: Tensor  # (..., p) θ_k less all moves that every θ_k has made together
    precision: Tensor  # (..., p) 1/λ²
    auxiliary: Tensor  # (..., p) 1/ν
    noise: Tensor  # (...) 1, for the sums that all regressions report
    likelihood: Tree  # of joint moves given Pólya–Gamma numbers; {} if it is not sent
    intercept: Tensor  # (...) β_k


class _Rows(NamedTuple):
    x: Tensor  # (K, N, 1 + p) with ones in front
    y: Tensor  # (K, N) minus a half
    count: Tensor  # type: ignore[assignment]  # (K,)


def logistic_regression(
    *, deviation: Deviation | None = None, intercept_scale: float = 10.0, interweave: int = sparse.INTERWEAVE
) -> LocalKernel:
    """Return the clients' half: logistic regression with coefficients that deviate from the global ones.

    Every site has its own intercept β_k ~ N(0, s²). Rows are (x `(d,)`, y `()`), y 0 or 1.

    Args:
        deviation: the prior of θ_kj − θ_j; default `horseshoe()`.
        intercept_scale: s.
        interweave: most coefficients for which the server moves θ with all θ_k; see `sparse.regression`.

    Raises:
        ValueError: `intercept_scale` is not positive; rows of another form, or y other than 0 and 1 (when a population
            is bound).
    """
    if not intercept_scale > 0:
        raise ValueError(f"Expected a positive intercept_scale, but got {intercept_scale}")
    deviation = horseshoe() if deviation is None else deviation

    def init(start: Tensor) -> LogisticSite:
        ones = torch.ones_like(start)
        likelihood = interweaving.nothing(start) if start.shape[-1] <= interweave else {}
        return LogisticSite(start, start, ones, ones, ones[:, 0], likelihood, torch.zeros_like(start[:, 0]))

    def sweep(
        received: sparse.GlobalVariables, site: LogisticSite, data: _Rows, keys: Tensor, sweeps: int
    ) -> LogisticSite:
        check_start(site.theta.shape[-1], data.x.shape[-1] - 1)
        if len(keys) == 0:
            return site
        # One client after another, without padding, so that a client's numbers do not depend on its block.
        states = []
        for k, n in enumerate(data.count.tolist()):
            one_received, one_site = tree.map(lambda leaf, k=k: leaf[k].clone(), (received, site))
            x, y = data.x[k, :n].clone(), data.y[k, :n].clone()
            states.append(_sweep_one(deviation, intercept_scale**-2, one_received, one_site, x, y, keys[k], sweeps))
        return tree.stack(states)

    def newcomer(draws: dict[str, Tensor], key: Tensor) -> Newcomer:
        mean, variance, _ = sparse.deviating(deviation, draws, key)
        first = torch.zeros_like(mean[:, :1])
        of_all = torch.cat([first + intercept_scale**2, variance], 1)
        return Newcomer(torch.cat([first, mean], 1), of_all, torch.full_like(first[:, 0], torch.nan))

    summary = partial(sparse.report, half_cauchy=deviation.half_cauchy)
    return LocalKernel(init, _prepare, sweep, summary, LOGISTIC, None if deviation.prior is None else newcomer)


def _sweep_one(
    deviation: Deviation,
    flat: float,
    received: sparse.GlobalVariables,
    site: LogisticSite,
    x: Tensor,
    y: Tensor,
    keys: Tensor,
    sweeps: int,
) -> LogisticSite:
    """Sweep over one client's variables, all chains at once."""
    p = site.theta.shape[-1]
    for_normals, for_rows, for_mixing = random.split(keys, 3)
    normals = random.normal(for_normals, (sweeps, p + 1), torch.float64)
    mixing = deviation.noise(for_mixing, (sweeps, p))
    centre = torch.cat([torch.zeros_like(site.intercept)[:, None], received.theta], 1)
    ridge = torch.full_like(centre, flat)
    offset = centre @ x.mT
    coefficients = torch.cat([site.intercept[:, None], site.place - received.centre], 1)
    w, u = sparse.scaled(received, site.precision, site.auxiliary)
    for s in range(sweeps):
        omega = polya_gamma(random.fold_in(for_rows, s), offset + coefficients @ x.mT)
        ridge[:, 1:] = w * received.precision
        weighted = omega[:, :, None] * x
        factor = torch.linalg.cholesky(x.mT @ weighted + torch.diag_embed(ridge))
        right = (y - omega * offset) @ x
        coefficients = linalg.normal_draw(factor, right, normals[:, s])
        energy = coefficients[:, 1:].square() * received.precision / 2
        w, u = deviation.update(w, u, energy, tuple(part[:, s] for part in mixing))
    theta, place = received.theta + coefficients[:, 1:], received.centre + coefficients[:, 1:]
    likelihood = site.likelihood
    if likelihood:
        predictor = torch.cat([coefficients[:, :1], place], 1) @ x.mT
        likelihood = interweaving.logistic(x[:, 1:], y - omega * predictor, omega)
    return LogisticSite(theta, place, *sparse.less_factors(received, w, u), site.noise, likelihood, coefficients[:, 0])


def _prepare(data: Any) -> _Rows:
    """Return the rows with a column of ones, checked."""
    x, y = regression_rows(data)
    refuse(((y != 0) & (y != 1)).any(-1), "Expected responses of 0 and 1, but got others; recode y")
    return _Rows(torch.cat([torch.ones_like(x[..., :1]), x], -1), y - 0.5, data.count)
