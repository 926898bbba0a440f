r"""Missing covariates, filled in from the mean and covariance of all sites together.

Rows are draws of one normal distribution, with values missing at random: some sites may lack a covariate altogether.
`fedtorch.federation.algorithms.normal_em` estimates its mean and covariance. Then every site fills its gaps: `impute`
once, by conditional means or, for multiple imputation, by conditional draws; `imputing` in every round of a Gibbs
sampler, so that the regression's estimate of a covariate's effect helps to fill it in: the second of the future
directions that Kidd et al. (2023, section 4) name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random, tree
from fedtorch._lazy import only
from fedtorch.data import ClientData, FederatedData
from fedtorch.data.frames.incomplete import Incomplete, incomplete_cells
from fedtorch.models.gibbs import sparse
from fedtorch.models.gibbs._gaussian_conditional import Design
from fedtorch.models.gibbs.kernels import LocalKernel
from fedtorch.models.incomplete_normal import Normal as Normal, check_columns, conditional, incomplete_rows
from fedtorch.models.rows import refuse

__all__ = ["Normal", "imputing", "incomplete"]
__dir__ = only(__all__)


def incomplete(clients: Sequence[tuple[Tensor, Tensor]], names: Sequence[str] = ()) -> FederatedData:
    """Return federated data of sites' rows (x `(n, p)`, y `(n,)`) with NaN for what is missing.

    Raises:
        ValueError: no sites, rows of another form, a row without any observed value, or infinite numbers.
    """
    shapes = [(tuple(x.shape), tuple(y.shape)) for x, y in clients]
    if not shapes or any(len(x) != 2 or y != x[:1] for x, y in shapes):
        raise ValueError(f"Expected x (n, p) and y (n,) of every site, but got shapes {shapes}")
    joined = [torch.cat([x, y[:, None]], 1).to(torch.float64) for x, y in clients]
    rows, counts = incomplete_cells(torch.cat(joined)), torch.tensor([len(z) for z in joined])
    if not bool(rows.observed.any(1).all()):
        raise ValueError("Expected an observed value in every row, but got a row of NaN; leave it out")
    return FederatedData(rows, counts, tuple(names))


def impute(data: FederatedData, normal: Normal, key: Tensor | None = None) -> FederatedData:
    """Return the data with gaps filled, rows (x `(p,)`, y `()`): each site does this with its own rows.

    Args:
        data: from `incomplete`.
        normal: from `normal_em`.
        key: for draws from the conditional distribution; default: its mean. Several keys give the data sets of a
            multiple imputation, whose posteriors are mixed; means alone make intervals too short.
    """

    def fill(rows: Incomplete) -> tuple[Tensor, Tensor]:
        expected, spread, values = conditional(rows, tree.to(normal, incomplete_rows(rows).values))
        if key is not None:
            p = expected.shape[-1]
            factor = _root(spread)
            keys = random.fold_in(key, torch.arange(len(expected), device=key.device)).to(factor.device)
            z = random.normal(keys, (p,), torch.float64)
            expected = expected + (factor @ z[..., None])[..., 0]
        filled = torch.where(rows.observed, values, expected)
        return filled[:, :-1], filled[:, -1]

    return data.map(fill)


class _Gaps(NamedTuple):
    x: Tensor  # (K, N, p), zero where missing
    y: Tensor  # (K, N)
    seen: Tensor  # (K, N, p) bool
    count: Tensor  # type: ignore[assignment]  # (K,)


def imputing(regression: LocalKernel, normal: Normal) -> LocalKernel:
    r"""Return the clients' half with the missing covariates among its variables. Run it on `incomplete(...)` data.

    Every round starts with a draw of a row's missing covariates from their conditional distribution, whose precision is
    :math:`(\Sigma^{-1})_{mm} + \theta_{k,m} \theta_{k,m}' / \sigma_k^2`, for rows of N(μ, Σ) at known μ and Σ.

    Args:
        regression: `sparse.regression(...)` without intercepts; centre the columns instead.
        normal: from `normal_em`; its response is not used.

    Raises:
        BadClients: a response is missing (when a population is bound).
        ValueError: another kernel, or one with intercepts, which the draws of the covariates would ignore.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import imputation, sparse
        >>> x = ft.random.normal(ft.random.key(0), (3, 40, 2), torch.float64)
        >>> y = x[..., 0] + x[..., 1]
        >>> x[:, ::2, 0] = torch.nan
        >>> data = imputation.incomplete([(x[k], y[k]) for k in range(3)])
        >>> normal = imputation.Normal(torch.zeros(3).double(), torch.eye(3).double())
        >>> local = imputation.imputing(sparse.regression(), normal)
        >>> algorithm = ft.gibbs(local, sparse.hierarchy(), sweeps=3, chains=2)
        >>> sampler = ft.Sampler(burn_in=5)
        >>> _ = ft.run(algorithm, ft.InProcess(data), torch.zeros(2), rounds=20, record=sampler)
        >>> sampler.mean()["theta"].round()
        tensor([1., 1.], dtype=torch.float64)
    """
    _check_regression(regression, len(normal.mean) - 1)
    mean = normal.mean[:-1].to(torch.float64)
    precision = torch.linalg.inv(normal.covariance[:-1, :-1].to(torch.float64))

    def sweep(
        received: sparse.GlobalVariables, site: sparse.RegressionSite, data: _Gaps, keys: Tensor, sweeps: int
    ) -> sparse.RegressionSite:
        clients, chains = keys.shape
        for_gaps, for_sweeps = random.split(keys, 2)
        theta = received.theta + (site.place - received.centre)
        prior = mean.to(theta.device), precision.to(theta.device)
        x = data.x.repeat_interleave(chains, 0)
        for k, n in enumerate(data.count.tolist()):
            gaps = _Gaps(data.x[k, :n].clone(), data.y[k, :n].clone(), data.seen[k, :n].clone(), data.count[k])
            for c in range(chains):
                x[k * chains + c, :n] = _draw(gaps, *prior, theta[k, c], site.noise[k, c], for_gaps[k, c])
        rows = ClientData((x, data.y.repeat_interleave(chains, 0)), data.count.repeat_interleave(chains))
        # Each chain has its own completed rows, so the regressions' program sees chains as clients.
        each = tree.map(lambda leaf: leaf.flatten(0, 1).unsqueeze(1), (received, site, for_sweeps))
        after = regression.sweep(each[0], each[1], regression.prepare(rows), each[2], sweeps)
        return tree.map(lambda leaf: leaf.reshape(clients, chains, *leaf.shape[2:]), after)

    prepare = lambda data: _gaps(data, normal)
    return LocalKernel(regression.init, prepare, sweep, regression.report, regression.family, regression.newcomer)


def _check_regression(regression: LocalKernel, covariates: int) -> None:
    """Refuse a kernel that is not a linear regression through the origin, by its preparation of a client of one row."""
    nothing = torch.zeros(1, 1, covariates + 1, dtype=torch.float64)
    design = regression.prepare(ClientData((nothing[..., 1:], nothing[..., 0]), torch.ones(1, dtype=torch.int64)))
    if not isinstance(design, Design) or not torch.equal(design.degrees, design.statistics.count):
        raise ValueError(
            "Expected sparse.regression(...) without intercepts, but got another kernel; centre the columns instead of "
            "intercept=True"
        )


def _gaps(data: Any, normal: Normal) -> _Gaps:
    values, seen = incomplete_rows(data.batch)
    check_columns(normal, values.shape[-1])
    values = values.to(torch.float64)
    refuse(
        (~seen[..., -1] & data.mask).any(1),
        "Expected a response in every row, but got rows without one, which say nothing of the effects; leave them out",
    )
    return _Gaps(values[..., :-1], values[..., -1], seen[..., :-1], data.count)


def _draw(gaps: _Gaps, mean: Tensor, precision: Tensor, theta: Tensor, noise: Tensor, key: Tensor) -> Tensor:
    """Return one site's covariates `(n, p)` with the missing ones drawn given the others, y, θ_k `(p,)` and 1/σ_k²."""
    x, y, seen, _ = gaps
    z = random.normal(key, x.shape, x.dtype)
    some = (~seen).any(1)
    open = (~seen[some]).to(x.dtype)
    known = x[some]
    # In the whole matrix, with the identity in rows and columns of observed variables.
    joint = precision + noise * theta[:, None] * theta
    system = joint * (open[:, :, None] * open[:, None, :]) + torch.diag_embed(1 - open)
    shift = precision @ mean + noise * y[some, None] * theta - known @ joint
    drawn = linalg.normal_draw(torch.linalg.cholesky(system), shift * open, z[some])
    filled = x.clone()
    filled[some] = torch.where(seen[some], known, drawn)
    return filled


def _root(spread: Tensor) -> Tensor:
    """Return a square root of covariances that are zero for observed variables."""
    values, vectors = torch.linalg.eigh(spread)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
