r"""Priors of shared parameters: a normal density times factors of one coordinate each.

Scales enter as logarithms. A `Hyperprior` is the prior of one such coordinate x: `log_normal` is a normal density of x,
`non_informative` an exponential of x, which both are natural parameters; `half_cauchy` is a factor of another form,
approximated by a site in expectation propagation. A scale is exp(x · power): power is ½ if x is the logarithm of a
variance, and 1 if it is that of the scale itself.

Source: Yue, Kontar, Estrada Gómez (2022), section 4.3; Van Erp, Oberski, Mulder (2019), "Shrinkage priors for Bayesian
penalized regression"; Gelman (2006), "Prior distributions for variance parameters in hierarchical models".

>>> from fedtorch.models.hierarchical.hyperpriors import log_normal
>>> log_normal(mean=1.0, sd=0.5)[:2]
(4.0, 4.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedtorch._lazy import only
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Natural

__all__ = ["half_cauchy", "log_normal", "non_informative"]
__dir__ = only(__all__)

_GRID = 2001  # nodes of the integrals over a factor's coordinate
_REACH = 12.0  # sds of the cavity on either side
_SWEEPS = 20
_WIDEST = 60.0  # of a factor alone


class Hyperprior(NamedTuple):
    """The prior of one coordinate x: exp(shift · x − ½ precision · x²) times an optional factor.

    >>> import torch
    >>> from torch.distributions import Gamma
    >>> gamma = Gamma(torch.tensor(2.0).double(), torch.tensor(4.0).double())  # of the variance exp(x)
    >>> own = Hyperprior(0.0, 0.0, lambda x: gamma.log_prob(x.exp()) + x)
    >>> float(own.log_density(torch.tensor(0.0).double()).exp())  # 16 e⁻⁴
    0.293050...
    """

    shift: float
    precision: float
    log_density: Callable[[Tensor], Tensor] | None = None  # of x, up to a constant


class Factor(NamedTuple):
    """A part of a prior that is not normal, in coordinate number `coordinate` of φ."""

    coordinate: int
    log_density: Callable[[Tensor], Tensor]


class Prior(NamedTuple):
    """A prior of φ.

    >>> import torch
    >>> normal = gaussian.natural(gaussian.Moments(torch.zeros(2).double(), torch.eye(2).double()))
    >>> twice = Prior(normal, (Factor(1, lambda x: -0.5 * (x - 4).square()),))  # N(0, 1) times N(4, 1)
    >>> gaussian.moments(twice.completed()).mean.round(decimals=3)
    tensor([0., 2.], dtype=torch.float64)
    """

    normal: Natural  # normal part, which may be improper
    factors: tuple[Factor, ...] = ()

    def replaced(self, normal: Natural) -> Prior:
        """Return the same factors with another normal part."""
        return Prior(normal, self.factors)

    @property
    def sites(self) -> Natural:
        """Return the factors' sites before any data, `(F,)`: their own moments."""
        around = torch.linspace(-_WIDEST, _WIDEST, 20_001, dtype=torch.float64)
        shifts, precisions = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)]
        for factor in self.factors:
            x = around + torch.softmax(factor.log_density(around), 0) @ around  # its location, for any scale
            weight = torch.softmax(factor.log_density(x), 0)
            mean = (weight * x).sum()
            precision = 1 / (weight * (x - mean).square()).sum()
            shifts.append((precision * mean)[None])
            precisions.append(precision[None])
        return Natural(
            torch.cat(shifts).to(self.normal.shift.device), torch.cat(precisions).to(self.normal.shift.device)
        )

    def completed(self) -> Natural:
        """Return a density: the prior with its factors' sites, and unit precision in coordinates without any."""
        precision = gaussian.unpack(self.normal.precision).clone()
        shift, sites = self.normal.shift.clone(), self.sites
        for i, factor in enumerate(self.factors):
            precision[factor.coordinate, factor.coordinate] += sites.precision[i]
            shift[factor.coordinate] += sites.shift[i]
        bare = precision.diagonal() <= 0
        return Natural(torch.where(bare, 0.0, shift), gaussian.pack(precision + torch.diag(bare.to(precision.dtype))))


def log_normal(mean: float = 0.0, sd: float = 1.0) -> Hyperprior:
    """Return the hyperprior x ~ N(mean, sd²): exp(x) is log-normal."""
    if not sd > 0:
        raise ValueError(f"Expected a positive sd, but got {sd}")
    return Hyperprior(mean / sd**2, 1 / sd**2)


