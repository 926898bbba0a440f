"""Clients' rows for models, with checks of shapes and finiteness, in float64.

Rows of a regression are (x, y), or (x, y, {"offset": …, "weight": …, "trials": …}) with any of these names, a number
for each row: a term of the predictor, the row's weight, and the number of trials in which y counts successes. A model
refuses unknown names.

>>> import torch, fedtorch as ft
>>> from fedtorch.models import rows
>>> data = ft.data.from_tensors([(torch.ones(3, 2), torch.ones(3, 1)), (torch.ones(1, 2), torch.ones(1, 1))])
>>> x, y = rows.regression_rows(data.stack([0, 1]))
>>> x.shape, y.tolist()  # zeros where there is no row
(torch.Size([2, 3, 2]), [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
>>> rows.client_by_client(lambda own: own.mean(0), data.counts, x)  # each from its own rows
tensor([[1., 1.],
        [1., 1.]], dtype=torch.float64)
>>> groups = (torch.ones(3, 2), torch.tensor([1.0, 0.0, 4.0]), {"trials": torch.tensor([5.0, 2.0, 4.0])})
>>> rows.observations(ft.data.from_tensors([groups]).stack([0])).trials
tensor([[5., 2., 4.]], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import BadClients
from fedtorch.expected import loaded
from fedtorch.tree import Tree

EXTRAS = ("offset", "weight", "trials")
_MISSING = "; fill missing values by fedtorch.models.gibbs.imputation.impute"
_INSTEAD = f"{_MISSING}, or in every round by imputation.imputing"


class Observations(NamedTuple):
    """Rows of a regression, float64, zero on padding."""

    x: Tensor  # (K, N, d)
    y: Tensor  # (K, N)
    offset: Tensor | None = None  # (K, N) added to the linear predictor
    weight: Tensor | None = None  # (K, N) positive
    trials: Tensor | None = None  # (K, N) whole, at least 1

    def whitened(self) -> tuple[Tensor, Tensor]:
        """Return x and y as rows with unit variance and without an offset."""
        x, y = self.x, self.y
        if self.offset is not None:
            y = y - self.offset
        if self.weight is not None:
            root = self.weight.sqrt()
            x, y = root[..., None] * x, root * y
        return x, y


def observations(data: Any, features: int | None = None, extras: Sequence[str] = EXTRAS) -> Observations:
    """Return the rows of a block with their further fields.

    Args:
        data: `ClientData` of rows (x `(d,)`, y `()` or `(1,)`), or of these and a dict of numbers by name.
        features: d, if it is known.
        extras: the model's further fields.

    Raises:
        ValueError: rows of another form, or with an unknown field; `BadClients`: NaN or Inf, weights that are not
            positive, trials that are not whole numbers from 1.
    """
    pair, beside = _parted(data.batch, extras)
    x, y = regression_fields(pair, features)
    x, y = _checked(data, x, "x", _INSTEAD), _checked(data, y, "y", _INSTEAD)
    more = {name: _checked(data, _column(values, name, y), name, "") for name, values in beside.items()}
    if "weight" in more:
        bad = (more["weight"] <= 0) & data.mask
        got = _some(more["weight"], bad)
        refuse(
            bad.any(1), f"Expected positive weights, but got {got}; leave such rows out", "others than positive weights"
        )
    if "trials" in more:
        bad = ((more["trials"] < 1) | (more["trials"] != more["trials"].round())) & data.mask
        refuse(
            bad.any(1),
            f"Expected trials, whole numbers from 1, but got {_some(more['trials'], bad)}; leave rows without any out",
            "others than trials, whole numbers from 1",
        )
    return Observations(x, y, **more)


def log_weights(data: Any) -> Tensor:
    """Return Σ log w of each client's rows, `(K,)`; zeros where rows have no weights.

    >>> import fedtorch as ft
    >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2), {"weight": torch.tensor([4.0, 0.5])})])
    >>> log_weights(data.stack([0])).exp()
    tensor([2.], dtype=torch.float64)
    """
    weight = _parted(data.batch, EXTRAS)[1].get("weight")
    if weight is None:
        return torch.zeros(len(data.count), dtype=torch.float64, device=data.count.device)
    weight = weight.to(torch.float64).reshape(data.mask.shape)
    return torch.where(data.mask, weight, 1.0).log().sum(1)


def _parted(batch: Tree, extras: Sequence[str]) -> tuple[Tree, Mapping[str, Tensor]]:
    """Separate rows from their third field, whose names must be known."""
    if not (isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[2], Mapping)):
        return batch, {}
    unknown = [name for name in batch[2] if name not in extras]
    if unknown:
        raise ValueError(
            f"Expected rows (x, y), with {' or '.join(extras) or 'no extras'} for this model, but got "
            f"{', '.join(map(repr, unknown))}; leave it out, or use another model"
        )
    return tuple(batch[:2]), batch[2]


def _column(values: Tensor, name: str, y: Tensor) -> Tensor:
    if values.shape not in (y.shape, (*y.shape, 1)):
        raise ValueError(f"Expected one number a row as {name}, but got shape {tuple(values.shape[2:])}")
    return values.reshape(y.shape)


def _some(values: Tensor, bad: Tensor) -> str:
    """Return the least and greatest of the bad values."""
    if not bool(bad.any()):
        return ""
    least, greatest = float(values[bad].min()), float(values[bad].max())
    return f"{least:g}" if least == greatest else f"{least:g} to {greatest:g}"


def regression_rows(data: Any, features: int | None = None) -> tuple[Tensor, Tensor]:
    """Return x `(K, N, d)` and y `(K, N)` of a block, zero on padding.

    Args:
        data: `ClientData` of rows (x `(d,)`, y `()` or `(1,)`).
        features: d, if it is known.

    Raises:
        ValueError: rows of another form; `BadClients`: NaN or Inf in them.
    """
    return observations(data, features, ())[:2]


def regression_fields(batch: Tree, features: int | None = None) -> tuple[Tensor, Tensor]:
    """Return x `(K, N, d)` and y `(K, N)` of a block's batch unchanged; errors as for `regression_rows`, except NaN.

    >>> x, y = regression_fields((torch.ones(2, 5, 3), torch.ones(2, 5, 1)), features=3)
    >>> x.shape, y.shape
    (torch.Size([2, 5, 3]), torch.Size([2, 5]))
    """
    batch, _ = _parted(batch, ())
    if isinstance(batch, loaded("fedtorch.data.frames.incomplete", "Incomplete")):
        raise ValueError(
            "Expected complete rows (x, y), but got rows with missing cells; fit what ft.inference.imputed(data) "
            "completes and pool the fits, integrate cells out by hierarchical.regression(…, covariates=), or let a "
            "Gibbs sampler of linear regressions draw the cells by imputation.imputing"
        )
    leaves = tree.leaves(batch)
    shapes = [tuple(leaf.shape[2:]) for leaf in leaves]
    wanted = [len(shape) == 1 for shape in shapes[:1]] if features is None else [shapes[:1] == [(features,)]]
    if len(shapes) != 2 or not all(wanted) or shapes[1] not in ((), (1,)):
        known = "d" if features is None else features
        raise ValueError(
            f"Expected rows (x, y) of shapes ({known},) and (), but got {shapes}; pass "
            "ft.data.from_tensors([(x, y), …])"
        )
    return leaves[0], leaves[1].reshape(leaves[1].shape[:2])


def variable_rows(data: Any) -> Tensor:
    """Return y `(K, N, p)` of a block, zero on padding.

    Args:
        data: `ClientData` of rows y `(p,)`, p at least 2.

    Raises:
        ValueError: rows of another form; `BadClients`: NaN or Inf in them.
    """
    shapes = [tuple(leaf.shape[2:]) for leaf in tree.leaves(data.batch)]
    if len(shapes) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"Expected rows y of shape (p,) and nothing else, but got rows of shapes {shapes}")
    (y,) = tree.leaves(data.batch)
    if y.shape[-1] < 2:
        raise ValueError(f"Expected at least 2 variables, but got {y.shape[-1]}")
    return _checked(data, y, "y", _MISSING)


def refuse(bad: Tensor, message: str, told: str | None = None) -> None:
    """Raise `BadClients` with this message if any client `(K,)` is bad; `told` is a version without rows' values."""
    if bool(bad.any()):
        raise BadClients(bad.nonzero()[:, 0], message, told)


def client_by_client(function: Callable[..., Tree], count: Tensor, *leaves: Tensor) -> Tree:
    """Apply `function` to each client's own rows and stack: a client's numbers do not depend on its block.

    Args:
        function: own rows `(n_k, ...)` of every leaf, in separate memory -> a tree.
        count: rows of each client, `(K,)`.
        leaves: `(K, N, ...)`.
    """
    results = [function(*(leaf[k, :n].clone() for leaf in leaves)) for k, n in enumerate(count.tolist())]
    alike = results or [function(*(leaf.new_zeros(1, *leaf.shape[2:]) for leaf in leaves))]
    return tree.take(tree.stack(alike), slice(len(results)))


def _checked(data: Any, values: Tensor, name: str, remedy: str) -> Tensor:
    values = values.to(torch.float64)
    wrong = ~values.flatten(1).isfinite().all(1)
    refuse(wrong, f"Expected finite {name}, but got NaN or Inf{remedy}", f"others than finite {name}")
    mask = data.mask
    return values if bool(mask.all()) else torch.where(tree.along(mask, values), values, 0.0)
