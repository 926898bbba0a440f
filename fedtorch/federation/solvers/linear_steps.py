"""Gradient steps of linear models, known by type: one compiled program per round, or a loop with a few matrix products.

The module is an `nn.Linear` or a `LinearHead` of raw features, and the loss is torch's `mse_loss`,
`binary_cross_entropy_with_logits`, `poisson_nll_loss` or `cross_entropy`, as a function or as its module with the
settings of its constructor. A subclass, a hook, a parametrisation or a replaced `forward` excludes the module. All
conditions are checked in every round, because the user may change the module between rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.solvers._configured import Configured
from fedtorch.federation.solvers._state import LocalState
from fedtorch.federation.solvers.batches import Batches
from fedtorch.federation.solvers.least_squares import LinearForm, linear_form
from fedtorch.federation.solvers.objective import Loss
from fedtorch.federation.solvers.plain_layers import is_linear, unchanged
from fedtorch.models.linear import LinearHead
from fedtorch.optimisers import elementwise
from fedtorch.programs import choice, glm_steps, optimiser_rules
from fedtorch.programs.glm_loop import glm_loop
from fedtorch.programs.glm_steps import BERNOULLI, CATEGORICAL, GAUSSIAN, POISSON, Family
from fedtorch.programs.optimiser_rules import Momentum, Rule
from fedtorch.tree import Tree

# The loss of a family, the module that calls it, and the settings of that module's constructor.
_LOSSES: dict[Any, tuple[Family, Any, dict[str, Any]]] = {
    nn.MSELoss: (GAUSSIAN, F.mse_loss, {"reduction": "mean"}),
    nn.BCEWithLogitsLoss: (
        BERNOULLI,
        F.binary_cross_entropy_with_logits,
        {"reduction": "mean", "weight": None, "pos_weight": None},
    ),
    nn.PoissonNLLLoss: (POISSON, F.poisson_nll_loss, {"reduction": "mean", "log_input": True, "full": False}),
    nn.CrossEntropyLoss: (
        CATEGORICAL,
        F.cross_entropy,
        {"reduction": "mean", "weight": None, "ignore_index": glm_steps.IGNORED, "label_smoothing": 0.0},
    ),
}
_FUNCTIONS = {function: family for family, function, _ in _LOSSES.values()}


class LinearSteps(NamedTuple):
    """A linear model with SGD, Adam or AdamW on a loss of `torch.nn.functional`."""

    module: nn.Module
    loss: Loss
    form: LinearForm
    lr: float
    weight_decay: float  # added to the gradient
    rule: Rule | None  # how gradients become steps; None for plain SGD

    def family(self, start: Tree, rows: Tree, quadratic: Quadratic | None) -> Family | None:
        """Return the family whose program takes the steps of clients with such parameters and rows, or None."""
        family = _family(self.loss)
        if family is None or not is_linear(self.module):
            return None
        first = next(iter(start.values()))
        launches = self._launches(first)
        if first.device.type != "cpu" and not launches:
            return None  # the loop over steps is for a CPU
        if quadratic is not None and isinstance(quadratic.precision, dict):
            return None
        if not isinstance(rows, tuple) or len(rows) != 2 or not all(isinstance(part, Tensor) for part in rows):
            return None
        (x, y), dtype = rows, first.dtype
        wanted = torch.int64 if family is CATEGORICAL else dtype
        parameters = sum(leaf[0].numel() for leaf in start.values()) // self.form.outputs
        if launches and not glm_steps.fits(family, parameters, self.form.outputs, dtype):
            return None
        if x.shape[2:] != (self.form.features,) or (x.dtype, y.dtype) != (dtype, wanted):
            return None
        columns = () if family is CATEGORICAL or isinstance(self.module, LinearHead) else (1,)
        one = self.form.outputs == 1 or family is CATEGORICAL
        return family if one and y.shape[2:] == columns else None

    def _launches(self, like: Tensor) -> bool:
        """Return whether a program takes all steps, and not a loop over them."""
        return self.rule is None and choice.possible(like.device) and choice.installed()

    def solve(
        self, family: Family, start: Tree, state: LocalState, data: Any, batches: Batches, quadratic: Quadratic | None
    ) -> Local:
        """Take the steps; the result equals that of stacked steps, up to rounding."""
        (x, y), form = data.batch, self.form
        join = form.join if family is CATEGORICAL else lambda parameters: form.join(parameters)[..., 0]
        total = batches.total.to(x.device)
        theta_start, precision, shift = join(start), None, None
        if quadratic is not None or self.weight_decay:
            strength = theta_start.new_zeros(len(theta_start)) if quadratic is None else quadratic.precision_of("")
            precision = strength + self.weight_decay
            shift = torch.zeros_like(theta_start) if quadratic is None else join(quadratic.shift)
        y = y.reshape(x.shape[:2])
        more: dict[str, Any] = {"lr": self.lr, "total": total, "precision": precision, "shift": shift}
        if self._launches(theta_start):
            more["batches"] = batches.chosen()
            steps = int(batches.total.max())
            theta, loss = glm_steps.glm_steps(family, x, y, data.count, theta_start, steps=steps, **more)
        else:
            theta, loss = glm_loop(family, x, y, theta_start, batches.runs, rule=self.rule, **more)
        solver_state = LocalState(state.optimizer, {}, None if state.steps is None else state.steps + total)
        solution = form.split(theta.reshape(*theta_start.shape[:2], -1))
        return Local(solution, solver_state, self.lr * total.double(), {"loss": loss})


def linear_steps(
    module: nn.Module, loss: Loss | None, trained: list[str], configured: Configured, keep: bool
) -> LinearSteps | None:
    """Return the steps of a linear model by a supported optimiser, None for any other.

    Args:
        module: the user's.
        loss: for a module that is not a LightningModule.
        trained: names of the parameters that are trained.
        configured: its optimiser and schedule.
        keep: whether the optimiser's state is kept between rounds.
    """
    if not is_linear(module) or set(trained) != {name for name, _ in module.named_parameters()}:
        return None
    if loss is None or not (type(loss) in _LOSSES or any(loss is known for known in _FUNCTIONS)):
        return None
    optimizer = configured.optimizer.original
    if type(optimizer) not in (SGD, Adam, AdamW) or configured.schedule is not None or not elementwise(optimizer):
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
    return LinearSteps(module, loss, linear_form(module), group["lr"], decay, rule)


def _family(loss: Loss) -> Family | None:
    """Return the family whose loss this is, with the settings that it has now."""
    if not isinstance(loss, nn.Module):
        return next((family for known, family in _FUNCTIONS.items() if loss is known), None)
    if type(loss) not in _LOSSES or not unchanged(loss):
        return None
    family, function, settings = _LOSSES[type(loss)]
    if getattr(F, function.__name__) is not function:  # the function that the module calls
        return None
    now = {name: getattr(loss, name) for name in settings}
    return family if all(now[name] is value or now[name] == value for name, value in settings.items()) else None


def _rule(group: Mapping[str, Any]) -> tuple[Rule | None, float]:
    """Return how the optimiser of a group makes steps, and the weight decay that is a part of the gradient."""
    decay = group["weight_decay"]
    if "betas" in group:
        apart = bool(group.get("decoupled_weight_decay"))
        return optimiser_rules.Adam(group["betas"], group["eps"], decay if apart else 0.0), 0.0 if apart else decay
    if not group["momentum"]:
        return None, decay
    return Momentum(group["momentum"], group["dampening"], group["nesterov"]), decay
