r"""Draws of the scale τ_j together with the scales λ_kj of all sites, for deviations under a horseshoe.

With w_k = 1/λ_kj² and its auxiliary variable u_k, p(w, u) ∝ w^{-1/2} e^{-u (1 + w)}, and deviations δ_k = θ_kj − θ_j of
M sites, t = 1/τ_j² is determined only up to the width of a gamma density from each of three directions:

- all w_k and u_k held fixed, as in the plain sampler
- λ_kj τ_j and u_k held fixed, so that w_k ∝ 1/t, with the prior of the w_k given the u_k
- λ_kj τ_j and u_k w_k held fixed, so that w_k ∝ 1/t and u_k ∝ t, with the prior of the u_k

.. math::
    p(t) \propto \frac{t^{(M + 1) / 2}}{1 + t} e^{-t \sum_k w_k \delta_k^2 / 2},\qquad
    p(s) \propto \frac{s^{(M + 1) / 2}}{1 + s} e^{-s \sum_k u_k w_k t},\ s = 1 / t,\qquad
    p(t) \propto \frac{t^{(M + 1) / 2}}{1 + t} e^{-t \sum_k u_k / t_0}

with respect to the invariant measure dt/t, where t_0 is the previous t. With an auxiliary variable x, exponential of
rate 1 + t, each is a gamma density of shape (M + 1)/2 whose rate is larger by x. `TURNS` rounds of the three draw τ_j,
the level of the w_k and that of the u_k almost independently of the previous ones: log τ_j then mixes two to three
times faster. (Moves along orbits of a group: Liu and Sabatti, "Generalised Gibbs sampler and multigrid Monte Carlo for
Bayesian computation", Biometrika 87, 2000.)

Silent sites take part, so a site sends its w_k and u_k without the *factors* common to all sites, which the server
keeps. Factors drift, but stay between 1/`LOOSEST` and `LOOSEST`, so that sums in limbs can represent them: the
posterior does not depend on them, so a draw beyond that range is rejected.

The remaining dependence is that of τ_j on the width of the δ_k. A move of τ_j and all δ_kj by one factor, given
everything else, would need Σ_k δ_k X_k'X_k δ_k / σ_k² for all pairs of coefficients, and answers of all sites in the
same round, because their deviations would change with it. It would replace every second move of θ with its sites. In
four sites of eleven coefficients, this halves the correlation time of log τ once more, and lengthens that of θ by a
half.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.programs import gibbs_server

TURNS = 4
LOOSEST = 2.0**50


class Levels(NamedTuple):
    """Sufficient statistics of the sites' variables for the levels, without the common factors."""

    clients: Tensor  # (C,) M
    energy: Tensor  # (C, p) Σ w δ² / 2
    rate: Tensor  # (C, p) Σ u w
    auxiliary: Tensor  # (C, p) Σ u


def move(sums: Levels, precision: Tensor, factors: Tensor, bound: float, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1/τ² and the factors after `TURNS` rounds of draws.

    Args:
        sums: of the sites.
        precision: 1/τ², `(C, p)`.
        factors: of w and of u, `(C, 2, p)`.
        bound: of |log τ²|.
        keys: `(C,)`.
    """
    if (drawn := gibbs_server.levels((*sums, precision, factors), keys, TURNS, (LOOSEST, bound))) is not None:
        return drawn
    for_rates, for_draws = random.split(keys, 2)
    each = (TURNS, 3, precision.shape[-1])
    rates = random.exponential(for_rates, each, torch.float64)
    draws = random.gamma(for_draws, (sums.clients[:, None, None, None] + 1) / 2, each, torch.float64)
    state, limit = (precision, *factors.unbind(-2)), torch.tensor(bound, dtype=torch.float64, device=keys.device).exp()

    def bounded(t: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new state, or the previous one if the new one is out of bounds."""
        inside = (t <= limit) & (t * limit >= 1)
        for factor in (w, u):
            inside = inside & (factor <= LOOSEST) & (factor * LOOSEST >= 1)
        return tuple(torch.where(inside, new, old) for new, old in zip((t, w, u), state))  # type: ignore[return-value]

    for turn in range(TURNS):
        x, g = rates[:, turn].unbind(1), draws[:, turn].unbind(1)
        t, w, u = state
        state = bounded(g[0] / (x[0] / (1 + t) + sums.energy * w), w, u)
        t, w, u = state
        inverse = g[1] / (x[1] / (1 + 1 / t) + sums.rate * w * u * t)
        state = bounded(1 / inverse, w * (inverse * t), u)
        t, w, u = state
        new = g[2] / (x[2] / (1 + t) + sums.auxiliary * u / t)
        state = bounded(new, w * (t / new), u * (new / t))
    return state[0], torch.stack(state[1:], -2)
