"""Sites' rows with gaps, and the normal distribution that the pooled covariance finds of them."""

from __future__ import annotations

import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.normal_em import normal_em
from fedtorch.models.gibbs import imputation

START = imputation.Normal(torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))


def clients(missing: float) -> list[tuple[Tensor, Tensor]]:
    """Three sites; with gaps, the second has no first covariate at all."""
    found = []
    for k, n in enumerate((40, 25, 60)):
        keys = random.fold_in(random.key(k), torch.arange(2))
        z = random.normal(keys[0], (n, 4), torch.float64)
        z = z @ torch.tensor([[1.0, 0.5, 0, 0.8], [0, 1, 0.6, 0], [0, 0, 1, -0.5], [0, 0, 0, 0.7]]).double() + 1.0
        x, y = z[:, :3].clone(), z[:, 3]
        x[random.uniform(keys[1], (n, 3), torch.float64) < missing] = torch.nan
        if missing and k == 1:
            x[:, 0] = torch.nan
        found.append((x, y))
    return found


def fit(data: ft.data.FederatedData, rounds: int, chunk: int | None = None) -> imputation.Normal:
    return ft.run(normal_em(), ft.InProcess(data, chunk), START, rounds=rounds).last.server
