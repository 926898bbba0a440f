r"""Linear models in closed form: a head on any features, sufficient statistics, ridge, residual variance.

The rows of a client enter a linear model with squared loss through X'X, X'y, y'y and n only. All functions are batched:
leading dimensions are clients, `(K, N, d)`, or absent for one data set `(N, d)`. Statistics are in float64, because
forming them squares the condition number.

Columns may have any units: before factorisation or truncation they are scaled to one size (`fedtorch.linalg`). If
columns are linearly dependent, there are many solutions. Undetermined combinations are found at that one size; the
returned solution then has the least norm in the units of the given columns. A column of zeros gets the coefficient
zero.

>>> import torch
>>> from fedtorch.models.linear import LinearHead, polynomial, ridge, sufficient_statistics
>>> head = LinearHead(2, polynomial(2))  # 1, x, x²
>>> x = torch.linspace(-1, 1, 9)[:, None]
>>> statistics = sufficient_statistics(head.design(x), 1 - 3 * x[:, 0] ** 2)
>>> ridge(statistics).round(decimals=3) + 0.0
tensor([ 0.,  -3.,  1.], dtype=torch.float64)
>>> residual_sum(statistics, torch.tensor([0.0, -3.0, 2.0]).double()).round(decimals=6)  # 9 rows, each off by 1
tensor(9., dtype=torch.float64)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import linalg, tree
from fedtorch._lazy import only
from fedtorch.programs import choice

if TYPE_CHECKING:
    from fedtorch.data import FederatedData

__all__ = ["LinearHead", "SufficientStatistics", "polynomial", "ridge"]
__dir__ = only(__all__)

FeatureMap = Callable[[Tensor], Tensor]  # inputs (..., q) -> features (..., d)

LINEAR_EXTRAS = ("offset", "weight")  # fields of linear models besides x and y
CLEAR = 1e-6  # relative eigenvalue above which results are equally exact in any units
_EPS = torch.finfo(torch.float64).eps
_ROUNDING = 64 * _EPS  # of the sums over rows, relative to the largest eigenvalue


def raw(x: Tensor) -> Tensor:
    """Return the inputs unchanged, `(..., q)`."""
    return x


def polynomial(degree: int) -> FeatureMap:
    """Return powers 1 … `degree` of every input, `(..., q)` -> `(..., degree · q)`: x₁, …, x_q, x₁², …

    Raises:
        ValueError: `degree` is less than 1.
    """
    if degree < 1:
        raise ValueError(f"Expected a degree of at least 1, but got {degree}")
    return partial(_powers, degree)


def _powers(degree: int, x: Tensor) -> Tensor:
    return torch.cat([x**power for power in range(1, degree + 1)], -1)


def is_rowwise(module: nn.Module) -> bool:
    """Return whether a linear model's output for a row depends on that row alone, by its type.

    It belongs to an `nn.Linear`, or to a `LinearHead` of the inputs or their powers, without hooks.

    Example:
        >>> is_rowwise(LinearHead(3)), is_rowwise(LinearHead(3, lambda x: x - x.mean(-2, keepdim=True)))
        (True, False)
    """
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    if type(module) is not LinearHead:
        return type(module) is nn.Linear
    known = module.feature_map
    return known is raw or (isinstance(known, partial) and known.func is _powers)


class LinearHead(nn.Module):
    r"""A linear model on features, f(x) = ⟨θ, φ(x)⟩ + θ₀ with one output.

    θ is one parameter `coefficients` `(p,)`, the intercept θ₀ at its end, and starts at zero.

    Args:
        features: number of features of `feature_map`, d.
        feature_map: inputs `(..., q)` -> features `(..., d)`; `raw`, `polynomial(degree)` or any function, such as the
            body of a network, which is then a part of the module: frozen if the head is computed in closed form
            (`ft.least_squares`, `ft.matrix_normal`), trained or frozen in `ft.gradient_descent`.
        intercept: whether there is a constant feature at the end, so that p = d + 1.
        given: whether θ is a buffer that others fill in while the feature map is trained, as `ft.shared_body` does.
        dtype: of the coefficients.

    Shapes: inputs `(..., q)`, outputs `(...)`.

    Raises:
        ValueError: no features and no intercept; or, in a call, a feature map with another number of features.

    Example:
        >>> import torch
        >>> LinearHead(3)(torch.ones(5, 3)).shape
        torch.Size([5])
    """

    coefficients: Tensor  # (p,) θ

    def __init__(
        self,
        features: int,
        feature_map: FeatureMap = raw,
        *,
        intercept: bool = True,
        given: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if features < 0 or features + intercept < 1:
            raise ValueError(f"Expected at least one feature, but got {features} and intercept={intercept}")
        self.features, self.feature_map, self.intercept = features, feature_map, intercept
        start = torch.zeros(features + intercept, dtype=dtype)
        if given:
            self.register_buffer("coefficients", start)
        else:
            self.coefficients = nn.Parameter(start)

    def design(self, x: Tensor) -> Tensor:
        """Return the rows of the design matrix, `(..., p)`: the features, and the constant 1 at the end."""
        features = self.feature_map(x)
        if features.shape[-1:] != (self.features,):
            raise ValueError(
                f"Expected {self.features} features per row, but the feature map gives shape {tuple(features.shape)}; "
                "pass LinearHead their number"
            )
        if not self.intercept:
            return features
        return torch.cat([features, torch.ones_like(features[..., :1])], -1)

    def block_design(self, x: Tensor) -> Tensor:
        """Return the rows of the design matrices of stacked clients, inputs `(K, N, ...)` -> `(K, N, p)`.

        The feature map gets them as rows of one client, `(K · N, ...)`, the usual input of a network's body.

        >>> pixels = torch.ones(2, 5, 1, 4, 4)  # two clients' five images of one channel
        >>> LinearHead(16, nn.Flatten()).block_design(pixels).shape
        torch.Size([2, 5, 17])
        """
        return self.design(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def forward(self, x: Tensor) -> Tensor:
        """Return ⟨θ, φ(x)⟩ + θ₀ of every row, `(...)`."""
        return self.design(x) @ self.coefficients


class SufficientStatistics(NamedTuple):
    """The sufficient statistics of a linear model with squared loss, float64; `(...)` are the clients, if any.

    >>> found = sufficient_statistics(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0]))
    >>> found.gram.tolist(), found.cross.tolist(), float(found.power), float(found.count)
    ([[5.0]], [11.0], 25.0, 2.0)
    """

    gram: Tensor  # (..., p, p) X'X
    cross: Tensor  # (..., p) X'y, or (..., p, o) of o responses
    power: Tensor  # (...) y'y, of all responses
    count: Tensor  # type: ignore[assignment]  # (...) n

    @staticmethod
    def of(data: FederatedData) -> SufficientStatistics:
        """Return the statistics of all clients with rows (x `(d,)`, y `()`), `(K, ...)`, block by block.

        >>> import fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2)), (torch.ones(1, 1), torch.ones(1))])
        >>> SufficientStatistics.of(data).cross.tolist(), block_statistics(data.stack([1])).cross.tolist()
        ([[2.0], [1.0]], [[1.0]])
        """
        from fedtorch.models.rows import regression_fields

        ids, blocks = zip(*data.buckets())
        each = [sufficient_statistics(*regression_fields(block.batch))._replace(count=block.count) for block in blocks]
        joined = tree.take(tree.concatenate(each), torch.cat(ids).argsort())  # padding is zeros, and all are finite
        return joined._replace(count=joined.count.to(torch.float64))

    def per_row(self) -> SufficientStatistics:
        """Return X'X / n, X'y / n and y'y / n, zeros without rows."""
        n = self.count.clamp(min=1)
        return tree.map(lambda leaf: leaf / tree.along(n, leaf), self)._replace(count=self.count)

    def all_rows(self) -> SufficientStatistics:
        """Return the inverse of `per_row`."""
        return tree.map(lambda leaf: leaf * tree.along(self.count, leaf), self)._replace(count=self.count)


