"""Units' gradient steps, for all units of a block at once or in chunks, on all rows or some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, random, tree
from fedtorch.federation.populations.clients import block_bytes
from fedtorch.federation.turn import Turn
from fedtorch.programs import stacked_step
from fedtorch.programs.stacked_step import ClientValues
from fedtorch.tree import Tree

_MOST_NUMBERS = 2**20  # most rows times inducing values in a chunk on a processor
_COPIES = 32  # most copies of these numbers, in float64, that a step's gradient stores
_BETAS = 0.9, 0.99


Gradient = Callable[[int, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]  # (step, values) -> (value, gradient)


class UnitSteps(NamedTuple):
    """Settings of a unit's round, as in the arguments of `fedmgp`."""

    steps: int
    lr: float
    batch_size: int | None = None
    site_batch_size: int | None = None
    damping: float = 1.0

    def checked(self, server_lr: float, exact_units: bool) -> UnitSteps:
        """Return these settings; raise ValueError unless they and the server's rate are in range and fit together."""
        steps, lr, damping = self.steps, self.lr, self.damping
        expected.not_negative(steps=steps, server_lr=server_lr)
        expected.positive(lr=lr)
        for name, value in (("batch_size", self.batch_size), ("site_batch_size", self.site_batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"Expected {name} of at least 1, but got {value}")
            if value is not None and exact_units:
                raise ValueError(f"Expected all rows for exact units, but got {name}={value}; leave it away")
        if not 0 < damping <= 1:
            raise ValueError(f"Expected damping above 0 and at most 1, but got {damping}")
        if self.site_batch_size is not None and damping == 1:
            raise ValueError(
                "Expected damping below 1 with site_batch_size, so that draws average out; try damping=0.1"
            )
        return self

    def note(self, turn: Turn, count: Tensor) -> None:
        """Mark a message as coming from drawn rows: a gradient, and a site's sum, of one draw each."""
        for size in (self.batch_size, self.site_batch_size):
            if size is not None:
                turn.takes(count.clamp(max=size), count)

    def ascend(
        self, gradient: Gradient, values: dict[str, Tensor], moments: AdamMoments, active: Tensor
    ) -> tuple[dict[str, Tensor], AdamMoments, Tensor | None]:
        """Take Adam steps uphill; return the values, the moments and the sum of the objective over steps, `(K,)`."""
        total: Tensor | None = None
        for step in range(self.steps):
            value, slope = gradient(step, values)
            values, moments = adam(values, slope, moments, self.lr, active)
            total = value if total is None else total + value
        return values, moments, total


class AdamMoments(NamedTuple):
    """State of `adam`; leaves `(K, ...)` or of one value."""

    first: Tree
    second: Tree
    steps: Tensor  # per unit, because units that were away have taken fewer


def in_parts(function: Callable[..., Any], numbers: int, *stacked: Tree) -> Any:
    """Apply `function(*stacked)` to as many units at a time as the cache or the device holds, and join the results.

    Args:
        function: maps stacked trees `(K, ...)`.
        numbers: a unit's rows times inducing values.
        stacked: the function's arguments.
    """
    first = tree.leaves(stacked)[0]
    most = _MOST_NUMBERS if first.device.type == "cpu" else block_bytes(first.device) // (8 * _COPIES)
    units, some = len(first), max(1, most // max(1, numbers))
    if units <= some:
        return function(*stacked)
    parts = [function(*tree.take(stacked, slice(i, min(i + some, units)))) for i in range(0, units, some)]
    return tree.concatenate(parts)


def some_rows(rows: Tree, mask: Tensor, size: int | None, key: Tensor) -> tuple[Tree, Tensor, Tensor]:
    """Draw `size` rows of each unit, or take all: (rows, mask, the factor `(K,)` from their sum to that over all)."""
    if size is None or size >= mask.shape[1]:
        return rows, mask, mask.new_ones(len(mask))
    count = mask.sum(-1).long()
    chosen = random.permutation(key, mask.shape[1], count)[:, :size]
    taken = tree.map(
        lambda leaf: leaf.gather(
            1, chosen.reshape(*chosen.shape, *[1] * (leaf.ndim - 2)).expand(-1, -1, *leaf.shape[2:])
        ),
        rows,
    )
    return taken, mask.gather(1, chosen), count.to(mask.dtype) / count.clamp(min=1, max=size)


def row_draws(data: Any, key: Tensor) -> Callable[[int | None, int], tuple[Tree, Tensor, Tensor]]:
    """Return (size, number) -> `some_rows` of units' (x, y, the other fields), by the key of this number."""
    x, y, *extra = data.batch
    mask = data.mask.to(y.dtype)
    return lambda size, number: some_rows((x, y, tuple(extra)), mask, size, random.fold_in(key, number))


def adam(
    parameters: dict[str, Tensor], gradient: dict[str, Tensor], moments: AdamMoments, lr: float, active: Tensor
) -> tuple[dict[str, Tensor], AdamMoments]:
    """Take one step uphill with the rows that are `active` `(K,)` or `()`; the others and their moments stay.

    Each row of a stack has its own step count, where `torch.optim.Adam` has one per parameter.
    """
    one = moments.steps.ndim == 0  # on the server, whose tensors are a stack of one
    stacked = tree.map(lambda leaf: leaf[None] if one else leaf, (parameters, gradient, moments))
    moved, (first, second, steps) = tree.map(
        lambda leaf: leaf.clone(memory_format=torch.contiguous_format), (stacked[0], stacked[2])
    )
    clients = ClientValues(steps.long())
    for name, value in moved.items():
        stacked_step.adam(value, -stacked[1][name], first[name], second[name], clients, lr=lr, betas=_BETAS)
    after = moved, AdamMoments(first, second, steps + 1)
    after = tree.map(lambda leaf: leaf[0], after) if one else after
    return tree.where(active, after, (parameters, moments))


def no_moments(parameters: dict[str, Tensor]) -> AdamMoments:
    """Return the moments before the first step."""
    zeros = tree.zeros_like(parameters)
    return AdamMoments(zeros, zeros, torch.zeros((), dtype=torch.float64))
