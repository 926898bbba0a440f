r"""T gradient steps of K generalised linear models, each on its own rows, in one launch.

.. math:: \theta_k \leftarrow \theta_k - \eta \Big( \frac1{|B|} \sum_{i \in B} x_{ki}\, \partial\ell(y_{ki}, x_{ki}'
    \theta_k) + \lambda_k \theta_k - h_k \Big)

with the mean losses of `torch.nn.functional`: `mse_loss`, `binary_cross_entropy_with_logits`, `poisson_nll_loss`,
`cross_entropy`. A client's parameters stay in registers for all steps, and its rows too if they are few; otherwise they
are read in every step, from the cache if they fit. Wide Gaussian models with many steps are better solved from their
Gram matrices, as in `fedtorch.federation.solvers.least_squares`.

Source: McCullagh and Nelder, "Generalized linear models", 1989, section 2.5, for canonical links. Bound: one read of
the data while it stays resident, or 4 N d T operations a client. Not measured yet.

Differentiable by its reference only, which runs if a gradient is needed. Programs support float32 and float64, classes
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch.programs.choice import FLOATS, triton_programs
from fedtorch.programs.launch import launch, power_of_two

MOST_FEATURES, MOST_WITH_CLASSES, MOST_CLASSES = 128, 64, 16
_RESIDENT = 2**13  # numbers of a client's rows that stay in registers; in float64, whose logarithms need many, 2**11
_TILE = 2**14  # bytes of the rows that are read at a time otherwise
IGNORED = -100  # the label of rows that `cross_entropy` leaves out


class Family(NamedTuple):
    """A distribution with its canonical link."""

    code: int  # in the program
    loss: Callable[..., Tensor]  # of `torch.nn.functional`, of linear predictors and responses
    misfit: Callable[[Tensor, Tensor], Tensor]  # (linear predictors, responses) -> its derivatives


GAUSSIAN = Family(0, F.mse_loss, lambda eta, y: 2 * (eta - y))
BERNOULLI = Family(1, F.binary_cross_entropy_with_logits, lambda eta, y: torch.sigmoid(eta) - y)
POISSON = Family(2, F.poisson_nll_loss, lambda eta, y: eta.exp() - y)
CATEGORICAL = Family(3, F.cross_entropy, lambda eta, y: eta.softmax(-1) - F.one_hot(y, eta.shape[-1]).to(eta.dtype))


def fits(family: Family, features: int, classes: int, dtype: torch.dtype) -> bool:
    """Return whether the program supports this many features, the constant included, and classes."""
    if family.code == CATEGORICAL.code:
        return dtype == torch.float32 and 0 < features <= MOST_WITH_CLASSES and classes <= MOST_CLASSES
    return dtype in FLOATS and 0 < features <= MOST_FEATURES


def glm_steps(
    family: Family,
    x: Tensor,
    y: Tensor,
    count: Tensor,
    start: Tensor,
    *,
    steps: int,
    lr: float,
    total: Tensor | None = None,
    batches: Tensor | None = None,
    precision: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the parameters after all steps, in the shape of `start`, and the mean loss `(K,)` without λ and h.

    Args:
        family: `GAUSSIAN`, `BERNOULLI`, `POISSON` or `CATEGORICAL`.
        x: rows `(K, N, d)`; those beyond a client's count are not read.
        y: responses `(K, N)`, for `CATEGORICAL` classes 0, 1, …, or -100 for rows that are left out.
        count: `(K,)` rows of each client; one without rows only follows λ and h.
        start: `(K, p)`, for `CATEGORICAL` `(K, p, classes)`, p = d, or d + 1 with the intercept at the end.
        steps: T, the most that a client takes.
        lr: η.
        total: `(K,)` steps of each client; None for T.
        batches: `(K, T, B)` rows of each minibatch, −1 for none; None for all rows in every step.
        precision: λ, `(K,)`, and
        shift: h, like `start`; None for no quadratic.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check(family, x, y, count, start, steps, batches)
    total = count.new_full(count.shape, steps) if total is None else total
    others = [tensor for tensor in (batches, precision, shift) if tensor is not None]
    classes = start.shape[2] if start.ndim == 3 else 1
    known = fits(family, start.shape[1], classes, start.dtype) and start.dtype == x.dtype
    programs = triton_programs("fedtorch.programs.triton.glm_steps", (x, y, count, total, start, *others), fits=known)
    problem = _Problem(family, x, y, count, total, start, steps, lr, batches, precision, shift)
    return _launched(programs, problem) if programs else _reference(problem)


class _Problem(NamedTuple):
    """The arguments of `glm_steps`."""

    family: Family
    x: Tensor
    y: Tensor
    counts: Tensor
    total: Tensor
    start: Tensor
    steps: int
    lr: float
    batches: Tensor | None
    precision: Tensor | None
    shift: Tensor | None


def _launched(programs: Any, problem: _Problem) -> tuple[Tensor, Tensor]:
    family, x, y, count, total, start, steps, lr, batches, precision, shift = problem
    clients, longest, width = x.shape
    features = start.shape[1]
    words = x.element_size() // 4
    most, tiled = _RESIDENT // words**2, _TILE // x.element_size()
    out, losses = torch.empty_like(start, memory_format=torch.contiguous_format), start.new_empty(clients)
    labels = family.code == CATEGORICAL.code
    pull = precision is not None and shift is not None
    tensors = (
        out,
        losses,
        x.contiguous(),
        (y.long() if labels else y.to(x.dtype)).contiguous(),
        count.contiguous(),
        total.contiguous(),
        start.contiguous(),
        count if batches is None else batches.contiguous(),
        precision.to(x.dtype).contiguous() if pull and precision is not None else start,
        shift.to(x.dtype).contiguous() if pull and shift is not None else start,
    )
    batch = 0 if batches is None else batches.shape[2]
    flags = {"INDEXED": batches is not None, "PULL": pull}
    across = power_of_two(features)
    if labels:
        tile = {"IGNORED": IGNORED, "ROWS": 32, "FEATURES": max(across, 16), "CLASSES": 16}
        sizes = (longest, width, features, start.shape[2], steps, batch)
        launch(programs.categorical, clients, *tensors, *sizes, lr, **flags, **tile, warps=8)
        return out, losses
    resident = batches is None and power_of_two(longest) * across <= most
    rows = power_of_two(longest) if resident else max(tiled // across, 1)
    tile = {"FAMILY": family.code, "RESIDENT": resident, "ROWS": rows, "FEATURES": across}
    warps = 8 if resident and rows * across > tiled // words else 4
    launch(programs.linear, clients, *tensors, longest, width, features, steps, batch, lr, **flags, **tile, warps=warps)
    return out, losses


def _reference(problem: _Problem) -> tuple[Tensor, Tensor]:
    family, x, y, count, total, start, steps, lr, batches, precision, shift = problem
    rows = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    there = rows < count[:, None]
    x, y = torch.where(there[..., None], x, 0.0), torch.where(there, y, 0)
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1) if start.shape[1] > x.shape[2] else x
    labels = family.code == CATEGORICAL.code
    theta, loss_sums = start.reshape(*start.shape[:2], -1), start.new_zeros(len(start))
    for t in range(steps):
        index = torch.where(there, rows, -1) if batches is None else batches[:, t]
        inside, place = index >= 0, index.clamp(min=0)
        design, response = x.take_along_dim(place[..., None], 1), y.take_along_dim(place, 1)
        empty = ~inside.any(1)
        predictor = design @ theta
        if labels:
            inside = inside & (response != IGNORED)
            response = torch.where(inside, response, 0).long()
            losses = family.loss(predictor.mT, response, reduction="none")
        else:
            response = response.to(design.dtype)[..., None]
            losses = family.loss(predictor, response, reduction="none")[..., 0]
        gap = torch.where(inside[..., None], family.misfit(predictor, response), 0.0).to(design.dtype)
        seen = inside.sum(1).to(design.dtype)
        gradient = design.mT @ gap / seen.clamp(min=1)[:, None, None]
        if precision is not None and shift is not None:
            gradient = gradient + precision[:, None, None] * theta - shift.reshape(theta.shape)
        active = t < total
        theta = torch.where(active[:, None, None], theta - lr * gradient, theta)
        mean = torch.where(inside, losses, 0.0).sum(1) / (seen + empty)  # 0 / 0 where all are left out, as in torch
        loss_sums = loss_sums + torch.where(active, mean / total.clamp(min=1), 0.0)
    return theta.reshape(start.shape), loss_sums


def _check(
    family: Family, x: Tensor, y: Tensor, count: Tensor, start: Tensor, steps: int, batches: Tensor | None
) -> None:
    clients, _, features = x.shape
    dims = 3 if family.code == CATEGORICAL.code else 2
    if (
        y.shape != x.shape[:2]
        or count.shape != (clients,)
        or start.ndim != dims
        or len(start) != clients
        or start.shape[1] not in (features, features + 1)
    ):
        raise ValueError(
            f"Expected x (K, N, d), y (K, N), count (K,) and a start of {dims} dimensions (K, d or d + 1, ...), but "
            f"got {[tuple(part.shape) for part in (x, y, count, start)]}"
        )
    if batches is not None and batches.shape[:2] != (clients, steps):
        raise ValueError(f"Expected batches of shape ({clients}, {steps}, B), but got {tuple(batches.shape)}")
