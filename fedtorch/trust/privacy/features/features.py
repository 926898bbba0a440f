r"""Features that hide a private attribute: linear projections, and the privacy funnel of Gaussian variables.

The linear map that removes what is linear in s of features x is the projection (9.10),

.. math:: F = I - \frac{c c^\top}{\|c\|^2}, \qquad c = \mathrm{Cov}(x, s).

The privacy funnel (9.8) asks for the map z of x with the least I(s; z) among those with I(y; z) ≥ R. Let x, s and y be
jointly normal with scalar s and y of variance one, and x white, with covariances c_s and c_y at an angle θ. A linear
map with Gaussian noise is known by G = Cov(E[x | z]), any matrix with 0 ≼ G ≼ I, and

.. math:: I(s; z) = -\tfrac12 \log(1 - c_s^\top G c_s), \qquad I(y; z) = -\tfrac12 \log(1 - c_y^\top G c_y).

Both are linear in G, so the best G are projections on the negative eigenvector of c_s c_sᵀ − λ c_y c_yᵀ, a direction of
the plane of c_s and c_y: with t = 1 − e^{−2R},

.. math:: c_s^\top G c_s = \|c_s\|^2 \cos^2\bigl(\theta + \arccos(\sqrt t / \|c_y\|)\bigr)

as long as the angle is below π/2. At smaller R nothing leaks, and noise on the direction orthogonal to c_s suffices.

Source: Jung, "Federated learning: from theory to practice", section 9.4; Makhdoumi et al. (2014), "From the information
bottleneck to the privacy funnel".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-12  # tolerance of covariances, relative to the largest
_ABOVE = 1 + 1e-9  # tolerance for a request of all the information


def private_projection(features: Tensor, private: Tensor) -> Tensor:
    """Return F of (9.10), with covariances by (9.11)–(9.13): `F x` is uncorrelated with the private attributes.

    Args:
        features: `(m, d)`.
        private: `(m,)` a private attribute, or `(m, a)` several, whose covariances are all projected out.

    Returns:
        `(d, d)` float64, symmetric.

    Raises:
        ValueError: shapes that do not match.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> private = x[:, 0]
    >>> projection = private_projection(x, private)
    >>> projection.round(decimals=6).tolist()
    [[0.0, 0.0], [0.0, 1.0]]
    >>> [round(reconstruction_error(x, private, map), 6) for map in (torch.eye(2), projection)]
    [0.0, 0.5]
    """
    private = private[:, None] if private.ndim == 1 else private
    if features.ndim != 2 or private.ndim != 2 or len(features) != len(private):
        raise ValueError(
            f"Expected features (m, d) and private (m,) or (m, a), but got {tuple(features.shape)} and "
            f"{tuple(private.shape)}"
        )
    x, s = (part.to(torch.float64) - part.to(torch.float64).mean(0) for part in (features, private))
    cross = x.T @ s / len(x)
    basis, sizes, _ = torch.linalg.svd(cross, full_matrices=False)
    dominant = basis[:, sizes > _ROUNDING * x.norm() * s.norm() / len(x)]
    return torch.eye(x.shape[1], dtype=torch.float64) - dominant @ dominant.T


def reconstruction_error(features: Tensor, private: Tensor, map: Tensor) -> float:
    """Return ε(F) of (9.9), the mean squared error of the best affine reconstruction of `private` from `map x`."""
    x, s = (
        part.to(torch.float64) - part.to(torch.float64).mean(0) for part in (features @ map.T.to(features), private)
    )
    return float((s - x @ torch.linalg.lstsq(x, s[:, None], driver="gelsd").solution[:, 0]).square().mean())


class Funnel(NamedTuple):
    """A map z = ⟨direction, x⟩ + N(0, noise) with the least leakage for its information.

    Example:
        >>> import math, torch
        >>> private, label = torch.tensor([0.5, 0.0, 1.0]), torch.tensor([0.5, 0.5, 1.0])  # s knows x₀, y knows both
        >>> most = privacy_funnel(torch.eye(2), private, label, information=0.5 * math.log(2))  # all that x knows of y
        >>> most.direction.round(decimals=3).tolist(), round(most.noise, 4)
        ([0.707, 0.707], 0.0)
        >>> round(most.leak, 4), round(-0.5 * math.log(1 - 1 / 8), 4)  # of s along this direction, in nats
        (0.0668, 0.0668)
        >>> round(most.information, 4)
        0.3466
    """

    direction: Tensor  # (d,)
    noise: float  # variance, where ⟨direction, x⟩ has variance one
    leak: float  # I(s; z) in nats
    information: float  # I(y; z) in nats


def privacy_funnel(covariance: Tensor, private: Tensor, label: Tensor, information: float) -> Funnel:
    """Find the linear Gaussian map of x of least I(s; z) among those with I(y; z) of at least `information` (9.8).

    Args:
        covariance: `(d, d)` of x, positive definite.
        private: `(d + 1,)` covariances of s with x, followed by the variance of s.
        label: `(d + 1,)` the same for y.
        information: R in nats, at least 0.

    Raises:
        ValueError: invalid shapes or variances, or more information than x has about y; the message gives that amount.

    Example:
        >>> import math, torch
        >>> private, label = torch.tensor([0.5, 0.0, 1.0]), torch.tensor([0.5, 0.5, 1.0])  # s knows x₀, y knows both
        >>> little = privacy_funnel(torch.eye(2), private, label, information=-0.5 * math.log(1 - 1 / 8))
        >>> little.direction.tolist(), round(little.noise, 4), little.leak  # x₁ alone, and as much noise
        ([0.0, 1.0], 1.0, 0.0)
    """
    size = len(covariance)
    if covariance.shape != (size, size) or private.shape != (size + 1,) or label.shape != (size + 1,):
        raise ValueError(
            f"Expected a covariance (d, d), private and label (d + 1,), but got {tuple(covariance.shape)}, "
            f"{tuple(private.shape)} and {tuple(label.shape)}"
        )
    root, bad = torch.linalg.cholesky_ex(covariance.to(torch.float64))
    if int(bad) or not (float(private[-1]) > 0 and float(label[-1]) > 0):
        raise ValueError("Expected a positive definite covariance and positive variances of s and y")
    white = [
        torch.linalg.solve_triangular(root, each[:-1, None].to(torch.float64), upper=False)[:, 0]
        / each[-1].to(torch.float64).sqrt()
        for each in (private, label)
    ]
    (s, y), (size_s, size_y) = white, (float(each.norm()) for each in white)
    if max(size_s, size_y) >= 1:
        raise ValueError("Expected variances of s and y beyond what x explains, but x determines one of them")
    most = -0.5 * math.log1p(-(size_y**2))
    if not 0 <= information <= most * _ABOVE:
        raise ValueError(f"Expected information between 0 and I(y; x) = {most:.6g} nats, but got {information}")
    along = s / size_s if size_s > 0 else torch.zeros_like(s)
    across = y - (along @ y) * along  # part of c_y orthogonal to c_s
    wanted, free = -math.expm1(-2 * information), float(across.norm()) ** 2
    if wanted <= free * _ABOVE or size_s == 0:
        share = min(wanted / free, 1.0) if free > 0 else 0.0
        direction = across / math.sqrt(free) if free > 0 else across
        leak = 0.0
    else:
        share = 1.0
        angle = math.acos(min(1.0, math.sqrt(wanted) / size_y))  # angle from c_y, away from c_s
        towards = across / math.sqrt(free) if free > 0 else torch.zeros_like(y)
        sign = 1.0 if float(along @ y) >= 0 else -1.0
        theta = math.acos(min(1.0, abs(float(along @ y)) / size_y))
        direction = math.cos(theta + angle) * sign * along + math.sin(theta + angle) * towards
        leak = -0.5 * math.log1p(-((size_s * math.cos(theta + angle)) ** 2))
    original = torch.linalg.solve_triangular(root.mT, direction[:, None], upper=True)[:, 0]
    return Funnel(original, 1 / share - 1 if share > 0 else math.inf, leak, information)
