r"""B-spline bases, so that sparse regression selects smooth functions of covariates.

.. math:: f_j(x) = \sum_b \theta_{jb} B_b(x)

Each covariate becomes a block of columns, and a spike-and-slab with `groups=` has one indicator per block: the first of
the future directions that Kidd et al. (2023, section 4) name. Source: de Boor (1978), "A practical guide to splines".

>>> import torch
>>> from fedtorch.models.gibbs import splines
>>> basis, groups = splines.b_splines(torch.linspace(0, 1, 5)[:, None], pieces=2)
>>> basis.shape, groups.tolist()
(torch.Size([5, 4]), [0, 0, 0, 0])
"""

from __future__ import annotations

import numpy
import torch
from scipy.interpolate import BSpline
from torch import Tensor

from fedtorch._lazy import only

__all__ = ["b_splines"]
__dir__ = only(__all__)


def b_splines(
    x: Tensor, *, lower: float | Tensor = 0.0, upper: float | Tensor = 1.0, pieces: int = 5, degree: int = 3
) -> tuple[Tensor, Tensor]:
    """Return B-splines of every covariate on even knots, without the first of each, because all of them sum to one.

    The knots must be the same at all sites, so the range is an argument and is not taken from the rows: use
    `data.map(lambda rows: (b_splines(rows[0], …)[0], rows[1]))`. Values beyond the range are moved to its ends.

    Args:
        x: `(n, d)`.
        lower: the range's lower end, a number or `(d,)`.
        upper: its upper end.
        pieces: polynomials between the ends.
        degree: of the polynomials.

    Returns:
        the basis `(n, d · (pieces + degree − 1))`, float64, covariate after covariate, and each column's covariate
        `(d · (pieces + degree − 1),)` int64, for `spike_and_slab(groups=…)`.

    Raises:
        ValueError: an empty range, no pieces, a negative degree, or NaN.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import global_priors, sparse, splines
        >>> x = 2 * ft.random.uniform(ft.random.key(0), (5, 80, 2), torch.float64) - 1
        >>> y = 4 * x[..., 0].square()  # a parabola of the first covariate, nothing of the second
        >>> bases = [splines.b_splines(rows, lower=-1.0, pieces=2) for rows in x]
        >>> data, groups = ft.data.from_tensors([(b, y[k]) for k, (b, _) in enumerate(bases)]), bases[0][1]
        >>> prior = global_priors.spike_and_slab(groups=groups)
        >>> algorithm = ft.gibbs(sparse.regression(intercept=True), sparse.hierarchy(prior), sweeps=3, chains=2)
        >>> sampler = ft.Sampler(burn_in=5)
        >>> _ = ft.run(algorithm, ft.InProcess(data), torch.zeros(8), rounds=20, record=sampler)
        >>> sampler.mean()["prior.included"][::4].round()  # one indicator for each covariate's block of four
        tensor([1., 0.], dtype=torch.float64)
    """
    if pieces < 1 or degree < 0 or pieces + degree < 2:
        raise ValueError(f"Expected at least one piece and two splines, but got pieces={pieces}, degree={degree}")
    low = torch.as_tensor(lower, dtype=torch.float64, device="cpu").expand(x.shape[1])
    high = torch.as_tensor(upper, dtype=torch.float64, device="cpu").expand(x.shape[1])
    if not bool((low < high).all()) or not bool(x.isfinite().all()):
        raise ValueError(f"Expected finite x and lower < upper, but got lower={low.tolist()}, upper={high.tolist()}")
    knots = numpy.concatenate([numpy.zeros(degree), numpy.linspace(0, 1, pieces + 1), numpy.ones(degree)])
    unit = ((x.detach().to("cpu", torch.float64) - low) / (high - low)).clamp(0, 1)
    blocks = [BSpline.design_matrix(column, knots, degree).toarray()[:, 1:] for column in unit.T.numpy()]
    size = pieces + degree - 1
    basis = torch.from_numpy(numpy.concatenate(blocks, 1)) if blocks else torch.zeros(len(x), 0, dtype=torch.float64)
    return basis.to(x.device), torch.arange(x.shape[1]).repeat_interleave(size)
