r"""Rows of a normal distribution with missing cells: draws of the cells, and of the sites' means, given the observed
ones.

Row i of site k is :math:`z_{ki} \sim N(\mu_k, \Sigma)`, and sites differ by
:math:`\mu_k \sim N(\mu, \mathrm{diag}(\tau))`; τ = 0 gives all sites one mean. A site draws its mean with its missing
cells integrated out, then the cells given the mean:

.. math::
    \mu_k = \mu + \tau^{1/2} u, \quad
    u \sim N(V \tau^{1/2} \textstyle\sum_i J_i (z_i - \mu), V), \quad
    V^{-1} = I + \tau^{1/2} \textstyle\sum_i J_i \, \tau^{1/2},

with :math:`J_i = \Sigma_{oo}^{-1}`, zero in the rows and columns of missing cells. Rows with the same missing cells
share their matrices.

Source: Schafer (1997), "Analysis of Incomplete Multivariate Data", section 5.4; Schafer and Yucel (2002),
"Computational strategies for multivariate linear mixed-effects models with missing values", JCGS 11.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random
from fedtorch.data.frames.incomplete import Incomplete

_AT_ONCE = 2**22  # numbers of the rows' own matrices that are gathered at once


class Normal(NamedTuple):
    """A multivariate normal distribution of covariates and response, the response last."""

    mean: Tensor  # (p + 1,)
    covariance: Tensor  # (p + 1, p + 1)


class SiteNormal(NamedTuple):
    """A normal distribution of rows whose mean differs by site.

    >>> import torch
    >>> SiteNormal(torch.zeros(2), torch.eye(2), torch.ones(2)).between  # of the sites' means
    tensor([1., 1.])
    """

    mean: Tensor  # (..., p) μ
    covariance: Tensor  # (..., p, p) Σ, of rows about their site's mean
    between: Tensor  # (..., p) τ, zero where all sites have one mean


class Gaps(NamedTuple):
    """Rows of a block by patterns of missing cells; client k has the patterns with `rows` above 0."""

    values: Tensor  # (K, N, p), zero where missing
    observed: Tensor  # (K, N, p) bool
    pattern: Tensor  # (K, N) which of the client's patterns a row has
    patterns: Tensor  # (K, U, p) float64, 1 where observed
    rows: Tensor  # (K, U) float64, how many rows have it
    sums: Tensor  # (K, U, p) of their values
    count: Tensor  # type: ignore[assignment]  # (K,)


def gaps(data: Any) -> Gaps:
    """Return a block of rows with missing cells by patterns.

    Raises:
        ValueError: rows of another form.

    >>> import torch
    >>> from fedtorch.data import FederatedData
    >>> from fedtorch.data.frames.incomplete import incomplete_cells
    >>> rows = incomplete_cells(torch.tensor([[1.0, 5.0], [torch.nan, 6.0], [2.0, 7.0]]))
    >>> block = gaps(FederatedData(rows, torch.tensor([3])).stack([0]))
    >>> block.pattern, block.rows
    (tensor([[1, 0, 1]]), tensor([[1., 2.]], dtype=torch.float64))
    """
    values, observed = incomplete_rows(data.batch)
    values = values.to(torch.float64)
    clients, size, p = values.shape
    mask, owner = data.mask, torch.arange(clients, device=values.device)[:, None].expand(clients, size)
    labelled = torch.cat([owner[mask][:, None], observed[mask].long()], 1)
    kinds, which = labelled.unique(dim=0, return_inverse=True)
    counts = kinds[:, 0].bincount(minlength=clients)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(kinds), device=values.device) - first[kinds[:, 0]]
    most = int(counts.max()) if len(kinds) else 1
    patterns = values.new_ones(clients, most, p)
    patterns[kinds[:, 0], place] = kinds[:, 1:].to(values.dtype)
    pattern = owner.new_zeros(clients, size)
    pattern[mask] = place[which]
    flat = owner[mask] * most + place[which]
    rows = values.new_zeros(clients * most).index_add_(0, flat, torch.ones_like(flat, dtype=values.dtype))
    sums = values.new_zeros(clients * most, p).index_add_(0, flat, values[mask])
    return Gaps(
        values, observed, pattern, patterns, rows.reshape(clients, most), sums.reshape(clients, most, p), data.count
    )


def drawn(gaps: Gaps, normal: SiteNormal, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return (rows with their missing cells drawn `(K, N, p)`, the sites' means `(K, p)`) given the observed cells.

    Args:
        gaps: from `gaps`.
        normal: `(K, ...)`, as each client has received it.
        keys: `(K,)`.

    Raises:
        ValueError: a normal distribution of another number of columns.

    >>> import torch
    >>> from fedtorch import random
    >>> from fedtorch.data import FederatedData
    >>> from fedtorch.data.frames.incomplete import incomplete_cells
    >>> rows = incomplete_cells(torch.tensor([[1.0, 5.0], [torch.nan, 6.0]]))
    >>> block = gaps(FederatedData(rows, torch.tensor([2])).stack([0]))
    >>> known = SiteNormal(torch.zeros(1, 2).double(), 1e-12 * torch.eye(2).double()[None], torch.zeros(1, 2).double())
    >>> filled, means = drawn(block, known, random.key(0)[None])
    >>> filled.round(decimals=3)
    tensor([[[1., 5.],
             [0., 6.]]], dtype=torch.float64)
    """
    p, seen = gaps.values.shape[-1], gaps.patterns
    check_columns(normal, p)
    precision, slope, left = _given_observed(normal.covariance[:, None], seen)
    for_mean, for_rows = random.split(keys, 2)
    mean = _site_mean(gaps, normal, precision, random.normal(for_mean, (p,), torch.float64))
    root = torch.linalg.cholesky(left + torch.diag_embed(seen)) * (1 - seen)[..., None, :]
    z = random.normal(for_rows, gaps.values.shape[1:], torch.float64)
    return _filled(gaps, mean, slope, root, z), mean


