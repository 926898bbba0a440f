"""Probe a module on a few rows of a block: random numbers, separable losses, and what forbids stacking clients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import functional, random, tree
from fedtorch._untrained import refuse_untrained
from fedtorch.captured import IndexUsed, capture
from fedtorch.data import BadClients
from fedtorch.data.federated import described_rows
from fedtorch.data.items import seeded
from fedtorch.federation.solvers._broadcasts import Broadcasts, refuse_broadcast
from fedtorch.federation.solvers._probed_rows import some_rows, spread_rows
from fedtorch.federation.solvers._state import perturbed, refuse_changed_buffers, refuse_changed_loss
from fedtorch.federation.solvers.batches import is_ragged
from fedtorch.federation.solvers.loaders.batches import rows_in
from fedtorch.federation.solvers.stacked_loss import StackedLoss
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
_CHECKPOINTED = (
    "Expected a module without activation checkpointing or other hooks on saved tensors, whose backward pass would run "
    "on another client's tensors, but got one; switch checkpointing off, or use ft.lightning_fit"
)


def check_rows(
    stacked: StackedLoss,
    data: Any,
    values: Mapping[str, Tensor],
    original: Callable[[], nn.Module | None] | None = None,
) -> None:
    """Try whether the module can train on the rows of a block: on a few, with the extreme labels among them.

    Args:
        stacked: the loss.
        data: a block `ClientData`, which has clients.
        values: one client's tensors and stacked buffers by name.
        original: gives the user's module, while there is one, so that a loss which reads its parameters is refused;
            None looks for none.

    Raises:
        BadClients: it cannot take the rows of some.
        ValueError: the rows are not (input, target), and there is no `training_step` to read others; or the loss
            compares every output with every target, or reads parameters that are not trained.
        RuntimeError: it checkpoints activations.
    """
    if stacked.objective.supervised and not (isinstance(data.batch, tuple) and len(data.batch) == 2):
        raise ValueError(
            f"Expected rows (input, target) for loss=, but got {described_rows(data.batch)}; take a LightningModule, "
            "whose training_step reads any rows"
        )
    # Labels out of range end the process on an accelerator: they are looked for on the CPU first.
    for device in dict.fromkeys((torch.device("cpu"), data.count.device)):
        stacked.objective.to(device)
        own, (client, row) = _own(stacked, values, device), spread_rows(data)
        rows = _rows_at(data, client, row, device)
        with Broadcasts(len(row)) as broadcasts:
            error = _failure(stacked, own, rows, original)
        if error is None and broadcasts.met is not None:
            name = type(stacked.objective.module).__name__
            refuse_broadcast(partial(_loss_of, stacked, own, rows), name, broadcasts.met)
        if error is None or (device != data.count.device and not isinstance(error, IndexError)):
            continue
        if "checkpoint" in str(error) or (isinstance(error, Warning) and "requires_grad" in str(error)):
            raise RuntimeError(_CHECKPOINTED) from error
        alone = ((int(k), _rows_at(data, k.expand(2), r.expand(2), device)) for k, r in zip(client, row))
        bad = next((k for k, rows in alone if _failure(stacked, own, rows) is not None), int(client[0]))
        raise BadClients(
            torch.tensor([bad]),
            f"Expected rows that {type(stacked.objective.module).__name__} can train on, but got "
            f"{described_rows(data.batch)}: {error}; {_advice(error, data.batch, own[0].dtype)}",
        ) from error


def check_batch(
    stacked: StackedLoss,
    batch: Any,
    values: Mapping[str, Tensor],
    device: torch.device,
    original: Callable[[], nn.Module | None] | None = None,
) -> None:
    """Try whether the module can train on the first batch of a client's loader; see `check_rows`.

    Raises:
        BadClients: it cannot.
        ValueError: the loss reads parameters that are not trained, or compares every output with every target.
        RuntimeError: it checkpoints activations.
    """
    objective = stacked.objective.to(device)
    own, rows = _own(stacked, values, device), tuple(batch) if isinstance(batch, list) else batch
    if objective.supervised and not (isinstance(rows, tuple) and len(rows) == 2):
        raise ValueError(
            f"Expected batches (input, target) for loss=, but got {type(batch).__name__}; take a LightningModule, "
            "whose training_step reads any"
        )
    with Broadcasts(rows_in(batch)) as broadcasts:
        error = _failure(stacked, own, batch, original)
    if error is not None and ("checkpoint" in str(error) or isinstance(error, Warning)):
        raise RuntimeError(_CHECKPOINTED) from error
    name = type(objective.module).__name__
    if error is not None:
        raise BadClients(torch.tensor([0]), f"{name} cannot train on its first batch: {error}") from error
    if broadcasts.met is not None and all(isinstance(leaf, Tensor) for leaf in rows):
        refuse_broadcast(partial(_loss_of, stacked, own, rows), name, broadcasts.met)


def failure_on_one_row(loss: StackedLoss, data: Any, values: Mapping[str, Tensor], client: Tensor) -> Any:
    """Return the error of one row of a client `(1,)`, None if the module can train on it."""
    return _failure(loss, _own(loss, values, data.count.device), _rows_at(data, client, 0 * client, data.count.device))


def _failure(
    stacked: StackedLoss,
    own: list[Tensor],
    rows: Tree,
    original: Callable[[], nn.Module | None] | None = None,
) -> Exception | None:
    """Return the error of one client's loss and gradient, if its rows may be the cause."""
    leaves = [v.clone().requires_grad_(i < len(stacked.tensors)) for i, v in enumerate(own)]
    stacked.objective.trainer.answers.update(global_step=0, current_epoch=0)
    # Buffers that the module keeps stay as they are: `probe` says whether a pass changes them.
    buffers = functional.buffers(stacked.objective.module)
    kept = functional.Swap(stacked.objective.module, list(buffers))(list(buffers.values()))
    with kept, warnings.catch_warnings(), torch.enable_grad(), KeyedRandomness(random.key(0).to(own[0].device)):
        warnings.filterwarnings("error", message="None of the inputs have requires_grad")  # a checkpoint's
        try:
            with torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTED):
                loss = stacked.single(leaves, rows, None, 0)[0]
                if loss.requires_grad:
                    torch.autograd.grad(loss, leaves[: len(stacked.tensors)], allow_unused=True)
        except (IndexError, KeyError, RuntimeError, UserWarning, ValueError) as error:
            return None if isinstance(error, NotImplementedError) else error
        except Exception:  # the probe says what else a module objects to
            return None
    if original is not None:
        refuse_untrained(loss, leaves[: len(stacked.tensors)], stacked.objective.module, original())
    return None


