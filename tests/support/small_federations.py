"""Small federations of a classifier, and the Trainer around them, that several tests and their subprocesses share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn

import fedtorch as ft

FEATURES, CLASSES = 4, 3


class Classifier(L.LightningModule):
    """What people bring: layers with dropout, a torchmetrics attribute, `self.log`, an optimiser with a schedule."""

    def __init__(self, optimizer: str = "sgd", seed: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(5, CLASSES)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.choice = optimizer
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("size", logits.square().mean())
        return nn.functional.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        if self.choice == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.02)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def classes(
    sizes: Sequence[int] = (9, 14, 5, 11, 20), seed: int = 0, dtype: torch.dtype = torch.float32
) -> ft.data.FederatedData:
    """Clients with different class proportions whose classes depend on the features."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(FEATURES, CLASSES, generator=generator)
    clients = []
    for k, size in enumerate(sizes):
        x = torch.randn(size, FEATURES, generator=generator) + 0.3 * k
        clients.append((x.to(dtype), (x @ weight).argmax(1)))
    return ft.data.from_tensors(clients, [f"site {k}" for k in range(len(sizes))])


def solver(optimizer: str = "sgd", dtype: torch.dtype = torch.float32, **arguments: Any) -> ft.LocalSolver:
    """Two passes in minibatches of four."""
    return ft.gradient_descent(Classifier(optimizer).to(dtype), **{"epochs": 2, "batch_size": 4, **arguments})


def trainer(**arguments: Any) -> L.Trainer:
    """A Trainer that writes nothing unless asked."""
    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return L.Trainer(**{**silent, **arguments})


def everything(federation: ft.Federation) -> dict[str, Tensor]:
    """Server and client states, round and bytes, flat; the history has seconds, which no two runs share."""
    return {name: leaf for name, leaf in federation.get_extra_state().items() if not name.startswith("history.")}
