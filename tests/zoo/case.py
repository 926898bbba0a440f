"""A project of somebody else as the zoo takes it: a module, made rows, and all that a user says to train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from fedtorch.tree import Tree

WAYS = ("stacked", "client by client", "lightning_fit")


@dataclass(frozen=True)
class Case:
    """One project.

    Args:
        name: of the network or project.
        package: what it is imported from, with its name in the index after a slash where that is another one.
        make: the project, with small random weights.
        rows: number of rows -> made rows; with `loader` a loader of theirs over so many items.
        loader: whether clients have loaders, whose batches are taken as they are.
        says: the user's arguments besides epochs and batch size, of `gradient_descent` and `lightning_fit` alike.
        ignores: hooks of theirs that training does not depend on, of `gradient_descent`.
        dtype: of module and rows.
        ways: in which it trains; in the others it is refused by name.
        change: of their code, if it needs one.
        counts: rows of the clients.
        size: of a batch.
        step: what a plain loop does with (module, optimisers, batch), where that is not one backward pass and step.
        remark: for the table.
    """

    name: str
    package: str
    make: Callable[[], L.LightningModule]
    rows: Callable[[int], Any]
    says: dict[str, Any] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    ways: tuple[str, ...] = WAYS
    change: str = ""
    counts: tuple[int, ...] = (5, 4, 6)
    size: int = 2
    loader: bool = False
    step: Callable[[L.LightningModule, list[torch.optim.Optimizer], Any], Tensor] | None = None
    remark: str = ""

    @property
    def imports(self) -> str:
        return self.package.partition("/")[0]

    @property
    def distribution(self) -> str:
        return self.package.rpartition("/")[2]


class Project(L.LightningModule):
    """What people write around a network: a loss, and an optimiser."""

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    ) -> None:
        super().__init__()
        self.net, self._loss, self._optimizer = net, loss, optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def training_step(self, batch: Any) -> Tensor:
        loss = self._loss(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(p for p in self.parameters() if p.requires_grad)


def classifier(net: Callable[[], nn.Module], lr: float = 0.05) -> Callable[[], Project]:
    """Return what makes a project of a network that gives logits."""
    loss = lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])
    return lambda: Project(net(), loss, lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))


def images(size: int, channels: int = 3, classes: int = 3) -> Callable[[int], Tree]:
    """Return number of rows -> (pixels, labels)."""
    return lambda n: (torch.randn(n, channels, size, size), torch.randint(classes, (n,)))
