r"""Draws from the Gaussian conditional of regression coefficients, for many small problems at once.

For client k and chain c, with Gram matrix G = X'X, noise precision s and prior precisions d of the deviation δ,

.. math:: \delta \sim N(A^{-1} s X'r,\ A^{-1}), \qquad A = s G + \mathrm{diag}(d),

r being the residual at δ = 0. There are three methods, each with the same bits for a problem whatever is stacked beside
it:

- `elimination`: Gaussian elimination on all problems side by side, one coefficient at a time. Only additions,
  multiplications, divisions and roots are used, element by element, which IEEE arithmetic rounds alike in every place.
- `factorisation`: a Cholesky factor per problem from LAPACK, for more than 32 coefficients.
- `data_space`: the sampler of Bhattacharya, Chakraborty and Mallick ("Fast sampling with Gaussian scale mixture priors
  in high-dimensional regression", Biometrika 103, 2016, Algorithm 1), whose system has the size of the data, for more
  coefficients than rows.

Problems are `B = K · C` columns, the coefficients in front: `(p, B)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random
from fedtorch.models.linear import SufficientStatistics

SIDE_BY_SIDE = 32  # coefficients up to which elimination is the fastest; above that, designs store rows


class Design(NamedTuple):
    """The statistics of each client's rows for a linear regression; float64."""

    statistics: SufficientStatistics  # (K, ...)
    estimate: Tensor  # (K, p) the least squares estimate of least norm
    rss: Tensor  # (K,) its residual sum of squares
    degrees: Tensor  # (K,) rows that count for the noise: n, or n − 1 with an intercept
    x: Tensor | None  # (K, N, p), for many coefficients
    y: Tensor | None  # (K, N)


# (noise precisions (B,), prior precisions (p, B), standard normals (p, B)) -> (δ (p, B), residual sums of squares (B,))
Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def gaussian_conditional(design: Design, centre: Tensor, keys: Tensor) -> Draw:
    """Return the method for this number of coefficients, and the number of rows of each client.

    Args:
        design: K clients' data.
        centre: δ is the deviation from it, `(K, C, p)`.
        keys: `(K, C)`, for a method's draws beyond the given standard normals.
    """
    if design.x is None:
        return elimination(design.statistics.gram, design.estimate, design.rss, centre)
    return factorisation(design, centre, keys)


class Fold:
    """Sums over the first dimension of a buffer, in place and always in the same order: the second half onto the first.

    Args:
        buffer: `(n, ...)`, which calls overwrite; its first row is the sum.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.total, self.steps = buffer[0], []
        n = buffer.shape[0]
        while n > 1:
            half = (n + 1) // 2
            self.steps.append((buffer[: n - half], buffer[half:n]))
            n = half

    def __call__(self) -> Tensor:
        """Return the sum of the buffer's present values."""
        for target, source in self.steps:
            target.add_(source)
        return self.total


def least_norm(x: Tensor, y: Tensor) -> Tensor:
    """Return the least squares estimates of least norm `(..., p, m)` of rows x `(..., n, p)` and y `(..., n, m)`.

    Directions without information in the rows are found with the columns scaled to one size; the least norm is in their
    own units.
    """
    n, p = x.shape[-2:]
    scale = linalg.unit_scale(x.square().sum(-2))
    turn, upper = torch.linalg.qr(x * scale[..., None, :])
    rows = (0, 0, 0, max(p - n, 0))  # zeros, for a square matrix
    left, singular, right = torch.linalg.svd(torch.nn.functional.pad(upper, rows))
    known = singular > torch.finfo(x.dtype).eps * max(n, p) * singular[..., :1]
    target = left.mT @ torch.nn.functional.pad(turn.mT @ y, rows)
    inside = torch.where(known[..., None], target / singular[..., None], 0.0)
    solution = scale[..., None] * (right.mT @ inside)
    null = linalg.Equilibrated(scale, (singular * known).flip(-1), right.mT.flip(-1)).null()
    return solution - null @ (null.mT @ solution)


