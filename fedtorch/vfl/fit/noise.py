"""Draws of a vertical iteration: standard normal numbers, and keys of modules that draw, as functions of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch._representation import without_rows
from fedtorch.vfl.fit.guide import Guide
from fedtorch.vfl.model.vertical import VerticalModel

_THETA, _Z = 0, 1  # purposes of a node's key in `draw_noise`
_STEPS, _ROWS = 1, 2  # and of the key of `iterations`
_NUMBERS = 2**18  # normal numbers that `iterations` draws at a time


@without_rows
class Noise(NamedTuple):
    """Draws of an iteration; the leading dimension is 1 where the batch shares it.

    >>> import fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2), ft.vfl.linear(3)], rho=1.0)
    >>> noise = draw_noise(model, Guide(ft.vfl.mean_field()), random.key(0).reshape(1), rows=5, draws=4)
    >>> [tuple(own.shape) for own in noise.theta]  # of an intercept, two and three coefficients
    [(1, 4, 1), (1, 4, 2), (1, 4, 3)]
    >>> [tuple(own.shape) for own in noise.z]  # the parties draw z, the server does not
    [(1, 4, 0, 0), (1, 4, 1, 5), (1, 4, 1, 5)]
    """

    theta: tuple[Tensor, ...]  # (1 or B, M, noises), of the server and the parties
    z: tuple[Tensor, ...]  # (1 or B, M, noises · C, n), of the server and the parties
    keys: tuple[Callable[[], Tensor], ...] = ()  # make the keys (B,) of a node's dropout


def draw_noise(
    model: VerticalModel, guide: Guide, key: Tensor, rows: int, draws: int, dtype: torch.dtype = torch.float32
) -> Noise:
    """Return the noise of an iteration, a pure function of its key.

    Every node draws from a key of its own: what one draws does not depend on how many others there are.

    Args:
        model: the model.
        guide: the family.
        key: `(..., B)`, or `(..., 1)` where the batch shares its noise; other dimensions, such as iterations, in front.
        rows: n.
        draws: M.
        dtype: of the noise.
    """
    theta, z = [], []
    z_count = guide.auxiliary.noises(model)
    for j, size in enumerate(model.sizes):
        key_of_node = random.fold_in(key, j)
        # A joint family may take more numbers than coordinates; the server draws the surplus.
        surplus = guide.theta.noises(sum(model.sizes)) - sum(model.sizes) if guide.joint and j == 0 else 0
        count = size + surplus if guide.joint else guide.family(j).noises(size)
        theta.append(random.normal(random.fold_in(key_of_node, _THETA), (draws, count), dtype))
        draws_z = (j > 0) == (guide.auxiliary.party is not None)
        of_z = (draws, z_count * model.outputs[j], rows) if draws_z else (draws, 0, 0)
        z.append(random.normal(random.fold_in(key_of_node, _Z), of_z, dtype))
    return Noise(tuple(theta), tuple(z))


def iterations(
    model: VerticalModel,
    guide: Guide,
    key: Tensor,
    like: Tensor,
    total: int,
    steps: int,
    draws: int,
    rows: int | None,
    begin: int = 0,
) -> Iterator[tuple[Tensor | None, Noise]]:
    """Return rows and noise of each iteration, drawn for a block of iterations at a time.

    Args:
        model: the model.
        guide: the family.
        key: `()` or `(B,)`.
        like: has the noise's dtype.
        total: rows of the data.
        steps: iterations.
        draws: M.
        rows: of a minibatch, drawn uniformly with replacement; None for all.
        begin: the first iteration.
    """
    keys = key.reshape(-1)
    count = rows or total
    parties = len(model.predictors) if guide.auxiliary.party is not None or model.power else 1
    block = max(1, _NUMBERS // (len(keys) * draws * count * model.likelihood.outputs * parties))
    for start in range(begin, steps, block):
        step = torch.arange(start, min(start + block, steps), device=key.device)[:, None]
        of_block = random.fold_in(random.fold_in(keys, _STEPS), step)
        theta, z, _ = draw_noise(model, guide, of_block, count, draws, like.dtype)
        each = zip(zip(*(part.unbind(0) for part in theta)), zip(*(part.unbind(0) for part in z)))
        chosen: list[Tensor | None] = [None] * len(step)
        if rows is not None:
            drawn = random.randint(random.fold_in(random.fold_in(keys[0], _ROWS), step[:, 0]), total, (rows,))
            chosen = list(drawn)
        for of_step, (own_theta, own_z) in zip(chosen, each):
            yield of_step, Noise(own_theta, own_z)
