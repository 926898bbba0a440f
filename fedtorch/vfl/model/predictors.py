r"""Predictors: a party's parameters θ_j, their prior, and :math:`g_j(x_j, \theta_j)`.

Every party chooses its own predictor, and need not disclose it. A custom prior is a function of θ `(B, M, d)` to
`(B, M)`.

Source: Hassan et al., sections 3.1 (each client sets its own prior) and 5.2 (varying slopes by group). The printed
multilevel model gives every area slopes of its own with one draw each, which is not identifiable. Here a level of the
group has slopes :math:`\beta^r \sim N(\mu, \sigma)`, parametrised by :math:`u^r = (\beta^r - \mu)/\sigma`.

>>> import torch, fedtorch as ft
>>> normal_prior(sd=1.0)(torch.zeros(1, 1, 2)).round(decimals=3)
tensor([[-1.8380]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Prior = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Predictor:
    """A party's part of the model.

    Attributes:
        size: number of coordinates of θ_j.
        forward: (θ `(B, M, d)`, features `(n, p)` or `(B, n, p)`) -> g_j, `(B, M, C, n)`.
        log_prior: θ -> log p_j(θ), `(B, M)`.
        width: p, the columns that `forward` expects.
        outputs: C; the likelihood's by default.
        row_dims: dimensions of one row of features.
        start: initial θ, `(B, size)`; zero by default.
    """

    size: int
    forward: Callable[[Tensor, Tensor], Tensor]
    log_prior: Prior
    width: int | None
    outputs: int | None = None
    row_dims: int = 1
    start: Tensor | None = None

    def __call__(self, theta: Tensor, x: Tensor, keys: Callable[[], Tensor] | None = None) -> Tensor:
        """Return g_j; `keys`, which networks draw dropout with, are not used."""
        return self.forward(theta, x)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return no parameters to maximise over; a network returns its weights."""
        return iter(())


def flat_prior() -> Prior:
    """Make a constant density, for parameters that are maximised over.

    >>> flat_prior()(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))  # of two draws
    tensor([[0., 0.]])
    """
    return lambda theta: theta.new_zeros(theta.shape[:-1])


def normal_prior(sd: float = 1.0) -> Prior:
    """Make a prior of independent N(0, sd²).

    Raises:
        ValueError: `sd` is not positive.
    """
    if not sd > 0:
        raise ValueError(f"Expected a positive standard deviation, but got {sd}")
    return lambda theta: (
        theta.square().sum(-1) * (-0.5 / sd**2) - theta.shape[-1] * math.log(sd * math.sqrt(2 * math.pi))
    )


def laplace_prior(scale: float = 1.0) -> Prior:
    """Make a prior of independent Laplace variables with density exp(−|θ|/scale)/(2·scale).

    Raises:
        ValueError: `scale` is not positive.

    >>> laplace_prior(0.5)(torch.tensor([[[1.0], [-2.0]]]))  # of two draws
    tensor([[-2., -4.]])
    """
    if not scale > 0:
        raise ValueError(f"Expected a positive scale, but got {scale}")
    return lambda theta: theta.abs().sum(-1) * (-1 / scale) - theta.shape[-1] * math.log(2 * scale)


def linear(width: int, prior: Prior | None = None, outputs: int = 1) -> Predictor:
    r"""Make the predictor :math:`g(x, \beta) = x^\top\beta`, for each output.

    Args:
        width: the number of features.
        prior: of β; N(0, 1) by default.
        outputs: C of the likelihood.

    Raises:
        ValueError: no feature or no output.
    """
    if width < 1 or outputs < 1:
        raise ValueError(f"Expected at least one feature and one output, but got {width} and {outputs}")

    def forward(theta: Tensor, x: Tensor) -> Tensor:
        return _times(theta.unflatten(-1, (outputs, width)), x)

    return Predictor(outputs * width, forward, prior or normal_prior(), width, outputs)


