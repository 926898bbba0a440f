r"""Robust rules: a function of stacked messages, with the conditions under which it holds.

There are two kinds of rule. *Coordinatewise* rules treat one coordinate of all messages at a time (`by_columns`). The
others treat whole messages :math:`x_1, \dots, x_M` and return :math:`\sum_i a_i x_i`, where the coefficients `a` depend
only on the inner products :math:`\langle x_i, x_j\rangle` (`by_inner_products`): the messages are read twice, however
many steps the search for `a` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Average = Callable[[Tensor, Tensor], Tensor]  # (values (..., M, D), weights (..., M)) -> (..., D)
Coefficients = Callable[[Tensor, Tensor], Tensor]  # (inner products (..., M, M), weights (..., M)) -> (..., M)

_NUMBERS = 2**20  # numbers in a block of columns, so that it stays in the processor's cache


class Rule(NamedTuple):
    """Describe a robust average of messages.

    Attributes:
        name: name in errors.
        average: (values `(..., M, D)`, float64 weights `(..., M)` that sum to one) -> `(..., D)`.
        least: least number of messages.
        convex: whether the average is a convex combination of whole messages, which keeps a matrix positive definite if
            it is so in all of them.
        reference: the client whose message is not averaged but is the reference for the others; it comes first.

    Example:
        >>> import torch
        >>> def medoid(faulty):  # the message with the least sum of distances to the others
        ...     check_faulty(faulty)
        ...     def coefficients(products, weights):
        ...         far = (squared_distances(products).sqrt() * weights[..., None, :]).sum(-1)
        ...         return one_hot(far.argmin(-1), far.shape[-1])
        ...     return Rule("medoid", by_inner_products(coefficients), least=2 * faulty + 1, convex=True)
        >>> messages = torch.tensor([[1.0, 7.0], [2.0, 7.0], [3.0, 7.0], [4.0, 7.0], [100.0, 0.0]])
        >>> medoid(faulty=1).average(messages, torch.full((5,), 0.2, dtype=torch.float64))
        tensor([3., 7.], dtype=torch.float64)
    """

    name: str
    average: Average
    least: int = 1
    convex: bool = False
    reference: int | None = None


def check_faulty(faulty: int) -> None:
    """Raise ValueError unless `faulty` is a whole number of at least 0."""
    if not (isinstance(faulty, int) and faulty >= 0):
        raise ValueError(f"Expected the number of faulty clients as a whole number of at least 0, but got {faulty!r}")


def by_columns(average: Average) -> Average:
    """Return a coordinatewise function in blocks of columns, each laid out with a coordinate's numbers side by side.

    Args:
        average: (values `(..., D, M)`, weights `(..., M)`) -> `(..., D)`.

    >>> import torch
    >>> inner = by_columns(lambda values, weights: values.sort(-1).values[..., 1:-1].mean(-1))  # without the extremes
    >>> inner(torch.tensor([[1.0, 9.0], [2.0, 8.0], [99.0, 7.0]]), torch.full((3,), 1 / 3))
    tensor([2., 8.])
    """

    def blocks(values: Tensor, weights: Tensor) -> Tensor:
        columns = max(1, _NUMBERS // max(1, values[..., 0].numel()))
        return torch.cat([average(part.mT.contiguous(), weights) for part in values.split(columns, -1)], -1)

    return blocks


def by_inner_products(coefficients: Coefficients) -> Average:
    """Return Σ a_i x_i, float64, with coefficients that depend on the messages' inner products."""
    return lambda values, weights: combined(coefficients(inner_products(values), weights), values)


def inner_products(values: Tensor) -> Tensor:
    """Return ⟨x_i, x_j⟩, `(..., M, M)` float64, of values `(..., M, D)`."""
    total = torch.zeros(*values.shape[:-1], values.shape[-2], dtype=torch.float64, device=values.device)
    for part in _wide(values):
        total += part @ part.mT
    return total


def combined(coefficients: Tensor, values: Tensor) -> Tensor:
    """Return Σ a_i x_i, `(..., D)` float64, for coefficients `(..., M)`; `(..., A, D)` for `(..., A, M)`."""
    if coefficients.ndim == values.ndim:
        return torch.cat([coefficients @ part for part in _wide(values)], -1)
    return combined(coefficients[..., None, :], values)[..., 0, :]


def squared_distances(products: Tensor) -> Tensor:
    """Return ‖x_i − x_j‖², `(..., M, M)` and symmetric to the bit, of inner products."""
    products = 0.5 * (products + products.mT)
    squares = products.diagonal(dim1=-2, dim2=-1)
    return (squares[..., None] + squares[..., None, :] - 2 * products).clamp(min=0)


def distances_from(products: Tensor, coefficients: Tensor) -> Tensor:
    """Return ‖x_i − Σ_j a_j x_j‖, `(..., M)`.

    >>> import torch
    >>> messages, weights = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]]), torch.full((5,), 0.2).double()
    >>> far = distances_from(inner_products(messages), weights)  # from the mean, 22
    >>> far.round(decimals=3)
    tensor([21., 20., 19., 18., 78.], dtype=torch.float64)
    >>> combined(normalised(torch.where(far < far.max(), weights, 0.0)), messages)  # the mean without the farthest
    tensor([2.5000], dtype=torch.float64)
    """
    towards = (products @ coefficients[..., None])[..., 0]
    square = (towards * coefficients).sum(-1, keepdim=True)
    return (products.diagonal(dim1=-2, dim2=-1) - 2 * towards + square).clamp(min=0).sqrt()


def one_hot(index: Tensor, count: int) -> Tensor:
    """Return coefficients that choose a message, `(...)` -> `(..., count)` float64."""
    return torch.nn.functional.one_hot(index, count).to(torch.float64)


def normalised(coefficients: Tensor) -> Tensor:
    """Return coefficients that sum to one."""
    return coefficients / coefficients.sum(-1, keepdim=True)


def _wide(values: Tensor) -> list[Tensor]:
    """Return blocks of columns in float64; of no columns one block."""
    columns = max(1, _NUMBERS // max(1, values[..., 0].numel() if values.shape[-1] else 1))
    return [part.to(torch.float64) for part in values.split(columns, -1)]
