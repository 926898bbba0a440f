"""Noise drawn for a block of iterations at a time: fewer calls, and the numbers of one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.vfl.fit.guide import Guide
from fedtorch.vfl.fit.noise import Noise, draw_noise
from fedtorch.vfl.model.vertical import VerticalModel

_DRAWS, _DROPOUT = 0, 1  # purposes of a node's key
_STEPS, _ROWS = 1, 2  # and of the key of `iterations`
_BLOCK, _NUMBERS = 64, 2**18  # iterations and normal numbers that are drawn at a time


def iterations(
    model: VerticalModel, guide: Guide, key: Tensor, like: Tensor, total: int, steps: int, draws: int, rows: int | None
) -> Iterator[tuple[Tensor | None, Noise]]:
    """Rows and noise of each iteration, drawn for a block of iterations at a time.

    Args:
        model: the model.
        guide: the family.
        key: `()` or `(B,)`.
        like: has the noise's dtype.
        total: rows of the data.
        steps: iterations.
        draws: M.
        rows: of a minibatch, drawn uniformly with replacement; None for all.
    """
    keys = key.reshape(-1)
    count = rows or total
    parties = len(model.predictors) if guide.auxiliary.party is not None or model.power else 1
    block = max(1, _NUMBERS // (len(keys) * draws * count * model.likelihood.outputs * parties))
    for start in range(0, steps, block):
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


class NodeNoise:
    """One node's noise by itself: a pure function of its key and the step, drawn for a block of steps.

    Args:
        key: of the node.
        theta: numbers for its parameters.
        z: numbers for a row.
    """

    def __init__(self, key: Tensor, theta: int, z: int) -> None:
        self.key, self.theta, self.z = key, theta, z
        self._blocks: dict[tuple[int, torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def at(self, step: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Noise of the parameters `(1, 1, theta)` and of z `(1, 1, z, rows)`."""
        count, block = self.theta + self.z * rows, step // _BLOCK
        place = rows, like.dtype, like.device
        if not count:
            return like.new_zeros(1, 1, 0), like.new_zeros(1, 1, 0, rows)
        if place not in self._blocks or self._blocks[place][0] != block:
            steps = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device=like.device)
            keys = random.fold_in(random.fold_in(self.key.to(like.device), _DRAWS), steps)
            self._blocks[place] = block, random.normal(keys, (count,), like.dtype)
        own, rest = self._blocks[place][1][step % _BLOCK].split([self.theta, self.z * rows])
        return own.reshape(1, 1, -1), rest.reshape(1, 1, self.z, rows)

    def keys(self, step: int, like: Tensor) -> Callable[[], Tensor]:
        """Makes the keys of a step's dropout, one for each element of `like` `(B, ...)`, where they are asked for."""
        return partial(self._keys, step, len(like), like.device)

    def _keys(self, step: int, size: int, device: torch.device) -> Tensor:
        own = random.fold_in(random.fold_in(self.key.to(device), _DROPOUT), step)
        return random.fold_in(own, torch.arange(size, device=device))