def by_level(x: Tensor, groups: Tensor, levels: int) -> Tensor:
    """Return the design of slopes by level, `(n, levels · p)`: a row's features are in the columns of its level.

    Args:
        x: `(n, p)`.
        groups: `(n,)` integers from 0 to `levels − 1`.
        levels: number of levels.

    Raises:
        ValueError: a group out of range.

    >>> by_level(torch.tensor([[1, 2], [3, 4]]), groups=torch.tensor([0, 1]), levels=2)
    tensor([[1, 2, 0, 0], [0, 0, 3, 4]])
    """
    if not bool(((groups >= 0) & (groups < levels)).all()):
        raise ValueError(f"Expected groups from 0 to {levels - 1}, but got {int(groups.min())} to {int(groups.max())}")
    return (torch.nn.functional.one_hot(groups.long(), levels).to(x.dtype)[:, :, None] * x[:, None]).flatten(1)


def multilevel(
    width: int, levels: int, *, mean_sd: float = 1.0, spread_sd: float = 1.0, centred: bool = False
) -> Predictor:
    r"""Make varying slopes by group: :math:`g(x) = x^\top\beta^r,\ \beta^r = \mu + \sigma u^r,\ u^r \sim N(0, 1)`.

    :math:`\mu \sim N(0, \text{mean\_sd}^2)` and σ half-normal of scale `spread_sd`, one each per feature. θ holds
    (μ, log σ, u), or (μ, log σ, β) where `centred`: `(2 + levels) · width` numbers. Features are made by `by_level`.

    Args:
        width: features p of a row.
        levels: levels R of the group.
        mean_sd: prior standard deviation of μ.
        spread_sd: prior scale of σ.
        centred: parametrise by β, which is better where every level has many rows; u is better where levels have few.

    >>> predictor = multilevel(1, levels=2)
    >>> theta = torch.tensor([[[10.0, 0.0, -1.0, 1.0]]])  # μ, log σ, and u of both levels
    >>> slopes(theta, 1, levels=2).flatten()
    tensor([ 9., 11.])
    >>> predictor.forward(theta, by_level(torch.ones(3, 1), torch.tensor([0, 1, 0]), 2))
    tensor([[[[ 9., 11.,  9.]]]])
    """
    normal = normal_prior()
    mean_prior = normal_prior(mean_sd)

    def log_prior(theta: Tensor) -> Tensor:
        mean, log_spread, effects = _parts(theta, width, levels)
        standard = (effects - mean.unsqueeze(-2)) * torch.exp(-log_spread).unsqueeze(-2) if centred else effects
        jacobian = levels * log_spread.sum(-1) if centred else 0
        ratio = log_spread.exp() / spread_sd
        half_normal = -0.5 * ratio.square() + ratio.log() + 0.5 * math.log(2 / math.pi)  # of log σ
        return mean_prior(mean) + half_normal.sum(-1) + normal(standard.flatten(-2)) - jacobian

    def forward(theta: Tensor, x: Tensor) -> Tensor:
        return _times(slopes(theta, width, levels, centred=centred).flatten(-2).unsqueeze(-2), x)

    return Predictor((2 + levels) * width, forward, log_prior, levels * width)


def slopes(theta: Tensor, width: int, levels: int, *, centred: bool = False) -> Tensor:
    """Return the slopes β^r from the parameters of `multilevel`, `(..., levels, width)`."""
    mean, log_spread, effects = _parts(theta, width, levels)
    return effects if centred else mean.unsqueeze(-2) + log_spread.exp().unsqueeze(-2) * effects


def _parts(theta: Tensor, width: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_spread, standard = theta.split([width, width, levels * width], -1)
    return mean, log_spread, standard.unflatten(-1, (levels, width))


def _times(coefficients: Tensor, x: Tensor) -> Tensor:
    """Multiply coefficients `(B, M, C, p)` and features `(n, p)` or `(B, n, p)`: `(B, M, C, n)`."""
    flat = coefficients.flatten(1, 2) @ x.mT
    return flat.unflatten(1, coefficients.shape[1:3])
