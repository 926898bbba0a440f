"""What has to be known about a module before its clients can be stacked: tried out on a few rows of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import functional, random, tree
from fedtorch.federation.local_solvers.batches import is_ragged
from fedtorch.federation.local_solvers.captured import IndexUsed, capture
from fedtorch.federation.local_solvers.stacked_loss import StackedLoss
from fedtorch.federation.local_solvers.state import refuse_changed_buffers
from fedtorch.module_randomness import Drawn
from fedtorch.tree import Tree

_ROWS = 16


def probe(stacked: StackedLoss, data: Any, values: Mapping[str, Tensor]) -> None:
    """Runs the module on a few rows of a block: does it draw, change buffers, run stacked, split by example?

    Args:
        stacked: the loss, which is told.
        data: a block `ClientData`.
        values: one client's tensors and stacked buffers by name.

    Raises:
        TypeError: it returns no loss, or compiled steps would freeze what changes from step to step.
        ValueError: it changes buffers that are not stacked.
        RuntimeError: `torch.vmap` cannot run it, or gives another loss.
    """
    rows = _some_rows(data, _ROWS)
    device = tree.leaves(rows)[0].device
    trained = len(stacked.tensors)
    own = [_perturbed(values[n].to(device)) for n in stacked.tensors]
    own += [values[n].to(device, copy=True) for n in stacked.buffers]
    key = random.key(0).to(device)
    with torch.no_grad():
        if not stacked.probed:
            loss, moved, asked = _alone(stacked, own, rows, key)
            if stacked.batched:
                _check_stacked(stacked, own, rows, loss, key)
            if stacked.eager is None:
                _check_captured(stacked, own, rows, asked)
            if any(not torch.equal(a, b) for a, b in zip(own[trained:], moved)):
                stacked.separable = False
        if stacked.batched and stacked.separable is not False and is_ragged(data.count):
            stacked.separable = _splits(stacked, own, rows, key)
    stacked.probed = True


def _alone(
    stacked: StackedLoss, own: list[Tensor], rows: Tree, key: Tensor
) -> tuple[Tensor, Sequence[Tensor], set[str]]:
    """One client's loss and new buffers, evaluated without `vmap`, and what the module has asked its trainer."""
    module, trainer = stacked.objective.module, stacked.objective.trainer
    before, asked = functional.buffers(module), set(trainer.asked)
    trainer.asked.clear()
    trainer.answers.update(global_step=0, current_epoch=0)
    with Drawn(key) as drawn:
        loss, _, new = stacked.single([v.clone() for v in own], rows, None, 0)
    stacked.random = drawn.calls > 0
    questions = set(trainer.asked)
    trainer.asked |= asked
    refuse_changed_buffers(module, before)
    return loss, new, questions


def _check_stacked(stacked: StackedLoss, own: list[Tensor], rows: Tree, alone: Tensor, key: Tensor) -> None:
    name = type(stacked.objective.module).__name__
    try:
        together = _twice(stacked, own, rows, False, key)[0]
    except Exception as error:
        raise RuntimeError(
            f"{name} cannot run on stacked clients under torch.vmap: {error}\n"
            "Use batched=False, which calls the loss client by client, or ft.lightning_fit"
        ) from error
    if not _close(together, alone.expand(2), equal_nan=True):
        raise RuntimeError(
            f"{name} gives the losses {together.tolist()} on two stacked copies of a client, but {float(alone)} on "
            "one alone; use batched=False, which calls the loss client by client"
        )


def _check_captured(stacked: StackedLoss, own: list[Tensor], rows: Tree, asked: set[str]) -> None:
    changing = [f"trainer.{question}" for question in sorted(asked - {"max_epochs", "training"})]
    try:
        capture(partial(stacked.step, rows, None), *[leaf[None] for leaf in (*own, *tree.leaves(rows))])
    except IndexUsed:
        changing.append("batch_idx")
    if changing:
        raise TypeError(
            f"The training_step of {type(stacked.objective.module).__name__} depends on {', '.join(changing)}, which "
            "a compiled step would freeze; use compile=False"
        )


def _twice(stacked: StackedLoss, own: list[Tensor], rows: Tree, weighted: bool, key: Tensor) -> tuple[Tensor, ...]:
    """Losses and logs of two stacked copies of one client."""
    values, some = tree.map(lambda leaf: leaf.expand(2, *leaf.shape).clone(), (tuple(own), rows))
    size = len(tree.leaves(rows)[0])
    weights = torch.full((2, size), 1.0 / size, device=key.device, dtype=torch.float64)
    flat = [*values, *tree.leaves(some), *([weights] if weighted else [])]
    with Drawn(torch.stack([key, key])):
        found = stacked.stacked(flat, some, 0, "different")
    return found[: 1 + len(stacked.told)]


def _splits(stacked: StackedLoss, own: list[Tensor], rows: Tree, key: Tensor) -> bool:
    """Whether loss and logs are the means of the examples' on batches of several sizes."""
    size = len(tree.leaves(rows)[0])
    for part in sorted({size, (size + 1) // 2, 2}):
        some = tree.map(lambda leaf, part=part: leaf[:part], rows)
        try:
            whole, summed = (_twice(stacked, own, some, weighted, key) for weighted in (False, True))
        except Exception:  # whatever a module objects to in batches of one: clients are then grouped by size
            return False
        if len(whole) != len(summed) or not all(_close(a, b) for a, b in zip(whole, summed)):
            return False
    return True


def _close(first: Tensor, second: Tensor, equal_nan: bool = False) -> bool:
    first, second = first.detach(), second.detach()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(second.dtype, 1e-2)
    return torch.allclose(first.double(), second.double(), rtol=tolerance, atol=tolerance, equal_nan=equal_nan)


def _perturbed(tensor: Tensor) -> Tensor:
    """A little away from the start, where a loss may be the same for all examples; signs are kept."""
    wave = 0.1 * torch.sin(torch.arange(1, tensor.numel() + 1, device=tensor.device)).reshape(tensor.shape)
    return torch.where(tensor == 0, wave, tensor * (1 + wave)).to(tensor.dtype)


def _some_rows(data: Any, most: int) -> Tree:
    """Valid rows spread over the clients of a block, with some for each of the first values of integer fields."""
    client, row = data.mask.nonzero().T
    chosen = [torch.linspace(0, len(client) - 1, min(most, len(client)), device=client.device).long()]
    for leaf in tree.leaves(data.batch):
        if leaf.ndim == 2 and not (leaf.is_floating_point() or leaf.is_complex()):
            values, which = leaf[client, row].unique(return_inverse=True)
            first = which.new_full((len(values),), len(which))
            first.scatter_reduce_(0, which, torch.arange(len(which), device=which.device), "amin")
            chosen.append(first[:most])
    at = torch.cat(chosen).unique()
    return tree.map(lambda leaf: leaf[client[at], row[at]], data.batch)
