"""What the benchmarks of sites run: a linear model of a few rows, so that a round's time is that of its messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import fedtorch as ft

FEATURES, ROWS = 10, 50


def clients(names: Sequence[str], each: int = 2) -> ft.data.FederatedData:
    """So many clients of every site, the same in any process."""
    rows = []
    for name in names:
        for k in range(each):
            key = ft.random.fold_in(ft.random.key(int(name)), k)
            x = ft.random.normal(key, (ROWS, FEATURES), torch.float64)
            rows.append((x, x.sum(1)))
    return ft.data.from_tensors(rows, [f"{name}/{k}" for name in names for k in range(each)])


def averaged() -> ft.Algorithm:
    """FedAvg of a linear model: five steps of gradient descent a round."""
    return ft.fedavg(linear())


def controlled() -> ft.Algorithm:
    """SCAFFOLD of the same, whose clients have states that sites keep on the disk."""
    return ft.scaffold(linear())


def linear() -> ft.LocalSolver:
    """The clients' problem, from zero."""
    module = torch.nn.Linear(FEATURES, 1).double()
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    return ft.least_squares(module, steps=5)


ALGORITHMS = {"averaged": averaged, "controlled": controlled}
