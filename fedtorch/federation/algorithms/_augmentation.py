r"""Data augmentation: posterior draws of the normal distribution of sites' rows with missing cells.

In the first round sites send the number, sum and sum of squares (about the start) of each column's observed values,
which set the prior's units; for columns far from the start, a second round takes them about the means. In each other
round every site draws its mean and its missing cells (`models.incomplete_normal`) and sends sums of the completed rows;
the server draws

.. math::
    \Sigma \sim \mathrm{IW}\bigl(n + \epsilon, \textstyle\sum_{ki} r_{ki} r_{ki}' + \epsilon S\bigr), \quad
    \mu \sim N(\bar\mu_k, \mathrm{diag}(\tau) / K), \quad
    \tau_j \sim \mathrm{IG}\bigl(\tfrac12 (K + \nu), \tfrac12 \textstyle\sum_k (\mu_{kj} - \mu_j)^2
    + \tfrac12 \nu c S_j\bigr), \qquad r_{ki} = z_{ki} - \mu_k,

where S is diagonal with the columns' variances. ε acts like a row with uncorrelated columns, which stabilises the draws
for constant columns and few rows (Schafer's ridge prior). All chains are one more batch dimension.

Source: Tanner and Wong (1987), "The calculation of posterior distributions by data augmentation", JASA 82; Schafer
(1997), "Analysis of Incomplete Multivariate Data", sections 5.2.3 and 5.4.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random, tree
from fedtorch.data import Design
from fedtorch.data.frames.raw_columns import RawColumns
from fedtorch.federation.algorithm import Reply
from fedtorch.federation.exchanges.exchange import Sum
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.models.incomplete_normal import Gaps, Normal, SiteNormal, drawn, gaps

RIDGE = 1.0  # ε, in rows
_FAR = 1e6  # squared sds
_AT_ONCE = 2**21  # most numbers of completed rows of several chains
WEIGHT, GUESS = 2.0, 0.1  # ν in sites, and c: the prior guess of τ, in variances of the columns


class NormalDraws(NamedTuple):
    """The chains' latest draws, and the columns' statistics of the first round."""

    normal: SiteNormal  # (M, ...)
    variance: Tensor  # (p,) S
    version: Tensor  # rounds that have been aggregated since the columns' units are known, 0 before


@tells(Learns("exact sums of products of a site's columns: of fewer rows than columns, the rows"))
class _Sums(NamedTuple):
    """Sums of one site; in the first round over observed values only."""

    count: Tensor  # type: ignore[assignment]  # (p,) values of each column
    first: Tensor  # (M, p) Σ residuals
    second: Tensor  # (M, p, p)
    place: Tensor  # (M, p) μ_k − μ
    square: Tensor  # (M, p) its square
    sites: Tensor  # 1


def augmentation(draws: int, between: bool, columns: int | Design | None) -> dict[str, Any]:
    """Build the fields of an `Algorithm` for data augmentation with a number of chains; see `normal_em`."""
    return dict(
        start=start(columns),
        settings={"algorithm": "normal_em", "draws": draws, "between": between},
        init=partial(_init, draws=draws),
        outbox=lambda server: (server.normal, server.version),
        client=_client,
        prepare=gaps,
        server=partial(_server, between=between),
        model=lambda inbox, state: inbox[0],
    )


def start(columns: int | Design | None) -> Normal | None:
    """Return a normal distribution to start from, if the number of columns is known."""
    if columns is None:
        return None
    count = len(RawColumns(columns).names) if isinstance(columns, Design) else columns
    return Normal(torch.zeros(count, dtype=torch.float64), torch.eye(count, dtype=torch.float64))


def _init(parameters: Any, clients: int, *, draws: int) -> tuple[NormalDraws, tuple[()]]:
    """Start at the given distribution; the first round sets the units."""
    mean, covariance = tree.to(tuple(parameters[:2]), torch.float64)
    normal = SiteNormal(mean, covariance, torch.zeros_like(mean))
    return NormalDraws(tree.expand(normal, draws), torch.ones_like(mean), torch.tensor(0)), ()


def _client(inbox: tuple[SiteNormal, Tensor], state: Any, data: Gaps, turn: Turn) -> Reply:
    normal, version = inbox
    chains = normal.mean.shape[1]
    rows = torch.arange(data.values.shape[1], device=data.count.device) < data.count[:, None]
    if len(version) and int(version[0]) == 0:
        return Reply(Sum(_observed(data, rows, normal.mean)), state, {})
    keys = random.fold_in(turn.key[:, None], torch.arange(chains, device=turn.key.device))
    some = max(1, _AT_ONCE // max(1, data.values.numel()))
    groups = [slice(m, m + some) for m in range(0, chains, some)]
    each = [_completed(data, rows, SiteNormal(*(leaf[:, g] for leaf in normal)), keys[:, g]) for g in groups]
    first, second, place = (torch.cat(parts, 1) for parts in zip(*each))
    count = data.count.to(first.dtype)[:, None].expand(-1, first.shape[-1])
    return Reply(Sum(_Sums(count, first, second, place, place.square(), torch.ones_like(count[:, 0]))), state, {})


def _observed(data: Gaps, rows: Tensor, mean: Tensor) -> _Sums:
    """Return sums over the observed cells of values minus the start `(K, M, p)`."""
    seen = (data.observed & rows[..., None]).to(data.values.dtype)
    values = (data.values[:, None] - mean[:, :, None]) * seen[:, None]
    first, square = (leaf.sum(2) for leaf in (values, values.square()))
    nothing = torch.zeros_like(first)
    return _Sums(seen.sum(1), first, torch.diag_embed(square), nothing, nothing, torch.ones_like(seen[:, 0, 0]))


def _completed(data: Gaps, rows: Tensor, normal: SiteNormal, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of some chains' completed rows about their site's mean, and that mean about the server's."""
    shape = keys.shape
    many = tree.map(lambda leaf: leaf.repeat_interleave(shape[1], 0), data)
    filled, mean = drawn(many, tree.map(lambda leaf: leaf.flatten(0, 1), normal), keys.flatten())
    away = (filled - mean[:, None]) * rows.repeat_interleave(shape[1], 0)[..., None]
    sums = away.sum(1), away.mT @ away, mean - normal.mean.flatten(0, 1)
    return tuple(leaf.reshape(*shape, *leaf.shape[1:]) for leaf in sums)  # type: ignore[return-value]


