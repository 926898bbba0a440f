"""Slopes of each area, as far as identifiable: their law, and what is known of each (Figure 4 of the VFL source).

As printed, the multilevel Poisson model gives every area slopes of its own, β_i ~ N(μ, diag σ²), with one count each:
two parties with two columns, 2000 areas of 250 to 350 people. A count informs about one number, x_i'β_i, so that of
the four slopes of an area three directions are not informed about at all. Their law is: with the slopes integrated
out, log rate ~ N(o_i + b + x_i'μ, τ_i²) with τ_i² = Σ_k x_ik² σ_k², and it is the way in which counts scatter more
where a column is far from 0 that tells its σ. The server needs two numbers of a party per area, x_ij'μ_j and
Σ_k x_ijk² σ_jk², and adaptive Gauss–Hermite quadrature of the normal law in between; b, μ and log σ are its maximum
(L-BFGS), with standard errors from the curvature.

Told are the errors of μ and log σ in their standard errors, and of the posterior of an area's slopes at the maximum
the share of the prior's variance that its count takes away: of x_i'β_i, and of all four slopes together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common, result_pages
from fedtorch import random

WIDTH, PARTIES, INTERCEPT, POINTS = 2, 2, -2.0, 9
READING = result_pages.Reading(smaller="error")


class Areas(NamedTuple):
    """Counts of areas and the law of their slopes."""

    x: Tensor  # (n, 4), of both parties
    offset: Tensor
    y: Tensor
    mean: Tensor  # (4,) μ
    spread: Tensor  # (4,) σ


def simulated(rows: int, seed: int) -> Areas:
    """Slopes drawn for each area."""
    keys = [random.fold_in(random.key(seed), i) for i in range(5)]
    width = WIDTH * PARTIES
    x = random.normal(keys[0], (rows, width), torch.float64)
    offset = (250.0 + random.randint(keys[1], 101, (rows,)).double()).log()
    mean = 0.3 * random.normal(keys[2], (width,), torch.float64)
    spread = 0.1 + 0.2 * random.uniform(keys[3], (width,), torch.float64)
    slopes = mean + spread * random.normal(keys[4], (rows, width), torch.float64)
    y = torch.poisson((INTERCEPT + offset + (x * slopes).sum(1)).exp(), torch.Generator().manual_seed(seed))
    return Areas(x, offset, y, mean, spread)


def log_likelihood(theta: Tensor, of: Areas) -> Tensor:
    """Log-likelihood of each area, `(n,)`, at θ = (b, μ, log σ), the slopes integrated out."""
    width = of.x.shape[1]
    intercept, mean, log_spread = theta.split([1, width, width])
    centre = of.offset + intercept + of.x @ mean
    variance = of.x.square() @ (2 * log_spread).exp()
    place, sd = at_the_mode(centre.detach(), variance.detach(), of.y)
    nodes, weights = np.polynomial.hermite_e.hermegauss(POINTS)
    u = torch.tensor(nodes)[:, None]
    s = place + sd * u
    prior = -0.5 * ((s - centre).square() / variance + variance.log())
    count = of.y * s - s.exp() - torch.lgamma(of.y + 1)
    around = torch.tensor(weights).log()[:, None] + 0.5 * u.square() + sd.log() - 0.5 * math.log(2 * math.pi)
    return (prior + count + around).logsumexp(0)


def at_the_mode(centre: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mode of the log rate given its count, and its sd there."""
    s = (y + 0.5).log()
    for _ in range(20):
        gradient = y - s.exp() - (s - centre) / variance
        s = s + gradient / (s.exp() + 1 / variance)
    return s, (s.exp() + 1 / variance).rsqrt()


def fitted(of: Areas) -> tuple[Tensor, Tensor]:
    """The maximum, and its standard errors."""
    width = of.x.shape[1]
    theta = torch.cat(
        [(of.y.sum() / of.offset.exp().sum()).log()[None], torch.zeros(width), torch.full((width,), -1.5)]
    )
    theta = theta.double().requires_grad_()
    optimizer = torch.optim.LBFGS([theta], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -log_likelihood(theta, of).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    hessian = torch.autograd.functional.hessian(lambda at: -log_likelihood(at, of).sum(), theta.detach())
    return theta.detach(), torch.linalg.inv(hessian).diagonal().sqrt()


def informed(theta: Tensor, of: Areas) -> tuple[Tensor, Tensor]:
    """Shares of the prior's variance that an area's count takes away: of x'β and of all slopes, `(n,)` each."""
    intercept, mean, log_spread = theta.split([1, of.x.shape[1], of.x.shape[1]])
    prior = (2 * log_spread).exp()
    variance = of.x.square() @ prior
    _, sd = at_the_mode(of.offset + intercept + of.x @ mean, variance, of.y)
    share = 1 - sd.square() / variance
    return share, share * (of.x * prior).square().sum(1) / variance / prior.sum()


def scores(of: Areas) -> tuple[dict[str, float], Tensor, Tensor]:
    """Figures of a fit, the maximum and its standard errors."""
    theta, errors = fitted(of)
    width = of.x.shape[1]
    away = (theta[1:] - torch.cat([of.mean, of.spread.log()])) / errors[1:]
    along, together = informed(theta, of)
    return (
        {
            "root mean square error of μ, in standard errors": float(away[:width].square().mean().sqrt()),
            "root mean square error of log σ, in standard errors": float(away[width:].square().mean().sqrt()),
            "standard error of μ": float(errors[1 : 1 + width].mean()),
            "standard error of log σ": float(errors[1 + width :].mean()),
            "share of the variance of x'β that a count takes away": float(along.mean()),
            "share of the variance of all slopes that a count takes away": float(together.mean()),
        },
        theta,
        errors,
    )


def draw(of: Areas, theta: Tensor, errors: Tensor) -> Figure:
    """The law of the slopes with intervals beside the truth, and what each count says of its own area."""
    figure, axes = common.subplots(1, 3, figsize=(11, 3.3))
    width = of.x.shape[1]
    for axis, name, truth, place in zip(axes, ("μ", "log σ"), (of.mean, of.spread.log()), (1, 1 + width)):
        estimate, error = theta[place : place + width], errors[place : place + width]
        axis.errorbar(range(width), estimate, 2 * error, fmt="o", label="maximum ± 2 standard errors")
        axis.plot(range(width), truth, "x", color="C3", label="truth")
        axis.set_xticks(
            range(width), [f"party {k // WIDTH + 1},\ncolumn {k % WIDTH + 1}" for k in range(width)], fontsize=8
        )
        axis.set_title(name)
    axes[0].legend(frameon=False, fontsize=8)
    along, together = informed(theta, of)
    axes[2].hist([along.numpy(), together.numpy()], bins=30, range=(0, 1), label=["of x'β", "of all four slopes"])
    axes[2].set(title="variance that a count takes away", xlabel="share of the prior's", ylabel="areas")
    axes[2].legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Fit the law of the slopes, print its errors and what counts say of areas, and draw both."""
    options = common.arguments(__doc__).parse_args(argv)
    problems = [simulated(200 if options.smoke else 2000, seed) for seed in range(options.seeds)]
    fits = [scores(of) for of in problems]
    rows = common.over_seeds(f"{len(problems[0].y)} areas", [found for found, _, _ in fits])
    common.show_rows("Slopes of each area", rows)
    common.finish("vfl.areas", rows, options, lambda: {"vfl_areas": draw(problems[0], *fits[0][1:])})


if __name__ == "__main__":
    main()
