"""Derivatives of rows' log likelihoods in given directions: variances of predictors, third and fourth derivatives.

Third and fourth derivatives in θ are sums over rows of products of their columns, so that they are found by one product
of matrices for all nodes; what they are in a direction is then a sum over as many numbers.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from fedtorch.models import gaussian

Powers = tuple[Tensor, Tensor]  # products of three and of four


def forms(powers: Powers, values: tuple[Tensor, Tensor], columns: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ values · (x'columns v)^k over rows at nodes v, for k = 3 and 4, `(K, R, J)` each.

    Args:
        powers: of the rows' columns x, `(K, N, ...)`.
        values: two, `(K, R, N)`.
        columns: `(K, R, e, c)`.
        nodes: v, `(J, c)`.
    """
    (row, column), three, four = _places(columns.shape[-2])
    first, second = torch.tril_indices(columns.shape[-1], columns.shape[-1], device=columns.device)
    left, right = columns[..., row, :], columns[..., column, :]
    pairs = left[..., first] * right[..., second] + left[..., second] * right[..., first]
    same = columns.new_tensor([0.5 if i == j else 1.0 for i, j in zip(row, column)])
    pairs = pairs * same[:, None]  # what products of two of x are multiplied by in products of two of x'columns
    cubic = pairs.mT @ (values[0] @ powers[0])[..., three] @ columns
    quartic = pairs.mT @ (values[1] @ powers[1])[..., four] @ pairs
    products = torch.where(first == second, 1.0, 2.0).to(nodes) * nodes[:, first] * nodes[:, second]
    three_nodes = (products[:, :, None] * nodes[:, None, :]).flatten(1)
    four_nodes = (products[:, :, None] * products[:, None, :]).flatten(1)
    return cubic.flatten(2) @ three_nodes.mT, quartic.flatten(2) @ four_nodes.mT


def monomials(x: Tensor) -> Powers:
    """Return the products of three and of four coordinates of x `(..., e)`, each product once."""
    size = x.shape[-1]
    three, four = (list(combinations_with_replacement(range(size), k)) for k in (3, 4))
    two = {(i, j): x[..., i] * x[..., j] for i, j in combinations_with_replacement(range(size), 2)}
    return (
        torch.stack([two[c[:2]] * x[..., c[2]] for c in three], -1),
        torch.stack([two[c[:2]] * two[c[2:]] for c in four], -1),
    )


@cache
def _places(size: int) -> tuple[tuple[list[int], list[int]], list[list[int]], list[list[int]]]:
    """Return both numbers of every pair, and where the products of pair and number, and of two pairs, are."""
    pairs = list(combinations_with_replacement(range(size), 2))
    three, four = ({c: i for i, c in enumerate(combinations_with_replacement(range(size), k))} for k in (3, 4))
    row, column = zip(*pairs)
    cubic = [[three[tuple(sorted((*pair, k)))] for k in range(size)] for pair in pairs]
    quartic = [[four[tuple(sorted(one + other))] for other in pairs] for one in pairs]
    return (list(row), list(column)), cubic, quartic


def variances(products: Tensor, columns: Tensor) -> Tensor:
    """Return the variances of rows' predictors under θ = columns · z, `(K, R, N)`, from their xx', packed."""
    packed = gaussian.pack(columns @ columns.mT)
    twice = gaussian.pack(2 - torch.eye(columns.shape[-2], dtype=packed.dtype, device=packed.device))
    return (packed * twice) @ products.mT
