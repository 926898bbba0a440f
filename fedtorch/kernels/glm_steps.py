r"""T gradient steps of K generalised linear models, each on its own rows, in one launch.

.. math:: \theta_k \leftarrow \theta_k - \eta \Big( \frac1{|B|} \sum_{i \in B} x_{ki}\, \partial\ell(y_{ki}, x_{ki}'
    \theta_k) + \lambda_k \theta_k - h_k \Big)

with the mean losses of `torch.nn.functional`: `mse_loss`, `binary_cross_entropy_with_logits`, `poisson_nll_loss`,
`cross_entropy`. A client's parameters stay in registers for all steps, and its rows too where they are few; else they
are read again every step, from the cache where they fit there. Wide Gaussian models with many steps are better solved
from their Gram matrices, as `fedtorch.federation.local_solvers.least_squares` does.

Source: McCullagh and Nelder, "Generalized linear models", 1989, section 2.5, for canonical links. Bound: one read of
the data while it stays resident, or 4 N d T operations a client. Not measured yet.

Differentiable by its reference only, which runs where a gradient is asked for. Programs know float32 and float64,
classes in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedtorch.kernels.choice import FLOATS, launch, power_of_two, program

MOST_FEATURES, MOST_WITH_CLASSES, MOST_CLASSES = 128, 64, 16
_RESIDENT = 2**15  # bytes of a client's rows that stay in registers
_TILE = 2**14  # bytes of the rows that are read at a time otherwise


class Family(NamedTuple):
    """A distribution with its canonical link."""

    code: int  # in the program
    misfit: Callable[[Tensor, Tensor], Tensor]  # (linear predictors, responses) -> derivatives of the loss


GAUSSIAN = Family(0, lambda eta, y: 2 * (eta - y))
BERNOULLI = Family(1, lambda eta, y: torch.sigmoid(eta) - y)
POISSON = Family(2, lambda eta, y: eta.exp() - y)
CATEGORICAL = Family(3, lambda eta, y: eta.softmax(-1) - one_hot(y.long(), eta.shape[-1]).to(eta.dtype))


def glm_steps(
    family: Family,
    x: Tensor,
    y: Tensor,
    count: Tensor,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    batches: Tensor | None = None,
    precision: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """The parameters after all steps, in the shape of `start`.

    Args:
        family: `GAUSSIAN`, `BERNOULLI`, `POISSON` or `CATEGORICAL`.
        x: rows `(K, N, d)`; those beyond a client's count are not looked at.
        y: responses `(K, N)`, for `CATEGORICAL` classes 0, 1, ….
        count: `(K,)` rows of each client; who has none only follows λ and h.
        start: `(K, d)`, for `CATEGORICAL` `(K, d, classes)`.
        steps: T.
        lr: η.
        batches: `(K, T, B)` rows of each minibatch, −1 for none; None for all rows in every step.
        precision: λ, `(K,)`, and
        shift: h, like `start`; None for no quadratic.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check(family, x, y, count, start, steps, batches)
    others = [tensor for tensor in (batches, precision, shift) if tensor is not None]
    classes = start.shape[2] if start.ndim == 3 else 1
    labels = family.code == CATEGORICAL.code
    fits = 0 < x.shape[2] <= (MOST_WITH_CLASSES if labels else MOST_FEATURES) and classes <= MOST_CLASSES
    dtypes = (torch.float32,) if labels else FLOATS
    programs = program("glm_steps", (x, y, count, start, *others), dtypes, fits=fits and start.dtype == x.dtype)
    problem = _Problem(family, x, y, count, start, steps, lr, batches, precision, shift)
    return _launched(programs, problem) if programs else _reference(problem)


class _Problem(NamedTuple):
    """The arguments of `glm_steps`."""

    family: Family
    x: Tensor
    y: Tensor
    counts: Tensor
    start: Tensor
    steps: int
    lr: float
    batches: Tensor | None
    precision: Tensor | None
    shift: Tensor | None


def _launched(programs: Any, problem: _Problem) -> Tensor:
    family, x, y, count, start, steps, lr, batches, precision, shift = problem
    clients, longest, features = x.shape
    most, tiled = _RESIDENT // x.element_size(), _TILE // x.element_size()
    out = torch.empty_like(start, memory_format=torch.contiguous_format)
    labels = family.code == CATEGORICAL.code
    pull = precision is not None and shift is not None
    tensors = (
        out,
        x.contiguous(),
        (y.long() if labels else y.to(x.dtype)).contiguous(),
        count.contiguous(),
        start.contiguous(),
        count if batches is None else batches.contiguous(),
        precision.to(x.dtype).contiguous() if pull and precision is not None else start,
        shift.to(x.dtype).contiguous() if pull and shift is not None else start,
    )
    batch = 0 if batches is None else batches.shape[2]
    flags = {"INDEXED": batches is not None, "PULL": pull}
    across = power_of_two(features)
    if labels:
        across = max(across, 16)
        tile = {"ROWS": 32, "FEATURES": across, "CLASSES": 16}
        sizes = (longest, features, start.shape[2], steps, batch)
        launch(programs.categorical, clients, *tensors, *sizes, lr, **flags, **tile, warps=8)
        return out
    resident = batches is None and power_of_two(longest) * across <= most
    rows = power_of_two(longest) if resident else max(tiled // across, 1)
    tile = {"FAMILY": family.code, "RESIDENT": resident, "ROWS": rows, "FEATURES": across}
    warps = 4 if rows * across <= tiled else 8
    launch(programs.linear, clients, *tensors, longest, features, steps, batch, lr, **flags, **tile, warps=warps)
    return out


def _reference(problem: _Problem) -> Tensor:
    family, x, y, count, start, steps, lr, batches, precision, shift = problem
    rows = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    there = rows < count[:, None]
    x, y = torch.where(there[..., None], x, 0.0), torch.where(there, y, 0)
    theta = start.reshape(*x.shape[::2], -1)
    for t in range(steps):
        index = torch.where(there, rows, -1) if batches is None else batches[:, t]
        inside = (index >= 0)[..., None]
        place = index.clamp(min=0)
        design = x.take_along_dim(place[..., None], 1)
        predictor = design @ theta
        labels = y.take_along_dim(place, 1)
        gap = family.misfit(predictor, labels if family.code == CATEGORICAL.code else labels[..., None])
        gap = torch.where(inside, gap, 0.0).to(design.dtype)
        gradient = design.mT @ gap / inside.sum(1, keepdim=True).clamp(min=1).to(design.dtype)
        if precision is not None and shift is not None:
            gradient = gradient + precision[:, None, None] * theta - shift.reshape(theta.shape)
        theta = theta - lr * gradient
    return theta.reshape(start.shape)


def _check(
    family: Family, x: Tensor, y: Tensor, count: Tensor, start: Tensor, steps: int, batches: Tensor | None
) -> None:
    clients, _, features = x.shape
    dims = 3 if family.code == CATEGORICAL.code else 2
    if (
        y.shape != x.shape[:2]
        or count.shape != (clients,)
        or start.ndim != dims
        or start.shape[:2] != (clients, features)
    ):
        raise ValueError(
            f"Expected x (K, N, d), y (K, N), count (K,) and a start of {dims} dimensions (K, d, ...), but got "
            f"{[tuple(part.shape) for part in (x, y, count, start)]}"
        )
    if batches is not None and batches.shape[:2] != (clients, steps):
        raise ValueError(f"Expected batches of shape ({clients}, {steps}, B), but got {tuple(batches.shape)}")
