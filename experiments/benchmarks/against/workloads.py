"""Short pieces of work that two versions of fedtorch can both do: a worker that times them for `against`.

Runs as a program in the environment of either version. Names that differ between versions are looked for, the newer
first. A workload is set up once and hands back what is timed; that returns a number to compare, the size of what was
found. The worker reads the name of a workload per line from standard input, runs it once, and answers with a line of
JSON: its seconds and that number, or the error.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fedtorch as ft

Work = Callable[[], float]


def first(*names: str) -> Any:
    """The first of some modules that this version has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"Expected one of the modules {', '.join(names)}, but this version has none")


def finished(algorithm: Any, population: Any, start: Any = None, *, rounds: int) -> Any:
    """The finished run, or the last round where `ft.run` is a generator of rounds; both have `server` and `clients`."""
    run = ft.run(algorithm, population, start, rounds=rounds)
    if inspect.isgenerator(run):
        *_, run = run
    return run


def norm(*leaves: Tensor) -> float:
    """The Euclidean norm of all numbers."""
    return float(torch.stack([leaf.detach().double().norm() for leaf in leaves]).norm())


def parameters_of(run: Any) -> float:
    """The norm of the server's parameters."""
    server = getattr(run.server, "parameters", run.server)
    return norm(*(server.values() if isinstance(server, dict) else [server]))


def expectation_propagation(model: Any) -> Any:
    """`ft.ep` of a model, or of its parts."""
    ep: Any = ft.ep
    if "project" not in inspect.signature(ep).parameters:
        return ep(model)
    return ep(model.project, model.prior, start=model.start, prepare=model.prepare)


def linear_data(
    clients: int, rows: int, features: int = 8, dtype: torch.dtype = torch.float32
) -> ft.data.FederatedData:
    """Clients of equal size with a common linear signal."""
    x = ft.random.normal(ft.random.key(0), (clients * rows, features), dtype)
    y = x.sum(-1) + ft.random.normal(ft.random.key(1), (len(x),), dtype)
    return ft.data.FederatedData((x, y), torch.full((clients,), rows))


def steps_of_linear(steps: int = 20) -> Any:
    """Full-batch steps of a linear model of eight features."""
    return ft.gradient_descent(
        nn.Linear(8, 1),
        steps=steps,
        loss=lambda output, y: (output[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )


def average_linear(small: bool, clients: int, rounds: int, algorithm: Callable[[Any], Any] = ft.fedavg) -> Work:
    """FedAvg, or another algorithm, of steps of a linear model."""
    clients, rounds = (10, 2) if small else (clients, rounds)
    made, population = algorithm(steps_of_linear()), ft.InProcess(linear_data(clients, 40))
    return lambda: parameters_of(finished(made, population, rounds=rounds))


def closed_form(small: bool) -> Work:
    """FedAvg of the same steps from Gram matrices."""
    made = ft.fedavg(ft.least_squares(nn.Linear(8, 1), steps=20, lr=0.05))
    population = ft.InProcess(linear_data(10 if small else 100, 40))
    return lambda: parameters_of(finished(made, population, rounds=2 if small else 400))


def perceptron(small: bool, compile: bool, clients: int = 100) -> Work:
    """FedAvg of Adam steps of 64-128-10 on digits."""
    clients, rounds = (10, 2) if small else (clients, 20)
    local = ft.gradient_descent(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        steps=5,
        batch_size=10,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        compile=compile,
    )
    data = ft.data.partition(ft.data.digits(), ft.data.iid(), clients=clients, seed=0)
    made, population = ft.fedavg(local), ft.InProcess(data)
    return lambda: parameters_of(finished(made, population, rounds=rounds))


def dropout(small: bool, batched: bool) -> Work:
    """FedAvg of Adam steps of 64-128-10 with dropout, of clients that have different numbers of rows."""
    clients, rounds = (10, 1) if small else (50, 10)
    local = ft.gradient_descent(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        steps=5,
        batch_size=10,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batched=batched,
    )
    data = ft.data.partition(ft.data.digits(), ft.data.iid(), clients=clients, seed=0)
    made, population = ft.fedavg(local), ft.InProcess(data)
    return lambda: parameters_of(finished(made, population, rounds=rounds))


def one_by_one(small: bool) -> Work:
    """FedAvg of steps of a linear model, client by client."""
    local = ft.gradient_descent(
        nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)),
        steps=20,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batched=False,
    )
    made, population = ft.fedavg(local), ft.InProcess(linear_data(5 if small else 100, 40))
    return lambda: parameters_of(finished(made, population, rounds=1 if small else 3))


