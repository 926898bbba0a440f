"""The gradients of one client whose loss is called alone: its tensors stand in the module for all of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedtorch.federation.solvers.host_state import UnchangedTensors
from fedtorch.federation.solvers.loaders.batches import LoadedBatch, LoadedBatches
from fedtorch.federation.solvers.stacked_loss import StepResult
from fedtorch.module_randomness.step_draws import StepKeys


@contextmanager
def evaluated(
    loss: Any, batches: LoadedBatches, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[Callable[..., Any]]:
    """Give what computes the gradients of each step: `loss.gradients`, or that of one client with a loader.

    The latter's module draws from the process's generators, which the client has to itself then.

    Args:
        loss: a `StackedLoss`.
        batches: of the steps.
        tensors: what is trained, `(K, ...)`, updated in place after each step.
        buffers: the stacked buffers.
    """
    if loss.batched or len(batches.total) != 1:
        yield loss.gradients
        return
    trained = [leaf[0].detach().requires_grad_() for leaf in tensors.values()]
    first, objective, device = len(trained), loss.objective, batches.device
    unchanged = UnchangedTensors(objective.module, [*loss.tensors, *loss.buffers])

    def gradients(
        tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: LoadedBatch, index: int, keys: StepKeys
    ) -> StepResult:
        with torch.enable_grad(), unchanged():
            with loss.computing(device):
                value, logs = objective(batch.alone(0), None, index)
            loss.check_trained(trained)
            each = torch.autograd.grad(value, trained, allow_unused=True)
        new = {name: value.detach()[None] for name, value in zip(buffers, loss.swap.current()[first:])}
        recorded = [{0: argument} for argument in objective.recorded]
        stacked = [None if gradient is None else gradient[None] for gradient in loss.hooks.alone(each)]
        return StepResult(value.detach()[None], {name: log[None] for name, log in logs.items()}, new, stacked, recorded)

    with loss.swap([*trained, *(leaf[0].clone() for leaf in buffers.values())]):
        yield gradients