def sufficient_statistics(design: Tensor, y: Tensor, mask: Tensor | None = None) -> SufficientStatistics:
    """Return X'X, X'y, y'y and n.

    Args:
        design: `(..., N, p)`, the features of every row.
        y: `(..., N)`, or `(..., N, o)` of o responses.
        mask: `(..., N)` bool, marks rows against padding; None for no padding. A client without rows has zeros.

    Raises:
        ValueError: the shapes do not match.
    """
    shape = design.shape[:-1]
    if y.shape[: len(shape)] != shape or y.ndim > design.ndim or (mask is not None and mask.shape != shape):
        shapes = ", ".join(str(tuple(part.shape)) for part in (design, y, mask) if part is not None)
        raise ValueError(f"Expected design (..., N, p), y (..., N) and mask (..., N), but got {shapes}")
    design, y = design.to(torch.float64), y.to(torch.float64)
    if mask is None:
        rows = torch.full(shape[:-1], shape[-1], dtype=torch.float64, device=y.device)
    else:
        rows = mask.sum(-1, dtype=torch.float64)
        if not (choice.plain((mask,)) and bool(mask.all())):
            design, y = torch.where(mask[..., None], design, 0.0), torch.where(tree.along(mask, y), y, 0.0)
    power = y.square().flatten(len(shape) - 1).sum(-1)
    if y.ndim > len(shape) and y.shape[-1] != 1:
        cross = design.mT @ y
    else:  # for one response, y'X is faster than X'y
        cross = y.reshape(*shape[:-1], 1, shape[-1]) @ design
        cross = cross.reshape(*shape[:-1], design.shape[-1], *y.shape[len(shape) :])
    return SufficientStatistics(design.mT @ design, cross, power, rows)


