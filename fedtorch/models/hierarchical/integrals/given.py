"""The distribution of coefficients θ_k at nodes of φ, before a device's rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.models.gaussian import Moments


class Coefficients(NamedTuple):
    """θ_k ~ N(mean + (inputs − origin) · slope, S(ζ) + shared) at `R` nodes of each client."""

    zeta: Tensor  # (K, R, s) the hierarchy's part of ζ
    inputs: Tensor  # (K, R, q)
    origin: Tensor  # (K, q)
    mean: Tensor  # (K, d)
    slope: Tensor  # (K, q, d)
    shared: Tensor  # (K, d, d)

    @staticmethod
    def at(mu: Tensor, zeta: Tensor, design: Tensor) -> Coefficients:
        """Return θ_k given μ `(K, R, m)` and ζ, in which fixed effects are known."""
        (clients, _, m), d = mu.shape, len(design)
        zero = mu.new_zeros(clients, d + m)
        shared, slope = mu.new_zeros(clients, d, d), design.mT.expand(clients, m, d)
        return Coefficients(zeta, mu, zero[:, :m], zero[:, m:], slope, shared)


class Given(NamedTuple):
    """μ given ζ under the cavity: μ ~ N(centre + slope (ζ − E ζ), covariance)."""

    scales: Moments  # moments of ζ
    centre: Tensor  # (K, m)
    slope: Tensor  # (K, m, s)
    covariance: Tensor  # (K, m, m)
    design: Tensor  # (d, m)
    spread: Tensor  # (K, d, d) of E θ_k given ζ

    @staticmethod
    def of(cavity: Moments, design: Tensor) -> Given:
        """Return μ given ζ under a cavity over (μ, ζ); `design` `(d, m)` maps μ to θ_k's prior mean."""
        m = design.shape[1]
        total, inner = cavity.covariance, cavity.covariance[:, m:, m:]
        factor = torch.linalg.cholesky_ex(inner).L
        half = torch.linalg.solve_triangular(factor, total[:, m:, :m], upper=False)
        slope = torch.linalg.solve_triangular(factor.mT, half, upper=True).mT
        covariance = total[:, :m, :m] - half.mT @ half
        scales = Moments(cavity.mean[:, m:], inner)
        return Given(scales, cavity.mean[:, :m], slope, covariance, design, design @ covariance @ design.mT)

    def mean(self, zeta: Tensor) -> Tensor:
        """Return E μ given ζ, `(K, R, m)`."""
        return self.centre[:, None] + (zeta - self.scales.mean[:, None]) @ self.slope.mT

    def coefficients(self, zeta: Tensor, inner: Tensor) -> Coefficients:
        """Return θ_k given ζ `(K, R, ...)`, with `inner` as the hierarchy's part."""
        slope, centre = (self.design @ self.slope).mT, self.centre @ self.design.mT
        return Coefficients(inner, zeta, self.scales.mean, centre, slope, self.spread)
