"""Detection of separation: a column predicts the response without error, so a likelihood has no maximum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE = 2.5  # of a coefficient per standard deviation of its column, an odds ratio of 12
_UNSURE = 0.2  # standard error or deviation, relative to the coefficient
_PRIOR = 0.07  # posterior share of the prior variance
_CUT = 1.5  # of such a coefficient whose rows leave `_HALF`: a truncated prior of sd 2.5 has mean 2.0
_MOVED = 1e-3  # least such coefficient that counts as moved by rows: one row of a million moves it by more
_HALF = 0.1  # of the prior variance; half a normal density has 0.36


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
    """Warn about coefficients that are large and uncertain, or limited by the prior, and diverge in a likelihood.

    Returns whether it has.

    Args:
        names: of the coefficients.
        coefficients, sds: `(d,)`, of columns with standard deviation 1; an sd may be NaN.
        before: sds under the prior `(d,)`, if there is one: rows that leave a large coefficient more than a little of
            its prior variance would prefer a larger one.
        fixed: whether a coefficient is the same at all clients, and not the intercept: for these a prior truncated on
            one side shows in the remaining variance, however few rows cause it.
        alone: whether rows have no information about a coefficient separately, `(d,)`: see `dependence.alone`.
        helps: remedy for the message.
        stacklevel: as for `warnings.warn`.

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
        far |= alone & (size > _MOVED)  # rows have moved it, which a column of zeros never does
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
