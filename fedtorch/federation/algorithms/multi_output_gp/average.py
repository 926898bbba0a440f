"""Algorithm 2 of the source: averages of the units' local optima."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Local, LocalSolver, Quadratic
from fedtorch.federation.algorithms.fedavg import Weight, rows_weight
from fedtorch.federation.algorithms.multi_output_gp._steps import AdamMoments, UnitSteps, no_moments, row_draws
from fedtorch.federation.algorithms.multi_output_gp.stacked import POSTERIOR, StackedGP
from fedtorch.federation.algorithms.personal import personal_layers
from fedtorch.federation.solvers.prediction import Rowwise
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.models.gaussian_process import ConvolvedGP


class _Unit(NamedTuple):
    """A unit's state between rounds; leaves `(K, ...)`."""

    moments: AdamMoments
    scales: dict[str, Tensor]  # the unit's hyperparameters that are not trained
    started: Tensor  # bool: whether these come from the unit's own data


def fedmgp_average(
    module: ConvolvedGP,
    *,
    steps: int = 5,
    lr: float = 0.01,
    server_lr: float = 1.0,
    batch_size: int | None = None,
    units: int,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Build Algorithm 2 of the source: FedAvg on pseudo-gradients of θ = (hyperparameters, μ, Cholesky factor of M).

    Each unit takes Adam steps on its risk (14), −E_q[log p(y_m | f_m)] + p_m KL(q ‖ p), in all parameters; the server
    averages the changes of the shared ones. Hyperparameters' priors are not in that risk and do not count. It is the
    published baseline: `fedmgp` is exact, and faster.

    Args:
        module: of one unit, no batch shape.
        steps: local iterates E in a round.
        lr: learning rate of these steps.
        server_lr: the global step η.
        batch_size: rows of a step; default: all.
        units: M, the number of units: p_m = 1/M.
        weight: data -> `(K,)` positive weights.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gaussian_process import ConvolvedGP
        >>> x = torch.linspace(0, 1, 10, dtype=torch.float64)[:, None]
        >>> data = ft.data.from_tensors([(x, a * (6 * x[:, 0]).sin()) for a in (1.0, -2.0)])
        >>> algorithm = ft.fedmgp_average(ConvolvedGP(x[::3]), units=2, steps=1)
        >>> run = ft.run(algorithm, ft.InProcess(data), rounds=1)
        >>> run.client_module(0).predict(x).mean.shape
        torch.Size([10])
    """
    gp = StackedGP(module, False)
    work = UnitSteps(steps, lr, batch_size).checked(server_lr, gp.exact_units)
    if units < 1:
        raise ValueError(f"Expected the number of units, but got {units}")
    local = LocalSolver(
        solve=partial(_solve, gp=gp, work=work, units=units),
        parameters=gp.start(*POSTERIOR),
        init=partial(_init, gp=gp),
        predict=Rowwise(gp.predict),
        tensors=lambda parameters, state: {**parameters, **state.scales},
        prepare=lambda data: gp.at(data.mask).check(data),
        module=gp.module,
        settings={"fixed": gp.fixed, "units": units, "steps": steps, "lr": lr, "batch_size": batch_size},
    )
    return personal_layers(local, gp.trained, lr=server_lr, weight=weight)


def _init(parameters: Tree, *, gp: StackedGP) -> _Unit:
    """Return the state of a unit before its first round."""
    return _Unit(no_moments(parameters), {name: gp.values[name].clone() for name in gp.scales}, torch.tensor(False))


def _solve(
    start: Tree, state: _Unit, data: Any, quadratic: Quadratic | None, turn: Turn, *, gp: StackedGP, work: UnitSteps,
    units: int,
) -> Local:  # fmt: skip
    """Take Adam steps on the units' risks, in chunks of units."""
    return gp.work(partial(_part, units=units), work, turn, data, start, state, quadratic)


def _part(
    start: Tree, state: _Unit, quadratic: Quadratic | None, data: Any, key: Tensor, *, gp: StackedGP, work: UnitSteps,
    units: int,
) -> Local:  # fmt: skip
    _, y, *extra = data.batch
    mask, draw = data.mask.to(y.dtype), row_draws(data, key)
    values = {**start, **state.scales}
    unit = {name: values[name] for name in gp.own}
    values = {**values, **tree.where(state.started, unit, gp.module.initial_units(y, mask, *extra))}
    scales, trained = ({name: values[name] for name in names} for names in (state.scales, start))

    def gradient(step: int, trained: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        risk, slope = gp.gradient(scales, trained, list(trained), *draw(work.batch_size, step), units=units)
        return risk, slope if quadratic is None else tree.add(slope, _pull(quadratic, trained))

    active = torch.ones_like(state.started)
    trained, moments, total = work.ascend(gradient, trained, state.moments, active)
    loss = y.new_zeros(len(y)) if total is None else -total / data.count.clamp(min=1) / work.steps
    new = _Unit(moments, scales, active)
    return Local(trained, new, torch.full_like(loss, work.steps * work.lr), {"loss": loss})


def _pull(quadratic: Quadratic, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return minus the quadratic's gradient."""
    return {n: quadratic.shift[n] - v * tree.along(quadratic.precision_of(n), v) for n, v in values.items()}