def matrix_normal(small: bool) -> Work:
    """HM1 of related linear devices, data preparation included."""
    head = importlib.import_module("fedtorch.models.linear").LinearHead(8, intercept=False, dtype=torch.float64)
    made = ft.matrix_normal(ft.least_squares(head, steps=20))
    data = linear_data(10 if small else 100, 40 if small else 200, dtype=torch.float64)
    return lambda: parameters_of(finished(made, ft.InProcess(data), rounds=2 if small else 30))


def gtv(small: bool) -> Work:
    """GTV minimisation by gradient steps of the nodes of a network with four neighbours each."""
    nodes, rounds = (50, 2) if small else (2000, 50)
    points = ft.random.uniform(ft.random.key(2), (nodes, 2), torch.float64)
    network = ft.Network.k_nearest(points, 4)
    made = ft.gtv(ft.least_squares(nn.Linear(8, 1, bias=False), steps=1, lr=0.01), network, 0.5)
    population = ft.InProcess(linear_data(nodes, 10))

    def work() -> float:
        run = finished(made, population, rounds=rounds)
        return norm(*run.clients.table.read(slice(0, nodes)).parameters.values())

    return work


def gibbs(small: bool) -> Work:
    """Sparse regression over four sites: five sweeps a round, four chains."""
    sparse = first("fedtorch.models.gibbs.sparse", "fedtorch.models.sparse")
    made = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=5, chains=4)
    population = ft.InProcess(linear_data(4, 120, 11, torch.float64))
    rounds = 3 if small else 100
    return lambda: norm(finished(made, population, torch.zeros(11), rounds=rounds).server.variables.theta)


def ep(small: bool) -> Work:
    """Expectation propagation of a hierarchical linear model whose noise is learnt."""
    hierarchical = importlib.import_module("fedtorch.models.hierarchical")
    made = expectation_propagation(hierarchical.linear(hierarchical.normal(4)))
    population = ft.InProcess(linear_data(10 if small else 100, 40, 4, torch.float64))
    return lambda: norm(finished(made, population, rounds=2 if small else 10).server.posterior.shift)


def fedmgp(small: bool) -> Work:
    """A multi-output Gaussian process of five units by sums of sites."""
    processes = first("fedtorch.models.gaussian_process", "fedtorch.models.convolved_gp")
    kernels = first("fedtorch.models.gaussian_process.kernels", "fedtorch.models.multi_output_kernels")
    inducing = torch.linspace(-1.1, 1.1, 20, dtype=torch.float64)[:, None]
    module = processes.ConvolvedGP(inducing, kernels.ConvolutionProcess(1, 1))
    made = ft.fedmgp(module, accept_disclosure=True)
    x = 2 * ft.random.uniform(ft.random.key(3), (5 * 60, 1), torch.float64) - 1
    y = (3 * x[:, 0]).sin() + 0.1 * ft.random.normal(ft.random.key(4), (len(x),), torch.float64)
    population = ft.InProcess(ft.data.FederatedData((x, y), torch.full((5,), 60)))
    return lambda: float(finished(made, population, rounds=2 if small else 20).server.bound)


def vertical_data(rows: int, copies: int | None = None) -> Any:
    """Two parties' features of the same rows with binary labels; for one problem, or for several at once."""
    lead = () if copies is None else (copies,)
    x = ft.random.normal(ft.random.key(5), (*lead, rows, 11))
    y = (ft.random.uniform(ft.random.key(6), (*lead, rows)) < (0.5 * x.sum(-1)).sigmoid()).float()
    return ft.vfl.VerticalData(x.split((5, 6), -1), y)


