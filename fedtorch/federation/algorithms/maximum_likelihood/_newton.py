"""A step of Newton's method from sums of a function at nodes around a point."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg

APART = 0.1  # distance of neighbouring nodes, in standard errors
_BITS = 14  # bits of a step between nodes
_LEAST = 1e-10  # least curvature assumed for a direction, in squared standard errors
_LONGEST = 3.0  # longest step of a log variance, a correlation's parameter or log σ²
_WIDEST = 1.0  # largest standard error used to place nodes in these
NOISE = 1e-12  # relative, of sums in float64
_CUBIC = 1e-6  # third differences, relative


class Point(NamedTuple):
    """The clients' sums at a point and the nodes around it."""

    at: Tensor  # (p,)
    steps: Tensor  # (p,) between nodes
    value: Tensor  # () log likelihood at the point
    relative: Tensor  # (R,) differences of the nodes' values to the point's


class Expansion(NamedTuple):
    """Second-order expansion of a function of p coordinates."""

    at: Tensor  # (p,)
    value: Tensor  # ()
    gradient: Tensor  # (p,)
    curvature: Tensor  # (p, p) minus its second derivatives


def stencil(size: int) -> Tensor:
    """Return the nodes that `differences` needs, in steps `(R, size)`, R = 1 + 2 size + 2 size², the point first.

    >>> stencil(1).flatten()
    tensor([ 0.,  1., -1.,  2., -2.], dtype=torch.float64)
    """
    eye = torch.eye(size, dtype=torch.float64)
    i, j = torch.triu_indices(size, size, 1)
    pairs = eye[i] + eye[j]
    around = [sign * each for each in (eye, pairs) for sign in (1, -1, 2, -2)]
    return torch.cat([torch.zeros(1, size, dtype=torch.float64), *around])


