"""Online gradient descent while rows come in one by one (4.8), beside the exact mean of its excess risk.

A hundred clients learn a linear model each from the row that came last, with learning rates 1/(t + 5) and 1/√(t + 5).
For x of d independent standard normal features the mean of e = ‖w − w̄‖², the risk less σ², follows

    e(t + 1) = (1 − 4η + 4η²(d + 2)) e(t) + 4η²dσ²,

which bounds the risk from both sides; it ends near 4dσ²/(3t) with the first rate, and near dσ²/√t with the second.
Source: Jung, "Federated learning: from theory to practice", problem 4.1 and equation (4.23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common

FEATURES, NOISE, STEPS, CLIENTS = 3, 0.5, 1000, 100
RATES: dict[str, Callable[[int], float]] = {
    "η = 1/(t + 5)": lambda t: 1 / (t + 5),
    "η = 1/√(t + 5)": lambda t: (t + 5) ** -0.5,
}
LIMITS: dict[str, Callable[[float], float]] = {
    "η = 1/(t + 5)": lambda t: 4 * FEATURES * NOISE**2 / (3 * t),
    "η = 1/√(t + 5)": lambda t: FEATURES * NOISE**2 / t**0.5,
}


class Online(L.LightningModule):
    """A linear model from zero, with a learning rate by time."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        super().__init__()
        self.linear, self.rate = common.linear_module(FEATURES), rate

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The squared error."""
        x, y = batch
        return (self.linear(x)[:, 0] - y).square().mean()

    def configure_optimizers(self) -> Any:
        """Plain steps; time begins with one."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: self.rate(done + 1))]


def rows_of(seed: int, steps: int) -> ft.data.FederatedData:
    """All rows that will come; the truth is one in every direction."""
    key = ft.random.key(seed)
    x = ft.random.normal(ft.random.fold_in(key, 0), (CLIENTS, steps, FEATURES), torch.float64)
    noise = ft.random.normal(ft.random.fold_in(key, 1), (CLIENTS, steps), torch.float64)
    return ft.data.from_tensors(list(zip(x, x.sum(2) + NOISE * noise)))


def excess(name: str, data: ft.data.FederatedData, steps: int) -> list[float]:
    """The clients' mean of ‖w − w̄‖² after every row."""
    growing = ft.Growing(data, lambda rounds: torch.full((CLIENTS,), rounds + 1), window=1)
    run = ft.Run(ft.separate(ft.gradient_descent(Online(RATES[name]), epochs=1)), growing)
    return [float((run.tensors()["linear.weight"][:, 0] - 1).square().sum(1).mean()) for _ in run.rounds(steps)]


def exact(name: str, steps: int) -> list[float]:
    """Its mean over all rows that could come."""
    found, now = [], float(FEATURES)
    for t in range(1, steps + 1):
        rate = RATES[name](t)
        now = (1 - 4 * rate + 4 * rate**2 * (FEATURES + 2)) * now + 4 * rate**2 * FEATURES * NOISE**2
        found.append(now)
    return found


def draw(curves: dict[str, list[float]], steps: int) -> Figure:
    """Excess risk over time."""
    figure, axes = common.subplots(figsize=(6.4, 4.0))
    times = range(1, steps + 1)
    for i, (name, values) in enumerate(curves.items()):
        axes.loglog(times, values, color=f"C{i}", label=name)
        axes.loglog(times, exact(name, steps), "--", color="black", linewidth=1, label="exact mean" if i else None)
        axes.loglog(times[20:], [LIMITS[name](t) for t in times[20:]], ":", color=f"C{i}", label="limit")
    axes.set_xlabel("rows seen")
    axes.set_ylabel("excess risk ‖w − w̄‖²")
    axes.legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Learn from rows that come, and draw the excess risk."""
    options = common.arguments(__doc__).parse_args(argv)
    steps = 60 if options.smoke else STEPS
    runs = [
        {name: excess(name, data, steps) for name in RATES}
        for data in (rows_of(seed, steps) for seed in range(options.seeds))
    ]
    rows = []
    for name in RATES:
        for t in sorted({steps // 10, steps}):
            rows.append(common.row(f"{name}, {t} rows", "excess risk", [run[name][t - 1] for run in runs]))
            rows.append(common.Row(f"{name}, {t} rows", "excess risk, closed form", exact(name, t)[-1]))
            rows.append(common.Row(f"{name}, {t} rows", "limit", LIMITS[name](t)))
    common.show_rows(f"Online gradient descent at {CLIENTS} clients", rows, form=".4g")
    common.finish("gtv.online", rows, options, lambda: {"gtv_online": draw(runs[0], steps)})


if __name__ == "__main__":
    main()