def _loss_of(stacked: StackedLoss, own: list[Tensor], rows: Tree, size: int) -> Tensor:
    """Return one client's loss on so many of the rows, some of them several times."""
    leaves = [v.clone().requires_grad_(i < len(stacked.tensors)) for i, v in enumerate(own)]
    at = torch.arange(size, device=own[0].device)
    with warnings.catch_warnings(action="ignore"), torch.enable_grad(), KeyedRandomness(random.key(0).to(at.device)):
        return stacked.single(leaves, tree.map(lambda leaf: leaf[at % len(leaf)], rows), None, 0)[0].detach()


def _advice(error: Exception, batch: Tree, dtype: torch.dtype) -> str:
    if isinstance(error, IndexError):
        return "classes and tokens are numbered from 0 to one less than the module has"
    if any((leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype != dtype for leaf in tree.leaves(batch)):
        return f"convert them with data.to(dtype={dtype}), or the module with module.to(…)"
    return "change the rows, the module's inputs or the loss"


def probe(stacked: StackedLoss, data: Any, values: Mapping[str, Tensor]) -> None:
    """Run the module on a few rows of a block: does it draw, change buffers, run stacked, split by example?

    Args:
        stacked: the loss, which is told.
        data: a block `ClientData`.
        values: one client's tensors and stacked buffers by name.

    Raises:
        TypeError: it returns no loss, or compiled steps would freeze what changes from step to step.
        ValueError: it changes buffers that are not stacked.
        RuntimeError: `torch.vmap` cannot run it, or gives another loss.
    """
    probe_batch(stacked, some_rows(data), values, data.count)


def probe_batch(stacked: StackedLoss, rows: Any, values: Mapping[str, Tensor], count: Tensor) -> None:
    """Look at a module as `probe` does, on a batch of one client of a block with so many rows `(K,)`."""
    device = count.device
    trained, tensors, key = len(stacked.tensors), _own(stacked, values, device), random.key(0).to(device)
    whole = None
    with torch.no_grad():
        if not stacked.probed:
            loss, moved, asked = _alone(stacked, tensors, rows, key)
            if stacked.batched:
                whole = _choose(stacked, tensors, rows, loss, key)
            if stacked.eager is None:
                _check_captured(stacked, tensors, rows, asked)
            if any(not torch.equal(a, b) for a, b in zip(tensors[trained:], moved)):
                stacked.separable = False
        if stacked.batched and stacked.separable is not False and is_ragged(count):
            stacked.separable = _splits(stacked, tensors, rows, key, whole)
    stacked.probed = True


def _alone(
    stacked: StackedLoss, own: list[Tensor], rows: Tree, key: Tensor
) -> tuple[Tensor, Sequence[Tensor], set[str]]:
    """Return one client's loss and new buffers, evaluated without `vmap`, and what the module has asked its trainer."""
    module, trainer = stacked.objective.module, stacked.objective.trainer
    before, asked = functional.buffers(module), set(trainer.asked)
    trainer.asked.clear()
    trainer.answers.update(global_step=0, current_epoch=0)
    with seeded(0), stacked.drawing.observed(key) as drawn:
        loss, _, new = _once(stacked, own, rows)
    stacked.random = drawn.calls > 0
    questions = set(trainer.asked)
    trainer.asked |= asked
    refuse_changed_buffers(module, before)
    with seeded(0):
        if not stacked.random and not _close(again := _once(stacked, own, rows)[0], loss, equal_nan=True):
            refuse_changed_loss(module, loss, again)
    return loss, new, questions


def _choose(
    stacked: StackedLoss, own: list[Tensor], rows: Tree, alone: Tensor, key: Tensor
) -> tuple[Tensor, ...] | None:
    """Check that clients can be stacked; where they need not be and cannot, evaluate them one by one.

    Return losses and logs of two stacked copies, if they are.
    """
    name = type(stacked.objective.module).__name__
    try:
        whole = _check_stacked(stacked, own, rows, alone, key)
    except RuntimeError as error:
        if not stacked.automatic:
            raise
        why = str(error).splitlines()[0]
    else:
        if stacked.automatic:
            _LOG.info("batched='auto' evaluates the clients of %s together", name)
        return whole
    stacked.batched = False
    _LOG.info("batched='auto' evaluates the clients of %s one by one: %s", name, why)
    return None


def _check_stacked(
    stacked: StackedLoss, own: list[Tensor], rows: Tree, alone: Tensor, key: Tensor
) -> tuple[Tensor, ...]:
    """Return losses and logs of two stacked copies, if the losses are the one of a client alone."""
    name = type(stacked.objective.module).__name__
    try:
        found = _twice_or_reading(stacked, own, rows, key)
    except Exception as error:
        raise RuntimeError(
            f"{name} cannot run on stacked clients under torch.vmap: {error}\n"
            "Use batched=False, which calls the loss client by client, or ft.lightning_fit"
        ) from error
    together = found[0]
    if not _close(together, alone.expand(2), equal_nan=True):
        raise RuntimeError(
            f"{name} gives the losses {together.tolist()} on two stacked copies of a client, but {float(alone)} on "
            "one alone; use batched=False, which calls the loss client by client"
        )
    return found


def _twice_or_reading(stacked: StackedLoss, own: list[Tensor], rows: Tree, key: Tensor) -> tuple[Tensor, ...]:
    """Return `_twice`; of a module that branches on values, only by reading them, which takes a little longer."""
    try:
        return _twice(stacked, own, rows, False, key)
    except Exception:
        if not stacked.divides:
            raise
        stacked.reads = True
        try:
            return _twice(stacked, own, rows, False, key)
        except Exception:
            stacked.reads = False
            raise


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
    """Return losses and logs of two stacked copies of one client."""
    values, some = tree.map(lambda leaf: leaf.expand(2, *leaf.shape).clone(), (tuple(own), rows))
    size = len(tree.leaves(rows)[0])
    weights = torch.full((2, size), 1.0 / size, device=key.device, dtype=torch.float64)
    flat = [*values, *tree.leaves(some), *([weights] if weighted else [])]
    with KeyedRandomness(torch.stack([key, key])):
        results = stacked.stacked(flat, some, 0, "different")
    return results[: 1 + len(stacked.told)]


def _once(stacked: StackedLoss, own: list[Tensor], rows: Tree, weighted: bool = False) -> tuple[Any, ...]:
    """Return loss, logs and buffers of one client, which cost half of those of two copies."""
    size = len(tree.leaves(rows)[0]) if weighted else 0
    weights = torch.full((size,), 1.0 / size, device=own[0].device, dtype=torch.float64) if weighted else None
    return stacked.single([v.clone() for v in own], rows, weights, 0)


def _splits(stacked: StackedLoss, own: list[Tensor], rows: Tree, key: Tensor, known: tuple[Tensor, ...] | None) -> bool:
    """Return whether loss and logs are the means of the examples' on batches of several sizes.

    Two stacked copies are tried on all rows, of which losses and logs may be `known`, and one client on fewer rows,
    unless it draws random numbers, which are the same for a client alone only where whole batches draw them.
    """
    size = len(tree.leaves(rows)[0])
    try:
        for part in sorted({size, (size + 1) // 2, 2}, reverse=True):
            some = tree.map(lambda leaf, part=part: leaf[:part], rows)
            if part < size and not stacked.random:
                passes = (_once(stacked, own, some, weighted) for weighted in (False, True))
                whole, summed = ((loss, *logs.values()) for loss, logs, _ in passes)
            else:
                whole = known if part == size and known is not None else _twice(stacked, own, some, False, key)
                summed = _twice(stacked, own, some, True, key)
            if len(whole) != len(summed) or not all(_close(a, b) for a, b in zip(whole, summed)):
                return False
    except Exception:  # whatever a module objects to in batches of one: clients are then grouped by size
        return False
    return True


def _close(first: Tensor, second: Tensor, equal_nan: bool = False) -> bool:
    first, second = first.detach(), second.detach()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(second.dtype, 1e-2)
    return torch.allclose(first.double(), second.double(), rtol=tolerance, atol=tolerance, equal_nan=equal_nan)


def _own(stacked: StackedLoss, values: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
    """Return one client's tensors, a little away from the start, and its stacked buffers."""
    start = [perturbed(values[n].to(device)) for n in stacked.tensors]
    return start + [values[n].to(device, copy=True) for n in stacked.buffers]


def _rows_at(data: Any, client: Tensor, row: Tensor, device: torch.device) -> Tree:
    return tree.map(lambda leaf: leaf[client, row].to(device), data.batch)
