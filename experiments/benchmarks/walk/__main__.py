"""How many files of the package one round goes through, and how many it loads.

Counts the files, functions and calls of `fedtorch` that run in the second round of FedAvg in one process, by gradient
descent of a perceptron and of a linear LightningModule, by a program of linear models and in closed form; in a round of
expectation propagation of a formula; in one iteration of a vertical fit among two parties and a server; in one round of
FedAvg over two sites, both ends counted together; and from making a perceptron's federation to the end of its first
round. Bodies of modules are not counted. The files that two rounds of a perceptron's federation load are counted in a
process of their own. Fewer is easier to follow; `docs/explanation/architecture.md` names the files.

`python -m experiments.benchmarks.walk [--verbose]`
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import pandas as pd
import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.sites import Hub, SiteConfiguration, join
from fedtorch.sites.streams import memory
from fedtorch.vfl.nodes.iteration import exchange
from fedtorch.vfl.nodes.node import Iteration

ROOT = f"{Path(ft.__file__).parent}/"


class Walk:
    """The files, functions and calls of the package that run in some work.

    Other threads are seen, too, where `threading.setprofile(walk.see)` was called before they began.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.calls = 0
        self.on = False

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call, as a profile function."""
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if self.on and event == "call" and function != "<module>" and name.startswith(ROOT):
            self.files.add(name[len(ROOT) :])
            self.functions.add((name, function))
            self.calls += 1

    def of(self, work: Callable[[], Any]) -> Walk:
        """Walk through some work, and return itself."""
        self.on = True
        sys.setprofile(self.see)
        try:
            work()
        finally:
            sys.setprofile(None)
            self.on = False
        return self


class Net(L.LightningModule):
    """A network with the squared error and SGD.

    Args:
        net: from rows to one output.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error of a batch (x, y)."""
        return nn.functional.mse_loss(self.net(batch[0])[..., 0], batch[1])

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def perceptron() -> Net:
    """A perceptron of one hidden layer."""
    return Net(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)))


def made(local: ft.LocalSolver, *outputs: int) -> ft.Run:
    """A run of FedAvg in one process, of six clients with rows for three minibatches."""
    data = ft.data.from_tensors([(torch.randn(20, 3), torch.randn(20, *outputs)) for _ in range(6)])
    return ft.Run(ft.fedavg(local), ft.InProcess(data))


def second_round(run: ft.Run) -> Walk:
    """The second round of a run."""
    run.step()
    return Walk().of(run.step)


def of_a_formula() -> Walk:
    """The second round of expectation propagation of a linear mixed model by its formula."""
    frame = pd.DataFrame({"site": ["a", "b", "c"] * 8, "x": torch.randn(24).tolist(), "y": torch.randn(24).tolist()})
    data = ft.data.from_frame(frame, client="site", formula="y ~ x + (1 | site)")
    assert data.design is not None
    return second_round(ft.Run(ft.ep(hierarchical.regression(data.design, noise=1.0)), ft.InProcess(data)))


def loaded() -> list[str]:
    """The files of the package that are loaded after two rounds of a perceptron's federation."""
    program = f"""
import sys
import lightning, torch
import fedtorch as ft

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0])[..., 0], batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = ft.data.from_tensors([(torch.randn(20, 3), torch.randn(20)) for _ in range(6)])
run = ft.Run(ft.fedavg(ft.gradient_descent(Net(), epochs=1, batch_size=8)), ft.InProcess(data))
run.step(), run.step()
for module in list(sys.modules.values()):
    if (getattr(module, "__file__", None) or "").startswith({ROOT!r}):
        print(module.__file__[{len(ROOT)} :])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


def vertical() -> Walk:
    """The second iteration of a split network among two parties and a server, in one process."""
    data = ft.vfl.VerticalData((torch.randn(20, 2), torch.randn(20, 3)), torch.ones(20))
    bottoms = [torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)]
    network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli())
    server, parties = network.nodes(data, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    exchange(server, parties, Iteration(step=0))
    return Walk().of(lambda: exchange(server, parties, Iteration(step=1)))


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
    torch.manual_seed(0)
    line = nn.Linear(3, 1)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    descent = partial(ft.gradient_descent, epochs=1, batch_size=8)
    walks = {
        "a round of FedAvg, gradient descent of a perceptron": second_round(made(descent(perceptron()))),
        "a round of FedAvg, gradient descent of a linear LightningModule": second_round(made(descent(Net(line)))),
        "a round of FedAvg, gradient descent of a linear layer, by its program": second_round(
            made(descent(line, loss=nn.functional.mse_loss, optimizer=sgd), 1)
        ),
        "a round of FedAvg, closed form": second_round(made(ft.least_squares(line))),
        "a round of expectation propagation of a formula": of_a_formula(),
        "an iteration of a split network": vertical(),
        "a round over two sites, both ends": over_sites(),
        "making a perceptron's federation, and its first round": Walk().of(lambda: made(descent(perceptron())).step()),
    }
    for name, walk in walks.items():
        print(f"{name}: {len(walk.files)} files, {len(walk.functions)} functions, {walk.calls} calls")
        if options.verbose:
            print("  " + "\n  ".join(sorted(walk.files)))
    files = loaded()
    print(f"loaded by two rounds of a perceptron's federation: {len(files)} files")
    if options.verbose:
        print("  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
