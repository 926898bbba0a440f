"""Detection of separation: a column predicts the response without error, so a likelihood has no maximum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

# Coefficients are per standard deviation of their column.
_LARGE = 2.5  # a larger coefficient counts as large; it is an odds ratio of 12
_UNSURE = 0.2  # a larger standard error, relative to the coefficient, counts as uncertain
_PRIOR = 0.07  # a larger posterior variance, relative to the prior variance, counts as uncertain
_HALF = 0.1  # likewise for a one-sided posterior; half a normal density has 0.36 of the variance
_CUT = 1.5  # with `_HALF`, a larger coefficient counts as large; half a normal prior of sd 2.5 has mean 2.0
_MOVED = 1e-3  # a larger coefficient counts as moved by rows; one row of a million moves it by more


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
        before: sds under the prior `(d,)`, if there is one. A large coefficient that keeps more than a little of its
            prior variance would be larger without the prior.
        fixed: whether a coefficient is the same at all clients, and not the intercept. The remaining variance of these
            shows whether rows, however few, exclude one side of the prior.
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
        "Expected responses that no column separates, but 'sex[T.male"
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
            f"Expected responses that no column separates, but {separating} may do so (all rows of a level, or beyond "
            "a value, have the same response): the likelihood has no maximum there, and estimates depend on the "
            f"prior; {helps}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
    return bool(far.any())
