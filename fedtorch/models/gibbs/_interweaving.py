r"""The other half of an interweaving sampler: moves of the global parameter together with the sites' parameters.

Given the sites' θ_k alone, θ_j is determined up to the width of their deviations, λ_kj τ_j, which shrinkage makes
narrow: θ then moves slowly. Given the deviations d_k = θ_k − θ instead, the rows of all sites inform θ directly,

.. math:: y_k \approx N(X_k (\theta + d_k), \Omega_k^{-1}) \quad\Rightarrow\quad
    \theta \mid d, y \sim N\Bigl(Q^{-1} \sum_k X_k' \Omega_k (y_k - X_k d_k),\ Q^{-1}\Bigr), \qquad
    Q = P + \sum_k X_k' \Omega_k X_k,

where P is the prior precision of θ. Alternating this draw with the ordinary one leaves the posterior invariant, and the
pair mixes at least as fast as the better of the two (Yu and Meng, "To center or not to center: that is not the
question. An ancillarity–sufficiency interweaving strategy (ASIS) for boosting MCMC efficiency", JCGS 20, 2011).

The server needs sums only. It cannot wait for silent sites, whose coefficients move with the others all the same, so a
site sends its *place*, θ_k minus all joint moves so far, and the likelihood of such a move. The server keeps its
*centre*, θ minus those moves; d_k is the site's place minus the centre at any time.

A site sends X_k' Ω_k X_k and a vector, as in least squares in closed form: only their sums are needed, so secure
summation suits them.

The slowest component is then τ, for which `fedtorch.models.gibbs._scales` integrates θ out, and which
`fedtorch.models.gibbs._levels` moves together with the scales λ_k of all sites.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch import linalg, random
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Natural
from fedtorch.models.gibbs._gaussian_conditional import Design, Fold, columns, from_columns
from fedtorch.programs import gibbs_server


def nothing(start: Tensor) -> Natural:
    """Return the likelihood before any sweep, for a start `(C, p)`."""
    p = start.shape[-1]
    return Natural(torch.zeros_like(start), start.new_zeros(len(start), p * (p + 1) // 2))


def linear(design: Design, place: Tensor, noise: Tensor) -> Natural:
    """Return the log likelihood of a move in linear regressions, expanded about zero.

    Args:
        design: K clients' data.
        place: `(K, C, p)`.
        noise: 1/σ², `(K, C)`.
    """
    if (terms := gibbs_server.likelihoods(design.statistics.gram, design.estimate, place, noise)) is not None:
        return Natural(*terms)
    clients, chains, _ = place.shape
    gram = columns(design.statistics.gram[:, None].expand(-1, chains, -1, -1))
    gap = columns(design.estimate[:, None].expand(-1, chains, -1)) - columns(place)
    score = Fold(gram * gap.unsqueeze(1))()  # gram is symmetric
    return Natural(
        from_columns(score, clients, chains) * noise[..., None],
        gaussian.pack(design.statistics.gram)[:, None] * noise[..., None],
    )


def logistic(x: Tensor, residual: Tensor, weight: Tensor) -> Natural:
    """Return the log likelihood of a move in one client's logistic regressions given Pólya–Gamma numbers, about zero.

    Args:
        x: `(n, p)`.
        residual: y − ½ − ω ψ at the place, `(C, n)`.
        weight: ω, `(C, n)`.
    """
    return Natural(residual @ x, gaussian.pack(x.mT @ (weight[..., None] * x)))


def report(likelihood: Natural) -> dict[str, tuple[Tensor, ...]]:
    """Return a site's part of the sums."""
    return {"score": (likelihood.shift,), "information": (likelihood.precision,)}


def move(score: Tensor, packed: Tensor, theta: Tensor, centre: Tensor, prior: Tensor, keys: Tensor) -> Tensor:
    """Return θ given the deviations, `(C, p)`.

    θ stays if Q is not positive definite to rounding, as under a flat prior with collinear columns. Q does not depend
    on θ, so this leaves the posterior invariant too.

    Args:
        score: of `report`, summed over the sites, `(C, p)`.
        packed: the information of `report`, summed over the sites, `(C, p (p + 1) / 2)`.
        theta: θ, `(C, p)`.
        centre: θ less all moves so far, `(C, p)`.
        prior: P, the prior precisions of θ, `(C, p)` or a number.
        keys: `(C,)`.
    """
    z = random.normal(keys, centre.shape[-1:], torch.float64)
    given = (theta, centre, prior.to(centre.device).expand_as(centre), z)
    if (moved := gibbs_server.move((score, packed, *given))) is not None:
        return moved
    parts = (gaussian.unpack(packed), score, *given)
    # One chain after another: a chain's bits do not depend on the number of chains.
    return torch.stack([_draw(*(part[c].clone() for part in parts)) for c in range(len(keys))])


def _draw(information: Tensor, score: Tensor, theta: Tensor, centre: Tensor, prior: Tensor, z: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(information + prior.diag())
    factor = torch.where(failed > 0, torch.eye(len(theta), dtype=factor.dtype, device=factor.device), factor)
    return torch.where(failed > 0, theta, linalg.normal_draw(factor, score + information @ centre, z))
