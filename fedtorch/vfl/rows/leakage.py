r"""Labels among features: a column that equals or determines the response.

A column with v distinct values determines the labels where all rows of one value have one label, and where the labels
follow each other in blocks along its order. Of all arrangements of n labels with class counts :math:`n_c` at most
:math:`C^v`, and C! for blocks, do so; where that is a share of less than 10⁻⁶ it is not chance. A real response is
determined where it is a linear function of a column.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

_CHANCE = 1e-6
_MOST_CLASSES = 20


class LabelLeakageWarning(UserWarning):
    """A party's feature says what the label is.

    >>> ill = torch.tensor([0.0, 1.0] * 20)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", LabelLeakageWarning)
    ...     warn_of_leakage(torch.stack([torch.arange(40.0) % 7, 1 - ill], 1), ill, "clinic", ["ward", "discharged"])
    Traceback (most recent call last):
    fedtorch.vfl.rows.leakage.LabelLeakageWarning: Feature 'discharged' of party 'clinic' determines the label;
    is it made from it, or known only after it?
    """


def warn_of_leakage(x: Tensor, response: Tensor, party: str, names: Sequence[str] = ()) -> None:
    """Warn of every column of a party that determines the response.

    Args:
        x: `(n, p)`; features of another shape, such as images, are not looked at.
        response: `(n,)`.
        party: its name.
        names: of the columns.
    """
    if x.ndim != 2:
        return
    for column in range(x.shape[1]):
        if determines(x[:, column], response):
            name = repr(names[column]) if names else f"number {column}"
            warnings.warn(
                f"Feature {name} of party {party!r} determines the label; is it made from it, or known only after it?",
                LabelLeakageWarning,
                stacklevel=3,
            )


def determines(feature: Tensor, response: Tensor) -> bool:
    """Return whether a column `(n,)` determines a response `(n,)`, beyond chance."""
    seen = feature.isfinite()
    feature, response = feature[seen].double(), response[seen].double()
    labels, codes, counts = response.unique(return_inverse=True, return_counts=True)
    if len(feature) < 3 or len(labels) < 2:
        return False
    if len(labels) > _MOST_CLASSES:
        return _linear(feature, response)
    arrangements = math.lgamma(len(feature) + 1) - sum(math.lgamma(count + 1) for count in counts.tolist())
    values, places = feature.unique(return_inverse=True)
    pure = torch.zeros(len(values), len(labels), dtype=torch.bool)
    pure[places, codes] = True
    if bool((pure.sum(1) > 1).any()):
        return False
    ordered = pure.int().argmax(1)  # the one label of each value, in the order of values
    blocks = int((ordered[1:] != ordered[:-1]).sum()) + 1
    ways = len(values) * math.log(len(labels))
    if blocks == len(labels):
        ways = min(ways, math.lgamma(len(labels) + 1))
    return ways - arrangements < math.log(_CHANCE)


def _linear(feature: Tensor, response: Tensor) -> bool:
    a, b = feature - feature.mean(), response - response.mean()
    scale = a.norm() * b.norm()
    return bool(scale > 0 and (a @ b).abs() / scale > 1 - 1e-9)
