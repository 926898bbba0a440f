r"""Fits of completed data sets, pooled by Rubin's rules.

Of M fits with estimates :math:`\hat Q_m` and covariances :math:`U_m`, the estimate is their mean, and its covariance

.. math:: T = \bar U + (1 + 1/M) B, \qquad B = \tfrac{1}{M-1} \sum_m (\hat Q_m - \bar Q)(\hat Q_m - \bar Q)',

the variance within data sets plus that between them, due to missing cells. Intervals are of Student's t with the
degrees of freedom of Barnard and Rubin (1999, "Small-sample degrees of freedom with multiple imputation",
Biometrika 86).

Source: Rubin (1987), "Multiple Imputation for Nonresponse in Surveys", section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.run import Run

if TYPE_CHECKING:
    from fedtorch.tables.result_frame import ResultFrame

Scale = Callable[[Tensor], Tensor]
_SCALES: dict[str, tuple[Scale, Scale]] = {  # (to the scale of pooling, back), by the start of an estimate's name
    "sd(": (torch.log, torch.exp),
    "sigma": (torch.log, torch.exp),
    "cor(": (torch.atanh, torch.tanh),
}


class Pooled(NamedTuple):
    """Estimates pooled over several fits.

    Example:
        >>> import torch, fedtorch as ft
        >>> fits = [(torch.tensor([slope]), torch.tensor([[0.04]])) for slope in (0.9, 1.0, 1.2)]
        >>> print(ft.inference.pooled(fits, names=["slope"]).summary()[["estimate", "sd", "low", "high"]].to_markdown())
        | coefficient | estimate | sd | 95 % interval |
        | :-- | --: | --: | --: |
        | slope | 1.03 | 0.27 | 0.44 to 1.62 |
    """

    names: tuple[str, ...]
    mean: Tensor  # (q,)
    covariance: Tensor  # (q, q) T
    within: Tensor  # (q, q) Ū
    between: Tensor  # (q, q) B
    freedom: Tensor  # (q,) degrees of freedom
    missing: Tensor  # (q,) fraction of missing information, `fmi`
    fits: int  # M
    scales: tuple[str, ...] = ()  # keys of the scales on which quantities of runs were pooled, "" for their own

    def summary(self, level: float = 0.95) -> ResultFrame:
        """Return estimates, sds and intervals by name, degrees of freedom (`df`), missing information (`fmi`).

        Standard deviations and correlations of runs are pooled as logarithms and as Fisher's z, and transformed back
        here, with sds by the delta method.
        """
        from scipy.stats import t

        from fedtorch.tables.result_frame import ResultFrame  # imported here, because pandas imports slowly

        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, but got {level}")
        sd = self.covariance.diagonal().sqrt()
        half = torch.as_tensor(t.ppf((1 + level) / 2, self.freedom.numpy())) * sd
        columns = torch.stack([self.mean, sd, self.mean - half, self.mean + half], 1)
        for row, scale in enumerate(self.scales):
            if scale:
                back = _SCALES[scale][1]
                slope = torch.func.grad(back)(self.mean[row])
                columns[row] = torch.stack([back(self.mean[row]), slope * sd[row], *back(columns[row, 2:])])
        data = dict(zip(("estimate", "sd", "low", "high"), columns.T.tolist()))
        data |= {"df": self.freedom.tolist(), "fmi": self.missing.tolist()}
        about = f"pooled over {self.fits} imputations by Rubin's rules"
        return ResultFrame.of(data, self.names, "coefficient", level=level, about=about)


def refuse_pooled(run: Any, function: str) -> None:
    """Raise TypeError for pooled runs and vertical fits, in functions that take one run."""
    if isinstance(run, Pooled):
        raise TypeError(
            f"Expected a run, but got {run.fits} pooled ones; take {function}(run, …) of each run, and the mean of the "
            "estimates, or pooled([(estimate, covariance), …]) of them for intervals"
        )
    if hasattr(run, "history") and not hasattr(run, "population"):  # a `VerticalRun`, without importing its module
        raise TypeError(
            f"Expected a run of clients in a population, but got a {type(run).__name__}; use its run.predict(data) and "
            "run.evaluate(data)"
        )


def pooled(fits: Iterable[Any], *, names: Sequence[str] | None = None, freedom: float = math.inf) -> Pooled:
    """Pool fits of completed data sets by Rubin's rules.

    Args:
        fits: runs that have a `run.summary()`, such as those of `ft.ep`; or pairs (estimate `(q,)`, covariance
            `(q, q)`) of any analysis. Of `ft.maximum_likelihood` only coefficients are pooled: its variances have no
            standard errors.
        names: of the estimates; default: those of the runs' summaries, or "0", "1", ….
        freedom: degrees of freedom that the analysis would have without missing cells, such as n − q of a linear
            regression. The default, infinity, makes intervals too short where there are few rows.

    Raises:
        ValueError: fewer than two fits, or of different quantities.
        TypeError: a run of an algorithm without a posterior.

    Example:
        >>> import torch, fedtorch as ft
        >>> nan, x = torch.nan, torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]]).double()
        >>> y = torch.tensor([0.1, 0.9, nan, 3.2, 3.8, 5.1]).double()
        >>> x[1] = nan
        >>> data = ft.models.gibbs.imputation.incomplete([(x[:3], y[:3]), (x[3:], y[3:])])
        >>> fits = []
        >>> for complete in ft.inference.imputed(data, 5, between=False):
        ...     rows, response = complete.rows
        ...     slope = torch.linalg.lstsq(rows, response[:, None]).solution[0]
        ...     variance = (response - rows @ slope).square().sum() / 4 / rows.square().sum()
        ...     fits.append((slope, variance[None, None]))
        >>> round(float(ft.inference.pooled(fits, names=["slope"], freedom=4).mean[0]), 1)
        1.0
    """
    estimates = [_estimate(fit) for fit in fits]
    if len(estimates) < 2:
        raise ValueError(f"Expected at least two fits to pool, but got {len(estimates)}; impute more data sets")
    _check_alike(estimates, names)
    each = torch.stack([estimate.mean for estimate in estimates])
    within = torch.stack([estimate.covariance for estimate in estimates]).mean(0)
    count, size = each.shape
    away = each - each.mean(0)
    between = away.mT @ away / (count - 1)
    total = within + (1 + 1 / count) * between
    share = ((1 + 1 / count) * between.diagonal() / total.diagonal()).clamp(max=1)
    degrees = _degrees(share, count, freedom)
    ratio = share / (1 - share)
    information = torch.where(share < 1, (ratio + 2 / (degrees + 3)) / (1 + ratio), 1.0)
    labels = tuple(names or estimates[0].names or map(str, range(size)))
    return Pooled(labels, each.mean(0), total, within, between, degrees, information, count, estimates[0].scales)


def _degrees(share: Tensor, count: int, freedom: float) -> Tensor:
    """Return degrees of freedom from the share of the variance due to missing cells (Barnard and Rubin 1999)."""
    of_draws = (count - 1) / share.square()  # infinite where no cell is missing
    if math.isinf(freedom):
        return of_draws
    observed = (freedom + 1) / (freedom + 3) * freedom * (1 - share)
    return 1 / (1 / of_draws + 1 / observed)


class _Fit(NamedTuple):
    names: tuple[str, ...]
    mean: Tensor  # (q,)
    covariance: Tensor  # (q, q)
    scales: tuple[str, ...]


def _estimate(fit: Any) -> _Fit:
    """Return a fit's estimate and covariance, float64 and on the CPU."""
    if isinstance(fit, Run):
        return _of_run(fit)
    mean, covariance = (torch.as_tensor(part).detach().to("cpu", torch.float64) for part in fit)
    return _Fit((), mean, covariance, ())


