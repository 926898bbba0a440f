r"""T gradient steps of K generalised linear models, each on its own rows, in one launch.

.. math:: \theta_k \leftarrow \theta_k - \eta \Big( \frac1{|B|} \sum_{i \in B} x_{ki}\, \partial\ell(y_{ki}, x_{ki}'
    \theta_k) + \lambda_k \theta_k - h_k \Big)

with the mean losses of `torch.nn.functional`: `mse_loss`, `binary_cross_entropy_with_logits`, `poisson_nll_loss`,
`cross_entropy`. A client's parameters stay in registers for all steps, and its rows too where they are few; else they
are read again every step, from the cache where they fit there. Wide Gaussian models with many steps are better solved
from their Gram matrices, as `fedtorch.federation.solvers.least_squares` does.

Source: McCullagh and Nelder, "Generalized linear models", 1989, section 2.5, for canonical links. Bound: one read of
the data while it stays resident, or 4 N d T operations a client. Not measured yet.

Differentiable by its reference only, which runs where a gradient is asked for. Programs know float32 and float64,
classes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch import tree
from fedtorch.dispatch import choice
from fedtorch.dispatch.choice import FLOATS, program
from fedtorch.dispatch.launch import launch, power_of_two

MOST_FEATURES, MOST_WITH_CLASSES, MOST_CLASSES = 128, 64, 16
_RESIDENT = 2**13  # numbers of a client's rows that stay in registers; of float64, whose logarithms need many, 2**11
_TILE = 2**14  # bytes of the rows that are read at a time otherwise
_ROWS = 2**10  # of a run of steps of the loop, which stay in the cache
_IGNORED = -100  # the label of rows that `cross_entropy` leaves out


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
    """Return whether the program takes so many features, the constant included, and classes."""
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
        x: rows `(K, N, d)`; those beyond a client's count are not looked at.
        y: responses `(K, N)`, for `CATEGORICAL` classes 0, 1, …, or -100 for rows that are left out.
        count: `(K,)` rows of each client; who has none only follows λ and h.
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
    programs = program("fedtorch.kernels.programs.glm_steps", (x, y, count, total, start, *others), fits=known)
    problem = _Problem(family, x, y, count, total, start, steps, lr, batches, precision, shift)
    return _launched(programs, problem) if programs else _reference(problem)


def glm_loop(
    family: Family,
    x: Tensor,
    y: Tensor,
    start: Tensor,
    runs: Callable[[int | None], Iterable[tuple[Tensor | None, Tensor]]],
    *,
    lr: float,
    total: Tensor,
    precision: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `glm_steps` does, step by step on a CPU: by a program in C, or else by a loop of few products.

    Args:
        family, x, y, start, lr, precision, shift: as of `glm_steps`.
        runs: the most rows that a run may have, None for any number -> runs: of S steps after another the rows
            `(S, K, B)`, of which those beyond a client's size repeat others, or None for the first ones; and the sizes
            `(S, K)`. No client takes its last step within one.
        total: `(K,)` steps of each client.

    Not differentiable: where a gradient is asked for the loop runs, whose operations in place torch refuses to go back.
    """
    theta = start.reshape(*start.shape[:2], -1)
    pulled = None if precision is None or shift is None else (precision, shift.reshape(theta.shape))
    tensors = (x, y, start, total, *(pulled or ()))
    if (library := _library(family, tensors, theta.shape[2])) is not None:
        from fedtorch.kernels.programs import glm_loop as program

        theta, told = program.run(library, family.code, x, y, theta, runs(None), lr, total, pulled)
        return theta.reshape(start.shape), (told / total).to(start.dtype)
    return _looped(family, x, y, start, runs(_ROWS), lr, total, precision, shift)


def _library(family: Family, tensors: Sequence[Tensor], classes: int) -> Any:
    """Return the library in C where it knows these tensors, first of all x, y and the start; else None."""
    from fedtorch.kernels.programs import glm_loop as program

    x, y, start = tensors[:3]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if any(tensor.device.type != "cpu" for tensor in tensors) or choice.traced(tensors) or start.dtype != x.dtype:
        return None
    if family.code != CATEGORICAL.code:
        return program.program(x.dtype) if y.dtype == x.dtype else None
    known = (y == _IGNORED) | ((y >= 0) & (y < classes))  # others end with torch's error
    return program.program(x.dtype) if y.dtype == torch.int64 and bool(known.all()) else None


