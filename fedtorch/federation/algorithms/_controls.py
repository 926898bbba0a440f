"""Additive control variates, as in SCAFFOLD and FedDyn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree


class Controls(NamedTuple):
    """Additive controls: one client's, or the sum over the clients that have answered at least once."""

    weighted: Tree  # Σ w_k c_k, in the structure of the parameters
    weight: Tensor  # Σ w_k
    clients: Tensor  # number of clients in the sum


class State(NamedTuple):
    """State of a client; leaves `(K, ...)`."""

    controls: Controls  # the client's own controls, as it sends them
    solver: Tree


def no_controls(parameters: Tree) -> Controls:
    """Return the zero controls, of no client."""
    nothing = torch.zeros((), dtype=torch.float64, device=tree.leaves(parameters)[0].device)
    return Controls(tree.zeros_like(parameters), nothing, nothing)


def mean_control(total: Controls, population: Tensor) -> Tree:
    """Return Σ w_k c_k / Σ w_k, where Σ w_k is the number of clients times the mean weight of those who answered."""
    weight = population * total.weight / total.clients.clamp(min=1)
    return tree.scale(total.weighted, torch.where(weight > 0, 1 / weight, 0.0))
