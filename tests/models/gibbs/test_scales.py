"""Scales of the sites' deviations with the global coefficient integrated out, against quadrature of the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedtorch import random
from fedtorch.models.gibbs import _scales as scales, global_priors

SITES, PRECISIONS = np.array([0.3, 0.5, 1.4]), np.array([2.0, 0.4, 5.0])  # θ_k and 1/λ_k²
AT = np.linspace(-10, 25, 701)  # log τ²
SLAB, SPIKE, SHARE = 0.6, 0.05, 0.3
VARIANCE, INCLUSION = torch.full((1, 1), SLAB).double(), torch.tensor([SHARE]).double()
PRIORS = {
    "normal": (global_priors.gaussian(0.7), {}, [(1.0, 0.7**2)]),
    "slab or spike": (
        global_priors.spike_and_slab(spike=SPIKE),
        global_priors.SpikeAndSlab(torch.ones(1, 1), VARIANCE, INCLUSION),
        [(SHARE, SLAB), (1 - SHARE, SPIKE * SLAB)],
    ),
    "slab of a group": (
        global_priors.spike_and_slab(spike=SPIKE, groups=[0]),
        global_priors.SpikeAndSlab(torch.zeros(1, 1), VARIANCE, INCLUSION),
        [(1.0, SPIKE * SLAB)],
    ),
}


def posterior(parts: list[tuple[float, float]]) -> np.ndarray:
    """The probability of each log τ² of `AT`: the sites' densities and the prior's, summed over a grid of θ."""
    theta, tau = np.linspace(-8, 8, 2001)[:, None], np.exp(AT / 2)
    prior = sum(share * stats.norm.pdf(theta, scale=math.sqrt(variance)) for share, variance in parts)
    sites = (stats.norm.pdf(theta, SITES[k], tau / math.sqrt(PRECISIONS[k])) for k in range(len(SITES)))
    spacing = np.diff(theta[:, 0])[0]
    wide = math.log((10 * spacing) ** 2 * PRECISIONS.sum()) < AT  # where the grid is fine enough
    assert wide[AT > -3].all()  # below, the sites' scatter leaves nothing
    heights = np.where(wide, (prior * math.prod(sites)).sum(0), 0) * stats.halfcauchy.pdf(tau) * tau
    return heights / heights.sum()


@pytest.mark.parametrize("name", PRIORS)
def test_draws_have_the_density_of_the_model(name: str) -> None:
    """From a start that is far off, the last draws of 2 000 chains; one more step from draws of the model, too."""
    prior, variables, parts = PRIORS[name]
    chains, expected = 2_000, posterior(parts)
    weight = torch.tensor([[PRECISIONS.sum()]]).double()
    estimate = (SITES * PRECISIONS).sum() / weight
    scatter = torch.tensor([[(PRECISIONS * (SITES - float(estimate)) ** 2).sum()]]).double()
    clients = torch.full((1, 1), 3.0).double()
    heard = scales.ScaleStatistics(*(part.expand(chains, 1) for part in (clients, weight, estimate, scatter)))
    keys = random.fold_in(random.fold_in(random.key(3), torch.arange(21))[:, None], torch.arange(chains))

    def step(precision: torch.Tensor, t: int) -> torch.Tensor:
        return scales.draw(heard, precision, prior.components(variables), keys[t])

    far = torch.full((chains, 1), 1e6).double()
    for t in range(20):
        far = step(far, t)
    uniform = random.uniform(keys[20], (1,), torch.float64)[:, 0].numpy()
    exact = np.interp(uniform, expected.cumsum(), AT + np.diff(AT)[0] / 2)
    near = step(torch.tensor(np.exp(-exact))[:, None], 20)
    for draws in (far, near):
        inside = np.interp(-draws[:, 0].log().numpy(), AT + np.diff(AT)[0] / 2, expected.cumsum())
        assert stats.kstest(inside, "uniform").pvalue > 1e-3


def test_undetermined_scales_stay_finite() -> None:
    """Equal coefficients at all sites, which the scale zero would explain best, and a single site."""
    components = global_priors.gaussian().components({})
    for count in (1.0, 3.0):
        one = torch.ones(4, 2).double()
        heard, precision = scales.ScaleStatistics(count * one[:, :1], one, one, 0 * one), one
        for t in range(30):
            keys = random.fold_in(random.fold_in(random.key(5), t), torch.arange(4))
            precision = scales.draw(heard, precision, components, keys)
        assert bool((precision.log().abs() <= scales.BOUND + 1e-9).all())
