"""Gradient steps of linear models, where all they do is known: one program for a round, or a loop of few products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from fedtorch.dispatch import choice
from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.solvers._configured import Configured
from fedtorch.federation.solvers._state import LocalState
from fedtorch.federation.solvers.batches import Batches
from fedtorch.federation.solvers.linear.recognition import LinearModel, linear_model
from fedtorch.federation.solvers.objective import Loss, Objective
from fedtorch.kernels import glm_steps, optimiser_rules
from fedtorch.kernels.glm_loop import glm_loop
from fedtorch.kernels.glm_steps import CATEGORICAL
from fedtorch.kernels.optimiser_rules import Momentum, Rule
from fedtorch.optimisers import hooked
from fedtorch.tree import Tree


class LinearSteps(NamedTuple):
    """A linear model with SGD, Adam or AdamW on a loss of `torch.nn.functional`."""

    model: LinearModel
    lr: float
    weight_decay: float  # that is a part of the gradient
    rule: Rule | None  # how gradients become steps; None for plain SGD

    def knows(self, start: Tree, rows: Tree, quadratic: Quadratic | None) -> bool:
        """Return whether a program takes the steps of clients with such parameters and rows."""
        first = next(iter(start.values()))
        if first.device.type != "cpu" and not self._launches(first):
            return False  # the loop over steps is for a CPU
        if not self.model.code.holds():
            return False
        if quadratic is not None and isinstance(quadratic.precision, dict):
            return False
        if not isinstance(rows, tuple) or len(rows) != 2 or not all(isinstance(part, Tensor) for part in rows):
            return False
        (x, y), dtype = rows, first.dtype
        family, form = self.model.family, self.model.form
        wanted = torch.int64 if family is CATEGORICAL else dtype
        parameters = sum(leaf[0].numel() for leaf in start.values()) // form.outputs
        known = not self._launches(first) or glm_steps.fits(family, parameters, form.outputs, dtype)
        one = y.ndim in self.model.dims and y.shape == (*x.shape[:2], 1)[: y.ndim]
        if not (known and one and (x.dtype, y.dtype) == (dtype, wanted)):
            return False
        shape = tuple(x.shape[2:])
        return shape == (form.features,) or self.model.flattens(shape)

    def _launches(self, like: Tensor) -> bool:
        """Return whether a program takes all steps, and not a loop over them."""
        return self.rule is None and choice.possible(like.device) and choice.installed()

    def solve(self, start: Tree, state: LocalState, data: Any, batches: Batches, quadratic: Quadratic | None) -> Local:
        """Take the steps; the result is that of stacked steps, up to rounding."""
        (family, form, _, logs, *_), (x, y) = self.model, data.batch
        join = form.join if family is CATEGORICAL else lambda parameters: form.join(parameters)[..., 0]
        total = batches.total.to(x.device)
        own, precision, shift = join(start), None, None
        if quadratic is not None or self.weight_decay:
            strength = own.new_zeros(len(own)) if quadratic is None else quadratic.precision_of("")
            precision = strength + self.weight_decay
            shift = torch.zeros_like(own) if quadratic is None else join(quadratic.shift)
        x, y = x if x.ndim == 3 else x.flatten(2), y.reshape(x.shape[:2])
        more: dict[str, Any] = {"lr": self.lr, "total": total, "precision": precision, "shift": shift}
        if self._launches(own):
            more["batches"] = batches.chosen()
            steps = int(batches.total.max())
            theta, loss = glm_steps.glm_steps(family, x, y, data.count, own, steps=steps, **more)
        else:
            theta, loss = glm_loop(family, x, y, own, batches.runs, rule=self.rule, **more)
        kept = LocalState(state.optimizer, {}, None if state.steps is None else state.steps + total)
        solution = form.split(theta.reshape(*own.shape[:2], -1))
        return Local(solution, kept, self.lr * total.double(), dict.fromkeys((*logs, "loss"), loss))


def linear_steps(
    objective: Objective, loss: Loss | None, trained: list[str], configured: Configured, keep: bool
) -> LinearSteps | None:
    """Return the steps of a module if they are all that the program does, None otherwise.

    Args:
        objective, loss, trained: see `linear_model`.
        configured: its optimiser and schedule.
        keep: whether the optimiser's state is kept between rounds.
    """
    optimizer = configured.optimizer.original
    if type(optimizer) not in (SGD, Adam, AdamW) or configured.schedule is not None or hooked(optimizer):
        return None
    if len(optimizer.param_groups) != 1:
        return None
    group = optimizer.param_groups[0]
    refused = any(group.get(name) for name in ("amsgrad", "capturable", "differentiable", "maximize"))
    if refused or any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return None
    rule, decay = _rule(group)
    if keep and rule is not None:
        return None
    model = linear_model(objective, loss, trained)
    return None if model is None else LinearSteps(model, group["lr"], decay, rule)


def _rule(group: Mapping[str, Any]) -> tuple[Rule | None, float]:
    """Return how the optimiser of a group makes steps, and the weight decay that is a part of the gradient."""
    decay = group["weight_decay"]
    if "betas" in group:
        apart = bool(group.get("decoupled_weight_decay"))
        return optimiser_rules.Adam(group["betas"], group["eps"], decay if apart else 0.0), 0.0 if apart else decay
    if not group["momentum"]:
        return None, decay
    return Momentum(group["momentum"], group["dampening"], group["nesterov"]), decay
