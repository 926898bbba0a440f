r"""Gradient steps of K generalised linear models on a CPU, one after another, by SGD, momentum, Adam or AdamW.

With the mean gradient g of a batch, and with λ and h as in `glm_steps`, the slope of client k's objective is

.. math:: s = g(\theta_k) + \lambda_k \theta_k - h_k,

and a step moves θ by −η s, or as `torch.optim.SGD` with momentum, `Adam` and `AdamW` do with s as the gradient; of
plain SGD the part of λ and h first, which is the same.

The program takes all steps of a client while its rows are in the cache. Without it a loop over steps has a few
products each. Bound: one read of the data, or 4 N d T operations a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.dispatch import choice
from fedtorch.kernels.glm_steps import CATEGORICAL, IGNORED, Family
from fedtorch.programs import glm_steps as program
from fedtorch.programs.optimiser_rules import Rule, moments_of

_ROWS = 2**10  # of a run of steps of the loop, which stay in the cache


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
    rule: Rule | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the parameters after all steps, in the shape of `start`, and the mean loss `(K,)` without λ and h.

    Args:
        family, x, y, start, lr, precision, shift: as of `glm_steps`.
        runs: the most rows that a run may have, None for any number -> runs: of S steps after another the rows
            `(S, K, B)`, of which those beyond a client's size repeat others, or None for the first ones; and the sizes
            `(S, K)`. No client takes its last step within one.
        total: `(K,)` steps of each client.
        rule: how slopes become steps; None for plain SGD.

    Not differentiable: where a gradient is asked for the loop runs, whose operations in place torch refuses to go back.
    """
    theta = start.reshape(*start.shape[:2], -1)
    pulled = None if precision is None or shift is None else (precision, shift.reshape(theta.shape))
    tensors = (x, y, start, total, *(pulled or ()))
    if _known(family, tensors, theta.shape[2]):
        theta, told = program.run(family.code, x, y, theta, runs(None), lr, total, pulled, rule)
        return theta.reshape(start.shape), (told / total).to(start.dtype)
    return _looped(family, x, y, start, runs(_ROWS), lr, total, precision, shift, rule)


def _known(family: Family, tensors: Sequence[Tensor], classes: int) -> bool:
    """Return whether the program takes these tensors, first of all x, y and the start."""
    x, y, start = tensors[:3]
    if start.dtype != x.dtype or not choice.plain(tensors) or not program.usable(x.dtype):
        return False
    if family.code != CATEGORICAL.code:
        return y.dtype == x.dtype
    known = (y == IGNORED) | ((y >= 0) & (y < classes))  # others end with torch's error
    return y.dtype == torch.int64 and bool(known.all())


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
    rule: Rule | None,
) -> tuple[Tensor, Tensor]:
    """Return what `glm_loop` does, by a loop over steps in which clients that are done take no part."""
    rows = x if start.shape[1] == x.shape[2] else torch.cat([x, torch.ones_like(x[..., :1])], -1)
    width, (flat, responses) = x.shape[1], (rows.flatten(0, 1), y.flatten())
    theta = start.reshape(*start.shape[:2], -1).clone(memory_format=torch.contiguous_format)
    told = start.new_zeros(len(start), dtype=torch.float64)
    pull = None if precision is None or shift is None else (precision[:, None, None], shift.reshape(theta.shape))
    moments = tuple(torch.zeros_like(theta) for _ in range(moments_of(rule)))
    done, ends = (torch.empty_like(theta), torch.empty_like(told)), set(total.tolist())
    whole = rows[None], y[None]  # of the clients that are here, for steps that take all rows
    client, here = torch.arange(len(start)), (theta, told, pull, width * torch.arange(len(start))[:, None], moments)
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
        _run(family, here, design, response, size, lr, rule, step - len(size))
    done[0][client], done[1][client] = here[:2]
    return done[0].reshape(start.shape), (done[1] / total).to(start.dtype)


def _run(
    family: Family,
    here: Any,
    design: Tensor,
    response: Tensor,
    size: Tensor,
    lr: float,
    rule: Rule | None,
    first: int,
) -> None:
    """Take the steps of sizes `(S, K)` by the clients that are `here`, in place; rows are of each step, or of all."""
    theta, told, pull, _, moments = here
    steps, labels, share = len(size), family.code == CATEGORICAL.code, 1 / design.shape[2]
    inside = None
    if labels and bool((response == IGNORED).any()):
        inside = response != IGNORED
        response = response.where(inside, 0)
    if not bool((size == design.shape[2]).all()):
        counted = torch.arange(design.shape[2]) < size[..., None]
        inside = counted if inside is None else counted & inside
    wanted = (response if labels else response.to(theta.dtype))[..., None]
    weights = None
    if inside is not None:
        seen = inside.sum(2)
        weights, share = (inside.to(theta.dtype) / seen.clamp(min=1)[..., None])[..., None], 1.0
    each = [_of(steps, part).unbind() for part in (design, design.mT, wanted)]
    weight = (None,) * steps if weights is None else _of(steps, weights).unbind()
    less = theta.new_full((), -1.0).expand(wanted.shape[1:])
    keep, push = (None, None) if pull is None or rule is not None else (1 - lr * pull[0], lr * pull[1])
    kept = []  # what losses are made of: linear predictors, or the log probabilities of labels
    for number, (x, transposed, y, w) in enumerate(zip(*each, weight), first):
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
        if rule is None:
            if keep is not None:
                theta.mul_(keep).add_(push)
            theta.baddbmm_(transposed, gap, alpha=-lr * share)
            continue
        slope = (transposed @ gap).mul_(share)
        rule.step(theta, slope if pull is None else slope.addcmul_(pull[0], theta).sub_(pull[1]), moments, number, lr)
    logged = torch.stack(kept)
    losses = (-logged if labels else family.loss(logged, _of(steps, wanted), reduction="none"))[..., 0]
    if inside is None:
        told += losses.mean(2).sum(0)
    else:  # 0 / 0 where all are left out, as in torch
        told += (torch.where(inside, losses, 0.0).sum(2) / seen).sum(0)


def _of(steps: int, part: Tensor) -> Tensor:
    """Return the part for each of the steps, where it is one of all."""
    return part.expand(steps, *part.shape[1:])
