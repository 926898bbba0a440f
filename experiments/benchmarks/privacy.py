"""What privacy and secrecy take: DP-SGD beside plain steps and Opacus, and a secure sum beside Flower's SecAgg+.

- `steps`: a round of five steps of 10 clients with a 64-128-10 network, by `privacy.example_level` with and without
  ghost norms, beside `gradient_descent` with batches of the same size; ratios are medians over pairs of rounds. Where
  `opacus` can be imported, it does the same steps client by client, on batches that are at hand.
- `sums`, `large_sums`: a secure sum of 100 clients × 10⁵ and 10⁶ numbers, a tenth of whom drop out before they send
  masked words: the clients' own work, and that of all, in one process, per client. But for `--smoke`, Flower's SecAgg+
  does the same in an environment of its own, `.venv-peers/flower`, with as many neighbours and the same threshold:
  those for a server that is curious and keeps to the protocol, which is all that SecAgg+ is made for.
- `adversaries`, `large_adversaries`: a secure sum of 10 and 100, and of 1000 clients × 100 numbers, a tenth of whom
  drop out, with the neighbours and thresholds for a server that is curious and for one that is active and tells clients
  what it likes. Seconds of secure sums are those of the processor.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure
from experiments.benchmarks.peers import __main__ as peers
from fedtorch.sites.secure.messages import MASKED
from fedtorch.sites.secure.neighbours import neighbourhoods
from fedtorch.sites.secure.simulation import SecureSum, secure_sum
from fedtorch.trust import privacy, secure

STEPS = 5
LARGE = 1024  # batches whose examples' gradients are not made: 400 MB each step


def network() -> nn.Module:
    """64-128-10."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def steps(smoke: bool) -> list[common.Row]:
    """How many times longer a private round takes."""
    rows = []
    for batch in (16,) if smoke else (16, 64, 256, 1024):
        generator = torch.Generator().manual_seed(0)
        clients = [
            (torch.randn(batch, 64, generator=generator), torch.randint(10, (batch,), generator=generator))
            for _ in range(10)
        ]
        population = ft.InProcess(ft.data.from_tensors(clients))
        own: dict[str, Any] = {"steps": STEPS, "loss": F.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=0.1)}
        solvers = {
            "plain": ft.gradient_descent(network(), batch_size=batch, **own),
            "ghost": private(ghost=True, **own),
        }
        if batch < LARGE:
            solvers["by example"] = private(ghost=False, **own)
        runs = {name: ft.Run(ft.fedavg(local), population) for name, local in solvers.items()}
        ways: dict[str, Callable[[], object]] = {name: run.step for name, run in runs.items()}
        if importlib.util.find_spec("opacus") is not None:
            ways[f"Opacus {importlib.metadata.version('opacus')}"] = opacus_round(clients)
        times = measure.interleaved(ways, 2 if smoke else 10)
        setting = f"10 clients, batches of {batch}"
        rows.append(common.Row(setting, "ms a round, plain", 1e3 * measure.medians(times)["plain"]))
        for name in list(ways)[1:]:
            rows.append(common.Row(setting, f"times plain, {name}", measure.ratio(times[name], times["plain"])))
    return rows


def private(**settings: Any) -> ft.LocalSolver:
    """DP-SGD on all rows in every step, whose account takes no time."""
    return privacy.example_level(network(), clip=1.0, noise=1.0, sampling_rate=1.0, delta=1e-6, **settings)


def opacus_round(clients: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
    """The same round by Opacus, whose model and optimiser are made once."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(network())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    batch = len(clients[0][1])
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=batch
    )

    def round() -> list[torch.Tensor]:
        ends = []
        for x, y in clients:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start):
                    parameter.copy_(value)
            for _ in range(STEPS):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
        return [torch.stack(each).mean(0) for each in zip(*ends)]

    return round


def sums(smoke: bool, size: int) -> list[common.Row]:
    """Seconds of a client, and of all that is done for it."""
    clients, size = (20, 1000) if smoke else (100, size)
    graph, gone = neighbourhoods(clients, adversary="curious"), clients // 10
    values, found, whole = summed(clients, size, "curious")
    setting = f"{clients} clients × {size} numbers, a tenth drop out, {graph.neighbours} neighbours"
    rows = [
        common.Row(setting, "a client's own seconds", found.seconds / clients),
        common.Row(setting, "all seconds per client", whole / clients),
        common.Row(setting, "MB sent a client", found.sent / clients / 1e6),
    ]
    del values, found  # some gigabytes
    if not smoke:
        flower = [peers.python("flower"), str(Path(peers.__file__).parent / "flower_sums.py")]
        numbers = [clients, size, gone, graph.neighbours + 1, graph.threshold]  # its clients keep a share themselves
        ran = subprocess.run([*flower, *map(str, numbers)], capture_output=True, text=True, check=True)
        theirs = json.loads(ran.stdout.splitlines()[-1])
        name = f"Flower {theirs['version']} SecAgg+"
        rows += [
            common.Row(setting, f"{name}, a client's own seconds", theirs["clients"] / clients),
            common.Row(setting, f"{name}, all seconds per client", theirs["whole"] / clients),
        ]
    return rows


def summed(clients: int, size: int, adversary: secure.neighbours.Adversary) -> tuple[torch.Tensor, SecureSum, float]:
    """(numbers, their sum without a tenth of the clients, the processor's seconds that it took)."""
    gone = clients // 10
    values = torch.randn(clients, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    begun = time.process_time()
    found = secure_sum(values, gone=dict.fromkeys(range(gone), MASKED), adversary=adversary)
    whole = time.process_time() - begun
    grid = secure.Grid()
    assert torch.equal(found.total, grid.decode(grid.encode(values[gone:]).sum(0)))
    return values, found, whole


def adversaries(sizes: Sequence[int]) -> list[common.Row]:
    """What it costs that a server may lie, for so many clients."""
    rows = []
    for clients in sizes:
        for adversary in secure.neighbours.ADVERSARIES:
            near = neighbourhoods(clients, adversary=adversary)
            _, found, whole = summed(clients, 100, adversary)
            setting = f"{clients} clients, {near.neighbours} neighbours, threshold {near.threshold}: {adversary} server"
            rows += [
                common.Row(setting, "a client's own seconds", found.seconds / clients),
                common.Row(setting, "all seconds per client", whole / clients),
                common.Row(setting, "kB sent a client", found.sent / clients / 1e3),
                common.Row(setting, "kB received a client", found.received / clients / 1e3),
            ]
    return rows


def parts(smoke: bool) -> measure.Parts:
    """The parts by name."""
    return {
        "steps": partial(steps, smoke),
        "sums": partial(sums, smoke, 10**5),
        "large_sums": partial(sums, smoke, 10**6),
        "adversaries": partial(adversaries, (10,) if smoke else (10, 100)),
        "large_adversaries": partial(adversaries, (20,) if smoke else (1000,)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all or one of the parts."""
    measure.run("privacy", __doc__, parts, argv)


if __name__ == "__main__":
    main()