def _server(state: NormalDraws, aggregate: Sum, key: Tensor, *, between: bool) -> NormalDraws:
    sums: _Sums = aggregate.value
    return (_first if int(state.version) == 0 else _later)(state, sums, key, between)


def far(moved: Tensor, mean: Tensor, variance: Tensor) -> bool:
    """Return whether the means `(p,)` are so far from the start that sums about it lose digits of the variances.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> far(1e4 * one, 1e4 * one, one), far(1e-16 * one, one, 0 * one)  # the second has moved by rounding
    (True, False)
    """
    return bool(((moved.square() > _FAR * variance) & (moved.square() > _rounding(mean))).any())


def _rounding(mean: Tensor) -> Tensor:
    """Return the variance due to rounding of equal values."""
    return (64 * torch.finfo(mean.dtype).eps * mean).square()


def _first(state: NormalDraws, sums: _Sums, key: Tensor, between: bool) -> NormalDraws:
    """Start at the columns' means and variances, uncorrelated; if the columns are far off, first move to them."""
    if bool((sums.count == 0).any()):
        empty = (sums.count == 0).nonzero()[:, 0].tolist()
        raise ValueError(f"Expected values of every column, but no site has any of columns {empty}; leave these out")
    moved = sums.first / sums.count
    mean = state.normal.mean + moved
    variance = sums.second[0].diagonal() / sums.count - moved[0].square()
    if far(moved[0], mean[0], variance):
        return state._replace(normal=state.normal._replace(mean=mean))
    constant = variance <= _rounding(mean[0])
    least = _rounding(mean[0]).clamp(min=torch.finfo(mean.dtype).tiny ** 0.5)  # for columns whose values are all equal
    variance = torch.where(constant, least, variance)
    spread = GUESS * variance if between else torch.zeros_like(variance)
    chains = len(mean)
    normal = SiteNormal(mean, torch.diag(variance).expand(chains, -1, -1), spread.expand(chains, -1))
    return NormalDraws(normal, variance, state.version + 1)


def _later(state: NormalDraws, sums: _Sums, key: Tensor, between: bool) -> NormalDraws:
    """Draw Σ, then μ, then τ, of each chain."""
    normal, variance = state.normal, state.variance
    chains, p = normal.mean.shape
    rows, sites = sums.count[0], sums.sites
    if float(rows) + RIDGE < p + 1:
        raise ValueError(f"Expected more rows than the {p} columns, but got {int(rows)}; leave columns out")
    of_covariance, of_mean, of_spread = random.split(random.fold_in(key, torch.arange(chains, device=key.device)), 3)
    z = random.normal(of_mean, (p,), torch.float64)
    prior = torch.diag(RIDGE * variance)
    if not between:
        centre = sums.first / rows
        second = sums.second - rows * centre[:, :, None] * centre[:, None, :]
        covariance = inverse_wishart(of_covariance, rows - 1 + RIDGE, linalg.symmetric(second + prior))
        factor = torch.linalg.cholesky(covariance / rows)
        mean = normal.mean + centre + (factor @ z[..., None])[..., 0]
        return state._replace(normal=SiteNormal(mean, covariance, normal.between), version=state.version + 1)
    covariance = inverse_wishart(of_covariance, rows + RIDGE, linalg.symmetric(sums.second + prior))
    step = sums.place / sites + (normal.between / sites).sqrt() * z
    square = sums.square - 2 * step * sums.place + sites * step.square()
    scale = (square.clamp(min=0) + WEIGHT * GUESS * variance) / 2
    spread = scale / random.gamma(of_spread, (sites + WEIGHT) / 2, (p,), torch.float64)
    return state._replace(normal=SiteNormal(normal.mean + step, covariance, spread), version=state.version + 1)


def inverse_wishart(keys: Tensor, freedom: Tensor, scale: Tensor) -> Tensor:
    """Draw covariances `(M, p, p)` of density ∝ |Σ|^{−(ν+p+1)/2} exp(−½ tr(S Σ⁻¹)), by Bartlett's decomposition.

    >>> import torch
    >>> keys = random.fold_in(random.key(0), torch.arange(4000))
    >>> draws = inverse_wishart(keys, torch.tensor(8.0), torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double())
    >>> draws.mean(0).round(decimals=1)  # S / (ν − p − 1)
    tensor([[0.4000, 0.2000],
            [0.2000, 0.4000]], dtype=torch.float64)
    """
    p = scale.shape[-1]
    of_diagonal, below = random.split(keys, 2)
    half = (freedom.to(scale) - torch.arange(p, dtype=scale.dtype, device=scale.device)) / 2
    diagonal = (2 * random.gamma(of_diagonal, half, (p,), torch.float64)).sqrt()
    triangle = random.normal(below, (p, p), torch.float64).tril(-1) + torch.diag_embed(diagonal)
    root = torch.linalg.cholesky(scale) @ linalg.inverse_factor(triangle).mT
    return root @ root.mT
