"""Derivatives of rows' log likelihoods along given directions: variances of predictors, third and fourth derivatives.

Third and fourth derivatives in θ are sums over rows of products of their columns, computed by one matrix product for
all nodes; the derivative along a direction is then a sum over these numbers.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.models import gaussian

Powers = tuple[Tensor, Tensor]  # products of three and of four


class Forms(NamedTuple):
    """Sums Σ values · (x'columns v)^k over rows for k = 3 and 4, as forms in v `(c,)`."""

    cubic: Tensor  # (K, R, c (c + 1) / 2, c) of a pair of coordinates and one
    quartic: Tensor  # (K, R, c (c + 1) / 2, c (c + 1) / 2) of two pairs

    def at(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return both at nodes v `(J, c)`, `(K, R, J)`."""
        first, second = torch.tril_indices(nodes.shape[1], nodes.shape[1], device=nodes.device)
        pairs = nodes[:, first] * nodes[:, second] * twice(nodes)
        three = (pairs[:, :, None] * nodes[:, None, :]).flatten(1)
        four = (pairs[:, :, None] * pairs[:, None, :]).flatten(1)
        return self.cubic.flatten(2) @ three.mT, self.quartic.flatten(2) @ four.mT


def twice(like: Tensor) -> Tensor:
    """Return the multiplicities of pairs of `like`'s last coordinates in a square, in the order of `gaussian.pack`."""
    first, second = torch.tril_indices(like.shape[-1], like.shape[-1], device=like.device)
    return torch.where(first == second, 1.0, 2.0).to(like)


def cubic(third: Tensor, columns: Tensor) -> Tensor:
    """Return `Forms.cubic` from sums of values times products of three of x, `(K, R, ...)`; columns `(K, R, e, c)`."""
    return _pairs(columns).mT @ third[..., _places(columns.shape[-2])[1]] @ columns


def forms(third: Tensor, fourth: Tensor, columns: Tensor) -> Forms:
    """Return both forms from sums of values times products of three, and of four, of x."""
    pairs = _pairs(columns)
    quartic = pairs.mT @ fourth[..., _places(columns.shape[-2])[2]] @ pairs
    return Forms(cubic(third, columns), quartic)


def _pairs(columns: Tensor) -> Tensor:
    """Return the weights of products of two columns of x with products of two others, `(K, R, pairs, pairs)`."""
    row, column = _places(columns.shape[-2])[0]
    first, second = torch.tril_indices(columns.shape[-1], columns.shape[-1], device=columns.device)
    left, right = columns[..., row, :], columns[..., column, :]
    same = columns.new_tensor([0.5 if i == j else 1.0 for i, j in zip(row, column)])
    return (left[..., first] * right[..., second] + left[..., second] * right[..., first]) * same[:, None]


def monomials(x: Tensor) -> Powers:
    """Return the products of three and of four coordinates of x `(..., e)`, each product once."""
    size = x.shape[-1]
    three, four = (list(combinations_with_replacement(range(size), k)) for k in (3, 4))
    two = {(i, j): x[..., i] * x[..., j] for i, j in combinations_with_replacement(range(size), 2)}
    return (
        torch.stack([two[c[0], c[1]] * x[..., c[2]] for c in three], -1),
        torch.stack([two[c[0], c[1]] * two[c[2], c[3]] for c in four], -1),
    )


@cache
def _places(size: int) -> tuple[tuple[list[int], list[int]], list[list[int]], list[list[int]]]:
    """Return both numbers of every pair, and the positions of products of a pair with a number, and with a pair."""
    pairs = list(combinations_with_replacement(range(size), 2))
    three, four = ({c: i for i, c in enumerate(combinations_with_replacement(range(size), k))} for k in (3, 4))
    row, column = zip(*pairs)
    cubic = [[three[tuple(sorted((*pair, k)))] for k in range(size)] for pair in pairs]
    quartic = [[four[tuple(sorted(one + other))] for other in pairs] for one in pairs]
    return (list(row), list(column)), cubic, quartic


def variances(products: Tensor, columns: Tensor) -> Tensor:
    """Return the variances of rows' predictors under θ = columns · z, `(K, R, N)`, from their xx', packed."""
    spread = columns @ columns.mT
    return (gaussian.pack(spread) * twice(spread)) @ products.mT
