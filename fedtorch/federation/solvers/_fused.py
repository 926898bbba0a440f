"""Steps of a stacked optimiser with quadratic and clipping in one pass over memory, for supported optimisers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedtorch.optimisers import elementwise
from fedtorch.programs import stacked_step
from fedtorch.programs.stacked_step import ClientValues

_REFUSED = ("amsgrad", "maximize", "differentiable", "capturable")
Pull = tuple[Tensor, Tensor]  # λ and h


class FusedSteps:
    """Steps of the parameters that a bound optimiser holds, in the optimiser's own state.

    Args:
        optimizer: SGD, Adam or AdamW of parameters for which `knows` holds.
        clip: the greatest norm of a client's gradients; None for any.
    """

    def __init__(self, optimizer: Optimizer, clip: float | None) -> None:
        self.optimizer, self.clip = optimizer, clip

    @staticmethod
    def knows(optimizer: Optimizer) -> bool:
        """Return whether a program implements all settings of the optimiser, and runs on its tensors."""
        if type(optimizer) not in (SGD, Adam, AdamW) or not elementwise(optimizer):
            return False
        for group in optimizer.param_groups:
            plain = not any(group.get(name) for name in _REFUSED)
            if not plain or any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
                return False
            if not all(map(stacked_step.fits, group["params"])):
                return False
        return bool(optimizer.param_groups)

    def step(self, gradients: Mapping[Tensor, Tensor | None], pulls: Mapping[Tensor, Pull]) -> None:
        """Take a step.

        Args:
            gradients: by parameter; None if the loss does not depend on it.
            pulls: λ, which broadcasts with the parameter, and h; {} for none.
        """
        todo = []
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                gradient = gradients[tensor]
                if gradient is None and tensor not in pulls:
                    continue
                precision, shift = pulls.get(tensor, (None, None))
                strength = None if precision is None else precision.reshape(-1).expand(len(tensor))
                clients = ClientValues(0, precision=strength, shift=shift)
                todo.append((tensor, torch.zeros_like(tensor) if gradient is None else gradient, clients, group))
        share = None
        if self.clip is not None and todo:
            tensors, todo_gradients, clients_of, _ = zip(*todo)
            share = stacked_step.clipped(tensors, todo_gradients, clients_of, self.clip)
        for tensor, gradient, clients, group in todo:
            update = self._sgd if type(self.optimizer) is SGD else self._adam
            update(tensor, gradient, clients._replace(share=share), group)

    def _sgd(self, tensor: Tensor, gradient: Tensor, clients: ClientValues, group: Mapping[str, Any]) -> None:
        state, momentum = self.optimizer.state[tensor], group["momentum"]
        begun = state.get("momentum_buffer") is not None
        if momentum and not begun:
            state["momentum_buffer"] = torch.zeros_like(tensor)
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        buffer = state["momentum_buffer"] if momentum else None
        beginning = clients._replace(taken=int(begun))
        stacked_step.sgd(tensor, gradient, buffer, beginning, **{name: group[name] for name in names})

    def _adam(self, tensor: Tensor, gradient: Tensor, clients: ClientValues, group: Mapping[str, Any]) -> None:
        state = self.optimizer.state[tensor]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        count = state["step"]
        taken = int(count) if count.device.type == "cpu" else count.long().expand(len(tensor)).contiguous()
        stacked_step.adam(
            tensor,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            clients._replace(taken=taken),
            decoupled=type(self.optimizer) is AdamW or bool(group.get("decoupled_weight_decay")),
            **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
        )
        count.add_(1)
