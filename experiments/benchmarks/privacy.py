"""What privacy and secrecy take: DP-SGD beside plain steps, and a secure sum per client.

- `steps`: a round of five steps of 10 clients with a 64-128-10 network, by `privacy.example_level` with and without
  ghost norms, beside `gradient_descent` with batches of the same size; ratios are medians over pairs of rounds.
- `sums`: a secure sum of 100 clients, a tenth of whom drop out before they send masked words: seconds of a client's own
  work, averaged, all phases together, in the simulation of the whole protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks import measure
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
    for batch in (32,) if smoke else (32, 256, 1024):
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
        times = measure.interleaved({name: run.step for name, run in runs.items()}, 2 if smoke else 10)
        setting = f"10 clients, batches of {batch}"
        rows.append(common.Row(setting, "ms a round, plain", 1e3 * measure.medians(times)["plain"]))
        for name in list(solvers)[1:]:
            rows.append(common.Row(setting, f"times plain, {name}", measure.ratio(times[name], times["plain"])))
    return rows


def private(**settings: Any) -> ft.LocalSolver:
    """DP-SGD on all rows in every step, whose account takes no time."""
    return privacy.example_level(network(), clip=1.0, noise=1.0, rate=1.0, delta=1e-6, **settings)


def sums(smoke: bool) -> list[common.Row]:
    """Seconds of a client."""
    clients, size = (20, 1000) if smoke else (100, 1_000_000)
    values = torch.randn(clients, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gone = dict.fromkeys(range(clients // 10), 3)
    found = secure.secure_sum(values, gone=gone)
    grid = secure.Grid()
    assert torch.equal(found.total, grid.decode(grid.encode(values[clients // 10 :]).sum(0)))
    setting = f"{clients} clients × {size} numbers, a tenth drop out"
    return [
        common.Row(setting, "seconds a client", found.seconds / clients),
        common.Row(setting, "MB sent a client", found.sent / clients / 1e6),
    ]


def parts(smoke: bool) -> measure.Parts:
    """The parts by name."""
    return {"steps": partial(steps, smoke), "sums": partial(sums, smoke)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all or one of the parts."""
    measure.run("privacy", __doc__, parts, argv)


if __name__ == "__main__":
    main()
