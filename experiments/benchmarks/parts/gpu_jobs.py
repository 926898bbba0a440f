"""Whole jobs on a GPU, the device's numbers beside the CPU's where a job is small enough."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from experiments.benchmarks.core import digit_clients, plain_loop
from experiments.benchmarks.parts import gpu_beside
from experiments.benchmarks.parts.gpu_timing import busy, timed
from experiments.benchmarks.vfl_split import stepper
from experiments.common import Row
from experiments.fedmgp import models as fm
from fedtorch.federation.algorithms.ep import settled
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse


class Images(nn.Module):
    """Two convolutions and a layer, for 28 × 28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 49, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Block(nn.Module):
    """Two convolutions with group normalisation beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(4, after)
        self.second, self.two = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(4, after)
        self.short = (
            nn.Identity() if before == after and stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.two(self.second(F.relu(self.one(self.first(x)))))
        return F.relu(inner + self.short(x))


def resnet() -> nn.Module:
    """A ResNet-8 for 32 × 32 images."""
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    first = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def per_round(setting: str, run: ft.Run, device: str, small: bool) -> list[Row]:
    """Seconds of a round, and how busy the device is."""
    time = timed(run.step, device, seconds=5.0)
    found = [Row(setting, "ms a round", 1e3 * time.median, 1e3 * time.spread)]
    return (
        found
        if small or device == "cpu"
        else [*found, Row(setting, "share of it that the device is busy", busy(run.step))]
    )


def labelled(clients: int, rows: int, *shape: int) -> ft.data.FederatedData:
    """Random inputs with ten classes."""
    x = ft.random.normal(ft.random.key(0), (clients * rows, *shape))
    return ft.data.FederatedData((x, ft.random.randint(ft.random.key(1), 10, (len(x),))), torch.full((clients,), rows))


def classifiers(small: bool, device: str) -> list[Row]:
    """FedAvg of a perceptron, of a small convolutional network and of a ResNet-8."""
    mlp = lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sizes = [
        ("64-128-10", mlp, 3 if small else 100, None, (64,)),
        ("64-128-10", mlp, 5 if small else 10_000, None, (64,)),
        ("two convolutions, 28 × 28", Images, 3 if small else 1000, 2 if small else 50, (1, 28, 28)),
        ("ResNet-8, 32 × 32", resnet, 2 if small else 100, 1 if small else 10, (3, 32, 32)),
    ]
    found = []
    for name, make, clients, cohort, shape in sizes:
        rows = 4 if small else 40
        local = ft.gradient_descent(
            make(), epochs=1, batch_size=2 if small else 20, loss=F.cross_entropy, optimizer=torch.optim.Adam
        )
        population = ft.InProcess(labelled(clients, rows, *shape), device=device)
        run = ft.Run(ft.fedavg(local), population, cohort=cohort)
        setting = f"FedAvg, {clients} clients{'' if cohort is None else f', {cohort} a round'}, {name}"
        found += per_round(setting, run, device, small)
        x, y = (leaf.unflatten(0, (clients, rows)) for leaf in population.data.rows)
        seconds = gpu_beside.loop(make, x, y, 2 if small else 20, cohort or clients, device)
        ours = next(row.ours for row in found if (row.setting, row.metric) == (setting, "ms a round"))
        found.append(Row(setting, "ms a round, a loop over clients", 1e3 * seconds))
        found.append(Row(setting, "times faster than the loop", 1e3 * seconds / ours))
    return found


def precisions(small: bool, device: str) -> list[Row]:
    """What short numbers save and cost: a round of a wide perceptron beside float64's change."""
    clients, rows, width = (2, 4, 8) if small else (100, 200, 1024)
    data = labelled(clients, rows, 64)
    module = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    changes, found = {}, []
    short: tuple[Literal["32", "tf32", "bf16"], ...] = ("32", "tf32", "bf16")
    for name, precision, dtype in (("64", short[0], torch.float64), *((each, each, torch.float32) for each in short)):
        local = ft.gradient_descent(
            module.to(dtype), steps=2 if small else 10, loss=F.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            precision=precision,
        )  # fmt: skip
        own = ft.InProcess(data.to(dtype=dtype), device=device)
        run = ft.Run(ft.fedavg(local), own)
        server = run.step().server
        changes[name] = torch.cat([(server[leaf].cpu() - p).double().flatten() for leaf, p in local.parameters.items()])
        time = timed(run.step, device)
        setting = f"FedAvg, {clients} clients, 64-{width}-{width}-10, precision {name}"
        error = (changes[name] - changes["64"]).norm() / changes["64"].norm()
        found.append(Row(setting, "ms a round", 1e3 * time.median, 1e3 * time.spread))
        found.append(Row(setting, "relative error of the first round", float(error)))
    return found


