"""Normal factors of whitened values (sites), their posterior and evidence, and Cholesky factors.

>>> import torch
>>> from fedtorch.models.gaussian_process.algebra import GaussianSite, at_first_go, evidence, posterior
>>> sites = GaussianSite(torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[4.0], [4.0]]), torch.zeros(2))  # of two units
>>> mean, root, log_evidence = posterior(torch.eye(1), *sites.total())  # 8 / (1 + 1 + 2), √(1 / (1 + 1 + 2))
>>> mean, root, torch.allclose(log_evidence, evidence(sites.total()))
(tensor([2.]), tensor([[0.5000]]), True)
>>> at_first_go(evidence, sites.total()) == evidence(sites.total())  # a device is asked once only whether it went well
tensor(True)
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedtorch.linalg import symmetric

_ATTEMPTS = 7  # jitters that are tried, each ten times the last
_HOPED: ContextVar[list[Tensor] | None] = ContextVar("factors that are taken for positive definite", default=None)
Found = TypeVar("Found")


class GaussianSite(NamedTuple):
    r"""The units' likelihood of t, or its approximation: log-likelihood c + a't − ½ t'B t."""

    precision: Tensor  # (*b, P, P) B, P = latents · inducing inputs
    shift: Tensor  # (*b, P) a
    constant: Tensor  # (*b,) c

    def total(self) -> GaussianSite:
        """Return the sum over all batch dimensions."""
        size = self.shift.shape[-1]
        return GaussianSite(self.precision.sum_to_size(size, size), self.shift.sum_to_size(size), self.constant.sum())

    def turned(self, change: Tensor) -> GaussianSite:
        """Return the likelihood of u where t = `change` u, `(*b, P, P)`."""
        shift = (change.mT @ self.shift[..., None])[..., 0]
        return GaussianSite(change.mT @ self.precision @ change, shift, self.constant)


def posterior(change: Tensor, precision: Tensor, shift: Tensor, constant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mean `(*b, P)`, lower root of the covariance `(*b, P, P)`, log-evidence `(*b,)`) of t from a site.

    Args:
        change: the prior's Z `(P, P)`, lower triangular; t has the prior precision Z'Z.
        precision: B, or Σ B of units that share t, `(*b, P, P)`.
        shift: Σ a, `(*b, P)`.
        constant: Σ c, `(*b,)`.
    """
    # In coordinates that are white under the prior: the numbers of B span many orders of magnitude in others.
    half = torch.linalg.solve_triangular(change.mT, symmetric(precision), upper=True)
    white = torch.linalg.solve_triangular(change.mT, half.mT, upper=True)
    moved = torch.linalg.solve_triangular(change.mT, shift[..., None], upper=True)
    eye = torch.eye(white.shape[-1], dtype=white.dtype, device=white.device)
    # The factor of the matrix in reverse order gives a lower triangular root of the inverse.
    factor = stable_cholesky(eye + symmetric(white).flip(-1, -2), 0.0).flip(-1, -2)
    root = torch.linalg.solve_triangular(factor, eye, upper=True).mT
    solved = torch.linalg.solve_triangular(factor, moved, upper=True)
    minus_log = constant + 0.5 * (solved.square().sum((-1, -2)) - log_determinant(factor))
    mean, root = (torch.linalg.solve_triangular(change, part, upper=False) for part in (root @ solved, root))
    return mean[..., 0], root, minus_log


def evidence(site: GaussianSite) -> Tensor:
    """Return log ∫ N(z; 0, I) exp(c + a'z − ½ z'B z) dz, `(*b,)`."""
    eye = torch.eye(site.precision.shape[-1], dtype=site.precision.dtype, device=site.precision.device)
    factor = stable_cholesky(eye + symmetric(site.precision), 0.0)
    solved = torch.linalg.solve_triangular(factor, site.shift[..., None], upper=False)
    return site.constant + 0.5 * (solved.square().sum((-1, -2)) - log_determinant(factor))


def stable_cholesky(matrix: Tensor, jitter: float) -> Tensor:
    """Return Cholesky factors `(*b, n, n)`; only matrices that are not positive definite get jitter, increasingly more.

    Args:
        matrix: symmetric, `(*b, n, n)`.
        jitter: added to the diagonal, relative to its mean.

    Raises:
        ValueError: a matrix that is not positive definite even with 10⁶ times the jitter; the message names its place
            in a batch.

    >>> singular = torch.ones(2, 2, dtype=torch.float64)
    >>> factor = stable_cholesky(singular, jitter=1e-8)
    >>> torch.allclose(factor @ factor.mT, singular, rtol=0, atol=1e-6)
    True
    """
    smallest = torch.finfo(matrix.dtype).eps
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    scale = matrix.detach().diagonal(dim1=-2, dim2=-1).mean(-1)
    amount = torch.full_like(scale, max(jitter, 10 * smallest) if jitter > 0 else 0.0)
    for _ in range(_ATTEMPTS):
        factor, wrong = torch.linalg.cholesky_ex(matrix + (amount * scale)[..., None, None] * eye)
        failed = (wrong > 0) | ~factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
        hoped = _HOPED.get()
        if hoped is not None:
            hoped.append(failed.any())
            return factor
        if not bool(failed.any()):
            return factor
        tried, amount = amount, torch.where(failed, (10 * amount).clamp(min=1e-8), amount)
    place = f" number {failed.nonzero()[0].tolist()} of the batch" if failed.ndim else ""
    raise ValueError(
        f"Expected a positive definite covariance, but got one{place} that is not with a jitter of "
        f"{float(tried.max()):.0e}; look for outputs or hyperparameters that are not finite or enormous"
    )


def at_first_go(function: Callable[..., Found], *args: Any) -> Found:
    """Call `function(*args)` and check all of its `stable_cholesky` factors together, once.

    If a factorisation has failed, the function is called again and each factor is checked. So a device is synchronised
    only once as long as none fails.

    Args:
        function: deterministic and without side effects.
        args: its arguments.
    """
    hoped: list[Tensor] = []
    token = _HOPED.set(hoped)
    try:
        result = function(*args)
        failed = bool(torch.stack(hoped).any()) if hoped else False
    except (ValueError, RuntimeError):  # invalid numbers from a failed factor; otherwise the repetition raises again
        failed = True
    finally:
        _HOPED.reset(token)
    return function(*args) if failed else result


def block_diagonal(blocks: Tensor) -> Tensor:
    """Return `(*b, I, J, J)` as `(*b, IJ, IJ)`.

    >>> block_diagonal(torch.tensor([[[2.0]], [[3.0]]]))
    tensor([[2., 0.],
            [0., 3.]])
    """
    count, size = blocks.shape[-3], blocks.shape[-1]
    if count == 1:
        return blocks[..., 0, :, :]
    place = torch.eye(count, dtype=blocks.dtype, device=blocks.device)[:, None, :, None]
    whole = blocks[..., :, :, None, :] * place
    return whole.reshape(*blocks.shape[:-3], count * size, count * size)


def log_determinant(factor: Tensor) -> Tensor:
    """Return log |factor factor'| of triangular factors."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """Return factor⁻¹ right, of lower triangular factors."""
    return torch.linalg.solve_triangular(factor, right, upper=False)