def block_statistics(data: Any, features: int | None = None) -> SufficientStatistics:
    """Return the statistics of a block with rows (x `(d,)`, y `()`), `(K, ...)`; errors as for `rows.observations`.

    An offset is subtracted from y, and a weight w means that the row's variance is σ² / w: both sides are multiplied by
    w^½.

    >>> import fedtorch as ft
    >>> beside = {"offset": torch.ones(2), "weight": torch.tensor([4.0, 1.0])}
    >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([3.0, 2.0]), beside)])
    >>> block_statistics(data.stack([0])).cross  # 4 (3 − 1) + (2 − 1)
    tensor([[9.]], dtype=torch.float64)
    """
    from fedtorch.models.rows import observations

    x, y = observations(data, features, LINEAR_EXTRAS).whitened()
    return sufficient_statistics(x, y)._replace(count=data.count.to(torch.float64))


def ridge(statistics: SufficientStatistics, penalty: Tensor | float = 0.0) -> Tensor:
    r"""Return the minimiser of ‖y − Xθ‖² + penalty · ‖θ‖², `(..., p)`; penalty 0 is least squares.

    Args:
        statistics: of the rows.
        penalty: a number or `(...)`, not negative, in units of X'X.

    Raises:
        ValueError: a penalty is negative, or the solution is not unique: no penalty, and fewer rows than features,
            or features that depend on each other (a constant one beside an intercept).
    """
    penalty = torch.as_tensor(penalty, dtype=torch.float64, device=statistics.gram.device)
    if not bool((penalty >= 0).all()):
        raise ValueError(f"Expected a penalty of at least 0, but got {float(penalty.min())}")
    eye = torch.eye(statistics.gram.shape[-1], dtype=torch.float64, device=statistics.gram.device)
    matrix = statistics.gram + penalty[..., None, None] * eye
    factor, failed = torch.linalg.cholesky_ex(matrix)
    size = matrix.diagonal(dim1=-2, dim2=-1)  # a relative pivot is one minus the column's R² on those before it
    pivot = factor.diagonal(dim1=-2, dim2=-1).square()
    unique = (failed == 0) & (pivot > _ROUNDING * matrix.shape[-1] * size).all(-1)
    if not bool(unique.all()):
        raise ValueError(_not_unique(statistics, unique))
    return torch.cholesky_solve(statistics.cross[..., None], factor)[..., 0]


