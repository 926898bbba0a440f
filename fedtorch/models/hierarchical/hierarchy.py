r"""Normal distributions of devices' coefficients: μ, variances, a full covariance, fixed effects.

A coefficient that is not `random` has variance 0, a fixed effect: that makes linear mixed-effects models.

Source: Yue, Kontar, Estrada Gómez (2022), "Federated data analytics: a study on linear models", Example 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.models import gaussian
from fedtorch.models.hierarchical import hyperpriors
from fedtorch.models.hierarchical.hyperpriors import Hyperprior, Prior


class Components(NamedTuple):
    """Covariances as S(ζ) = Σ_t c_t(ζ) E_t, where E_t has ones at (row, column) and (column, row)."""

    values: Callable[[Tensor], Tensor]  # ζ (..., s) -> c (..., T)
    rows: Tensor  # (T,)
    columns: Tensor  # (T,)


class Coordinates(NamedTuple):
    """Coordinates in place of ζ, as many, in which equal steps approach a boundary."""

    of: Callable[[Tensor], Tensor]  # ζ (..., s) -> coordinates (..., s)
    back: Callable[[Tensor], Tensor]


class Hierarchy(NamedTuple):
    """The normal distribution of θ_k given φ = (μ, ζ).

    >>> import torch
    >>> hierarchy = normal(2, correlated=True)
    >>> hierarchy.names[2:]
    ('log variance 0', 'log variance 1', 'dependence 1 on 0')
    >>> zeta = hierarchy.scales(torch.tensor([[4.0, 2.0], [2.0, 10.0]]), torch.tensor(0.0))
    >>> zeta[:2].exp().round(decimals=3), zeta[2]  # 9 of 10 are beyond what the first explains
    (tensor([4., 9.]), tensor(0.3333))
    >>> hierarchy.covariance(zeta).round(decimals=3)
    tensor([[ 4.,  2.], [ 2., 10.]])
    >>> whole = hierarchy.coordinates.of(zeta)  # logarithms of variances, and Fisher's z of the correlation
    >>> whole[:2].exp().round(decimals=3), whole[2].tanh() ** 2
    (tensor([ 4., 10.]), tensor(0.1000))
    """

    names: tuple[str, ...]  # of the coordinates of φ
    mean: Tensor  # (d, m) E θ_k = mean · μ
    covariance: Callable[[Tensor], Tensor]  # ζ (..., s) -> S (..., d, d)
    scales: Callable[[Tensor, Tensor], Tensor]  # (E θθ' about μ (d, d), log σ² ()) -> ζ (s,) that would give it
    prior: Prior  # prior of φ
    coefficients: tuple[str, ...] = ()  # names of θ_k
    random: tuple[int, ...] = ()  # positions of those that differ between devices
    components: Components | None = None  # `covariance` by its entries; None if only the whole is defined
    coordinates: Coordinates | None = None  # for maximisation; None if ζ itself can be used

    @property
    def varying(self) -> Tensor:
        """Return the positions of the coefficients that φ does not determine, `(e,)`: those with positive variance."""
        zeta = gaussian.moments(self.prior.completed()).mean[self.mean.shape[1] :]
        return (self.covariance(zeta).diagonal() != 0).nonzero()[:, 0]


def normal(
    features: int,
    *,
    random: Sequence[int | str] | None = None,
    correlated: bool = False,
    mean: float | Tensor = 0.0,
    sd: float | Tensor = 1.0,
    variance: Hyperprior | Sequence[Hyperprior] | None = None,
    names: Sequence[str] | None = None,
) -> Hierarchy:
    r"""Return θ_k ~ N(μ, diag(τ)), or with a full covariance; μ_j ~ N(mean_j, sd_j²) and hyperpriors of log τ_j.

    With `correlated`, S = L L' with :math:`L = \mathrm{diag}(\tau^{1/2}) U`, U unit lower triangular with free entries
    :math:`U_{ij} \sim N(0, 1)`: τ_i is the variance of coefficient i given those before it.

    Args:
        features: d.
        random: numbers or names of the coefficients that differ between devices; default: all. The others are fixed
            effects, θ_kj = μ_j.
        correlated: whether the random coefficients are.
        mean, sd: of the prior of μ, numbers or `(d,)`, in the units of the coefficients, response per feature: with sd
            1, means beyond ±2 are unlikely in any units. Standardise features and response, or give an sd for each in
            theirs.
        variance: hyperprior of x_j = log τ_j, one or one for each, in those units squared; default: log-normal(0, 1),
            by which devices also differ by about 1.
        names: of the coefficients; default: "0", "1", ….

    >>> hierarchy = normal(2, names=["intercept", "slope"])
    >>> hierarchy.names
    ('mean intercept', 'mean slope', 'log variance intercept', 'log variance slope')
    """
    labels = tuple(str(j) for j in range(features)) if names is None else tuple(names)
    if len(labels) != features or features < 1:
        raise ValueError(f"Expected a name for each of {features} coefficients (at least 1), but got {len(labels)}")
    if twice := [name for name in dict.fromkeys(labels) if labels.count(name) > 1]:
        raise ValueError(f"Expected a name of its own for each coefficient, but got {twice} twice; rename one of them")
    chosen = list(range(features)) if random is None else [_number(which, labels) for which in random]
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"Expected distinct random coefficients, but got {list(random or ())}")
    r = len(chosen)
    hyperprior = hyperpriors.log_normal() if variance is None else variance
    each = [hyperprior] * r if isinstance(hyperprior, Hyperprior) else list(hyperprior)
    if len(each) != r:
        raise ValueError(f"Expected a hyperprior for each of {r} random coefficients, but got {len(each)}")
    row, column = torch.tril_indices(r, r, -1) if correlated else torch.zeros(2, 0, dtype=torch.int64)
    place = torch.tensor(chosen, dtype=torch.int64)
    first, second = torch.tril_indices(r, r) if correlated else torch.arange(r).expand(2, r)

    def root(zeta: Tensor) -> Tensor:
        unit = torch.eye(r, dtype=zeta.dtype, device=zeta.device).expand(*zeta.shape[:-1], r, r).clone()
        unit[..., row, column] = zeta[..., r:]
        return (zeta[..., :r, None] / 2).exp() * unit

    def entries(zeta: Tensor) -> Tensor:
        if not correlated:
            return zeta.exp()
        half = root(zeta)
        return (half @ half.mT)[..., first, second]

    def covariance(zeta: Tensor) -> Tensor:
        full, values = zeta.new_zeros((*zeta.shape[:-1], features, features)), entries(zeta)
        full[..., place[first], place[second]] = values
        if correlated:
            full[..., place[second], place[first]] = values
        return full

    def scales(matrix: Tensor, log_noise: Tensor) -> Tensor:
        inner = matrix[place[:, None], place]
        if not correlated:
            return inner.diagonal().log()
        half = torch.linalg.cholesky(inner)
        return torch.cat([2 * half.diagonal().log(), (half / half.diagonal()[:, None])[row, column]])

    def of(zeta: Tensor) -> Tensor:
        return torch.cat([zeta[..., :r] + beyond(zeta[..., r:]), zeta[..., r:].asinh()], -1)

    def back(coordinates: Tensor) -> Tensor:
        dependence = coordinates[..., r:].sinh()
        return torch.cat([coordinates[..., :r] - beyond(dependence), dependence], -1)

    def beyond(dependence: Tensor) -> Tensor:
        """Return the logarithms of marginal variances in units of those given the coefficients before."""
        squares = torch.zeros_like(dependence[..., :1]).expand(*dependence.shape[:-1], r)
        return squares.index_add(-1, row, dependence.square()).log1p()

    shape = torch.ones(features, dtype=torch.float64)
    prior = hyperpriors.prior(
        mean * shape, torch.diag((sd * shape).square()), [*each, *[hyperpriors.log_normal()] * len(row)]
    )
    titles = [f"mean {name}" for name in labels] + [f"log variance {labels[j]}" for j in chosen]
    titles += [f"dependence {labels[chosen[i]]} on {labels[chosen[j]]}" for i, j in zip(row, column)]
    design = torch.eye(features, dtype=torch.float64)
    components = Components(entries, place[first], place[second])
    coordinates = Coordinates(of, back) if len(row) else None
    return Hierarchy(tuple(titles), design, covariance, scales, prior, labels, tuple(chosen), components, coordinates)


def _number(which: int | str, names: Sequence[str]) -> int:
    if isinstance(which, str):
        if which not in names:
            raise ValueError(f"Expected one of the coefficients {list(names)}, but got {which!r}")
        return list(names).index(which)
    if not 0 <= which < len(names):
        raise ValueError(f"Expected the number of a coefficient below {len(names)}, but got {which}")
    return which
