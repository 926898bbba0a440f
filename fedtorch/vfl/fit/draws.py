"""Draws of γ, θ_1, …, θ_J from a guide, at all nodes together or at one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.vfl.fit.guide import Guide, Parameters
from fedtorch.vfl.model.vertical import VerticalModel


def draw_theta(
    model: VerticalModel, guide: Guide, parameters: Parameters, noise: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Draws (γ, θ_1, …, θ_J), `(B, M, d_j)` each, and log q of them, `(B, M)`."""
    if guide.joint:
        q = parameters.joint
        assert q is not None
        # The coordinates' noise in the order of the nodes, and the server's surplus last.
        own, surplus = noise[0].split([model.sizes[0], noise[0].shape[-1] - model.sizes[0]], -1)
        theta = guide.theta.draw(q, torch.cat([own, *noise[1:], surplus], -1))
        return list(theta.split(model.sizes, -1)), guide.theta.log_density(fixed(guide, q), theta)
    nodes = [node["theta"] for node in (parameters.server, *parameters.parties)]
    thetas = [draw_own(model, guide, j, q, e) for j, (q, e) in enumerate(zip(nodes, noise))]
    densities = [
        guide.family(j).log_density(fixed(guide, q), theta)
        for j, (q, theta) in enumerate(zip(nodes, thetas))
        if theta.shape[-1]
    ]
    return thetas, model.masked(torch.stack(densities).sum(0), 0.0) if densities else thetas[0].new_zeros(1, 1)


def draw_own(model: VerticalModel, guide: Guide, index: int, q: dict[str, Tensor], noise: Tensor) -> Tensor:
    """Draws of node `index` alone, `(B, M, d)`: of q, or of its mean in elements without priors."""
    theta = guide.family(index).draw(q, noise)
    if model.active is None or not theta.shape[-1]:
        return theta
    return model.masked(theta, q["mean"].unsqueeze(1))


def fixed(guide: Guide, q: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters for log q: detached to stick the landing."""
    return {name: value.detach() for name, value in q.items()} if guide.sticking else q
