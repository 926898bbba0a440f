"""Extreme eigenvalues of large sparse symmetric matrices whose null space is known.

Two methods complete each other. Lanczos multiplies only, and is quick where the smallest positive eigenvalue is not
small beside the largest. Where it is, as on a grid or a map, the network falls into parts by removing few nodes, so
that a sparse factorisation stays small, and Lanczos on the inverse is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedtorch import random

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["largest_eigenvalue", "smallest_positive_eigenvalue"]

_RESTARTS = 30
_SHIFT = 1e-9  # of the largest eigenvalue: what makes a singular matrix one with factors


def largest_eigenvalue(matrix: csr_matrix) -> float:
    """The largest eigenvalue of a symmetric matrix of two rows or more."""
    from scipy.sparse.linalg import eigsh

    if matrix.shape[0] == 2:
        return float(np.linalg.eigvalsh(matrix.toarray())[-1])
    return float(eigsh(matrix, 1, which="LA", return_eigenvectors=False, v0=_start(matrix.shape[0]))[0])


def smallest_positive_eigenvalue(
    matrix: csr_matrix, project: Callable[[np.ndarray], np.ndarray], top: float, restarts: int = _RESTARTS
) -> float:
    """The smallest eigenvalue of a positive semi-definite matrix on the complement of its null space.

    Args:
        matrix: `(N, N)`, N at least 3.
        project: takes a vector `(N,)` to the complement of the null space.
        top: a number that is not less than the largest eigenvalue.
        restarts: of Lanczos, 40 products each, before the matrix is factorised.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    size = matrix.shape[0]
    options = {"k": 1, "which": "LA", "ncv": min(40, size), "v0": project(_start(size)), "return_eigenvectors": False}
    reverse = LinearOperator((size, size), matvec=lambda x: top * project(x) - matrix @ x, dtype=np.float64)
    try:
        return top - float(eigsh(reverse, tol=1e-12, maxiter=restarts, **options)[0])
    except ArpackNoConvergence:
        inverse = _inverse(matrix, _SHIFT * top, project)
        operator = LinearOperator((size, size), matvec=inverse, dtype=np.float64)
        return 1 / float(eigsh(operator, **options)[0]) - _SHIFT * top


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
    """A start for Lanczos that is the same every time."""
    return random.normal(random.key(size), (size,), torch.float64).numpy()
