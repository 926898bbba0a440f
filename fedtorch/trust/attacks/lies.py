"""Attacks by clients without knowledge of each other.

Source: Li, Xu, Chen, Giannakis and Ling (2019), "RSA: Byzantine-robust stochastic aggregation methods", section 5, for
the flipped sign and noise; Fraboni, Vidal and Lorenzi (2021), "Free-rider attacks on model aggregation in federated
learning", section 3; denial of service in Jung, "Federated learning: from theory to practice", section 10.2.

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import attacks
>>> said, keys = {"weight": torch.tensor([[1.0, -2.0]])}, ft.random.key(0)[None]  # of one client
>>> attacks.sign_flip([0], scale=3.0).alone(said, keys)
{'weight': tensor([[-3.,  6.]])}
>>> attacks.free_rider([0]).alone(said, keys)
{'weight': tensor([[0., 0.]])}
>>> attacks.denial_of_service([0]).alone(said, keys)
{'weight': tensor([[nan, nan]])}
>>> attacks.noise([0], sd=0.5).alone(torch.zeros(1, 10_000), keys).std().round(decimals=1)
tensor(0.5000)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.tree import Tree
from fedtorch.trust.attacks.attack import Attack


def sign_flip(clients: Sequence[int], scale: float = 1.0) -> Attack:
    """Send minus `scale` times the honest message."""
    return Attack(tuple(clients), "sign_flip", alone=lambda message, key: tree.scale(message, -scale))


def noise(clients: Sequence[int], sd: float) -> Attack:
    """Add independent normal noise to every number."""
    return Attack(tuple(clients), "noise", alone=lambda message, key: tree.add(message, _normal(message, key, sd)))


def free_rider(clients: Sequence[int], sd: float = 0.0) -> Attack:
    """Send zeros, without any work: no change. With `sd` normal noise disguises the free rider."""
    return Attack(tuple(clients), "free_rider", alone=lambda message, key: _normal(message, key, sd))


def denial_of_service(clients: Sequence[int], value: float = math.nan) -> Attack:
    """Send one number everywhere: NaN, infinity, or a large one."""
    return Attack(
        tuple(clients),
        "denial_of_service",
        alone=lambda message, key: tree.map(lambda leaf: torch.full_like(leaf, value), message),
    )


def claimed_rows(clients: Sequence[int], factor: float) -> Attack:
    """Build the attack that claims `factor` times as many rows: it multiplies the weights of `Mean`s."""
    return Attack(tuple(clients), "claimed_rows", weight=factor)


def _normal(message: Tree, key: Tensor, sd: float) -> Tree:
    """Draw normal numbers in the structure of a message, a key for every leaf and client."""
    drawn = [
        sd * random.normal(random.fold_in(key, number), tuple(leaf.shape[1:]), leaf.dtype)
        for number, leaf in enumerate(tree.leaves(message))
    ]
    return tree.refill(message, drawn)
