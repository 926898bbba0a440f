"""The core's speed: ratios against a plain PyTorch loop, the cost of the outer Trainer, and the cost of many clients.

Ratios are medians over repetitions in which both sides run one after the other in the same process, so that they hold
when the machine's speed drifts. Each part runs in a process of its own.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure

Client = tuple[Tensor, Tensor]


class Linear(L.LightningModule):
    """A linear model with squared error and SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Client, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Perceptron(L.LightningModule):
    """64-128-10 with Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Client, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Wide(L.LightningModule):
    """A model with 10 000 personal weights and 1000 shared ones."""

    def __init__(self) -> None:
        super().__init__()
        self.personal, self.shared = nn.Linear(10, 1000, bias=False), nn.Linear(1000, 1, bias=False)

    def training_step(self, batch: Client, batch_idx: int) -> Tensor:
        return F.mse_loss(self.shared(self.personal(batch[0]).tanh()).squeeze(-1), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def linear_clients(count: int, rows: int) -> list[Client]:
    """Clients with 8 features and a common linear signal."""
    key = ft.random.key(0)
    x = ft.random.normal(key, (count, rows, 8))
    y = x.sum(-1) + ft.random.normal(ft.random.fold_in(key, 1), (count, rows))
    return list(zip(x, y))


def digit_clients(count: int) -> list[Client]:
    """Digits dealt out to clients of equal size."""
    return list(ft.data.partition(ft.data.digits(), ft.data.iid(), clients=count, seed=0))


def plain_loop(
    module: Linear | Perceptron, clients: Sequence[Client], rounds: int, steps: int, size: int | None
) -> None:
    """FedAvg as one writes it by hand in PyTorch: every client in turn, the same module and optimiser."""
    server = {name: p.detach().clone() for name, p in module.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    rows = sum(len(y) for _, y in clients)
    for _ in range(rounds):
        total = {name: torch.zeros_like(p) for name, p in server.items()}
        for x, y in clients:
            module.load_state_dict(server)
            optimizer = module.configure_optimizers()
            order = None if size is None else torch.randperm(len(y), generator=generator)
            for t in range(steps):
                if order is None or size is None:
                    batch = (x, y)
                else:
                    start = t * size % (len(y) - size + 1)
                    batch = (x[order[start : start + size]], y[order[start : start + size]])
                optimizer.zero_grad()
                module.training_step(batch, t).backward()
                optimizer.step()
            for name, p in module.named_parameters():
                total[name] += p.detach() * (len(y) / rows)
        server = total


def trainer(rounds: int, **arguments: Any) -> L.Trainer:
    """A Lightning trainer without anything but what is asked for."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return L.Trainer(max_epochs=rounds, accelerator="cpu", enable_model_summary=False, **{**quiet, **arguments})


def against_loop(
    name: str,
    make: Callable[[], Linear | Perceptron],
    clients: list[Client],
    steps: int,
    size: int | None,
    rounds: int,
    repeat: int,
    target: float,
) -> list[common.Row]:
    """Stacked clients under the outer Trainer against the plain loop: ratios in pairs."""
    population = ft.InProcess(ft.data.from_tensors(clients))
    rows = []
    for label, compile in (("", False), (", compile=True", True)):
        local = ft.gradient_descent(make(), steps=steps, batch_size=size, compile=compile)
        federations = iter([ft.Federation(ft.fedavg(local), population) for _ in range(repeat + 1)])
        ways = {
            "plain loop": lambda: plain_loop(make(), clients, rounds, steps, size),
            "fedtorch": lambda: trainer(rounds).fit(next(federations)),  # noqa: B023
        }
        times = measure.interleaved(ways, repeat)
        rows += [common.Row(name + label, f"{way}, s", value) for way, value in measure.medians(times).items()]
        ratio = measure.ratio(times["plain loop"], times["fedtorch"])
        rows.append(common.Row(name + label, f"times faster (target {target:g})", ratio))
    return rows


