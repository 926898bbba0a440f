"""Algorithm 2 of the source: averages of what units have found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.federation.algorithm import Algorithm, Local, LocalSolver, Quadratic
from fedtorch.federation.algorithms.fedavg import Weight, rows_weight
from fedtorch.federation.algorithms.multi_output_gp.stacked import POSTERIOR, StackedGP
from fedtorch.federation.algorithms.multi_output_gp.steps import (
    adam,
    check_settings,
    in_parts,
    no_moments,
    some_rows,
)
from fedtorch.federation.algorithms.personal import personal_layers
from fedtorch.federation.exchange import Exchange, star
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.models.gaussian_process import ConvolvedGP

__all__ = ["fedmgp_average"]


def fedmgp_average(
    module: ConvolvedGP,
    *,
    steps: int = 5,
    lr: float = 0.01,
    server_lr: float = 1.0,
    batch_size: int | None = None,
    units: int,
    exchange: Exchange | None = None,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Algorithm 2 of the source: FedAvg on pseudo-gradients of θ = (hyperparameters, μ, Cholesky factor of M).

    Each unit takes Adam steps on its risk (14), −E_q[log p(y_m | f_m)] + p_m KL(q ‖ p), in all parameters; the server
    averages the changes of the shared ones. Kept as the published baseline: `fedmgp` is exact, and faster.

    Args:
        module: of one unit, no batch shape.
        steps: local iterates E in a round.
        lr: of these steps.
        server_lr: the global step η.
        batch_size: rows of a step; default: all.
        units: how many units there are, M: p_m = 1/M.
        exchange: how changes are averaged; default: the weighted mean of `star()`; see `fedtorch.federation.trust`.
        weight: data -> `(K,)` positive weights.
    """
    gp = StackedGP(module, False)
    check_settings(steps, lr, server_lr, batch_size, None, 1.0, gp.exact_units)
    if units < 1:
        raise ValueError(f"Expected the number of units, but got {units}")
    own_names = [name for name in gp.own if name in gp.trained]
    everything = [*gp.shared, *own_names, *POSTERIOR]
    scales = [name for name in gp.own if name not in gp.trained]

    def init(parameters: Tree) -> dict[str, Any]:
        moments = no_moments({name: parameters[name] for name in everything})
        return {"moments": moments, "scales": {n: gp.values[n].clone() for n in scales}, "started": torch.tensor(False)}

    def solve(start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
        return in_parts(part, gp.module.points * data.mask.shape[1], start, state, data, key, quadratic)

    def part(start: Tree, state: Tree, data: Any, key: Tensor, quadratic: Quadratic | None) -> Local:
        x, y, *extra = data.batch
        mask = data.mask.to(y.dtype)
        fresh = gp.module.initial_units(y, mask, *extra)
        values = {**start, **state["scales"]}
        begun = state["started"]
        own = {name: torch.where(tree.along(begun, values[name]), values[name], fresh[name]) for name in gp.own}
        values = {**values, **own}
        moments, active = state["moments"], torch.ones_like(begun)
        loss = y.new_zeros(len(y))
        for step in range(steps):
            rows = some_rows((x, y, tuple(extra)), mask, batch_size, random.fold_in(key, step))
            trained = {name: values[name] for name in everything}
            risk, gradient = gp.gradient({n: values[n] for n in scales}, trained, everything, *rows, units=units)
            if quadratic is not None:
                towards = {n: trained[n] * tree.along(quadratic.precision_of(n), trained[n]) for n in everything}
                pull = tree.subtract({n: quadratic.shift[n] for n in everything}, towards)
                gradient = tree.add(gradient, pull)
            trained, moments = adam(trained, gradient, moments, lr, active)
            values, loss = {**values, **trained}, loss - risk / data.count.clamp(min=1) / steps
        new = {"moments": moments, "scales": {n: values[n] for n in scales}, "started": active}
        solved = {name: values[name] for name in start}
        return Local(solved, new, torch.full_like(loss, steps * lr), {"loss": loss})

    local = LocalSolver(
        solve=solve,
        parameters={name: gp.values[name].clone() for name in everything},
        init=init,
        predict=gp.predict,
        tensors=lambda parameters, state: {**parameters, **state["scales"]},
        prepare=gp.check,
        module=gp.module,
        settings={"units": units, "steps": steps, "lr": lr, "batch_size": batch_size},
    )
    algorithm = personal_layers(local, own_names, lr=server_lr, weight=weight)
    return replace(algorithm, exchange=star() if exchange is None else exchange)
