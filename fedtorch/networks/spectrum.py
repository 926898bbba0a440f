"""Extreme eigenvalues of large sparse symmetric matrices whose null space is known.

Two methods complement each other. Lanczos needs only products, and is fast if the smallest positive eigenvalue is not
small relative to the largest. If it is, as on a grid or a map, removing few nodes splits the network into parts, so a
sparse factorisation stays small, and Lanczos on the inverse is fast. A rough run of Lanczos decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedtorch import random

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_ROUGH = 0.005  # relative residual of the rough run
_SMALL = 0.01  # ratio to the largest eigenvalue below which the matrix is factorised
_FINE = 1e-9  # relative residual, which bounds the error; the error is about its square where eigenvalues are apart
_SHIFT = 1e-9  # regularisation of a singular matrix, relative to the largest eigenvalue


def largest_eigenvalue(matrix: csr_matrix) -> float:
    """Return the largest eigenvalue of a symmetric matrix of two rows or more, to a relative 1e-9 or better."""
    return _largest(lambda x: matrix @ x, _start(matrix.shape[0]), _FINE)[0]


def smallest_positive_eigenvalue(
    matrix: csr_matrix, project: Callable[[np.ndarray], np.ndarray], top: float, small: float = _SMALL
) -> float:
    """Return the smallest eigenvalue of a positive semi-definite matrix on the complement of its null space.

    The error is at most 1e-9 of the largest eigenvalue where Lanczos multiplies with the matrix, usually far less.

    Args:
        matrix: `(N, N)`, N at least 3.
        project: takes a vector `(N,)` to the complement of the null space.
        top: a number that is not less than the largest eigenvalue.
        small: ratio to `top` below which the eigenvalue is found by factorising the matrix.
    """
    reverse = lambda x: top * project(x) - matrix @ x
    value, vector = _largest(reverse, project(_start(matrix.shape[0])), _ROUGH)
    if top - value > small * top:
        return top - _largest(reverse, vector, _FINE)[0]
    inverse = _inverse(matrix, _SHIFT * top, project)
    return 1 / _largest(inverse, vector, _FINE)[0] - _SHIFT * top


def _largest(
    product: Callable[[np.ndarray], np.ndarray], start: np.ndarray, tolerance: float
) -> tuple[float, np.ndarray]:
    """Return the largest eigenvalue of the operator `product`, and its vector."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    size = len(start)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    values, vectors = eigsh(operator, 1, which="LA", ncv=min(40, size), v0=start, tol=tolerance, maxiter=10_000)
    return float(values[0]), vectors[:, 0]


def _inverse(
    matrix: csr_matrix, shift: float, project: Callable[[np.ndarray], np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    from scipy.sparse import identity
    from scipy.sparse.linalg import splu

    options = {"SymmetricMode": True}
    shifted = (matrix + shift * identity(matrix.shape[0])).tocsc()
    factors = splu(shifted, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    return lambda x: project(factors.solve(project(x)))


def _start(size: int) -> np.ndarray:
    """Return a start for Lanczos that is the same every time."""
    return random.normal(random.key(size), (size,), torch.float64).numpy()
