r"""Priors of the clients' deviations from the global parameter, as scale mixtures of normals.

.. math:: \theta_{kj} \mid \theta_j \sim N(\theta_j, \lambda_{kj}^2 \tau_j^2)

A prior defines the distribution of λ, and the draw of w = 1/λ² given the deviation δ = θ_kj − θ_j and τ. All random
numbers in that draw have fixed distributions, so those of many sweeps are drawn in one block beforehand and a sweep is
arithmetic on them: only additions, multiplications, divisions and roots, which round alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtorch import random
from fedtorch._lazy import only

__all__ = ["Deviation", "horseshoe", "laplace", "normal"]
__dir__ = only(__all__)

Noise = tuple[Tensor, ...]


@dataclass(frozen=True)
class Deviation:
    """A prior of deviations.

    Attributes:
        noise: (keys `(...)`, shape) -> random numbers `(..., *shape)` each, for many sweeps.
        update: (w, auxiliary u, δ²/(2τ²), one sweep's random numbers) -> (w, u), all of one shape.
        prior: (keys `(...)`, shape) -> draws of λ² `(..., *shape)`, for predictions of clients without rows; None if
            undefined.
        half_cauchy: whether p(w, u) ∝ w^{−1/2} e^{−u (1 + w)}, as of the horseshoe: τ then moves with the λ of all
            sites, too, and chains mix faster.

    A user-defined prior with λ² ~ IG(2, 2), so that deviations are Student's t with four degrees of freedom:

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models.gibbs import sparse
    >>> student = Deviation(
    ...     noise=lambda keys, shape: (ft.random.gamma(keys, 2.5, shape, torch.float64),),
    ...     update=lambda w, u, energy, noise: (noise[0] / (2 + energy), u),
    ... )
    >>> w, u, energy = torch.ones(2), torch.ones(2), torch.tensor([0.5, 23.0])  # energy: δ²/(2τ²)
    >>> student.update(w, u, energy, (torch.tensor([2.5, 2.5]),))[0]  # w = 1/λ² is small where δ is large
    tensor([1.0000, 0.1000])
    >>> local = sparse.regression(deviation=student)
    """

    noise: Callable[[Tensor, tuple[int, ...]], Noise]
    update: Callable[[Tensor, Tensor, Tensor, Noise], tuple[Tensor, Tensor]]
    prior: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None
    half_cauchy: bool = False


def horseshoe() -> Deviation:
    r"""Build the prior with λ half-Cauchy, which shrinks small deviations to zero and hardly affects large ones.

    With λ² ~ IG(½, 1/ν), ν ~ IG(½, 1) the conditionals are (Makalic and Schmidt, "A simple sampler for the horseshoe
    estimator", IEEE Signal Processing Letters 23, 2016)

    .. math:: \lambda^2 \sim IG(1, 1/\nu + \delta^2 / (2\tau^2)), \qquad \nu \sim IG(1, 1 + 1/\lambda^2),

    where IG(1, b) is b over an exponential number; u is 1/ν.

    >>> import torch, fedtorch as ft
    >>> prior, one = horseshoe(), torch.ones(3, dtype=torch.float64)
    >>> noise = prior.noise(ft.random.key(0), (3,))
    >>> w, u = prior.update(one, one, torch.tensor([1e-6, 1.0, 1e6]).double(), noise)
    >>> bool(w[2] < 1e-3)  # 1/λ² of a deviation of a thousand times τ: left alone
    True
    """

    def update(w: Tensor, u: Tensor, energy: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        first, second = noise
        w = first / (u + energy)
        return w, second / (w + 1)

    def noise(keys: Tensor, shape: tuple[int, ...]) -> Noise:
        return tuple(random.exponential(key, shape, torch.float64) for key in random.split(keys, 2))

    def prior(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
        return (math.pi / 2 * random.uniform(keys, shape, torch.float64)).tan().square()

    return Deviation(noise, update, prior, half_cauchy=True)


def laplace() -> Deviation:
    r"""Return the prior with λ² exponential of mean 2: δ is Laplace of scale τ: the Bayesian lasso of deviations.

    .. math:: 1/\lambda^2 \sim \text{InverseGaussian}(\tau / |\delta|, 1)

    (Park and Casella, "The Bayesian lasso", JASA 103, 2008, section 2), drawn as a root of a quadratic (Michael,
    Schucany and Haas, "Generating random variates using transformations with multiple roots", The American
    Statistician 30, 1976).

    >>> import torch, fedtorch as ft
    >>> prior, one = laplace(), torch.ones(10_000, dtype=torch.float64)
    >>> noise = prior.noise(ft.random.key(0), (10_000,))
    >>> w, _ = prior.update(one, one, 8 * one, noise)  # δ = 4τ
    >>> round(float(w.mean()), 2)  # the mean of the inverse Gaussian, τ / |δ|
    0.25
    """

    def noise(keys: Tensor, shape: tuple[int, ...]) -> Noise:
        for_square, for_root = random.split(keys, 2)
        return random.normal(for_square, shape, torch.float64).square_(), random.uniform(for_root, shape, torch.float64)

    def update(w: Tensor, u: Tensor, energy: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        square, uniform = noise
        mean = (2 * energy).clamp_min(1e-30).rsqrt()  # a mean of 1e15 or more counts as infinite
        scaled = mean * square
        smaller = mean * (2 / (2 + scaled + (scaled * (scaled + 4)).sqrt()))
        return torch.where(uniform * (mean + smaller) <= mean, smaller, mean * (mean / smaller)), u

    return Deviation(noise, update, lambda keys, shape: 2 * random.exponential(keys, shape, torch.float64))


def normal() -> Deviation:
    """Return the prior with λ = 1: normal deviations of standard deviation τ_j, the conjugate case.

    >>> import torch
    >>> prior, one = normal(), torch.ones(2)
    >>> prior.update(one, one, torch.tensor([0.1, 100.0]), ())[0]  # 1/λ², whatever the deviations are
    tensor([1., 1.])
    """
    ones = lambda keys, shape: torch.ones(*keys.shape, *shape, dtype=torch.float64)
    return Deviation(lambda keys, shape: (), lambda w, u, energy, noise: (w, u), ones)