def beside_a_loop(small: bool, device: str) -> list[Row]:
    """FedAvg of the perceptron beside the loop that one writes by hand, on the device."""
    from experiments.benchmarks.core import Perceptron

    count, steps = (3, 2) if small else (100, 10)
    clients = [(x.to(device), y.to(device)) for x, y in digit_clients(count)]
    run = ft.Run(
        ft.fedavg(ft.gradient_descent(Perceptron(), steps=steps)),
        ft.InProcess(ft.data.from_tensors(clients), device=device),
    )
    module, setting = Perceptron().to(device), f"FedAvg, {count} clients of digits, {steps} full-batch steps of Adam"
    ours, loop = timed(run.step, device), timed(lambda: plain_loop(module, clients, 1, steps, None), device)
    times = [
        Row(setting, f"ms a round, {name}", 1e3 * t.median, 1e3 * t.spread)
        for name, t in (("ours", ours), ("loop", loop))
    ]
    return [*times, Row(setting, "times faster than the loop", loop.median / ours.median)]


def networks(small: bool, device: str) -> list[Row]:
    """GTV over many nodes."""
    nodes, rows, features = (30, 4, 3) if small else (1_000_000, 8, 16)
    ends = ft.random.randint(ft.random.key(0), nodes, (nodes * 5, 2))
    network = ft.Network(ends[ends[:, 0] != ends[:, 1]], nodes=nodes)
    x = ft.random.normal(ft.random.key(1), (nodes * rows, features))
    data = ft.data.FederatedData((x, x.sum(1)), torch.full((nodes,), rows))
    local = ft.least_squares(nn.Linear(features, 1, bias=False), steps=5)
    run = ft.Run(ft.gtv(local, network, 0.1), ft.InProcess(data, device=device))
    edges = 2 * len(network.edges)
    setting = f"GTV, {nodes} nodes, {edges} edges, d = {features}"
    # Statistics, eigenvectors and three vectors of a node, and an index, a weight and a row an edge.
    moved = 8.0 * nodes * (2 * features**2 + 6 * features) + edges * (12.0 + 8.0 * features)
    found = per_round(setting, run, device, small)
    return [*found, Row(setting, "GB/s of what it must read", moved / found[0].ours / 1e6)]


def processes(small: bool, device: str) -> list[Row]:
    """Federated multi-output Gaussian processes."""
    units, rows = (3, 6) if small else (10_000, 50)
    x = torch.linspace(0, 1, rows, dtype=torch.float64)[None, :, None].repeat(units, 1, 1)
    y = (6 * x[..., 0]).sin() + 0.1 * ft.random.normal(ft.random.key(0), (units, rows), torch.float64)
    data = ft.data.FederatedData((x.flatten(0, 1), y.flatten()), torch.full((units,), rows))
    inducing = torch.linspace(0, 1, 4 if small else 20, dtype=torch.float64)
    run = ft.Run(ft.fedmgp(fm.model(inducing), steps=2, accept_disclosure=True), ft.InProcess(data, device=device))
    return per_round(f"FedMGP, {units} units × {rows} points", run, device, small)


def sampler(small: bool, device: str) -> list[Row]:
    """Gibbs sampling of a sparse regression."""
    clients, rows, size = (3, 12, 2) if small else (1000, 30, 10)
    x = ft.random.normal(ft.random.key(0), (clients * rows, size), torch.float64)
    y = x[:, 0] + ft.random.normal(ft.random.key(1), (len(x),), torch.float64)
    data = ft.data.FederatedData((x, y), torch.full((clients,), rows))
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2 if small else 20, chains=1)
    run = ft.Run(algorithm, ft.InProcess(data, device=device), torch.zeros(size))
    return per_round(f"Gibbs, {clients} sites, {size} covariates", run, device, small)


def propagation(small: bool, device: str) -> list[Row]:
    """Expectation propagation to its end."""
    clients, rows = (4, 12) if small else (20_000, 20)
    x = ft.random.normal(ft.random.key(0), (clients * rows, 3), torch.float64)
    y = x.sum(1) + 0.1 * ft.random.normal(ft.random.key(1), (len(x),), torch.float64)
    data = ft.data.FederatedData((x, y), torch.full((clients,), rows))
    model = hierarchical.linear(hierarchical.normal(3))
    work = partial(ft.run, ft.ep(model), ft.InProcess(data, device=device), rounds=3 if small else 50, until=settled())
    time = timed(work, device, seconds=5.0)
    return [Row(f"EP, {clients} devices", "seconds to the end", time.median, time.spread)]


def split_networks(small: bool, device: str) -> list[Row]:
    """Hierarchical Bayes split networks at once beside one after another."""
    found: list[Row] = []
    times: dict[int, float] = {}
    with torch.device(device):
        for count in (1, 2, 3) if small else (1, 40, 1000):
            for way, captured in (("", False), (", captured", True)):
                take = stepper(count, captured)
                take(3)
                time = statistics.median(timed(partial(take, 1), device).median for _ in range(3))
                times[count] = min(time, times.get(count, time))
                found.append(Row(f"{count} split networks", f"ms an iteration{way}", 1e3 * time))
    faster = lambda count: count * times[1] / times[count]
    many = [count for count in times if count > 1]
    return [*found, *(Row(f"{n} split networks", "times faster than one after another", faster(n)) for n in many)]


JOBS: dict[str, Callable[[bool, str], list[Row]]] = {
    "classifiers": classifiers,
    "precisions": precisions,
    "loop": beside_a_loop,
    "flower": gpu_beside.flower,
    "networks": networks,
    "processes": processes,
    "sampler": sampler,
    "propagation": propagation,
    "split_networks": split_networks,
}
