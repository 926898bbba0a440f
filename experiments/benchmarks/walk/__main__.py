"""How many files of the package one round goes through.

Counts the files and functions of `fedtorch` that run in the second round of FedAvg by gradient descent and by closed
form in one process, in one iteration of a vertical fit among two parties and a server, and in one round of FedAvg over
two sites, both ends counted together. Fewer is easier to follow; `docs/explanation/architecture.md` names the files.

`python -m experiments.benchmarks.walk [--verbose]`
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fedtorch as ft
from fedtorch.sites import Hub, SiteConfiguration, join
from fedtorch.sites.streams import memory
from fedtorch.vfl.nodes.iteration import exchange
from fedtorch.vfl.nodes.node import Iteration

ROOT = f"{Path(ft.__file__).parent}/"


class Walk:
    """The files and functions of the package that run in some work.

    Other threads are seen, too, where `threading.setprofile(walk.see)` was called before they began.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.on = False

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call, as a profile function."""
        name = frame.f_code.co_filename
        if self.on and event == "call" and name.startswith(ROOT):
            self.files.add(name[len(ROOT) :])
            self.functions.add((name, frame.f_code.co_name))

    def of(self, work: Callable[[], Any]) -> None:
        """Walk through some work."""
        self.on = True
        sys.setprofile(self.see)
        try:
            work()
        finally:
            sys.setprofile(None)
            self.on = False


def in_process(local: ft.LocalSolver) -> Walk:
    """The second round of FedAvg in one process."""
    data = ft.data.from_tensors([(torch.randn(20, 3), torch.randn(20)) for _ in range(6)])
    run = ft.Run(ft.fedavg(local), ft.InProcess(data))
    run.step()
    walk = Walk()
    walk.of(run.step)
    return walk


def vertical() -> Walk:
    """The second iteration of a split network among two parties and a server, in one process."""
    data = ft.vfl.VerticalData((torch.randn(20, 2), torch.randn(20, 3)), torch.ones(20))
    bottoms, keys = [torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)], ft.random.key(0).reshape(1)
    network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli(), keys=keys)
    server, parties = network.nodes(data, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    exchange(server, parties, Iteration(step=0))
    walk = Walk()
    walk.of(lambda: exchange(server, parties, Iteration(step=1)))
    return walk


def over_sites() -> Walk:
    """The second round of FedAvg over two sites, both ends, in threads over links in memory."""
    make = partial(ft.least_squares, torch.nn.Linear(3, 1))
    walk = Walk()
    threading.setprofile(walk.see)
    hub = Hub()
    try:
        with ThreadPoolExecutor() as pool:
            sites = []
            for name in ("north", "south"):
                data = ft.data.from_tensors([(torch.randn(20, 3), torch.randn(20))], names=[name])
                configuration = SiteConfiguration(data, {"fedavg": lambda: ft.fedavg(make())})
                sites.append(pool.submit(join, partial(memory.link, hub, name), configuration, timeout=30.0))
            remote = ft.Remote(hub, ["north", "south"], "fedavg", timeout=30.0)
            run = ft.Run(ft.fedavg(make()), remote)
            run.step()
            walk.of(run.step)
            remote.finish(run)
            for site in sites:
                site.result()
    finally:
        threading.setprofile(None)
    return walk


def main() -> None:
    """Print the counts, with `--verbose` the files too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="print the files, too")
    options = parser.parse_args()
    line = torch.nn.Linear(3, 1)
    loss = lambda output, y: torch.nn.functional.mse_loss(output[..., 0], y)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    descent = ft.gradient_descent(line, epochs=1, batch_size=8, loss=loss, optimizer=sgd)
    walks = {
        "a round of FedAvg, gradient descent": in_process(descent),
        "a round of FedAvg, closed form": in_process(ft.least_squares(line)),
        "an iteration of a split network": vertical(),
        "a round over two sites, both ends": over_sites(),
    }
    for name, walk in walks.items():
        print(f"{name}: {len(walk.files)} files, {len(walk.functions)} functions")
        if options.verbose:
            print("  " + "\n  ".join(sorted(walk.files)))


if __name__ == "__main__":
    main()
