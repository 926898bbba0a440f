r"""The posterior of each device's coefficients: intervals, tests, selection and predictions.

A device's posterior is a mixture of normal densities, one for each node of the shared scales, as a
`torch.distributions` object. Probabilities of single coefficients and predictions come from the mixture's distribution
function, without draws.

Bayesian false discovery rate: of the coefficients that are called non-null the expected share of null ones is the mean
of their posterior null probabilities; the largest set whose mean is at most `rate` is called.

Source: Yue, Kontar, Estrada Gómez (2022), sections 4.2.1 and 4.3; Müller, Parmigiani, Rice (2007), "FDR and Bayesian
multiple comparisons rules".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

from fedtorch._lazy import only

__all__ = ["discoveries", "interval", "selected"]
__dir__ = only(__all__)

_BISECTIONS = 60


class DevicePosterior(NamedTuple):
    """The posteriors of `K` devices' coefficients θ_k `(d,)`.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1, 1, 1).double()  # one device, one node, one coefficient ~ N(1, 1)
        >>> device = DevicePosterior(one[0, 0], one[0], one, torch.full((1, 1), torch.nan))
        >>> prediction = device.predictive(torch.tensor([[[3.0]]]), noise=0.5)  # of y = 3 θ + noise
        >>> prediction.mean, prediction.variance  # 9 + 0.5
        (tensor([[3.]], dtype=torch.float64), tensor([[9.5000]], dtype=torch.float64))
    """

    weights: Tensor  # (K, R) of sum 1
    means: Tensor  # (K, R, d)
    covariances: Tensor  # (K, R, d, d)
    log_noise: Tensor  # (K, R) log σ² at the nodes; NaN for likelihoods without noise, or of known noise

    def distribution(self) -> MixtureSameFamily:
        """Return θ_k, batch `(K,)`, event `(d,)`."""
        known = self.covariances.diagonal(dim1=-2, dim2=-1) == 0  # fixed effects are known given the shared parameters
        root = torch.linalg.cholesky(self.covariances + torch.diag_embed(known.to(self.covariances)))
        root = root.masked_fill(known[..., None], 0.0)
        each = MultivariateNormal(self.means, scale_tril=root, validate_args=False)
        return MixtureSameFamily(Categorical(self.weights), each, validate_args=False)

    def marginals(self) -> MixtureSameFamily:
        """Return the marginal of each coefficient, batch `(K, d)`, which has a distribution function."""
        sd = self.covariances.diagonal(dim1=-2, dim2=-1).sqrt()
        return _mixture(self.weights[:, None].expand(-1, self.means.shape[-1], -1), self.means.mT, sd.mT)

    def predictive(self, x: Tensor, noise: float | Tensor | None = None) -> MixtureSameFamily:
        """Return the predictor x'θ_k, or a new response y of the linear model, batch `(K, N)`.

        Args:
            x: `(K, N, d)`.
            noise: variance of y around x'θ_k, a number or `(K,)`; default: as learnt, and none where none was.
        """
        x = x.to(self.means)
        mean = x @ self.means.mT
        variance = torch.einsum("knd,krde,kne->knr", x, self.covariances, x)
        if noise is None:
            variance = variance + self.log_noise.exp().nan_to_num(0.0)[:, None]
        else:
            variance = variance + torch.as_tensor(noise, dtype=x.dtype, device=x.device).reshape(-1, 1, 1)
        return _mixture(self.weights[:, None].expand_as(mean), mean, variance.sqrt())


def quantile(distribution: MixtureSameFamily, probability: float) -> Tensor:
    """Return quantiles of univariate mixtures, in their batch shape, by bisection of the distribution function.

    >>> import torch
    >>> from torch.distributions import Categorical, MixtureSameFamily, Normal
    >>> places = Normal(torch.tensor([-1.0, 3.0]).double(), 0.1 * torch.ones(2).double())
    >>> halves = MixtureSameFamily(Categorical(torch.tensor([0.5, 0.5]).double()), places)
    >>> quantile(halves, 0.25).round(decimals=3), quantile(halves, 0.75).round(decimals=3)  # the median of each half
    (tensor(-1., dtype=torch.float64), tensor(3., dtype=torch.float64))
    """
    if not 0 < probability < 1:
        raise ValueError(f"Expected a probability between 0 and 1, but got {probability}")
    parts = distribution.component_distribution
    edge = torch.special.ndtri(torch.tensor(probability, dtype=torch.float64)).to(parts.mean)
    each = parts.mean + edge * parts.stddev
    low, high = each.amin(-1), each.amax(-1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = distribution.cdf(middle) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def interval(distribution: MixtureSameFamily | Normal, level: float = 0.9) -> tuple[Tensor, Tensor]:
    """Return the equal-tailed interval of probability `level`, in the batch shape.

    >>> import torch
    >>> from torch.distributions import Normal
    >>> low, high = interval(Normal(torch.tensor([0.0, 3.0]).double(), torch.ones(2).double()), level=0.9)
    >>> low.round(decimals=3).tolist(), high.round(decimals=3).tolist()
    ([-1.645, 1.355], [1.645, 4.645])
    """
    if not 0 < level < 1:
        raise ValueError(f"Expected a level between 0 and 1, but got {level}")
    tails = (1 - level) / 2, (1 + level) / 2
    if isinstance(distribution, Normal):
        low, high = (distribution.icdf(torch.tensor(p, dtype=torch.float64).to(distribution.mean)) for p in tails)
    else:
        low, high = (quantile(distribution, p) for p in tails)
    return low, high


def selected(distribution: MixtureSameFamily | Normal, level: float = 0.9) -> Tensor:
    """Return where credible intervals of coefficients do not cover 0, bool in the batch shape (section 4.3).

    >>> import torch
    >>> from torch.distributions import Normal
    >>> selected(Normal(torch.tensor([0.0, 3.0]).double(), torch.ones(2).double()), level=0.9)
    tensor([False,  True])
    """
    low, high = interval(distribution, level)
    return (low > 0) | (high < 0)


def null_probability(distribution: MixtureSameFamily | Normal, width: float = 0.0) -> Tensor:
    """Return the posterior probability of the null hypothesis, in the batch shape.

    Args:
        distribution: of single coefficients.
        width: the null is |θ| ≤ width; for 0 it is that θ has its less probable sign.

    >>> import torch
    >>> from torch.distributions import Normal
    >>> coefficients = Normal(torch.tensor([0.0, 3.0]).double(), torch.ones(2).double())
    >>> null_probability(coefficients).round(decimals=3)  # Φ(0) and Φ(−3)
    tensor([0.5000, 0.0010], dtype=torch.float64)
    >>> null_probability(coefficients, width=1.0).round(decimals=3)  # Φ(1) − Φ(−1) and Φ(−2) − Φ(−4)
    tensor([0.6830, 0.0230], dtype=torch.float64)
    """
    if width < 0:
        raise ValueError(f"Expected a width of at least 0, but got {width}")
    edge = torch.as_tensor(width).to(distribution.mean)
    below, upto = (
        distribution.cdf(-edge.expand(distribution.batch_shape)),
        distribution.cdf(edge.expand(distribution.batch_shape)),
    )
    return upto - below if width > 0 else torch.minimum(upto, 1 - upto)


def discoveries(null: Tensor, fdr: float = 0.05) -> Tensor:
    """Return the largest set of hypotheses whose Bayesian false discovery rate is at most `fdr`.

    Args:
        null: posterior probabilities of the null hypotheses, of any shape; for inclusion, 1 minus its probability.
        fdr: bound on the mean of `null` over the set, between 0 and 1.

    Returns:
        bool, in the shape of `null`.

    Raises:
        ValueError: a rate out of range.

    >>> import torch
    >>> discoveries(torch.tensor([0.01, 0.6, 0.15, 0.2]), fdr=0.1)  # (0.01 + 0.15) / 2 is below, with 0.2 above
    tensor([ True, False,  True, False])
    """
    if not 0 <= fdr <= 1:
        raise ValueError(f"Expected a rate between 0 and 1, but got {fdr}")
    ordered, order = null.flatten().sort(stable=True)
    mean = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=null.device)
    called = torch.zeros_like(ordered, dtype=torch.bool)
    called[order] = mean <= fdr
    return called.reshape(null.shape)


def _mixture(weights: Tensor, mean: Tensor, sd: Tensor) -> MixtureSameFamily:
    """Return mixtures of normal densities, in which very narrow ones represent points."""
    sd = sd.clamp(min=torch.finfo(sd.dtype).tiny)
    return MixtureSameFamily(Categorical(weights), Normal(mean, sd, validate_args=False), validate_args=False)