def overhead(rounds: int, repeat: int) -> list[common.Row]:
    """What Federation and Trainer add to a round, in milliseconds."""
    local = ft.least_squares(nn.Linear(8, 1))
    population = ft.InProcess(ft.data.from_tensors(linear_clients(10, 20)))

    def alone() -> ft.Run:
        return ft.run(ft.fedavg(local), population, rounds=rounds)

    def under(**arguments: Any) -> Callable[[], None]:
        return lambda: trainer(rounds, **arguments).fit(ft.Federation(ft.fedavg(local), population))

    class Lightnings(TQDMProgressBar):
        """Lightning's bar, which a federation leaves alone when it is a class of its own."""

    rows, bar = [], {"enable_progress_bar": True, "callbacks": Lightnings()}
    with tempfile.TemporaryDirectory() as folder:
        for name, target, arguments in (
            ("Lightning's progress bar", 2, bar),
            ("Lightning's progress bar and CSV logger", 4, {**bar, "logger": CSVLogger(folder)}),
            ("RoundProgressBar", 2, {"enable_progress_bar": True, "callbacks": ft.RoundProgressBar()}),
        ):
            times = measure.interleaved({"with": under(**arguments), "without": alone}, repeat)
            added = statistics.median((a - b) / rounds * 1e3 for a, b in zip(times["with"], times["without"]))
            rows.append(common.Row(f"outer Trainer, {name}", f"ms added to a round (target < {target})", added))
    return rows


def many_clients(count: int) -> list[common.Row]:
    """A round of many linear clients, and the memory of the process."""
    local = ft.gradient_descent(Linear(), steps=20)
    data = ft.data.from_tensors(linear_clients(count, 40))
    times = measure.round_seconds(ft.Run(ft.fedavg(local), ft.InProcess(data)), 6)
    name = f"{count} linear clients, 20 full-batch steps"
    return [
        common.Row(name, "s a round (target < 0.5)", statistics.median(times[1:])),
        common.Row(name, "peak memory of the process, MB (target < 1000)", common.peak_megabytes()),
    ]


def touched_only(count: int, cohort: int) -> list[common.Row]:
    """A small cohort of many clients with large personal state: what a round costs beyond its training."""
    x = ft.random.normal(ft.random.key(0), (count, 5, 10))
    clients = list(zip(x, x.sum(-1)))
    algorithm = ft.personal_layers(ft.gradient_descent(Wide(), steps=5), personal="personal.*")
    few, many = (ft.InProcess(ft.data.from_tensors(those)) for those in (clients[:cohort], clients))
    alone = measure.round_seconds(ft.Run(algorithm, few), 12)
    every = measure.round_seconds(ft.Run(algorithm, many, cohort=cohort), 12)
    name = f"cohort of {cohort} among {count} clients, 10 000 personal parameters each"
    beyond = statistics.median(every[1:]) - statistics.median(alone[1:])
    return [
        common.Row(name, "s a round", statistics.median(every[1:])),
        common.Row(name, "s a round beyond training the cohort alone (target < 0.2)", beyond),
        common.Row(name, "peak memory of the process, MB", common.peak_megabytes()),
    ]


def parts(smoke: bool) -> measure.Parts:
    """The benchmarks by name."""
    repeat, rounds, clients = (1, 2, 10) if smoke else (5, 20, 100)
    return {
        "linear": lambda: against_loop(
            f"linear: {clients} clients × {rounds} rounds × 20 full-batch steps",
            Linear,
            linear_clients(clients, 40),
            20,
            None,
            rounds,
            repeat,
            20,
        ),
        "perceptron": lambda: against_loop(
            f"64-128-10: {clients} clients × {rounds} rounds × 5 Adam steps of 10",
            Perceptron,
            digit_clients(clients),
            5,
            10,
            rounds,
            repeat,
            6,
        ),
        "overhead": lambda: overhead(20 if smoke else 300, repeat),
        "many": lambda: many_clients(100 if smoke else 10_000),
        "touched": lambda: touched_only(200 if smoke else 20_000, 20 if smoke else 200),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all parts, or one."""
    measure.run("core", __doc__, parts, argv, own_processes=True)


if __name__ == "__main__":
    main()
