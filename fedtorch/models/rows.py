"""Clients' rows as models take them in: the shapes that are expected, float64, finite.

>>> import torch, fedtorch as ft
>>> from fedtorch.models import rows
>>> data = ft.data.from_tensors([(torch.ones(3, 2), torch.ones(3, 1)), (torch.ones(1, 2), torch.ones(1, 1))])
>>> x, y = rows.regression_rows(data.stack([0, 1]))
>>> x.shape, y.tolist()  # zeros where there is no row
(torch.Size([2, 3, 2]), [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
>>> rows.client_by_client(lambda own: own.mean(0), data.counts, x)  # each from its own rows
tensor([[1., 1.],
        [1., 1.]], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import BadClients
from fedtorch.tree import Tree


def regression_rows(data: Any, features: int | None = None) -> tuple[Tensor, Tensor]:
    """Return x `(K, N, d)` and y `(K, N)` of a block, zero where there is no row.

    Args:
        data: `ClientData` of rows (x `(d,)`, y `()` or `(1,)`).
        features: d, where it is known.

    Raises:
        ValueError: rows of another form; `BadClients`: NaN or Inf in them.
    """
    x, y = regression_fields(data.batch, features)
    instead = ", or in every round by imputation.imputing"
    return _checked(data, x, "x", instead), _checked(data, y, "y", instead)


def regression_fields(batch: Tree, features: int | None = None) -> tuple[Tensor, Tensor]:
    """Return x `(K, N, d)` and y `(K, N)` of a block's batch as they are; errors as for `regression_rows`, but for NaN.

    >>> x, y = regression_fields((torch.ones(2, 5, 3), torch.ones(2, 5, 1)), features=3)
    >>> x.shape, y.shape
    (torch.Size([2, 5, 3]), torch.Size([2, 5]))
    """
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
    """Return y `(K, N, p)` of a block, zero where there is no row.

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
    return _checked(data, y, "y")


def refuse(bad: Tensor, message: str) -> None:
    """Raise `BadClients` with this message if any of the clients `(K,)` is bad."""
    if bool(bad.any()):
        raise BadClients(bad.nonzero()[:, 0], message)


def client_by_client(function: Callable[..., Tree], count: Tensor, *leaves: Tensor) -> Tree:
    """Apply `function` to each client's own rows and stack: a client's numbers do not depend on its block.

    Args:
        function: own rows `(n_k, ...)` of every leaf, in memory of their own -> a tree.
        count: rows of each client, `(K,)`.
        leaves: `(K, N, ...)`.
    """
    results = [function(*(leaf[k, :n].clone() for leaf in leaves)) for k, n in enumerate(count.tolist())]
    alike = results or [function(*(leaf.new_zeros(1, *leaf.shape[2:]) for leaf in leaves))]
    return tree.take(tree.stack(alike), slice(len(results)))


def _checked(data: Any, values: Tensor, name: str, instead: str = "") -> Tensor:
    values = values.to(torch.float64)
    refuse(
        ~values.flatten(1).isfinite().all(1),
        f"Expected finite {name}, but got NaN or Inf; fill missing values by "
        f"fedtorch.models.gibbs.imputation.impute{instead}",
    )
    mask = data.mask
    return values if bool(mask.all()) else torch.where(tree.along(mask, values), values, 0.0)
