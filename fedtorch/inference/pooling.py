r"""Fits of completed data sets, pooled by Rubin's rules.

Of M fits with estimates :math:`\hat Q_m` and covariances :math:`U_m`, the estimate is their mean, and its covariance

.. math:: T = \bar U + (1 + 1/M) B, \qquad B = \tfrac{1}{M-1} \sum_m (\hat Q_m - \bar Q)(\hat Q_m - \bar Q)',

what the data sets agree on and what missing cells leave open. Intervals are of Student's t with the degrees of freedom
of Barnard and Rubin (1999, "Small-sample degrees of freedom with multiple imputation", Biometrika 86).

Source: Rubin (1987), "Multiple Imputation for Nonresponse in Surveys", section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.federation.algorithms.ep.posterior import posterior
from fedtorch.federation.runs.run import Run

if TYPE_CHECKING:
    import pandas


class Pooled(NamedTuple):
    """Hold what several fits say together.

    Example:
        >>> import torch, fedtorch as ft
        >>> fits = [(torch.tensor([slope]), torch.tensor([[0.04]])) for slope in (0.9, 1.0, 1.2)]
        >>> ft.inference.pooled(fits, names=["slope"]).table().round(3)[["estimate", "sd", "missing information"]]
               estimate     sd  missing information
        slope     1.033  0.267                0.521
    """

    names: tuple[str, ...]
    mean: Tensor  # (q,)
    covariance: Tensor  # (q, q) T
    within: Tensor  # (q, q) Ū
    between: Tensor  # (q, q) B
    freedom: Tensor  # (q,) degrees of freedom
    missing: Tensor  # (q,) fraction of information that is missing
    fits: int  # M

    def table(self, level: float = 0.95) -> pandas.DataFrame:
        """Return estimates, standard deviations and intervals by name, and how much of each is missing."""
        import pandas
        from scipy.stats import t

        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, but got {level}")
        mean, sd = self.mean.numpy(), self.covariance.diagonal().sqrt().numpy()
        half = t.ppf((1 + level) / 2, self.freedom.numpy()) * sd
        columns = {"estimate": mean, "sd": sd, "low": mean - half, "high": mean + half}
        columns |= {"df": self.freedom.numpy(), "missing information": self.missing.numpy()}
        return pandas.DataFrame(columns, index=list(self.names))


def pooled(fits: Iterable[Any], *, names: Sequence[str] | None = None, freedom: float = math.inf) -> Pooled:
    """Pool fits of completed data sets by Rubin's rules.

    Args:
        fits: runs of `ft.ep`, or pairs (estimate `(q,)`, covariance `(q, q)`) of any analysis.
        names: of the estimates; default: those of the runs' model, or "0", "1", ….
        freedom: degrees of freedom that the analysis would have without missing cells, such as n − q of a linear
            regression; intervals are shorter than they should be where few rows are taken for infinitely many.

    Raises:
        ValueError: fewer than two fits, or of different quantities.

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
    shapes = sorted({tuple(mean.shape) for _, mean, _ in estimates})
    if len(shapes) > 1 or any(covariance.shape != (*mean.shape, *mean.shape) for _, mean, covariance in estimates):
        raise ValueError(
            f"Expected fits of the same q quantities, (q,) and (q, q), but got estimates of shapes {shapes} and "
            f"covariances of {sorted({tuple(covariance.shape) for *_, covariance in estimates})}"
        )
    each = torch.stack([mean for _, mean, _ in estimates])
    within = torch.stack([covariance for *_, covariance in estimates]).mean(0)
    count = len(each)
    away = each - each.mean(0)
    between = away.mT @ away / (count - 1)
    total = within + (1 + 1 / count) * between
    share = ((1 + 1 / count) * between.diagonal() / total.diagonal()).clamp(max=1)
    degrees = _degrees(share, count, freedom)
    ratio = share / (1 - share)
    known = tuple(names) if names is not None else estimates[0][0]
    if known and len(known) != each.shape[1]:
        raise ValueError(f"Expected a name for each of {each.shape[1]} quantities, but got {len(known)}")
    labels = known or tuple(map(str, range(each.shape[1])))
    information = torch.where(share < 1, (ratio + 2 / (degrees + 3)) / (1 + ratio), 1.0)
    return Pooled(labels, each.mean(0), total, within, between, degrees, information, count)


def _degrees(share: Tensor, count: int, freedom: float) -> Tensor:
    """Return degrees of freedom from the share of the variance that missing cells make (Barnard and Rubin 1999)."""
    of_draws = (count - 1) / share.square()  # infinite where nothing is missing
    if math.isinf(freedom):
        return of_draws
    observed = (freedom + 1) / (freedom + 3) * freedom * (1 - share)
    return 1 / (1 / of_draws + 1 / observed)


def _estimate(fit: Any) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Return (names, estimate, covariance) of a fit, float64 and on the CPU."""
    names: tuple[str, ...] = ()
    if isinstance(fit, Run):
        names, normal = tuple(getattr(fit.algorithm.settings.get("model"), "names", ())), posterior(fit)
        fit = normal.mean, normal.covariance_matrix
    mean, covariance = (torch.as_tensor(part).detach().to("cpu", torch.float64) for part in fit)
    return names, mean, covariance
