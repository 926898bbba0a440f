"""Gradients that reach a layer's weight other than through the layer's call are not lost."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.trust import privacy


class Ridge(L.LightningModule):
    """Least squares with a penalty inside the loss, from zeros, where the penalty is flat."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.layer, self.strength = nn.Linear(3, 1, bias=False, dtype=torch.float64), strength
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x)[:, 0], y) + self.strength * self.layer.weight.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def ridge(strength: float = 1.0) -> Tensor:
    """argmin of the mean square plus the penalty."""
    x, y = rows()
    return torch.linalg.solve(x.T @ x / len(x) + strength * torch.eye(3, dtype=torch.float64), x.T @ y / len(x))


def test_by_default_a_penalty_inside_the_loss_is_in_the_gradients() -> None:
    local = privacy.example_level(Ridge(1.0), clip=1e6, noise=1e-15, rate=1.0, steps=200, delta=1e-3,
                                  entropy=privacy.from_seed(0))  # fmt: skip
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors([rows()])), rounds=1)
    assert float((run.server["layer.weight"][0] - ridge()).abs().max()) < 1e-6
