r"""Attacks by clients that see all messages and act together.

With the mean μ and the standard deviation σ of the honest messages, coordinate by coordinate, all attackers of a round
send

- a little is enough: μ − zσ, within the range of honest messages;
- inner-product manipulation: −εμ;
- min-max: μ − γσ with the largest γ by which it is no farther from any honest message than two of those from each
  other, :math:`\max_i \|\mu - \gamma\sigma - x_i\| \le \max_{i,j} \|x_i - x_j\|`.

Source: Baruch, Baruch and Goldberg (2019), "A little is enough: circumventing defenses for distributed learning",
Algorithm 3; Xie, Koyejo and Gupta (2020), "Fall of empires: breaking Byzantine-tolerant SGD by inner product
manipulation", section 4; Shejwalkar and Houmansadr (2021), "Manipulating the Byzantine: optimizing model poisoning
attacks and defenses for federated learning", section IV (equation 5, which they bisect; here in closed form).

>>> import torch
>>> from fedtorch.trust import attacks
>>> honest, own = torch.tensor([[1.0], [3.0]]).double(), torch.tensor([[2.0]]).double()  # μ = 2, σ = 1
>>> attacks.inner_product_manipulation([2], epsilon=0.5).together(honest, own)
tensor([[-1.]], dtype=torch.float64)
>>> attacks.a_little_is_enough([2], z=1.5).together(honest, own)
tensor([[0.5000]], dtype=torch.float64)
>>> attacks.min_max([2]).together(honest, own)  # as far from 3 as 1 is
tensor([[1.]], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from fedtorch.trust.attacks.attack import Attack


def a_little_is_enough(clients: Sequence[int], z: float | None = None) -> Attack:
    """Send μ − zσ.

    Args:
        clients: indices of the attackers.
        z: default: the largest z at which, for normal messages, enough honest messages are farther from μ than the
            attackers' that these belong to a majority.
    """
    return Attack(tuple(clients), "a_little_is_enough", together=partial(_a_little, z))


def inner_product_manipulation(clients: Sequence[int], epsilon: float) -> Attack:
    """Send −εμ, against the honest clients' direction."""
    return Attack(
        tuple(clients),
        "inner_product_manipulation",
        together=lambda honest, colluding: _all(colluding, -epsilon * honest.mean(0)),
    )


def min_max(clients: Sequence[int]) -> Attack:
    """Send μ − γσ with the largest γ that does not stand out by its distances."""
    return Attack(tuple(clients), "min_max", together=_min_max)


def usual_z(clients: int, attackers: int) -> float:
    """Return the z of `a_little_is_enough` for n clients of a round: Φ⁻¹((n − f − s)/(n − f)), s = ⌊n/2 + 1⌋ − f."""
    supporters = math.floor(clients / 2 + 1) - attackers
    honest = clients - attackers
    part = (honest - supporters) / honest
    return NormalDist().inv_cdf(min(max(part, 1e-3), 1 - 1e-3))


def _all(colluding: Tensor, message: Tensor) -> Tensor:
    return message.expand(len(colluding), *message.shape)


def _sd(honest: Tensor) -> Tensor:
    return honest.std(0, correction=0)


def _a_little(z: float | None, honest: Tensor, colluding: Tensor) -> Tensor:
    z = usual_z(len(honest) + len(colluding), len(colluding)) if z is None else z
    return _all(colluding, honest.mean(0) - z * _sd(honest))


def _min_max(honest: Tensor, colluding: Tensor) -> Tensor:
    mean, direction = honest.mean(0), -_sd(honest)
    reach, away = torch.cdist(honest, honest).max(), mean - honest
    # |away_i + γ·direction|² ≤ reach² for all i: the smallest of the larger roots.
    square = direction.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    half, rest = away @ direction, away.square().sum(1) - reach.square()
    roots = (-half + (half.square() - square * rest).clamp(min=0).sqrt()) / square
    return _all(colluding, mean + roots.min().clamp(min=0) * direction)
