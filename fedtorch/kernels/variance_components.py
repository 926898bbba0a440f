r"""Log densities and scores of many small normal vectors whose covariances are sums of variance components.

At node r of client k

.. math:: M = \sum_t c_{krt}\, B_k' E_t B_k + W_k + \sigma^2_{kr} I, \qquad
    u = z_k - \sum_j (x_{krj} - o_{kj})\, g_{kj},

with the same symmetric E_t for all clients, of ones at (i_t, j_t) and (j_t, i_t). That is the marginal distribution of
the rows of a linear mixed-effects model at values of its variances, with as many rows as there are coefficients. The
program computes a node in each place of a processor's vectors, and factorises M = LDL' without writing it anywhere; the
reference is a batched Cholesky factor.

Source: Searle, Casella, McCulloch, "Variance components", 1992, chapter 6. Bound: arithmetic, about d² T / 2 + d³ / 6
multiplications and additions a node.

Not differentiable by its program; where a gradient is asked for the reference runs. The program knows float64 and up to
16 dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.dispatch import choice
from fedtorch.programs import variance_components as compiled

MOST = 16  # dimensions


class VarianceComponents(NamedTuple):
    """Hold the normal vectors of `K` clients at `R` nodes."""

    values: Tensor  # (K, R, T) c
    inputs: Tensor  # (K, R, q) x
    noise: Tensor  # (K, R) σ²
    rows: Tensor  # (T,) i
    columns: Tensor  # (T,) j
    root: Tensor  # (K, d, d) B
    shared: Tensor  # (K, d, d) W
    origin: Tensor  # (K, q) o
    centre: Tensor  # (K, d) z
    slope: Tensor  # (K, q, d) g


def program(size: int, tensors: Sequence[Tensor]) -> Any:
    """Return the program for vectors of this size, where it is there and knows such tensors, else None."""
    wide = all(tensor.dtype == torch.float64 for tensor in tensors)
    if not (0 < size <= MOST and wide and choice.plain(tensors)):
        return None
    return compiled if compiled.usable() else None


def log_densities(model: VarianceComponents) -> Tensor:
    """Return log |M| + u'M⁻¹u, minus twice the log density without its constant, `(K, R)`; NaN if M is indefinite."""
    if (found := _program(model)) is not None:
        return found.log_densities(model)
    factor, white = _factorised(model)
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + white.square().sum(-1)


def scores(model: VarianceComponents, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return M⁻¹u `(K, R, d)`, and the sums over nodes of weights `(K, R)` times M⁻¹, `(K, d, d)`."""
    if (found := _program(model)) is not None:
        return found.scores(model, weights)
    factor, white = _factorised(model)
    inverse = linalg.inverse_factor(factor)
    return (inverse.mT @ white[..., None])[..., 0], (weights[..., None, None] * (inverse.mT @ inverse)).sum(1)


def _program(model: VarianceComponents) -> Any:
    """Return the program for these vectors, if there is one."""
    return program(model.centre.shape[1], (*model[:3], *model[5:]))


def _factorised(model: VarianceComponents) -> tuple[Tensor, Tensor]:
    """Return L and L⁻¹u, of NaN where M is indefinite."""
    one, other = model.root[:, model.rows], model.root[:, model.columns]
    products = one[..., :, None] * other[..., None, :]
    twice = (model.rows != model.columns)[:, None, None]
    matrices = torch.where(twice, products + products.mT, products)
    total = torch.einsum("krt,ktab->krab", model.values, matrices) + model.shared[:, None]
    total.diagonal(dim1=-2, dim2=-1).add_(model.noise[..., None])
    factor, info = torch.linalg.cholesky_ex(total)
    factor = torch.where((info == 0)[..., None, None], factor, torch.nan)
    misfit = model.centre[:, None] - (model.inputs - model.origin[:, None]) @ model.slope
    return factor, torch.linalg.solve_triangular(factor, misfit[..., None], upper=False)[..., 0]
