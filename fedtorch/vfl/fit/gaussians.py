r"""Gaussian families q(θ) by reparametrisation, :math:`\theta = \mu + L\varepsilon` with :math:`\Sigma = LL^\top`.

L is a Cholesky factor; equation (8) of the source multiplies by Σ, which would make the covariance Σ². Tensors are
stacked over the batch, `(B, ...)`, draws are `(B, M, d)`.

Source: Hassan, Sutton, Mira, Mengersen, "Scalable Vertical Federated Learning via Data Augmentation and Amortized
Inference", section 4.1.

>>> import torch, fedtorch as ft
>>> family = ft.vfl.diagonal()
>>> q = family.init(1, 2, 0.1, torch.float64, "cpu")
>>> family.covariance(q).diagonal(dim1=1, dim2=2)
tensor([[0.0100, 0.0100]], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class GaussianFamily:
    """A family q(θ) on `d` coordinates.

    Attributes:
        init: (batch, d, standard deviation at the start, dtype, device) -> parameters.
        noises: d -> how many standard normal numbers a draw takes.
        draw: (parameters, noise `(B, M, noises)`) -> θ `(B, M, d)`, differentiable in the parameters.
        log_density: (parameters, θ) -> log q(θ), `(B, M)`.
        covariance: parameters -> Σ `(B, d, d)`.
        shares: (parameters, θ) of some of the coordinates -> what they add to `Shares`, where log q is a function of
            such sums, so that nodes may hold coordinates of one family each; None where it is not.

    >>> family = diagonal()
    >>> q = {"mean": torch.tensor([[1.0, 2.0]]), "log_sd": torch.tensor([[1.0, 3.0]]).log()}
    >>> theta = family.draw(q, torch.tensor([[[0.0, 0.0], [1.0, -1.0]]]))  # the mean, and a standard deviation away
    >>> theta
    tensor([[[ 1.,  2.], [ 2., -1.]]])
    >>> density = family.log_density(q, theta)
    >>> round(float(density[0, 0] - density[0, 1]), 3)  # half a squared standard deviation for each coordinate
    1.0
    """

    init: Callable[[int, int, float, torch.dtype, torch.device], Tensors]
    noises: Callable[[int], int]
    draw: Callable[[Tensors, Tensor], Tensor]
    log_density: Callable[[Tensors, Tensor], Tensor]
    covariance: Callable[[Tensors], Tensor]
    shares: Callable[[Tensors, Tensor], Shares] | None = None


class Shares(NamedTuple):
    """Sums over coordinates of which a density of low rank is a function.

    >>> family, theta = low_rank(1), torch.ones(1, 1, 4, dtype=torch.float64)
    >>> q = family.init(1, 4, 1.0, torch.float64, "cpu")
    >>> of = lambda own: family.shares({name: value[:, own] for name, value in q.items()}, theta[..., own])
    >>> first, second = of(slice(0, 2)), of(slice(2, 4))  # of two nodes with two coordinates each
    >>> whole = Shares(*(a + b for a, b in zip(first, second)))
    >>> torch.allclose(whole.log_density(), family.log_density(q, theta))
    True
    """

    alone: Tensor  # (B, M) log-density as if there were no factor
    gram: Tensor  # (B, rank, rank) WᵀD⁻²W
    moment: Tensor  # (B, M, rank) WᵀD⁻²(θ − μ)

    def log_density(self) -> Tensor:
        """log q(θ) of all coordinates by Woodbury's identity, `(B, M)`."""
        eye = torch.eye(self.gram.shape[-1], dtype=self.gram.dtype, device=self.gram.device)
        lower = torch.linalg.cholesky(eye + self.gram)
        inner = torch.linalg.solve_triangular(lower, self.moment.mT, upper=False)
        return self.alone + 0.5 * inner.square().sum(-2) - lower.diagonal(dim1=-2, dim2=-1).log().sum(-1, True)


def _start(batch: int, size: int, sd: float, dtype: torch.dtype, device: torch.device) -> Tensors:
    mean = torch.zeros(batch, size, dtype=dtype, device=device)
    return {"mean": mean, "log_sd": torch.full_like(mean, math.log(sd))}


def _normaliser(size: int) -> float:
    return 0.5 * size * math.log(2 * math.pi)


def diagonal() -> GaussianFamily:
    """Independent coordinates: `2d` parameters."""

    def log_density(q: Tensors, theta: Tensor) -> Tensor:
        standard = (theta - q["mean"].unsqueeze(1)) * torch.exp(-q["log_sd"]).unsqueeze(1)
        return -0.5 * standard.square().sum(-1) - q["log_sd"].sum(-1, True) - _normaliser(theta.shape[-1])

    return GaussianFamily(
        init=_start,
        noises=lambda size: size,
        draw=lambda q, noise: torch.addcmul(q["mean"].unsqueeze(1), q["log_sd"].exp().unsqueeze(1), noise),
        log_density=log_density,
        covariance=lambda q: torch.diag_embed((2 * q["log_sd"]).exp()),
    )


