r"""Sums over rows for post-fit queries, clipped and perturbed so that simple queries do not disclose a single row.

A server chooses the models whose sums it asks for, so a single row may make up a whole sum, or its last digits. A site
that requires `minimum` rows behind each number therefore perturbs a sum :math:`\sum_i v_i` by one rule:

- values are centred at the mean of their middle half, if rows are at least four times the minimum; else at the value of
  all rows but fewer than the k of below, or at zero;
- absolute values are clipped at the k-th largest, up to a factor of √2, and at 0 if there are fewer rows; k is secret
  and separate for each number, because the existence of that many rows would disclose a row to someone who knows all
  others. It is normal with an sd of r / √12, see below, and a mean of 1.5 times the minimum, or three sds if these are
  more;
- a secret normal number is added, whose sd is the contribution of :math:`r / \sqrt{12}` rows of this size.

Here :math:`r = \max(minimum, 4\sqrt m)` if a row enters :math:`m` numbers of a query. To someone who knows all other
rows, the m numbers together disclose the presence of a row as much as one normal number that it shifts by at most
:math:`\sqrt{12} / 4` sds: a guess is right two times in three (67 %), and with m = 1 and a minimum of ten 57 %. The
clipping sizes disclose as much again; with both, a guess is right about three times in four. That is for one query:
several compose. It is a hurdle and not a bound: see what_is_private in the documentation. The secret numbers are
derived from the site's secret and the whole query.

For sums at draws of a posterior, of which there may be a thousand, the answer is their best linear approximation in the
draws of φ, with p + 1 numbers for any number of draws and however near each other they are, and the remaining variance
(`in_draws`, `over_draws`).

>>> ages = torch.tensor([[30.0], [41.0], [62.0], [63.0], [99.0]], dtype=torch.float64)
>>> held(ages, 1, None).total  # a site that counts no rows adds up
tensor([295.], dtype=torch.float64)
>>> told = held(ages, 2, random.key(0))
>>> bool((told.total - ages.clamp(max=64.0).sum()).abs() <= 2 * 64), told.variance.sqrt()  # r = 4, and sizes up to 64
(True, tensor([73.9008], dtype=torch.float64))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random
from fedtorch.models.device_posterior import DevicePosterior

_STEPS = 2  # of sizes, in a factor of 2
_ROWS = 4.0  # least perturbation of a query's numbers together, in √m times this many rows
_RANK = 1.5  # times the minimum is how many rows share a size, in the mean
_SDS = 3.0  # least distance between the mean of k and zero, in sds
_MIDDLE = 4  # times the minimum: rows needed for centring at the middle half
_GRID = 2.0**-30  # resolution of the answer, relative to the perturbation
_FLAT = 1e-9  # smallest singular value, relative to the largest, of a direction in which draws vary
_LEAST = 0.25  # least eigenvalue of an answered covariance, in units of the true one


class Held(NamedTuple):
    """Perturbed sums, and the variance of the perturbation."""

    total: Tensor  # (C,)
    variance: Tensor  # (C,)


def held(
    values: Tensor, minimum: int, key: Tensor | None, numbers: int | None = None, around: Tensor | None = None
) -> Held:
    """Return the sum over rows of values `(N, C)`, perturbed if `minimum` is above one.

    Args:
        values: of each row.
        minimum: rows that sizes are shared by, at least.
        key: random key of the secret numbers.
        numbers: numbers of the query that a row enters, default: C.
        around: public centre of the values, if there is one `(C,)`.
    """
    total, count = values.sum(0), len(values)
    if minimum <= 1 or key is None or not count:
        return Held(total, torch.zeros_like(total))
    values = torch.where(values.isnan(), 0.0, values)
    for_ranks, for_moves = random.split(key, 2)
    spread = max(minimum, _ROWS * math.sqrt(numbers or values.shape[1])) / math.sqrt(12)
    ranks = _ranks(for_ranks, total.shape, minimum, spread)
    if around is not None:
        middle = around
    elif count >= _MIDDLE * minimum:
        middle = values.sort(0).values[count // 4 : count - count // 4].mean(0)
    else:
        most = values.median(0).values
        middle = torch.where((values != most).sum(0) < ranks, most, 0.0)
    away = values - middle
    descending = away.abs().sort(0, descending=True).values
    largest = descending.gather(0, ranks.clamp(1, count)[None] - 1)[0].where((ranks >= 1) & (ranks <= count), 0.0)
    safe = largest.where(largest > 0, 1.0)
    edge = torch.exp2((safe.log2() * _STEPS).ceil() / _STEPS).where(largest > 0, 0.0)
    sd = spread * edge
    moved = count * middle + away.clamp(-edge, edge).sum(0) + sd * random.normal(for_moves, sd.shape, torch.float64)
    grid = (_GRID * sd).where(sd > 0, 1.0)
    return Held(torch.where(sd > 0, (moved / grid).round() * grid, moved), sd.square())


def _ranks(key: Tensor, shape: torch.Size, minimum: int, spread: float) -> Tensor:
    """Return how many rows share a size, secret whole numbers."""
    middle = max(_RANK * minimum, _SDS * spread)
    return (middle + spread * random.normal(key, shape, torch.float64)).round().long()


def basis(phi: Tensor) -> Tensor:
    """Return orthonormal functions of draws `(S, r)` that span a constant and the linear functions of φ `(S, p)`.

    >>> basis(torch.ones(7, 3).double()).shape  # draws that are alike
    torch.Size([7, 1])
    """
    constant = torch.full_like(phi[:, :1], 1 / math.sqrt(len(phi)))
    away = phi - phi.mean(0)
    units = away.abs().amax(0)
    left, values, _ = torch.linalg.svd(away[:, units > 0] / units[units > 0], full_matrices=False)
    moves = values > _FLAT * values.amax() if len(values) else values > 0
    linear = left[:, moves] - constant @ (constant.mT @ left[:, moves])
    return torch.cat([constant, linear], 1)


def in_draws(
    values: Callable[[slice], Tensor], parts: Sequence[slice], mask: Tensor, functions: Tensor
) -> Iterator[Tensor]:
    """Yield coefficients of some rows' values in functions of draws, and a variance beside, `(K, n, r + 1, C)`.

    The variance is the row's part in the variance of its client's sum beyond the linear approximation. Without the row
    that would change by twice as much, which is the returned value.

    Args:
        values: of some rows of each client, at each draw, `(K, n, S, C)`.
        parts: into which rows are divided.
        mask: marks rows, against padding, `(K, N)`.
        functions: the basis `(S, r)`.
    """
    draws, size = functions.shape
    every = ((values(part), mask[:, part, None, None]) for part in parts)
    total = sum((torch.where(there, leaf, 0.0).sum(1) for leaf, there in every), torch.zeros(()))
    beside = total - functions @ (functions.mT @ total)
    for part in parts:
        leaf = values(part)
        varies = 2 * torch.einsum("knsc,ksc->knc", leaf, beside) / max(draws - size, 1)
        yield torch.cat([torch.einsum("knsc,sr->knrc", leaf, functions), varies[:, :, None]], 2)


def over_draws(
    rows: Tensor,
    functions: Tensor,
    minimum: int,
    key: Tensor,
    numbers: int | None = None,
    around: Tensor | None = None,
) -> Held:
    """Return perturbed sums at draws `(S, C)`, and the mean over draws of their variances `(C,)`.

    The variation beyond the linear approximation is redrawn, normal with the same variance.

    Args:
        rows: output of `in_draws` for each row, `(N, r + 1, C)`.
        functions: the basis `(S, r)`.
        minimum, key, numbers: see `held`.
        around: public centre of the values at all draws, if there is one, `(C,)`.
    """
    moved, drawn = random.split(key, 2)
    if around is not None:
        constant = functions.sum(0)[:, None] * around
        around = torch.cat([constant, torch.zeros_like(constant[:1])]).flatten()
    sums = held(rows.flatten(1), minimum, moved, numbers, around)
    total, variance = (leaf.reshape(rows.shape[1:]) for leaf in sums)
    white = random.normal(drawn, (len(functions), rows.shape[2]), torch.float64)
    at_draws = functions @ total[:-1] + (total[-1] / 2).clamp(min=0).sqrt() * white
    return Held(at_draws, (functions.square().mean(0)[:, None] * variance[:-1]).sum(0))


def held_posterior(posterior: DevicePosterior, rows: Tensor, minimum: int, key: Tensor) -> DevicePosterior:
    """Return the clients' posteriors as normal ones, perturbed by the influence of `minimum` rows.

    A mixture is reduced to its mean and covariance, because the weights of many nodes would disclose the likelihood at
    each of them. One of n rows moves a mean by some 1/√n sds, and a covariance by 1/n of itself; both are moved by half
    of the largest influence of `minimum` rows, and covariances are then widened by as much.

    Args:
        posterior: of `K` clients.
        rows: number of rows of each `(K,)`.
        minimum, key: see `held`.
    """
    weights = posterior.weights[..., None]
    mean = (weights * posterior.means).sum(1)
    away = posterior.means - mean[:, None]
    covariance = (weights[..., None] * (posterior.covariances + away[..., None] * away[..., None, :])).sum(1)
    log_noise = (posterior.weights * posterior.log_noise.exp()).sum(1).log()
    part = (minimum / rows.clamp(min=minimum)).to(mean)[:, None]
    size = mean.shape[-1]
    secret = random.uniform(key, (len(mean), size * size + size + 1), torch.float64).to(mean) - 0.5
    of_mean, of_noise = secret[:, :size] * (part * minimum).sqrt(), secret[:, size] * part[:, 0]
    between = secret[:, size + 1 :].unflatten(1, (size, size)) * part[..., None]
    values, vectors = torch.linalg.eigh(torch.eye(size).to(mean) + between.tril() + between.tril(-1).mT)
    scale = (vectors * (values.clamp(min=_LEAST) + (part * minimum) / 12)[:, None]) @ vectors.mT
    root = linalg.square_root(covariance)
    return DevicePosterior(
        torch.ones_like(mean[:, :1]),
        (mean + (root @ of_mean[..., None])[..., 0])[:, None],
        (root @ scale @ root.mT)[:, None],
        (log_noise + of_noise)[:, None],
    )
