r"""Draws of the scales τ_j of the sites' deviations with the global θ_j integrated out.

Given the sites' θ_kj and w_kj = 1/λ_kj², for which M sites send W = Σ w, θ̂ = Σ w θ_k / W and S = Σ w (θ_k − θ̂)²,

.. math:: p(\tau_j \mid \theta_{\cdot j}, \lambda_{\cdot j}) \propto
    \frac{\tau^{-(M-1)}}{1 + \tau^2} \exp\Bigl(-\frac{S}{2 \tau^2}\Bigr)
    \int N(\hat\theta; \theta, \tau^2 / W)\, p(\theta)\, d\theta,

and then θ_j is drawn given τ_j: both at once from their joint conditional. Alternating draws mix slowly, since a wide
τ_j lets θ_j move away and a distant θ_j keeps τ_j wide.

The density is known up to a factor, at any point: a draw is one of `POINTS` points of a lattice through the previous
point, with random spacing and a random position of that point among them, chosen in proportion to their densities. The
lattice is equally probable from any of its points, so the density stays invariant (Tjelmeland, "Using all
Metropolis–Hastings proposals to estimate mean values", NTNU Statistics 4/2004; Neal, "MCMC using ensembles of states
for problems with fast and slow variables", technical report 1101, Toronto 2011). The lattice is even in y of x = m + s
sinh(y): fine about the middle m, where x = log τ² mostly is given all else, and wide at a distance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.programs import gibbs_server
from fedtorch.programs.gibbs_server import POINTS

FINEST = 0.2  # spacing of y, up to twice that; POINTS of them span 300 to 100 000 s
BOUND = 69.0  # of |log τ²|, which the prior exceeds with a probability of 6e-16


class Components(NamedTuple):
    """Normal densities with mean zero whose mixture is a prior of θ_j."""

    share: Tensor  # (k, C, p), or broadcastable to it
    precision: Tensor  # (k, C, p) likewise; with one component also zero, for a flat θ_j


class ScaleStatistics(NamedTuple):
    """Sufficient statistics of the sites' parameters for θ_j and τ_j."""

    clients: Tensor  # (C, 1) M
    weight: Tensor  # (C, p) W
    estimate: Tensor  # (C, p) θ̂
    scatter: Tensor  # (C, p) S


def evidence(components: Components, estimate: Tensor, variance: Tensor) -> Tensor:
    """Return log densities of estimates with given variances, `(..., C, p)`, θ integrated out, up to a constant.

    >>> standard = Components(torch.ones(1, 1, 1).double(), torch.ones(1, 1, 1).double())
    >>> at_two, variances = torch.tensor([[2.0]]).double(), torch.tensor([[[0.0]], [[3.0]]]).double()
    >>> evidence(standard, at_two, variances).flatten()  # log N(2; 0, 1) and N(2; 0, 4)
    tensor([-2.0000, -1.1931], dtype=torch.float64)
    """
    each = []
    for share, precision in zip(*components):
        ratio = 1 + precision * variance
        known = -0.5 * (ratio.log() + estimate.square() * precision / ratio)
        each.append(known if len(components.precision) == 1 else known + share.log() + precision.log() / 2)
    return functools.reduce(torch.logaddexp, each)


def draw(sums: ScaleStatistics, precision: Tensor, components: Components, keys: Tensor) -> Tensor:
    """Draw 1/τ² `(C, p)` given the previous value `precision`, with keys `(C,)`."""
    clients, weight, estimate, scatter = sums
    if (drawn := gibbs_server.scales((*sums, precision, *components), keys, (FINEST, BOUND))) is not None:
        return drawn
    middle = (scatter / (clients - 1).clamp_min(1)).clamp_min(1e-300).log().clamp(-BOUND, BOUND)

    def density(x: Tensor) -> Tensor:
        """Return the log density of x = log τ²."""
        inside = x.clamp(-BOUND, BOUND)
        variance = inside.exp()
        prior = inside / 2 - variance.log1p()
        likelihood = (clients - 1) * inside + scatter / variance
        log = prior - likelihood / 2 + evidence(components, estimate, variance / weight)
        return torch.where(inside == x, log, -torch.inf)

    return (-on_lattice(density, -precision.log(), middle, (2 / clients).sqrt(), keys)).exp()


def on_lattice(density: Callable[[Tensor], Tensor], x: Tensor, middle: Tensor, width: Tensor, keys: Tensor) -> Tensor:
    """Draw the next numbers from given densities, independently.

    Args:
        density: `(POINTS, C, p)` -> log densities up to a constant.
        x: the previous draws, `(C, p)`.
        middle: m, `(C, p)`, an estimate of the density's location that does not depend on x.
        width: s > 0, broadcastable to m, an estimate of the density's width that does not depend on x.
        keys: `(C,)`.
    """
    for_spacing, for_place, for_choice = random.uniform(keys, (3, x.shape[-1]), torch.float64).unbind(1)
    steps = torch.arange(POINTS, device=x.device, dtype=torch.float64)[:, None, None]
    y = ((x - middle) / width).asinh() + FINEST * (1 + for_spacing) * (steps - (POINTS * for_place).floor())
    points = middle + width * y.sinh()
    log = density(points) + y.cosh().log()
    heights = (log - log.amax(0)).exp().cumsum(0)
    chosen = (heights <= for_choice * heights[-1]).sum(0, keepdim=True).clamp_max(POINTS - 1)
    return points.gather(0, chosen)[0]