def half_cauchy(scale: float = 1.0, power: float = 0.5) -> Hyperprior:
    """Build the hyperprior for which exp(x · power) is half-Cauchy with this scale.

    >>> import torch
    >>> half_cauchy(power=1.0).log_density(torch.tensor(0.0)).exp()  # s / (1 + s²), s = eˣ = 1
    tensor(0.5000)
    """
    if not scale > 0 or not power > 0:
        raise ValueError(f"Expected a positive scale and power, but got {scale} and {power}")
    location = 2 * float(torch.tensor(scale, dtype=torch.float64).log())
    return Hyperprior(0.0, 0.0, lambda x: power * x - softplus(2 * power * x - location))


def non_informative(power: float = 0.5) -> Hyperprior:
    """Build the hyperprior for a flat density of exp(x · power); it is improper and needs more than one client.

    >>> non_informative(power=0.5)[:2]  # of x = log τ: exp(x / 2)
    (0.5, 0.0)
    """
    return Hyperprior(power, 0.0)


def prior(mean: Tensor, covariance: Tensor, hyperpriors: Sequence[Hyperprior]) -> Prior:
    """Return the prior of φ = (μ, x): μ ~ N(mean `(m,)`, covariance `(m, m)`), and independent hyperpriors of the x_j.

    >>> import torch
    >>> of_phi = prior(torch.tensor([1.0]), torch.tensor([[4.0]]), [log_normal(), half_cauchy()])
    >>> of_phi.normal.shift, gaussian.unpack(of_phi.normal.precision).diagonal()
    (tensor([0.2500, 0.0000, 0.0000], dtype=torch.float64), tensor([0.2500, 1.0000, 0.0000], dtype=torch.float64))
    >>> [factor.coordinate for factor in of_phi.factors]
    [2]
    """
    first = len(mean)
    normal = gaussian.natural(gaussian.Moments(mean.to(torch.float64), covariance.to(torch.float64)))
    shift = torch.cat([normal.shift, torch.tensor([h.shift for h in hyperpriors], dtype=torch.float64)])
    rest = torch.diag(torch.tensor([h.precision for h in hyperpriors], dtype=torch.float64))
    precision = torch.block_diag(gaussian.unpack(normal.precision), rest) if first else rest
    factors = tuple(Factor(first + j, h.log_density) for j, h in enumerate(hyperpriors) if h.log_density is not None)
    return Prior(Natural(shift, gaussian.pack(precision)), factors)


def renewed(base: Natural, sites: Natural, factors: Sequence[Factor]) -> Natural:
    """Return the factors' sites after some sweeps of expectation propagation, `(F,)`.

    A site whose cavity is not a density, or whose update would make the product improper, stays.

    Args:
        base: all of q except these sites.
        sites: present sites, `(F,)`.
        factors: the factors that they approximate.

    >>> import torch
    >>> base, none = Natural(torch.zeros(1).double(), torch.ones(1).double()), torch.zeros(1).double()
    >>> found = renewed(base, Natural(none, none), [Factor(0, lambda x: -1.5 * (x - 2).square())])  # N(2, 1/3)
    >>> found.shift.round(decimals=3), found.precision.round(decimals=3)
    (tensor([6.], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """
    shift, precision = sites.shift.clone(), sites.precision.clone()
    place = [factor.coordinate for factor in factors]
    for _ in range(_SWEEPS if factors else 0):
        before = torch.stack([shift, precision])
        for i, factor in enumerate(factors):
            whole = gaussian.moments(_with(base, shift, precision, place))
            variance, mean = whole.covariance[place[i], place[i]], whole.mean[place[i]]
            left = 1 / variance - precision[i]
            if not bool(left > 0):
                continue
            centre, spread = (mean / variance - shift[i]) / left, left.rsqrt()
            x = torch.linspace(-_REACH, _REACH, _GRID, dtype=base.shift.dtype, device=base.shift.device)
            weight = torch.softmax(factor.log_density(centre + spread * x) - x.square() / 2, 0)
            m = (weight * x).sum()
            v = (weight * (x - m).square()).sum()
            precision[i] = (1 / v - 1) * left
            shift[i] = (centre + spread * m) * left / v - centre * left
        if bool((torch.stack([shift, precision]) - before).abs().max() < 1e-9):
            break
    return Natural(shift, precision)


def _with(base: Natural, shift: Tensor, precision: Tensor, place: Sequence[int]) -> Natural:
    whole, moved = gaussian.unpack(base.precision).clone(), base.shift.clone()
    for i, j in enumerate(place):
        whole[j, j] += precision[i]
        moved[j] += shift[i]
    return Natural(moved, gaussian.pack(whole))
