"""Detection of linearly dependent columns, whose coefficients the rows do not identify."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

_NOTHING = 0.99  # remaining share of a direction's prior variance that counts as no information
_SHOWN = 8  # names
_ALONE = 0.99  # share of a coefficient's length in directions without information
_PART = 0.02  # relative to a direction's largest coefficient; columns below it are not named


def warn_of_dependence(
    names: Sequence[str], before: Tensor, after: Tensor, *, shown: str = "those of the prior", stacklevel: int = 3
) -> bool:
    """Warn about coefficients with a direction of no information in the rows, as for linearly dependent columns.

    Returns whether it has.

    Args:
        names: of the coefficients.
        before, after: covariances of their means, `(d, d)`, without and with the rows; the columns themselves, which
            sites do not send, are not needed.
        shown: value of the estimates along such a direction.
        stacklevel: as for `warnings.warn`.

    Example:
        >>> import torch, warnings
        >>> rows = torch.tensor([[1.0, 2.0, 3.0], [1.0, 4.0, 5.0], [1.0, 1.0, 2.0]]).double()  # the last is a sum
        >>> before = 100 * torch.eye(3).double()
        >>> after = torch.linalg.inv(before.inverse() + rows.T @ rows)
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warned = warn_of_dependence(["Intercept", "a", "b"], before, after)
        >>> str(seen[0].message)[:90]
        "Expected columns that are linearly independent, but those of 'Intercept', 'a' and 'b' are "
    """
    empty = _empty(before, after)
    if empty.shape[1] in (0, len(before)):  # no rows have been used yet
        return False
    listed = taking_part(names, empty)
    some = listed if len(listed) <= _SHOWN else [*listed[:_SHOWN], f"{len(listed) - _SHOWN} more"]
    together = " and ".join([", ".join(some[:-1]), some[-1]] if some[1:] else some)
    warnings.warn(
        f"Expected columns that are linearly independent, but those of {together} are dependent, or nearly so compared "
        f"with their prior: rows do not inform {empty.shape[1]} combination{'s' * (empty.shape[1] > 1)} of their "
        f"coefficients, whose estimates are {shown}; leave as many of the terms out",
        RuntimeWarning,
        stacklevel=stacklevel,
    )
    return True


def alone(before: Tensor, after: Tensor, shown: Tensor) -> Tensor:
    """Return for which coefficients rows have no information whatever the others are, `(q,)`.

    Dependent columns are at least two. A single coefficient without information is separated: rows have moved it so far
    that their likelihood is flat.

    Args:
        before, after: as for `warn_of_dependence`.
        shown: `(q, d)` makes the coefficients, in units of their columns' sds.

    >>> before, after = torch.eye(3).double(), torch.diag(torch.tensor([1.0, 0.1, 0.1])).double()
    >>> alone(before, after, torch.eye(3).double())
    tensor([ True, False, False])
    """
    empty = shown @ _empty(before, after)
    return torch.linalg.qr(empty).Q.norm(dim=1) > _ALONE


def _empty(before: Tensor, after: Tensor) -> Tensor:
    """Return the directions without information in the rows, `(d, n)`."""
    root = torch.linalg.cholesky(before)
    half = torch.linalg.solve_triangular(root, after, upper=False)
    left, directions = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.mT, upper=False))
    return root @ directions[:, left > _NOTHING]


def taking_part(names: Sequence[str], directions: Tensor) -> list[str]:
    """Return the quoted names of coefficients with a share in some of the directions `(d, n)`.

    >>> taking_part(["a", "b", "c"], torch.tensor([[1.0], [-1.0], [0.001]]))
    ["'a'", "'b'"]
    """
    involved = (directions.abs() > _PART * directions.abs().amax(0)).any(1)
    return [repr(name) for name, each in zip(names, involved.tolist()) if each]
