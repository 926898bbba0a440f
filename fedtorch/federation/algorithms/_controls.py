"""Control variates that add up, as those of SCAFFOLD and FedDyn do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree


class Controls(NamedTuple):
    """Hold controls that can be added up: one client's, or the sum over those that have been heard."""

    weighted: Tree  # Σ w_k c_k, in the structure of the parameters
    weight: Tensor  # Σ w_k
    clients: Tensor  # how many


class State(NamedTuple):
    """Hold a client's own state; leaves `(K, ...)`."""

    controls: Controls  # its own, as it tells them
    solver: Tree


def no_controls(parameters: Tree) -> Controls:
    """Return the controls of nobody."""
    nothing = torch.zeros((), dtype=torch.float64, device=tree.leaves(parameters)[0].device)
    return Controls(tree.zeros_like(parameters), nothing, nothing)


def mean_control(total: Controls, population: Tensor) -> Tree:
    """Return Σ w_k c_k / Σ w_k, where Σ w_k is the clients' number times the mean weight of those that were heard."""
    weight = population * total.weight / total.clients.clamp(min=1)
    return tree.scale(total.weighted, torch.where(weight > 0, 1 / weight, 0.0))
