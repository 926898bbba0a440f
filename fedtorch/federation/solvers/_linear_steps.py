"""Gradient steps of linear heads, where all they do is known: one program for a round, or a loop of few products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from fedtorch.dispatch import choice
from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.solvers._configured import Configured
from fedtorch.federation.solvers._state import LocalState
from fedtorch.federation.solvers.batches import Batches
from fedtorch.federation.solvers.least_squares import LinearForm, linear_form
from fedtorch.federation.solvers.objective import Loss
from fedtorch.kernels import glm_steps
from fedtorch.kernels.glm_steps import BERNOULLI, CATEGORICAL, GAUSSIAN, POISSON, Family
from fedtorch.models.linear import LinearHead, raw
from fedtorch.stacked_layers import StackedLinear
from fedtorch.tree import Tree


class LinearSteps(NamedTuple):
    """A linear head with plain SGD on a loss of `torch.nn.functional`."""

    family: Family
    form: LinearForm
    dims: int  # of y, the clients and rows included
    lr: float
    weight_decay: float

    def knows(self, start: Tree, rows: Tree, quadratic: Quadratic | None) -> bool:
        """Return whether a program takes the steps of clients with such parameters and rows."""
        first = next(iter(start.values()))
        if first.device.type != "cpu" and not self._launches(first):
            return False  # the loop over steps is for a CPU
        if quadratic is not None and isinstance(quadratic.precision, dict):
            return False
        (x, y), dtype = rows, first.dtype
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return False
        wanted = torch.int64 if self.family is CATEGORICAL else dtype
        features = sum(leaf[0].numel() for leaf in start.values()) // self.form.outputs
        known = not self._launches(first) or glm_steps.fits(self.family, features, self.form.outputs, dtype)
        one = y.ndim == self.dims and y.shape == (*x.shape[:2], 1)[: self.dims]
        return known and one and (x.ndim, x.dtype, y.dtype) == (3, dtype, wanted)

    def _launches(self, like: Tensor) -> bool:
        """Return whether a program takes all steps, and not a loop over them."""
        return choice.possible(like.device) and choice.installed()

    def solve(self, start: Tree, state: LocalState, data: Any, batches: Batches, quadratic: Quadratic | None) -> Local:
        """Take the steps; the result is that of stacked steps, up to rounding."""
        x, y = data.batch
        join = self.form.join if self.family is CATEGORICAL else lambda parameters: self.form.join(parameters)[..., 0]
        total = batches.total.to(x.device)
        own, precision, shift = join(start), None, None
        if quadratic is not None or self.weight_decay:
            strength = own.new_zeros(len(own)) if quadratic is None else quadratic.precision_of("")
            precision = strength + self.weight_decay
            shift = torch.zeros_like(own) if quadratic is None else join(quadratic.shift)
        more: dict[str, Any]
        y, more = y.reshape(x.shape[:2]), {"lr": self.lr, "total": total, "precision": precision, "shift": shift}
        if self._launches(own):
            more["batches"] = batches.chosen()
            steps = int(batches.total.max())
            theta, loss = glm_steps.glm_steps(self.family, x, y, data.count, own, steps=steps, **more)
        else:
            theta, loss = glm_steps.glm_loop(self.family, x, y, own, batches.runs, **more)
        kept = LocalState(state.optimizer, {}, None if state.steps is None else state.steps + total)
        return Local(self.form.split(theta.reshape(*own.shape[:2], -1)), kept, self.lr * total.double(), {"loss": loss})


def linear_steps(
    module: nn.Module, loss: Loss | None, trained: list[str], configured: Configured
) -> LinearSteps | None:
    """Return the steps of `module` if they are all that the program does, None otherwise."""
    family = next((f for f in (GAUSSIAN, BERNOULLI, POISSON, CATEGORICAL) if f.loss is loss), None)
    if family is None or type(module) not in (nn.Linear, StackedLinear, LinearHead) or _hooked(module):
        return None
    if trained != [name for name, _ in module.named_parameters()] or getattr(module, "feature_map", raw) is not raw:
        return None
    form, optimizer = linear_form(module), configured.optimizer.original
    classes = family is CATEGORICAL
    if classes != (form.outputs > 1) or (classes and isinstance(module, LinearHead)):
        return None
    if type(optimizer) is not SGD or configured.schedule is not None or len(optimizer.param_groups) != 1:
        return None
    group = optimizer.param_groups[0]
    refused = ("momentum", "nesterov", "maximize", "differentiable")
    if any(group[name] for name in refused) or isinstance(group["lr"], Tensor) or _hooked(optimizer):
        return None
    dims = 3 if isinstance(module, nn.Linear) and not classes else 2
    return LinearSteps(family, form, dims, group["lr"], group["weight_decay"])


def _hooked(owner: nn.Module | SGD) -> bool:
    """Return whether hooks are registered on the module."""
    return any(bool(value) for name, value in vars(owner).items() if name.endswith("_hooks"))
