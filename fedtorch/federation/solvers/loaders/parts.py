"""The gradients of clients whose batches are not all alike: a stack of those that are, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedtorch import tree
from fedtorch.federation.solvers.loaders.batches import LoadedBatch
from fedtorch.module_randomness.step_draws import StepKeys


def gradients_in_parts(
    loss: Any,
    tensors: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: LoadedBatch,
    index: int,
    keys: StepKeys,
) -> tuple[Any, ...]:
    """Return what `StackedLoss.gradients` does, `(K, ...)`, zeros for clients that train no more."""
    replies, count = [], len(batch.active)
    for at, part in batch.parts():
        if len(at) == count:
            return loss.gradients(tensors, buffers, part, index, keys)
        some = tree.take((dict(tensors), dict(buffers)), at)
        replies.append((at, loss.gradients(*some, part, index, keys.some(at, index))))
    places = [at for at, _ in replies]
    losses, logs, new, gradients, recorded = zip(*(reply for _, reply in replies))
    return (
        _spread(losses, places, count),
        {name: _spread([each[name] for each in logs], places, count) for name in logs[0]},
        {name: _spread([each[name] for each in new], places, count) for name in new[0]},
        [_spread(each, places, count) for each in zip(*gradients)],
        [_by_client(each, places) for each in zip(*recorded)],
    )


def _spread(parts: Sequence[Tensor | None], places: Sequence[Tensor], count: int) -> Any:
    """Return the values of clients at some places as rows of a stack `(count, ...)`; None if there are none."""
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    whole = some.new_zeros(count, *some.shape[1:])
    for part, at in zip(parts, places):
        if part is not None:
            whole[at.to(whole.device)] = part.detach()
    return whole


def _by_client(parts: Sequence[Tensor], places: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the arguments of metrics by the client that they are of."""
    return {client: row for part, at in zip(parts, places) for client, row in zip(at.tolist(), part)}