def _not_unique(statistics: SufficientStatistics, unique: Tensor) -> str:
    features = statistics.gram.shape[-1]
    rows = statistics.count.flatten()[int((~unique).flatten().int().argmax())]
    why = f"got {int(rows)} rows for {features} features" if rows < features else "got features that are dependent"
    which = f" (data set {int((~unique).flatten().int().argmax())} of {unique.numel()})" if unique.ndim else ""
    return f"Expected a unique least squares solution, but {why}{which}; pass a positive penalty"


class Spectral(NamedTuple):
    """Sufficient statistics with the eigenvectors of X'X = V diag(m) V', in the units of the columns.

    Sums of y are taken about the least squares fit θ̂, also for responses far from zero: ‖y − Xθ‖² = rest + δ'(X'X δ −
    2 left), δ = θ − θ̂.
    """

    statistics: SufficientStatistics
    values: Tensor  # (..., p) m, zero where the rows leave a direction open
    vectors: Tensor  # (..., p, p) V
    fit: LeastSquares  # θ̂ of least norm, (..., p), or (..., p, o) of o responses
    left: Tensor  # X'(y − Xθ̂), of the same shape: rounding errors
    cross: Tensor  # V' times that
    rest: Tensor  # (...) ‖y − Xθ̂‖², of all responses, at least the rounding errors
    count: Tensor  # type: ignore[assignment]  # (...) n


def spectral(statistics: SufficientStatistics, rows: tuple[Tensor, Tensor] | None = None) -> Spectral:
    """Return statistics in the basis of the eigenvectors of X'X; undetermined directions have eigenvalue 0.

    Eigenvalues below 1e-6 of the largest are inexact: `linalg.equilibrated` is the exact method, used here only to
    count them. Linearly dependent columns give a warning.

    Args:
        statistics: X'X, X'y and y'y.
        rows: X `(..., N, p)` and y, zero on padding, if they are at hand: for responses far from zero, y'y loses all
            digits of the residual.
    """
    gram = statistics.gram
    values, vectors = torch.linalg.eigh(gram)
    clear = values > CLEAR * values[..., -1:]
    rank = clear.sum(-1)
    doubtful = rank < _most(statistics)
    if bool(doubtful.any()):
        rank[doubtful] = linalg.equilibrated(gram[doubtful]).rank
        warn_of_dependence(statistics, rank)
    place = torch.arange(gram.shape[-1], device=gram.device)
    known = place >= gram.shape[-1] - rank[..., None]
    values = torch.where(known, values.clamp(min=torch.finfo(values.dtype).tiny), 0.0)
    flat = statistics.cross.ndim < gram.ndim
    cross = statistics.cross[..., None] if flat else statistics.cross
    fit = _fitted(gram, cross, values, vectors, clear.all(-1))
    if rows is None:
        left = cross - gram @ fit.solution
        rest, rounding = statistics.power - (fit.solution * (cross + left)).sum((-2, -1)), _ROUNDING
    else:
        design, y = rows
        away = (y[..., None] if flat else y) - design @ fit.solution
        left, rest, rounding = design.mT @ away, away.square().sum((-2, -1)), _EPS**2  # of the responses themselves
    rest = rest.maximum(rounding * statistics.power)
    turned, solution = vectors.mT @ left, fit.solution
    if flat:
        left, turned, solution = left[..., 0], turned[..., 0], solution[..., 0]
    fit = fit._replace(solution=solution)
    return Spectral(statistics, values, vectors, fit, left, turned, rest, statistics.count)


def spectral_rows(design: Tensor, y: Tensor, mask: Tensor) -> Spectral:
    """Return `spectral` of the sums of stacked clients' rows, a row, with their `count`.

    Args:
        design: X `(K, N, p)`.
        y: `(K, N)` or `(K, N, o)`.
        mask: `(K, N)` bool, which rows are data; a client without rows has zeros.
    """
    statistics = sufficient_statistics(design, y, mask)
    share = torch.where(mask, statistics.count.clamp(min=1).rsqrt()[:, None], 0.0)
    weighted = [torch.where(tree.along(mask, part), part, 0.0) * tree.along(share, part) for part in (design, y)]
    return spectral(statistics.per_row(), (weighted[0], weighted[1]))