def _of_run(run: Run) -> _Fit:
    """Return mean and covariance of the quantities in a run's summary, on the scales of pooling."""
    shown = posterior_of(run.algorithm).estimates(run)
    if len(shown.nodes) < 2 and shown.normal is not None:  # maximum likelihood, whose variances have no errors
        mean, covariance = (part.detach().to("cpu", torch.float64) for part in shown.normal)
        return _Fit(shown.names[: len(mean)], mean, covariance, ("",) * len(mean))
    keys = [next((key for key in _SCALES if name.startswith(key)), "") for name in shown.names]
    scales = tuple("" if j < shown.coefficients else key for j, key in enumerate(keys))
    columns = [_SCALES[key][0](leaf) if key else leaf for key, leaf in zip(scales, shown.nodes.unbind(1))]
    nodes = torch.stack(columns, 1).detach().to("cpu", torch.float64)
    if len(nodes) < 2:
        raise TypeError("Expected runs with a posterior, but got a point estimate; pass pairs (estimate, covariance)")
    if shown.weights is None:
        return _Fit(shown.names, nodes.mean(0), nodes.mT.cov().reshape(len(columns), -1), scales)
    weights = shown.weights.to(nodes)
    mean = weights @ nodes
    return _Fit(shown.names, mean, (weights[:, None] * (nodes - mean)).mT @ (nodes - mean), scales)


def _check_alike(fits: Sequence[_Fit], names: Sequence[str] | None) -> None:
    """Raise ValueError for fits of different quantities, and for another number of names."""
    shapes = sorted({tuple(fit.mean.shape) for fit in fits})
    if len(shapes) > 1 or any(fit.covariance.shape != (*fit.mean.shape, *fit.mean.shape) for fit in fits):
        raise ValueError(
            f"Expected fits of the same q quantities, (q,) and (q, q), but got estimates of shapes {shapes} and "
            f"covariances of {sorted({tuple(fit.covariance.shape) for fit in fits})}"
        )
    different = next((fit for fit in fits if fit.names != fits[0].names), None)
    if different is not None:
        raise ValueError(f"Expected all fits to be of {list(fits[0].names)}, but got one of {list(different.names)}")
    if names is not None and len(names) != shapes[0][0]:
        raise ValueError(f"Expected a name for each of {shapes[0][0]} quantities, but got {len(names)}")