def _site_mean(gaps: Gaps, normal: SiteNormal, precision: Tensor, z: Tensor) -> Tensor:
    """Return the sites' means `(K, p)`, drawn with missing cells integrated out."""
    spread = normal.between.sqrt()
    away = gaps.sums - gaps.rows[..., None] * gaps.patterns * normal.mean[:, None]
    shift = (precision @ away[..., None])[..., 0].sum(1) * spread
    precision_of_sites = (gaps.rows[..., None, None] * precision).sum(1) * (spread[:, :, None] * spread[:, None, :])
    factor = torch.linalg.cholesky(precision_of_sites + torch.eye(precision_of_sites.shape[-1]).to(precision_of_sites))
    return normal.mean + spread * linalg.normal_draw(factor, shift, z)


def _filled(gaps: Gaps, mean: Tensor, slope: Tensor, root: Tensor, z: Tensor) -> Tensor:
    """Return the rows with missing cells at their conditional mean plus root · z, some rows at a time."""
    clients, size, p = gaps.values.shape
    step = max(1, _AT_ONCE // max(1, clients * p * p))
    which = torch.arange(clients, device=mean.device)[:, None]
    filled = gaps.values.clone()
    for start in range(0, size, step):
        part = slice(start, start + step)
        values, pattern, seen = gaps.values[:, part], gaps.pattern[:, part], gaps.observed[:, part]
        away = torch.where(seen, values - mean[:, None], 0.0)
        expected = slope[which, pattern] @ away[..., None] + root[which, pattern] @ z[:, part, :, None]
        filled[:, part] = torch.where(seen, values, mean[:, None] + expected[..., 0])
    return filled


def incomplete_rows(rows: Any) -> Incomplete:
    """Return the rows of a block or data set; raise ValueError unless they are `Incomplete`."""
    if not isinstance(rows, Incomplete):
        raise ValueError(
            f"Expected rows with missing cells, but got a {type(rows).__name__}; make them by "
            'ft.data.from_frame(..., missing="impute") or imputation.incomplete(...)'
        )
    return rows


def check_columns(normal: Normal | SiteNormal, columns: int) -> None:
    """Raise ValueError unless a normal distribution has this many columns."""
    if (got := normal.mean.shape[-1]) != columns:
        raise ValueError(
            f"Expected a normal distribution of {columns} columns, the response last, but got one of {got}"
        )


def conditional(rows: Incomplete, normal: Normal) -> tuple[Tensor, Tensor, Tensor]:
    """Return (E[z | observed] `(..., p)`, its covariance `(..., p, p)`, the values) of every row.

    Args:
        rows: with gaps, `(..., p)`.
        normal: of all columns, in the rows' dtype.

    Raises:
        ValueError: a normal distribution of another number of columns.

    >>> import torch
    >>> normal = Normal(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    >>> rows = Incomplete(torch.tensor([0.0, 2.0]), observed=torch.tensor([False, True]))
    >>> expected, covariance, _ = conditional(rows, normal)
    >>> expected, covariance  # of the first, ½ · 2 and 1 − ½²
    (tensor([1., 2.]), tensor([[0.7500, 0.0000], [0.0000, 0.0000]]))
    """
    seen = rows.observed.to(normal.covariance.dtype)
    p = seen.shape[-1]
    check_columns(normal, p)
    mean, covariance = (
        leaf.reshape(*leaf.shape[: leaf.ndim - d], *[1] * (seen.ndim - 1 - (leaf.ndim - d)), *[p] * d)
        for leaf, d in ((normal.mean, 1), (normal.covariance, 2))
    )
    _, slope, spread = _given_observed(covariance, seen)
    expected = mean + (slope @ ((rows.values - mean) * seen)[..., None])[..., 0]
    return torch.where(rows.observed, rows.values, expected), spread, rows.values


def _given_observed(covariance: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return J = Σ_oo⁻¹, the slopes Σ_mo J and the covariance Σ_mm − Σ_mo J Σ_om, `(..., p, p)` each, zero elsewhere.

    Σ_oo is inverted within the whole matrix, with the identity in rows and columns of missing variables.

    Args:
        covariance: Σ, `(..., p, p)`.
        seen: `(..., p)`, 1 where observed and 0 where missing.
    """
    both = seen[..., :, None] * seen[..., None, :]
    inverse = linalg.inverse_factor(torch.linalg.cholesky(covariance * both + torch.diag_embed(1 - seen))) * both
    half, missing = inverse @ covariance, 1 - seen
    left = (covariance - half.mT @ half) * (missing[..., :, None] * missing[..., None, :])
    return inverse.mT @ inverse, missing[..., :, None] * (half.mT @ inverse), left
