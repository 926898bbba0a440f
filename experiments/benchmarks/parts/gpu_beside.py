"""What others need on the same device for whole jobs: a loop over clients, `vmap` with `torch.compile`, and Flower."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fedtorch as ft
from experiments.benchmarks.parts.gpu_timing import Rates, Timed, kernels, timed
from experiments.benchmarks.peers import ours, work
from experiments.benchmarks.peers.tasks import TASKS, Size
from experiments.common import Row

_LOOPED = 20  # clients of which a loop over all is timed, where there are more
_SHARE = 0.1  # of the device that a client of Flower's takes


def loop(make: Callable[[], nn.Module], x: Tensor, y: Tensor, batch_size: int, clients: int, device: str) -> float:
    """Seconds of a round of Adam, an epoch of every client in turn; of many clients some stand for all.

    Args:
        make: the module.
        x: the clients' inputs `(K, N, ...)`, K of them or more.
        y: labels `(K, N)`.
        batch_size: rows of a step.
        clients: of a round.
        device: where they are trained.
    """
    module, some = make().to(device), min(clients, _LOOPED)
    server = {name: value.clone() for name, value in module.state_dict().items()}
    x, y = x[:some].to(device), y[:some].to(device)

    def round() -> None:
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for rows, labels in zip(x, y):
            module.load_state_dict(server)
            optimizer = torch.optim.Adam(module.parameters())
            order = torch.randperm(len(rows), device=device)
            for chosen in order.split(batch_size):
                optimizer.zero_grad()
                F.cross_entropy(module(rows[chosen]), labels[chosen]).backward()
                optimizer.step()
            for name, value in module.state_dict().items():
                total[name] += value / some

    return timed(round, device).median * clients / some


def linear_clients(small: bool, device: str, rates: Rates) -> list[Row]:
    """FedAvg of many linear models: by the program, by stacked steps, and by hand with `vmap` and `torch.compile`."""
    clients, rows, features, steps, lr = (5, 8, 4, 2, 0.01) if small else (100_000, 64, 32, 20, 0.01)
    x = ft.random.normal(ft.random.key(0).to(device), (clients, rows, features))
    y = x.sum(-1, keepdim=True) + ft.random.normal(ft.random.key(1).to(device), (clients, rows, 1))
    data = ft.data.FederatedData((x.flatten(0, 1), y.flatten(0, 1)), torch.full((clients,), rows))
    module = nn.Linear(features, 1)
    local = ft.gradient_descent(
        module, steps=steps, loss=F.mse_loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr)
    )
    start = {name: value.detach().to(device) for name, value in module.named_parameters()}
    slope = vmap(grad(lambda own, x, y: F.mse_loss(functional_call(module, own, (x,)), y)))

    def trained(own: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for _ in range(steps):
            found = slope(own, x, y)
            own = {name: value - lr * found[name] for name, value in own.items()}
        return own

    compiled = torch.compile(trained, backend="eager" if device == "cpu" else "inductor", dynamic=False)
    stacked = {name: value.expand(clients, *value.shape).contiguous() for name, value in start.items()}
    run = ft.Run(ft.fedavg(local), ft.InProcess(data, device=device))
    times: dict[str, Timed] = {}
    for way, mode in (("one launch", "on" if device == "cuda" else "interpret"), ("stacked steps", "off")):
        with kernels(mode):
            times[way] = timed(run.step, device)
    times["vmap and torch.compile, local steps alone"] = timed(lambda: compiled(stacked, x, y), device)
    setting = f"FedAvg, {clients} linear clients, {rows} × {features}, {steps} steps"
    found = [Row(setting, f"ms a round, {way}", 1e3 * time.median, 1e3 * time.spread) for way, time in times.items()]
    one, *others = times.values()
    read = 4.0 * (x.numel() + y.numel()) / rates.copy
    return [
        *found,
        *(Row(setting, f"times faster than {way}", t.median / one.median) for way, t in zip(list(times)[1:], others)),
        Row(setting, "share of the bound of one read", read / one.median),
    ]


def flower(small: bool, device: str) -> list[Row]:
    """The same FedAvg in Flower's simulation, every client with a share of the device; nothing where it is missing."""
    if not all(importlib.util.find_spec(name) for name in ("flwr", "ray")):
        sys.stderr.write("flower: not installed\n")
        return []
    size = TASKS["perceptron"].smoke if small else Size(100, 5)
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PEERS_DEVICE": device}
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "work.npz", Path(folder) / "found.json"
        work.write(file, {"perceptron": size}, ours.schedule)
        command = [sys.executable, "-m", "experiments.benchmarks.peers.flower", str(file), "--task", "perceptron"]
        command += ["--out", str(out), *(["--gpus", str(_SHARE)] if device == "cuda" else [])]
        subprocess.run(command, env={**os.environ, **quiet}, check=True, capture_output=True, timeout=300)
        seconds = json.loads(out.read_text())["seconds"] / size.rounds
        task, clients = TASKS["perceptron"], work.load(str(file), "perceptron").clients
    local = ft.gradient_descent(
        task.model(), steps=task.steps, batch_size=task.batch_size, loss=task.loss,
        optimizer=lambda parameters: task.optimizer(parameters, lr=task.lr),
    )  # fmt: skip
    mine = timed(ft.Run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(clients), device=device)).step, device)
    setting = f"FedAvg, {size.clients} clients of digits, 64-128-10, {task.steps} steps"
    return [
        Row(setting, "ms a round, ours", 1e3 * mine.median, 1e3 * mine.spread),
        Row(setting, f"ms a round, Flower with {_SHARE:g} of the device a client", 1e3 * seconds),
        Row(setting, "times faster than Flower", seconds / mine.median),
    ]