def point() -> GaussianFamily:
    """No spread at all, for what is maximised over: log q counts as 0.

    >>> point().draw({"mean": torch.tensor([[1.0, 2.0]])}, torch.zeros(1, 1, 0))
    tensor([[[1., 2.]]])
    """
    return GaussianFamily(
        init=lambda batch, size, sd, dtype, device: {"mean": torch.zeros(batch, size, dtype=dtype, device=device)},
        noises=lambda size: 0,
        draw=lambda q, noise: q["mean"].unsqueeze(1),
        log_density=lambda q, theta: theta.new_zeros(theta.shape[:-1]),
        covariance=lambda q: torch.zeros_like(torch.diag_embed(q["mean"])),
    )


def cholesky(q: Tensors) -> Tensor:
    """L of `full_covariance`'s parameters, `(B, d, d)`: rows of a unit triangle, each times its positive scale.

    So a step of the optimiser turns L by as much whatever the scale of a coordinate is, and L stays well conditioned.

    >>> q = {"log_sd": torch.tensor([[1.0, 2.0]]).log(), "lower": torch.tensor([[[0.0, 0.0], [3.0, 0.0]]])}
    >>> cholesky(q)  # the second row is 2 times (3, 1)
    tensor([[[1., 0.], [6., 2.]]])
    >>> full_covariance().covariance(q)
    tensor([[[ 1.,  6.], [ 6., 40.]]])
    """
    eye = torch.eye(q["lower"].shape[-1], dtype=q["lower"].dtype, device=q["lower"].device)
    return q["log_sd"].exp().unsqueeze(-1) * (q["lower"].tril(-1) + eye)


def full_covariance() -> GaussianFamily:
    """Any covariance by its Cholesky factor: `d + d(d + 1)/2` parameters (kept in a square)."""

    def init(batch: int, size: int, sd: float, dtype: torch.dtype, device: torch.device) -> Tensors:
        return {
            **_start(batch, size, sd, dtype, device),
            "lower": torch.zeros(batch, size, size, dtype=dtype, device=device),
        }

    def log_density(q: Tensors, theta: Tensor) -> Tensor:
        centred = (theta - q["mean"].unsqueeze(1)).mT
        standard = torch.linalg.solve_triangular(cholesky(q), centred, upper=False)
        return -0.5 * standard.square().sum(-2) - q["log_sd"].sum(-1, True) - _normaliser(theta.shape[-1])

    return GaussianFamily(
        init=init,
        noises=lambda size: size,
        draw=lambda q, noise: q["mean"].unsqueeze(1) + noise @ cholesky(q).mT,
        log_density=log_density,
        covariance=lambda q: cholesky(q) @ cholesky(q).mT,
    )


def low_rank(rank: int) -> GaussianFamily:
    r"""Covariance :math:`\mathrm{diag}(D^2) + WW^\top` with W `(d, rank)`: `d(rank + 2)` parameters.

    A draw is μ + Dε + Wη; the density is by Woodbury's identity, at a cost of `d·rank²`.

    Raises:
        ValueError: `rank` is less than 1.
    """
    if rank < 1:
        raise ValueError(f"Expected a rank of at least 1, but got {rank}; see `diagonal` for none")

    def init(batch: int, size: int, sd: float, dtype: torch.dtype, device: torch.device) -> Tensors:
        # Not zero, where W's gradient would vanish: one column for every rank-th coordinate.
        column = torch.arange(size, device=device)[:, None] % rank == torch.arange(rank, device=device)
        factor = (0.1 * sd * column).to(dtype).expand(batch, size, rank).clone()
        return {**_start(batch, size, sd, dtype, device), "factor": factor}

    def draw(q: Tensors, noise: Tensor) -> Tensor:
        own, common = noise.split([q["mean"].shape[-1], rank], -1)
        return q["mean"].unsqueeze(1) + q["log_sd"].exp().unsqueeze(1) * own + common @ q["factor"].mT

    def shares(q: Tensors, theta: Tensor) -> Shares:
        scale = torch.exp(-q["log_sd"]).unsqueeze(1)
        standard, factor = (theta - q["mean"].unsqueeze(1)) * scale, q["factor"] * scale.mT
        alone = -0.5 * standard.square().sum(-1) - q["log_sd"].sum(-1, True) - _normaliser(theta.shape[-1])
        return Shares(alone, factor.mT @ factor, standard @ factor)

    return GaussianFamily(
        init=init,
        noises=lambda size: size + rank,
        draw=draw,
        log_density=lambda q, theta: shares(q, theta).log_density(),
        covariance=lambda q: torch.diag_embed((2 * q["log_sd"]).exp()) + q["factor"] @ q["factor"].mT,
        shares=shares,
    )
