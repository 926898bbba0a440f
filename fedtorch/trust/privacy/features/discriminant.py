r"""Linear discriminants that hide an attribute: one number aᵀx that predicts the label and reveals little of s = F x.

In two classes of equal weight let x be normal with means a distance Δ apart and a covariance C, and z = aᵀx. The
classes' separation is d = |aᵀΔ|/√(aᵀCa), with which the best threshold is right with probability Φ(d/2). The
information of z about s within a class, beyond the label, is

.. math:: I(s; z \mid y) = -\tfrac12 \log(1 - \|P b\|^2), \qquad b = C^{1/2} a, \quad \|b\| = 1,

with the projection P on the rows of F C^{1/2}. Both depend on b through its parts along and across these rows, so that
the best b with ‖Pb‖² ≤ τ is, with m = C^{−1/2}Δ,

.. math:: b = \sqrt\tau\, \frac{P m}{\|P m\|} + \sqrt{1 - \tau}\, \frac{(I - P) m}{\|(I - P) m\|},

or m itself if that leaks less. For classes with different covariances their mean is used, as in linear discriminant
analysis; the results are then those for the mean.

Source: Jung, "Federated learning: from theory to practice", problem 9.2; the closed form is ours.

>>> import math, torch
>>> from fedtorch.trust.privacy.features.discriminant import private_discriminant
>>> means, private = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0]])  # s = x₁
>>> [round(private_discriminant(means, torch.eye(2), private, leak).separation, 3) for leak in (math.inf, 0.0)]
[1.414, 1.0]
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.special import ndtr
from torch import Tensor

_ROUNDING = 1e-10  # tolerance of singular values and lengths, relative


class Discriminant(NamedTuple):
    """A map z = ⟨direction, x⟩ of variance one within the classes.

    Example:
        >>> import torch
        >>> means, private = torch.tensor([[0.0, 0.0], [2.0, 1.0]]), torch.tensor([[0.0, 1.0]])  # s = x₁
        >>> found = private_discriminant(means, torch.eye(2), private, leak=0.0)
        >>> torch.allclose(found.direction, torch.tensor([1.0, 0.0], dtype=torch.float64))  # x₀ alone
        True
        >>> round(found.separation, 6), round(found.accuracy, 4), round(found.leak, 6)  # Φ(1) are right
        (2.0, 0.8413, 0.0)
    """

    direction: Tensor  # (d,) a
    separation: float  # of the classes' means
    accuracy: float  # Φ(separation / 2), of the best threshold
    leak: float  # I(s; z | y) in nats


def private_discriminant(means: Tensor, covariances: Tensor, private: Tensor, leak: float) -> Discriminant:
    """Return the direction that best separates two classes, among those with at most this leak of s = F x.

    Args:
        means: `(2, d)` of x in each class.
        covariances: `(2, d, d)`, or `(d, d)` of both; their mean is positive definite.
        private: `(a, d)` F.
        leak: the largest I(s; z | y) in nats; infinite for Fisher's discriminant.

    Raises:
        ValueError: shapes that do not match, a covariance that is not positive definite, a negative leak, or means that
            differ only in the protected part.
    """
    size = means.shape[-1]
    if means.shape != (2, size) or covariances.shape[-2:] != (size, size) or private.shape[1:] != (size,):
        raise ValueError(
            f"Expected means (2, d), covariances (2, d, d) or (d, d) and private (a, d), but got {tuple(means.shape)}, "
            f"{tuple(covariances.shape)} and {tuple(private.shape)}"
        )
    if not leak >= 0:
        raise ValueError(f"Expected a leak of at least 0 nats, but got {leak}")
    covariance = covariances.to(torch.float64).reshape(-1, size, size).mean(0)
    root, bad = torch.linalg.cholesky_ex(covariance)
    if int(bad):
        raise ValueError("Expected a positive definite covariance, but got another")
    m = torch.linalg.solve_triangular(root, (means[1] - means[0]).to(torch.float64)[:, None], upper=False)[:, 0]
    rows, sizes, _ = torch.linalg.svd((private.to(torch.float64) @ root).T, full_matrices=False)
    rows = rows[:, sizes > _ROUNDING * sizes.max().clamp(min=1e-300)]
    along = rows @ (rows.T @ m)
    across = m - along
    inside, outside, whole = (float(part.norm()) for part in (along, across, m))
    most = -math.expm1(-2 * leak)  # τ
    if inside**2 <= most * whole**2:
        b = m / whole if whole > 0 else m
    elif outside <= _ROUNDING * whole:
        raise ValueError("Expected means that differ outside the protected part, but they differ in it only")
    else:
        b = math.sqrt(most) * along / inside + math.sqrt(1 - most) * across / outside
    leaked, separation = float((rows.T @ b).square().sum()), float(b @ m)
    original = torch.linalg.solve_triangular(root.mT, b[:, None], upper=True)[:, 0]
    lost = -0.5 * math.log1p(-leaked) if leaked < 1 else math.inf
    return Discriminant(original, separation, float(ndtr(separation / 2)), lost)