def sfvi(small: bool) -> Work:
    """Vertical inference of a logistic model."""
    likelihoods = first("fedtorch.vfl.model.likelihoods", "fedtorch.models.likelihoods")
    model = ft.vfl.augmented(likelihoods.bernoulli(), [ft.vfl.linear(5), ft.vfl.linear(6)], 1.0)
    guide, data = getattr(ft.vfl.Guide, "of", ft.vfl.Guide)(ft.vfl.sums()), vertical_data(60 if small else 800)
    fit = functools.partial(ft.vfl.sfvi, model, guide, data, steps=3 if small else 200)
    return lambda: norm(*ft.tree.leaves(fit().parameters))


def split_network(small: bool) -> Work:
    """Eight hierarchical Bayes split networks in one graph."""
    likelihoods = first("fedtorch.vfl.model.likelihoods", "fedtorch.models.likelihoods")
    mlp = first("fedtorch.vfl.model.split_nn", "fedtorch.models.split_nn").mlp
    rows = vertical_data(60 if small else 300, 8)
    steps = 2 if small else 50

    def work() -> float:
        bottoms, bayes = [mlp(width, (8, 8), 1) for width in (5, 6)], ft.vfl.HierarchicalBayes(rho=torch.ones(8))
        network = ft.vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), seed=range(8), bayes=bayes).train()
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for step in range(steps):
            optimizer.zero_grad()
            network.losses(rows, step).sum().backward()
            optimizer.step()
        return norm(*network.parameters())

    return work


# Name -> (whether small -> the work).
WORKLOADS: dict[str, Callable[[bool], Work]] = {
    "fedavg, linear, 100 clients × 20 rounds × 20 steps": lambda small: average_linear(small, 100, 20),
    "fedavg, linear, 10 000 clients, one round": lambda small: average_linear(small, 10_000, 1),
    "fedavg, least squares, 100 clients × 400 rounds": closed_form,
    "fedavg, 64-128-10, 100 clients × 20 rounds × 5 Adam steps": lambda small: perceptron(small, False),
    "the same with compile=True": lambda small: perceptron(small, True),
    "fedavg, 64-128-10 with dropout, 50 clients × 10 rounds × 5 Adam steps": lambda small: dropout(small, True),
    "fedavg, dropout, one by one: 50 clients × 10 rounds × 5 Adam steps": lambda small: dropout(small, False),
    "fedavg, linear, 100 clients × 3 rounds × 20 steps one by one": one_by_one,
    "fedavg, 64-128-10, 10 clients × 20 rounds × 5 Adam steps": lambda small: perceptron(small, False, 10),
    "hm1, 100 devices × 30 rounds": matrix_normal,
    "scaffold, linear, 100 clients × 20 rounds × 20 steps": lambda small: average_linear(small, 100, 20, ft.scaffold),
    "gtv, 2000 nodes × 50 rounds": gtv,
    "gibbs, 4 sites, 4 chains, 100 rounds × 5 sweeps": gibbs,
    "ep, hierarchical linear, 100 devices × 10 rounds": ep,
    "fedmgp, 5 units × 20 rounds": fedmgp,
    "sfvi, logistic, 200 steps": sfvi,
    "split networks, 8 × 50 steps": split_network,
}


def prepare(name: str, small: bool) -> Work:
    """A workload ready to run, from the same random weights every time."""
    torch.manual_seed(0)
    return WORKLOADS[name](small)


def main() -> None:
    """Answers requests until there are none; `--smoke` makes the work small."""
    small = "--smoke" in sys.argv
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    answers.write(json.dumps({"version": os.path.dirname(ft.__file__)}) + "\n")
    prepared: dict[str, Work] = {}
    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in prepared:
                prepared[name] = prepare(name, small)
            start = time.perf_counter()
            value = prepared[name]()
            answer: dict[str, object] = {"seconds": time.perf_counter() - start, "value": value}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
