"""Signs that a column tells yes from no without error, so that a logistic likelihood has no maximum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

_LARGE = 2.5  # of a coefficient per standard deviation of its column, an odds ratio of 12
_UNSURE = 0.2  # standard error or deviation, as a part of the coefficient
_PRIOR = 0.07  # of the variance before, what rows leave of it


def warn_of_separation(
    names: Sequence[str], coefficients: Tensor, sds: Tensor, *, before: Tensor | None = None, stacklevel: int = 3
) -> None:
    """Warn of coefficients that are large, and unsure or held by the prior, as a likelihood would take to infinity.

    Args:
        names: of the coefficients.
        coefficients, sds: `(d,)`, of columns with standard deviation 1; an sd may be NaN.
        before: sds under the prior `(d,)`, where there is one: where rows leave more than a little of its variance to a
            large coefficient, they would have it larger still.
        stacklevel: as that of `warnings.warn`.

    Source: Albert and Anderson (1984), "On the existence of maximum likelihood estimates in logistic regression
    models".

    Example:
        >>> import torch, warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warn_of_separation(["age", "sex[T.male]"], torch.tensor([0.5, 4.0]), torch.tensor([0.1, 1.2]))
        >>> str(seen[0].message)[:60]
        "Expected responses that no column tells apart, but 'sex[T.ma"
    """
    size = coefficients.abs()
    known = sds <= _UNSURE * size
    if before is not None:
        known &= sds.square() <= _PRIOR * before.square()
    far = (size > _LARGE) & ~known
    if bool(far.any()):
        found = ", ".join(repr(name) for name, each in zip(names, far.tolist()) if each)
        warnings.warn(
            f"Expected responses that no column tells apart, but {found} may do so (separation): the likelihood has no "
            "maximum there, and what is found rests on the prior alone; merge levels, leave the column out, or choose "
            "the prior's sd= with care",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
