r"""The prior of a further unit's own parameters, learnt from sums over units.

Units' vectors φ_m (amplitudes with their sign, means, logarithms of scale, noise and smoothing; `unit_vector`) are
draws from one normal distribution, whose mean and covariance have the conjugate normal-inverse-Wishart prior with the
weight of one unit. Its mean has amplitude 0, because neither sign is likelier; its standard deviations are the units'
own scale for amplitudes and means, and 1 for logarithms. The sum of the moments (1, φ_m)(1, φ_m)' over n units
determines the distribution of a further unit's φ, a multivariate t of n + 3 degrees of freedom: wide after few units.

Source: Gelman et al. (2013), "Bayesian Data Analysis", section 3.6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.models.gaussian_process._units import IN_SCALES, UnitModel


class UnitPrior(NamedTuple):
    """A multivariate t distribution of φ = mean + root · w."""

    mean: Tensor  # (D,)
    root: Tensor  # (D, D) lower
    freedom: float

    def draw(self, key: Tensor, count: int) -> Tensor:
        """Return draws of w, `(count, D)`."""
        normal_key, gamma_key = random.split(key, 2)
        half = torch.full((count, 1), self.freedom / 2, dtype=self.mean.dtype, device=self.mean.device)
        normal = random.normal(normal_key, (count, len(self.mean)), self.mean.dtype).to(self.mean.device)
        return normal * (half / random.gamma(gamma_key, half, (count, 1), half.dtype)).sqrt()

    def log_density(self, w: Tensor) -> Tensor:
        """Return the log-density of w `(*b, D)` up to a constant, `(*b,)`."""
        return -0.5 * (self.freedom + w.shape[-1]) * (w.square().sum(-1) / self.freedom).log1p()

    def vectors(self, w: Tensor) -> Tensor:
        """Return φ of w, `(*b, D)`."""
        return self.mean + w @ self.root.mT


def moments(vector: Tensor) -> Tensor:
    """Return (1, φ)(1, φ)' of vectors `(*b, D)`, `(*b, D + 1, D + 1)`.

    >>> moments(torch.tensor([2.0]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    one = torch.cat([torch.ones_like(vector[..., :1]), vector], -1)
    return one[..., :, None] * one[..., None, :]


def learnt(model: UnitModel, total: Tensor) -> UnitPrior:
    """Return the distribution of a further unit's vector, from the sum of the units' `moments` `(D + 1, D + 1)`.

    Args:
        model: of one unit, with the parameters of the vectors; it counts as the one unit if the sum has none.
        total: the sum.

    Raises:
        ValueError: moments of other parameters than the model's trained ones.
    """
    alone = moments(model.unit_vector(model.unit_trained))
    if total.shape != alone.shape:
        raise ValueError(
            f"Expected moments of {len(alone) - 1} numbers of a unit, but got those of {len(total) - 1}; freeze "
            "parameters of units before training"
        )
    if not bool(total[0, 0] > 0):
        total = alone
    count, mean = total[0, 0], total[0, 1:] / total[0, 0]
    scatter = total[1:, 1:] - count * mean[:, None] * mean
    size = mean[0].exp() if model.scale is None else torch.full_like(count, model.scale)
    values = dict(model.named_parameters())
    signed = torch.cat(
        [torch.zeros(int(model.scale is None), dtype=torch.bool)]
        + [torch.full((values[name].numel(),), name in IN_SCALES) for name in model.unit_trained]
    ).to(mean.device)
    base = torch.where(signed, size.square(), torch.ones_like(mean))
    gap = torch.where(signed, mean, torch.zeros_like(mean))  # from the prior's mean
    spread = torch.diag(base) + scatter + count / (count + 1) * gap[:, None] * gap
    freedom = float(count) + 3
    spread = spread * (count + 2) / (count + 1) / freedom
    return UnitPrior(mean - gap / (count + 1), torch.linalg.cholesky(spread), freedom)
