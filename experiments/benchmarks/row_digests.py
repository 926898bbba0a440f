"""What the digest of the clients' rows costs, which a checkpoint keeps, beside the first round of a small network.

python -m experiments.benchmarks.row_digests
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.data.digests import noted

CASES = ((442, 10, 5), (20_000, 10, 100), (100_000, 10, 1000), (1_000_000, 10, 100), (500_000, 50, 100))
REPEATS = 5


def seconds(function: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    began = time.process_time()
    function()
    return time.process_time() - began


def measured(rows: int, features: int, clients: int) -> tuple[float, float]:
    """Return the times of a first round and of a digest, medians of calls in turn."""
    x, y = ft.random.normal(ft.random.key(0), (rows, features)), torch.arange(rows) % 2
    parts = zip(x.chunk(clients), y.float().chunk(clients))
    data = ft.data.from_tensors(list(parts))
    network = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 1))
    local = ft.gradient_descent(network, epochs=1, batch_size=32, loss=squared, optimizer=torch.optim.SGD)

    def first() -> None:
        ft.Run(ft.fedavg(local), ft.InProcess(data)).step()

    first()
    noted(data)
    times = [(seconds(first), seconds(lambda: noted(data))) for _ in range(REPEATS)]
    return statistics.median(round for round, _ in times), statistics.median(digest for _, digest in times)


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (output[:, 0] - target).square().mean()


def main() -> None:
    """Print a line for each size."""
    print("rows       features  clients  first round  digest    share")
    for rows, features, clients in CASES:
        first, digest = measured(rows, features, clients)
        times = f"{1e3 * first:8.1f} ms  {1e3 * digest:5.2f} ms  {digest / first:6.2%}"
        print(f"{rows:9}  {features:8}  {clients:7}  {times}")


if __name__ == "__main__":
    main()
