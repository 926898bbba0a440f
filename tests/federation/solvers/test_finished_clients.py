"""Clients that have taken all their steps are left out of the others' steps once few still train."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtorch as ft
from fedtorch.federation.solvers.batches import Batch
from fedtorch.federation.solvers.stacked_loss import StackedLoss

SIZES = [3, 31, 4, 9, 5]


def clients(dtype: torch.dtype = torch.float64) -> ft.data.FederatedData:
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(len(SIZES)))
    draw = lambda key, n: (ft.random.normal(key, (n, 6), dtype), ft.random.randint(key, 3, (n,)))
    return ft.data.from_tensors([draw(key, n) for key, n in zip(keys, SIZES)])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


OPTIMISERS: dict[str, Any] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),  # of no fused program
}


def trained(data: ft.data.FederatedData, make: Any, dtype: torch.dtype, chunk: int | None, **settings: Any) -> ft.Run:
    local = ft.gradient_descent(network().to(dtype), loss=F.cross_entropy, optimizer=make, epochs=3, **settings)
    slow = ft.partial_work(1.0, shares=torch.tensor([1.0, 1.0, 0.3, 0.6, 1.0]))
    return ft.run(ft.ditto(local, 0.5), ft.InProcess(data, chunk), rounds=2, faults=slow)


@pytest.mark.parametrize(
    ("name", "batch_size", "dtype", "settings"),
    [
        ("momentum", 2, torch.float64, {}),
        ("Adam", 2, torch.float64, {}),
        ("RMSprop", 2, torch.float64, {}),
        ("Adam", 2, torch.float32, {}),
        ("momentum", None, torch.float64, {}),
        ("Adam", 2, torch.float64, {"compile": True}),
        ("RMSprop", 2, torch.float64, {"clip": 0.3}),
        ("Adam", 2, torch.float64, {"reset": "never"}),
    ],
    ids=str,
)
def test_all_are_trained_as_one_after_another(
    name: str, batch_size: int | None, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    data, settings = clients(dtype), {**settings, "batch_size": batch_size}
    together, alone = (trained(data, OPTIMISERS[name], dtype, chunk, **settings) for chunk in (None, 1))
    close = {torch.float64: 1e-11, torch.float32: 1e-4}[dtype]
    for one, two in ((together.server, alone.server), (together.tensors(), alone.tensors())):
        for key, leaf in two.items():
            torch.testing.assert_close(one[key], leaf, rtol=close, atol=close)
    logged = [torch.tensor(list(run.history["train_loss"])) for run in (together, alone)]
    torch.testing.assert_close(*logged, rtol=close, atol=close)


def test_finished_clients_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    local = ft.gradient_descent(
        network().double(), loss=F.cross_entropy, optimizer=OPTIMISERS["Adam"], epochs=3, batch_size=2
    )

    def counted(step: Any) -> Any:
        def of(self: StackedLoss, values: Any, rows: Any, *rest: Any) -> Any:
            if self is local.solve.__self__.loss:  # type: ignore[attr-defined]  # and no copy that is checked
                counts.append(len(rows.size) if isinstance(rows, Batch) else len(rest[-1]))
            return step(self, values, rows, *rest)

        return of

    for name in ("together", "each"):
        monkeypatch.setattr(StackedLoss, name, counted(getattr(StackedLoss, name)))
    ft.run(ft.fedavg(local), ft.InProcess(clients()), rounds=1)
    steps = sorted(3 * -(-size // 2) for size in SIZES)  # 6, 6, 9, 15, 48
    assert counts == [sum(step < each for each in steps) for step in range(steps[-1])]
