"""A classifier's stacked loss on a block of clients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fedtorch import random
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.solvers.descent import Descent
from fedtorch.federation.solvers.stacked_loss import StackedLoss

COUNTS = (2, 5, 3)


def block_of(counts: tuple[int, ...] = COUNTS) -> ClientData:
    """Clients with so many rows of three features and three classes."""
    total = sum(counts)
    x = random.normal(random.key(1), (total, 3), torch.float64)
    y = random.randint(random.key(2), 3, (total,))
    return FederatedData((x, y), torch.tensor(counts)).stack(range(len(counts)))


def linear(zero: bool = False) -> nn.Module:
    """A linear classifier whose parameters do not come from the global generator."""
    net = nn.Linear(3, 3).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.zeros_like(p) if zero else random.normal(random.key(i), p.shape, p.dtype))
    return net


def stacked(
    loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy,
    module: nn.Module | None = None,
    batched: bool | Literal["auto"] = True,
    compile: bool = False,
    block: ClientData | None = None,
) -> StackedLoss:
    """A module's stacked loss, looked at on a block."""
    module = linear() if module is None else module
    block = block_of() if block is None else block
    descent = Descent(module, 1, loss=loss, make=sgd, batched=batched, compile=compile)
    descent.prepare(block)
    return descent.loss


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)
