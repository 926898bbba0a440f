"""Small networks and clients that `lightning_fit` is tried on, in float64."""

from __future__ import annotations

import logging
import os
import random as python_random
import signal
import warnings

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.algorithm import Local

F = nn.functional


COUNTS = (3, 8, 9)  # n < B, n = B, n = B + 1 for B = 8


def clients(dtype: torch.dtype = torch.float64) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in COUNTS:
        x = torch.randn(n, 2, generator=generator, dtype=dtype)
        rows.append((x, x.sum(1, keepdim=True) + torch.randn(n, 1, generator=generator, dtype=dtype)))
    return ft.data.from_tensors(rows)


class Net(L.LightningModule):
    """A small network; subclasses change the optimiser."""

    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Momentum(Net):
    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Adam(Net):
    def configure_optimizers(self) -> object:
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.03}]
        optimizer = torch.optim.Adam(groups, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def block(data: ft.data.FederatedData) -> ft.data.ClientData:
    return data.stack(range(len(data)))


def keys(count: int = len(COUNTS)) -> Tensor:
    return ft.random.fold_in(ft.random.key(3), torch.arange(count))


def solve(local: ft.LocalSolver, quadratic: ft.Quadratic | None = None, data: object = None) -> Local:
    data = block(clients()) if data is None else data
    count = len(data.count)
    start, state = tree.expand((local.parameters, local.init(local.parameters)), count)
    return local.solve(start, state, data, quadratic, ft.Turn(keys(count), 0))


def pull(local: ft.LocalSolver, count: int = len(COUNTS)) -> ft.Quadratic:
    scale = torch.arange(1, count + 1, dtype=torch.float64)
    return ft.Quadratic(scale / 4, tree.scale(tree.expand(local.parameters, count), scale / 10))


def assert_same(first: object, second: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


class Random(Net):
    """Draws from all generators and leaves a mess behind."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.rand(()) + python_random.random() + np.random.rand()  # noqa: NPY002
        self.log("noise", noise)
        return F.mse_loss(self(F.dropout(x, 0.5)), y) * noise

    def teardown(self, stage: str) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cudnn.deterministic = True
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.environ["PL_GLOBAL_SEED"] = "5"
        os.environ.pop("WORLD_SIZE", None)
        rank_zero_only.rank = 7
        logging.getLogger("lightning.pytorch").setLevel(logging.DEBUG)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warnings.simplefilter("ignore")


class Measured(Random):
    """With torchmetrics, whose states are gathered over ranks if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.error.update(self(x), y)
        self.log_dict(self.error, on_epoch=True, on_step=False)
        self.log("mean", y.mean(), sync_dist=True, on_step=False, on_epoch=True, batch_size=len(y))
        return super().training_step(batch, batch_idx)