def _looped(
    family: Family,
    x: Tensor,
    y: Tensor,
    start: Tensor,
    runs: Iterable[tuple[Tensor | None, Tensor]],
    lr: float,
    total: Tensor,
    precision: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what `glm_loop` does, by a loop over steps in which clients that are done take no part."""
    rows = x if start.shape[1] == x.shape[2] else torch.cat([x, torch.ones_like(x[..., :1])], -1)
    width, (flat, responses) = x.shape[1], (rows.flatten(0, 1), y.flatten())
    theta = start.reshape(*start.shape[:2], -1).clone(memory_format=torch.contiguous_format)
    told = start.new_zeros(len(start), dtype=torch.float64)
    pull = (
        None if precision is None or shift is None else (lr * precision[:, None, None], lr * shift.reshape(theta.shape))
    )
    done, ends = (torch.empty_like(theta), torch.empty_like(told)), set(total.tolist())
    whole = rows[None], y[None]  # of the clients that are here, for steps that take all rows
    client, here = torch.arange(len(start)), (theta, told, pull, width * torch.arange(len(start))[:, None])
    step = 0
    for place, size in runs:
        if step in ends:
            left = total[client] > step
            done[0][client], done[1][client] = here[:2]
            client, here = client[left], tree.take(here, left.nonzero()[:, 0])
            whole = whole if place is not None else (rows[client][None], y[client][None])
        step += len(size)
        if len(client) < size.shape[1]:
            place, size = None if place is None else place[:, client], size[:, client]
        if place is None:
            design, response = whole
        else:
            at = (place + here[3]).flatten()
            design = flat.index_select(0, at).view(*place.shape, -1)
            response = responses.index_select(0, at).view(place.shape)
        _run(family, here, design, response, size, lr)
    done[0][client], done[1][client] = here[:2]
    return done[0].reshape(start.shape), (done[1] / total).to(start.dtype)


def _run(family: Family, here: Any, design: Tensor, response: Tensor, size: Tensor, lr: float) -> None:
    """Take the steps of sizes `(S, K)` by the clients that are `here`, in place; rows are of each step, or of all."""
    theta, told, pull, _ = here
    steps, labels, rate = len(size), family.code == CATEGORICAL.code, lr / design.shape[2]
    inside = None
    if labels and bool((response == _IGNORED).any()):
        inside = response != _IGNORED
        response = response.where(inside, 0)
    if not bool((size == design.shape[2]).all()):
        first = torch.arange(design.shape[2]) < size[..., None]
        inside = first if inside is None else first & inside
    wanted = (response if labels else response.to(theta.dtype))[..., None]
    weights = None
    if inside is not None:
        seen = inside.sum(2)
        weights, rate = (inside.to(theta.dtype) / seen.clamp(min=1)[..., None])[..., None], lr
    each = [_of(steps, part).unbind() for part in (design, design.mT, wanted)]
    weight = (None,) * steps if weights is None else _of(steps, weights).unbind()
    less = theta.new_full((), -1.0).expand(wanted.shape[1:])
    keep, push = (None, None) if pull is None else (1 - pull[0], pull[1])
    kept = []  # what losses are made of: linear predictors, or the log probabilities of labels
    for x, transposed, y, w in zip(*each, weight):
        predictor = x @ theta
        if labels:
            log = predictor.log_softmax(-1)
            kept.append(log.gather(-1, y))
            gap = log.exp_().scatter_add_(-1, y, less)
        else:
            kept.append(predictor)
            gap = family.misfit(predictor, y)
        if w is not None:
            gap *= w
        if keep is not None:
            theta.mul_(keep).add_(push)
        theta.baddbmm_(transposed, gap, alpha=-rate)
    logged = torch.stack(kept)
    losses = (-logged if labels else family.loss(logged, _of(steps, wanted), reduction="none"))[..., 0]
    if inside is None:
        told += losses.mean(2).sum(0)
    else:  # 0 / 0 where all are left out, as in torch
        told += (torch.where(inside, losses, 0.0).sum(2) / seen).sum(0)


def _of(steps: int, part: Tensor) -> Tensor:
    """Return the part for each of the steps, where it is one of all."""
    return part.expand(steps, *part.shape[1:])


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
    out, told = torch.empty_like(start, memory_format=torch.contiguous_format), start.new_empty(clients)
    labels = family.code == CATEGORICAL.code
    pull = precision is not None and shift is not None
    tensors = (
        out,
        told,
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
        tile = {"IGNORED": _IGNORED, "ROWS": 32, "FEATURES": max(across, 16), "CLASSES": 16}
        sizes = (longest, width, features, start.shape[2], steps, batch)
        launch(programs.categorical, clients, *tensors, *sizes, lr, **flags, **tile, warps=8)
        return out, told
    resident = batches is None and power_of_two(longest) * across <= most
    rows = power_of_two(longest) if resident else max(tiled // across, 1)
    tile = {"FAMILY": family.code, "RESIDENT": resident, "ROWS": rows, "FEATURES": across}
    warps = 8 if resident and rows * across > tiled // words else 4
    launch(programs.linear, clients, *tensors, longest, width, features, steps, batch, lr, **flags, **tile, warps=warps)
    return out, told


def _reference(problem: _Problem) -> tuple[Tensor, Tensor]:
    family, x, y, count, total, start, steps, lr, batches, precision, shift = problem
    rows = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    there = rows < count[:, None]
    x, y = torch.where(there[..., None], x, 0.0), torch.where(there, y, 0)
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1) if start.shape[1] > x.shape[2] else x
    labels = family.code == CATEGORICAL.code
    theta, told = start.reshape(*start.shape[:2], -1), start.new_zeros(len(start))
    for t in range(steps):
        index = torch.where(there, rows, -1) if batches is None else batches[:, t]
        inside, place = index >= 0, index.clamp(min=0)
        design, response = x.take_along_dim(place[..., None], 1), y.take_along_dim(place, 1)
        empty = ~inside.any(1)
        predictor = design @ theta
        if labels:
            inside = inside & (response != _IGNORED)
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
        told = told + torch.where(active, mean / total.clamp(min=1), 0.0)
    return theta.reshape(start.shape), told


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