def elimination(gram: Tensor, estimate: Tensor, rss: Tensor, centre: Tensor) -> Draw:
    """Eliminate the columns of (A, s X'r), problems side by side.

    With A = U' diag(u)⁻¹ U, u the diagonal of U, elimination leaves (U, c); then U δ = c + √u z for standard normal z.
    A pivot is at least the prior's part of it; if rounding makes it smaller, as for dependent columns, it is set to
    that part, and the rest of its row to zero.

    Args:
        gram: G, `(K, p, p)`.
        estimate: the least squares estimates, `(K, p)`.
        rss: their residual sums of squares, `(K,)`.
        centre: δ is the deviation from it, `(K, C, p)`.
    """
    chains, p = centre.shape[1:]
    gram = columns(gram[:, None].expand(-1, chains, -1, -1))
    estimate = columns(estimate[:, None].expand(-1, chains, -1))
    least = rss[:, None].expand(-1, chains).reshape(-1)
    gap = estimate - columns(centre)
    products = torch.empty_like(gram)
    of_products, of_errors = Fold(products), Fold(products[0])
    torch.mul(gram, gap.unsqueeze(1), out=products)  # gram is symmetric
    right = of_products().clone()
    work = torch.empty(p, p + 1, gram.shape[-1], dtype=gram.dtype, device=gram.device)
    matrix, vector = work[:, :p], work[:, p]
    diagonal = matrix.diagonal(0, 0, 1).mT
    delta = torch.empty_like(vector)
    look = work.is_cpu  # reading the result would synchronise an accelerator
    forward = [_forward_step(work, j) for j in range(p - 1)]
    backward = [(delta[j], work[j, j], delta[:j], work[:j, j], torch.empty_like(delta[:j])) for j in reversed(range(p))]

    def eliminate(noise: Tensor, prior: Tensor, checked: bool) -> None:
        torch.mul(gram, noise, out=matrix)
        torch.mul(right, noise, out=vector)
        diagonal.add_(prior)
        for j, (row, pivot, factor, factors, rest, product, below) in enumerate(forward):
            if checked:
                _bounded(work[j, j:], prior[j])
            torch.div(row, pivot, out=factor)
            torch.mul(factors, rest, out=product)
            below.sub_(product)
        if checked:
            _bounded(work[p - 1, p - 1 :], prior[p - 1])

    def draw(noise: Tensor, prior: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        eliminate(noise, prior, checked=not look)
        if look and not bool((diagonal >= prior).all()):
            eliminate(noise, prior, checked=True)  # which changes no other problem
        torch.sqrt(diagonal, out=delta)
        delta.mul_(z).add_(vector)
        for value, pivot, above, column, product in backward:
            value.div_(pivot)
            torch.mul(column, value, out=product)
            above.sub_(product)
        error = delta - gap
        torch.mul(gram, error.unsqueeze(1), out=products)
        of_products().mul_(error)
        return delta, least + of_errors()

    return draw


def _bounded(row: Tensor, least: Tensor) -> None:
    """Replace a row by (least, 0, ...) if its pivot is less than `least`."""
    short = row[0] < least
    row.masked_fill_(short, 0.0)
    torch.maximum(row[0], least, out=row[0])


def _forward_step(work: Tensor, j: int) -> tuple[Tensor, ...]:
    """Return views and buffers for the elimination of column j."""
    p = len(work)
    factor = torch.empty_like(work[j, j + 1 : p])
    below = work[j + 1 :, j + 1 :]
    return (
        work[j, j + 1 : p],
        work[j, j],
        factor,
        factor.unsqueeze(1),
        work[j, j + 1 :].unsqueeze(0),
        torch.empty_like(below),
        below,
    )


def factorisation(design: Design, centre: Tensor, keys: Tensor) -> Draw:
    """Solve problems one by one: `data_space` for clients with fewer rows than coefficients, else a Cholesky factor."""
    clients, chains, p = centre.shape
    draws = []
    for k in range(clients):
        assert design.x is not None
        assert design.y is not None
        n = int(design.statistics.count[k])
        x, y = design.x[k, :n].clone(), design.y[k, :n].clone()
        for c in range(chains):
            residual = y - x @ centre[k, c]
            if n < p:
                draws.append(data_space(x, residual, keys[k, c]))
            else:
                draws.append(_cholesky(design.statistics.gram[k].clone(), x, residual))

    def draw(noise: Tensor, prior: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        if not draws:
            return torch.zeros_like(prior), torch.zeros_like(noise)
        drawn = [one(noise[b], prior[:, b].clone(), z[:, b].clone()) for b, one in enumerate(draws)]
        return torch.stack([delta for delta, _ in drawn], 1), torch.stack([rss for _, rss in drawn])

    return draw


def _cholesky(gram: Tensor, x: Tensor, residual: Tensor) -> Draw:
    """Solve one problem by a Cholesky factor of A."""
    right = x.mT @ residual

    def draw(noise: Tensor, prior: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.linalg.cholesky(gram * noise + prior.diag())
        delta = linalg.normal_draw(factor, right * noise, z)
        return delta, (residual - x @ delta).square().sum()

    return draw


def data_space(x: Tensor, residual: Tensor, key: Tensor) -> Draw:
    """Solve one problem through a system of the size of its rows.

    With Φ = √s X and D = diag(d)⁻¹: u = √D z, v = Φ u + ε, (Φ D Φ' + I) w = √s r − v, δ = u + D Φ' w. The t-th draw
    takes ε from `key` and t.

    Args:
        x: `(n, p)`.
        residual: r, `(n,)`.
        key: `()`.
    """
    eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
    calls = 0

    def draw(noise: Tensor, prior: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        epsilon = random.normal(random.fold_in(key, calls), (len(x),), x.dtype)
        calls += 1
        root = noise.sqrt()
        features = root * x
        start = z / prior.sqrt()
        factor = torch.linalg.cholesky((features / prior) @ features.mT + eye)
        target = root * residual - features @ start - epsilon
        weight = torch.cholesky_solve(target[:, None], factor)[:, 0]
        delta = start + features.mT @ weight / prior
        return delta, (residual - x @ delta).square().sum()

    return draw


def columns(values: Tensor) -> Tensor:
    """Return `(K, C, ...)` as `(..., B)`, contiguous."""
    return values.flatten(0, 1).movedim(0, -1).contiguous()


def from_columns(values: Tensor, clients: int, chains: int) -> Tensor:
    """Return `(..., B)` as `(K, C, ...)`, the inverse of `columns`."""
    return values.movedim(-1, 0).reshape(clients, chains, *values.shape[:-1])
