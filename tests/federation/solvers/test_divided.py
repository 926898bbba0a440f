"""Heads that only some clients use: neither decay nor moments without a gradient, as in each client's own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05, weight_decay=0.1),
}
SIZES = (4, 4, 6, 4, 2)
STEPS, ROUNDS = 3, 3


class Heads(nn.Module):
    """A body and two heads: clients with many rows use the second, and the third nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(3, 4), nn.ModuleList(nn.Linear(4, 1) for _ in range(3))
        for i, p in enumerate(self.parameters()):
            p.data = 0.5 * random.normal(random.key(i), p.shape, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(len(x) > 4)](self.body(x).tanh())


def clients() -> list[tuple[Tensor, Tensor]]:
    x = [random.normal(random.key(10 + k), (size, 3), torch.float64) for k, size in enumerate(SIZES)]
    return [(each, each.sum(1, keepdim=True)) for each in x]


def ours(make: Any, reset: Any, clip: float | None, prox: float | None) -> dict[str, Tensor]:
    local = ft.gradient_descent(
        Heads(), steps=STEPS, loss=F.mse_loss, optimizer=make, reset=reset, clip=clip, batched="auto"
    )
    wrap = ft.fedavg(local) if prox is None else ft.fedprox(local, prox)
    return ft.run(wrap, ft.InProcess(ft.data.from_tensors(clients())), rounds=ROUNDS).server


def loop(make: Any, reset: str, clip: float | None, prox: float | None) -> dict[str, Tensor]:
    modules = [Heads() for _ in SIZES]
    optimizers = [make(module.parameters()) for module in modules]
    server = {name: p.detach().clone() for name, p in modules[0].named_parameters()}
    for _ in range(ROUNDS):
        for k, (x, y) in enumerate(clients()):
            with torch.no_grad():
                for name, p in modules[k].named_parameters():
                    p.copy_(server[name])
            if reset == "round":
                optimizers[k] = make(modules[k].parameters())
            for _ in range(STEPS):
                optimizers[k].zero_grad()
                F.mse_loss(modules[k](x), y).backward()
                for name, p in modules[k].named_parameters() if prox is not None else ():
                    pull = prox * (p.detach() - server[name])
                    p.grad = pull if p.grad is None else p.grad + pull
                if clip is not None:
                    nn.utils.clip_grad_norm_(modules[k].parameters(), clip)
                optimizers[k].step()
        each = [dict(module.named_parameters()) for module in modules]
        total = sum(SIZES)
        server = {name: sum(n / total * own[name].detach() for n, own in zip(SIZES, each)) for name in server}
    return server


@pytest.mark.parametrize(
    ("reset", "clip", "prox"),
    [("round", None, None), ("never", None, None), ("never", 0.3, 0.7)],
    ids=["plain", "kept", "clipped and pulled"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_heads_of_some_clients_train_as_in_a_loop(
    name: str, reset: str, clip: float | None, prox: float | None
) -> None:
    make = OPTIMIZERS[name]
    one, other = ours(make, reset, clip, prox), loop(make, reset, clip, prox)
    assert list(one) == list(other)
    for parameter, value in one.items():
        torch.testing.assert_close(
            value, other[parameter], rtol=1e-9, atol=1e-11, msg=lambda m, p=parameter: f"{p}: {m}"
        )


def test_unused_head_is_unchanged() -> None:
    server = ours(OPTIMIZERS["AdamW"], "never", None, None)
    for name, start in Heads().named_parameters():
        assert torch.equal(server[name], start.detach()) == name.startswith("heads.2"), name
