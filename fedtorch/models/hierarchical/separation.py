"""Signs that a column tells yes from no, or none from some, without error, so that a likelihood has no maximum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE = 2.5  # of a coefficient per standard deviation of its column, an odds ratio of 12
_UNSURE = 0.2  # standard error or deviation, as a part of the coefficient
_PRIOR = 0.07  # of the variance before, what rows leave of it
_CUT = 1.5  # of a coefficient as above of which rows leave `_HALF`: a prior of sd 2.5 that is cut off has mean 2.0
_MOVED = 1e-3  # of a coefficient as above, below which rows have not moved it: one of a million moves it by more
_HALF = 0.1  # of the variance before; half a normal density has 0.36


def warn_of_separation(
    names: Sequence[str],
    coefficients: Tensor,
    sds: Tensor,
    *,
    before: Tensor | None = None,
    fixed: Sequence[bool] | None = None,
    alone: Tensor | None = None,
    helps: str = "merge levels, leave the column out, or choose the prior's sd= with care",
    stacklevel: int = 3,
) -> bool:
    """Warn of coefficients that are large, and unsure or held by the prior, as a likelihood would take to infinity.

    Returns whether it has.

    Args:
        names: of the coefficients.
        coefficients, sds: `(d,)`, of columns with standard deviation 1; an sd may be NaN.
        before: sds under the prior `(d,)`, where there is one: where rows leave more than a little of its variance to a
            large coefficient, they would have it larger still.
        fixed: whether a coefficient is the same at all clients, and not the intercept: of these a prior that is cut off
            at one side is told by what is left of its variance, however few rows have done it.
        alone: whether rows say nothing of a coefficient by itself, `(d,)`: see `dependence.alone`.
        helps: what to do.
        stacklevel: as that of `warnings.warn`.

    Source: Albert and Anderson (1984), "On the existence of maximum likelihood estimates in logistic regression
    models".

    Example:
        >>> import torch, warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warned = warn_of_separation(["age", "sex[T.male]"], torch.tensor([0.5, 4.0]), torch.tensor([0.1, 1.2]))
        >>> str(seen[0].message)[:60]
        "Expected responses that no column tells apart, but 'sex[T.ma"
    """
    size = coefficients.abs()
    known = sds <= _UNSURE * size
    if before is not None:
        known &= sds.square() <= _PRIOR * before.square()
    far = (size > _LARGE) & ~known
    if before is not None and fixed is not None:
        cut = (size > _CUT) & (sds.square() > _HALF * before.square())
        far |= cut & torch.tensor(fixed, device=cut.device)
    if alone is not None:
        far |= alone & (size > _MOVED)  # rows had moved it; of a column that is zero nothing ever does
    if bool(far.any()):
        separating = ", ".join(repr(name) for name, each in zip(names, far.tolist()) if each)
        warnings.warn(
            f"Expected responses that no column tells apart, but {separating} may do so (separated: rows of a level, "
            "or beyond a value, that all respond alike): the likelihood has no maximum there, and what is found rests "
            f"on the prior; {helps}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
    return bool(far.any())