def differences(values: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return value, gradient and second derivatives, in steps, from values at the nodes of `stencil`, `(..., R)`.

    They are exact for polynomials of the fourth degree, the second derivatives of the fifth.

    >>> x, y = stencil(2).T
    >>> value, gradient, second = differences(5 + x - 3 * x * y + 2 * y**2 + y**4, 2)
    >>> gradient.tolist(), second.tolist()
    ([1.0, 0.0], [[0.0, -3.0], [-3.0, 4.0]])
    """
    i, j = torch.triu_indices(size, size, 1, device=values.device)
    centre, rest = values[..., :1], values[..., 1:]
    one, less, two, less_two = rest[..., : 4 * size].unflatten(-1, (4, size)).unbind(-2)
    both, less_both, twice, less_twice = rest[..., 4 * size :].unflatten(-1, (4, len(i))).unbind(-2)
    gradient = (8 * (one - less) - (two - less_two)) / 12
    near, far = one + less - 2 * centre, two + less_two - 2 * centre
    near_pair = both + less_both - 2 * centre - near[..., i] - near[..., j]
    far_pair = twice + less_twice - 2 * centre - far[..., i] - far[..., j]
    mixed = near_pair * (2 / 3) - far_pair / 24
    second = torch.diag_embed((16 * near - far) / 12)
    second[..., i, j] = mixed
    second[..., j, i] = mixed
    return centre[..., 0], gradient, second


def nodes(means: int, scales: int, restricted: bool) -> Tensor:
    """Return the nodes `(R, means + scales)` in steps: a stencil, or one of the means at each of one of the scales."""
    if not restricted:
        return stencil(means + scales)
    outer, inner = stencil(scales), stencil(means)
    return torch.cat([inner.repeat(len(outer), 1), outer.repeat_interleave(len(inner), 0)], 1)


def expansion(point: Point, means: int, restricted: bool) -> Expansion:
    """Return the likelihood around a point, or the restricted one, whose means are put where they are best.

    For the restricted likelihood, the curvature of the means is that of the full likelihood, and cross terms of means
    and scales are zero.
    """
    if not restricted:
        return _expanded(point)
    at, steps = point.at, point.steps
    scales = len(at) - means
    inner, slope, second = differences(point.relative.unflatten(0, (len(stencil(scales)), -1)), means)
    factor, failed = torch.linalg.cholesky_ex(-second)
    newton = torch.cholesky_solve(slope[..., None], factor)[..., 0]
    log_determinant = 2 * (factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - steps[:means].log().sum())
    profile = inner + 0.5 * (slope * newton).sum(-1) - 0.5 * log_determinant + 0.5 * means * math.log(2 * math.pi)
    profile = torch.where(failed == 0, profile, torch.nan)
    whole = _expanded(Point(at[means:], steps[means:], point.value, profile))
    information = -second[0] / torch.outer(steps[:means], steps[:means])
    return Expansion(
        torch.cat([at[:means] + steps[:means] * newton[0], at[means:]]),
        whole.value,
        torch.cat([torch.zeros_like(steps[:means]), whole.gradient]),
        torch.block_diag(information, whole.curvature),
    )


def _expanded(point: Point) -> Expansion:
    more, gradient, second = differences(point.relative, len(point.at))
    units = torch.outer(point.steps, point.steps)
    # a coordinate without curvature, as of an empty column, has only rounding in its cross terms
    felt = second.diagonal() != 0
    curvature = torch.where(torch.outer(felt, felt), -second / units, 0.0)
    return Expansion(point.at, point.value + more, gradient / point.steps, curvature)


def quadratic(relative: Tensor, means: int, scales: int) -> Tensor:
    """Return whether the likelihood's third differences in the means are at rounding level, `()`.

    >>> x = stencil(1)[:, 0]
    >>> quadratic(3 * x - x**2, 1, 0), quadratic(3 * x - x**2 + 1e-3 * x**3, 1, 0)
    (tensor(True), tensor(False))
    """
    inner = relative.unflatten(0, (len(stencil(scales)), -1))[:, 1 : 1 + 4 * means]
    one, less, two, less_two = inner.unflatten(-1, (4, means)).unbind(-2)
    third = (two - less_two - 2 * (one - less)).abs().amax()
    return third <= _CUBIC * inner.abs().amax() + torch.finfo(relative.dtype).tiny


def usable(new: Expansion, old: Expansion, means: int) -> Tensor:
    """Return whether the function is finite around the new point and not lower than at the old one, if any, `()`.

    A first point must also have negative curvature in the means, except for means without information, such as the
    coefficient of an empty column.
    """
    curved = new.curvature.diagonal()[:means]
    finite = new.gradient.isfinite().all() & new.curvature.isfinite().all() & new.value.isfinite()
    finite &= old.value.isfinite() | (curved >= 0).all() & ((curved > 0).any() | (means == 0))
    return finite & ((new.value >= old.value - NOISE * old.value.abs()) | ~old.value.isfinite())


def apart(best: Expansion, means: int, before: Tensor) -> Tensor:
    """Return the distances between nodes: a fraction of the standard errors by the curvature, `(p,)`."""
    diagonal = best.curvature.diagonal()
    errors = torch.where(diagonal > 0, diagonal.clamp(min=torch.finfo(before.dtype).tiny).rsqrt(), before / APART)
    errors[means:].clamp_(max=_WIDEST)
    return spaced(errors)


def spaced(errors: Tensor) -> Tensor:
    """Round the distances between nodes for these standard errors to few digits.

    Nodes are then exact also for coordinates 1e9 standard errors from zero.

    >>> float((1e9 + spaced(torch.ones(1, dtype=torch.float64)) - 1e9) - spaced(torch.ones(1, dtype=torch.float64)))
    0.0
    """
    mantissa, exponent = torch.frexp(APART * errors)
    return torch.ldexp((mantissa * 2**_BITS).round(), exponent - _BITS)


def step(best: Expansion, means: int, units: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step `(p,)`, and the predicted increase of the function `()` for a quadratic without damping.

    Args:
        best: expansion at the largest value so far.
        means: number of leading coordinates whose steps may have any length.
        units: of the coordinates, in which damping is the same for all, `(p,)`.
        damping: added to all curvatures; a direction with positive curvature is treated as if it were negative.
    """
    curvature = (best.curvature * torch.outer(units, units)).nan_to_num()
    values, vectors = torch.linalg.eigh(linalg.symmetric(curvature))
    curved = values.abs().clamp(min=_LEAST)
    slope = vectors.mT @ (best.gradient * units).nan_to_num()
    gain = 0.5 * (slope.square() / curved).sum()
    move = units * (vectors @ (slope / (curved + damping)))
    longest = move[means:].abs().amax() if means < len(move) else move.new_zeros(())
    return move * (_LONGEST / longest.clamp(min=_LONGEST)), gain
