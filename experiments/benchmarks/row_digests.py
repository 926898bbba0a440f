"""What digests cost: of the clients' rows, which a checkpoint keeps, beside the first round of a small network; and of
the clients' states, of which a site that counts rows makes the key of a round's draws, beside a round of control
variates with one step.

python -m experiments.benchmarks.row_digests
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import wire
from fedtorch.data.digests import noted
from fedtorch.sites.rounds._pseudonyms import Pseudonyms

CASES = ((442, 10, 5), (20_000, 10, 100), (100_000, 10, 1000), (1_000_000, 10, 100), (500_000, 50, 100))
STATES = ((10, 1_000), (1000, 100), (100, 10_000), (100, 100_000))  # clients, and features of each
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


def of_states(clients: int, width: int) -> tuple[float, float, int]:
    """Return the times of a later round and of its key, medians of calls in turn, and the bytes of the states."""
    x, y = ft.random.normal(ft.random.key(0), (clients * 20, width)), torch.arange(clients * 20) % 2
    data = ft.data.from_tensors(list(zip(x.chunk(clients), y.float().chunk(clients))))
    sgd = partial(torch.optim.SGD, lr=0.1)
    local = ft.gradient_descent(nn.Linear(width, 1), steps=1, batch_size=10, loss=squared, optimizer=sgd)
    run, secret = ft.Run(ft.scaffold(local), ft.InProcess(data)), Pseudonyms(None)
    run.step()
    states = run.clients.state_dict()
    key = lambda: secret.key("a round", wire.encode(states))
    times = [(seconds(run.step), seconds(key)) for _ in range(REPEATS)]
    size = sum(leaf.numel() * leaf.element_size() for leaf in states.values())
    return statistics.median(round for round, _ in times), statistics.median(made for _, made in times), size


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
    print("\nclients  numbers  of states  later round  key        share")
    for clients, width in STATES:
        later, made, size = of_states(clients, width)
        times = f"{1e3 * later:8.1f} ms  {1e3 * made:7.2f} ms  {made / later:6.2%}"
        print(f"{clients:7}  {width + 1:7}  {size / 1e6:6.1f} MB  {times}")


if __name__ == "__main__":
    main()