def _fitted(gram: Tensor, cross: Tensor, values: Tensor, vectors: Tensor, clear: Tensor) -> LeastSquares:
    """Return `least_norm` of each `(..., p, o)`, from eigenvectors where eigenvalues are `clear`, `(...)`."""
    solution = vectors @ (vectors.mT @ cross / values[..., None])
    rank = torch.full_like(clear, values.shape[-1], dtype=torch.int64)
    fit = LeastSquares(solution, rank, values.reciprocal().mean(-1))
    if bool(clear.all()):
        return fit
    others = ~clear
    exact = _equilibrated_fit(gram[others], cross[others])
    return LeastSquares(
        *(leaf.masked_scatter(tree.along(others, leaf), other.to(leaf)) for leaf, other in zip(fit, exact))
    )


def _most(statistics: SufficientStatistics) -> Tensor:
    """Return the rank of X if its nonzero columns are independent, `(...)`."""
    return statistics.count.minimum((statistics.gram.diagonal(dim1=-2, dim2=-1) > 0).sum(-1))


def warn_of_dependence(statistics: SufficientStatistics, rank: Tensor) -> None:
    """Warn if X has a smaller rank `(...)` than the numbers of its rows and nonzero columns allow.

    >>> twice = sufficient_statistics(torch.ones(3, 2), torch.ones(3))  # a column that is there twice
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn_of_dependence(twice, torch.tensor(1))
    >>> print(caught[0].message)
    Expected columns of rank 2, but got rank 1 in data set 0 of 1 (1 have dependent columns): ...
    """
    most = _most(statistics).flatten()
    missing = most - rank.flatten()
    if bool((missing > 0).any()):
        worst, bad = int(missing.argmax()), int((missing > 0).sum())
        warnings.warn(
            f"Expected columns of rank {int(most[worst])}, but got rank {int(rank.flatten()[worst])} in data set "
            f"{worst} of {missing.numel()} ({bad} have dependent columns): of the solutions that fit alike, the one "
            "of least norm is taken; leave columns out, centre them, or add a penalty",
            stacklevel=4,
        )


class LeastSquares(NamedTuple):
    """Least squares with the undetermined directions."""

    solution: Tensor  # (..., p) of least norm if it is not unique
    rank: Tensor  # (...) of X
    spread: Tensor  # (...) mean of 1/eigenvalue of X'X over its rank; times σ² the mean sampling variance


def least_norm(statistics: SufficientStatistics) -> LeastSquares:
    """Return the least squares solution of least norm in the columns' units; defined for any rows, also none.

    Linearly dependent columns give a warning.
    """
    fit = _equilibrated_fit(statistics.gram, statistics.cross[..., None])
    warn_of_dependence(statistics, fit.rank)
    return fit._replace(solution=fit.solution[..., 0])


def _equilibrated_fit(gram: Tensor, cross: Tensor) -> LeastSquares:
    """Return the solutions of X'X θ = X'y of least norm, `(..., p, o)`."""
    parts = linalg.equilibrated(gram)
    root = parts.inverse_root(parts.null())
    return LeastSquares(root @ (root.mT @ cross), parts.rank, root.square().sum((-2, -1)) / parts.rank.clamp(min=1))


def residual_sum(statistics: SufficientStatistics, coefficients: Tensor) -> Tensor:
    """Return ‖y − Xθ‖² `(...)` of coefficients `(..., p)`, not negative."""
    fitted = ((statistics.gram @ coefficients[..., None])[..., 0] - 2 * statistics.cross) * coefficients
    return (statistics.power + fitted.sum(-1)).clamp(min=0)


def residual_variance(statistics: SufficientStatistics) -> Tensor:
    """Return the unbiased ‖y − Xθ̂‖² / (n − rank) of least squares, `(...)`.

    Raises:
        ValueError: no degree of freedom is left, because there are not more rows than features.
    """
    fit = least_norm(statistics)
    freedom = statistics.count - fit.rank
    if not bool((freedom > 0).all()):
        worst = int(freedom.flatten().argmin())
        raise ValueError(
            f"Expected more rows than features to estimate a residual variance, but got "
            f"{int(statistics.count.flatten()[worst])} rows of rank {int(fit.rank.flatten()[worst])}; pool data sets"
        )
    return residual_sum(statistics, fit.solution) / freedom
