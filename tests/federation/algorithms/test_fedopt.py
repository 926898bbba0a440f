"""FedOpt against the server's optimiser on explicit pseudo-gradients, the paper's updates, and resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import ROUNDING, distance, joined, linear, linear_clients, moments, same_bits, sgd
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.algorithms.fedopt import Yogi

SIZES = [5, 2, 9, 4, 17, 6]
K = len(SIZES)
COUNTS = torch.tensor(SIZES, dtype=torch.float64)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.7, momentum=0.9),
    "Nesterov": lambda p: SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "Adam": lambda p: Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3),
    "AMSGrad with decay": lambda p: AdamW(p, lr=0.1, amsgrad=True),
    "NAdam": lambda p: NAdam(p, lr=0.1),
    "Adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=1e-6),
    "Yogi": lambda p: Yogi(p, lr=0.1),
}
SHORT: dict[str, Callable[[ft.LocalSolver], ft.Algorithm]] = {
    "Adam": lambda local: ft.fedadam(local, lr=0.1),
    "Yogi": lambda local: ft.fedyogi(local, lr=0.1),
    "Adagrad": lambda local: ft.fedadagrad(local, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_servers_optimiser_on_the_mean_change(name: str) -> None:
    """Each round's Δ is that of one round of FedAvg over the cohort; the optimiser is an ordinary one that lives on."""
    data, local = linear_clients(SIZES), sgd(0.1, steps=2)
    own = {n: torch.nn.Parameter(p.clone()) for n, p in local.parameters.items()}
    optimizer = OPTIMIZERS[name](own.values())
    algorithm = ft.fedopt(local, OPTIMIZERS[name], mu=0.2)
    for round in ft.Run(algorithm, ft.InProcess(data), cohort=4, seed=3).rounds(6):
        start = {n: p.detach().clone() for n, p in own.items()}
        cohort = ft.InProcess(data.select(round.ids))
        mean = ft.Run(ft.fedprox(local, 0.2), cohort, start).step().server
        for n, p in own.items():
            p.grad = start[n] - mean[n]
        optimizer.step()
        assert distance(round.server.parameters, {n: p.detach() for n, p in own.items()}) < 100 * ROUNDING  # g / √v


def moved(name: str, m: Tensor, v: Tensor, x: Tensor, data: ft.data.FederatedData) -> tuple[Tensor, Tensor]:
    """The moments of Algorithm 2 after a round from x of exact local solutions."""
    best = [torch.linalg.pinv(a, hermitian=True) @ (b - a @ x) + x for a, b in (moments(*rows) for rows in data)]
    delta = torch.stack([n / COUNTS.sum() * (end - x) for n, end in zip(COUNTS, best)]).sum(0)
    if name == "Adagrad":
        return delta, v + delta**2
    if name == "Yogi":
        return 0.9 * m + 0.1 * delta, v - 0.01 * delta**2 * torch.sign(v - delta**2)
    return 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2


@pytest.mark.parametrize("name", ["Adam", "Yogi", "Adagrad"])
def test_algorithm_2_of_the_paper(name: str) -> None:
    data, local, tau, rate = linear_clients(SIZES), ft.least_squares(linear()), 1e-3, 0.1
    x = joined(local.parameters)
    m, v = torch.zeros_like(x), torch.full_like(x, tau**2) if name != "Adam" else torch.zeros_like(x)
    for t, round in enumerate(ft.Run(SHORT[name](local), ft.InProcess(data)).rounds(5), 1):
        m, v = moved(name, m, v, x, data)
        corrected = (m / (1 - 0.9**t), v / (1 - 0.99**t)) if name == "Adam" else (m, v)
        x = x + rate * corrected[0] / (corrected[1].sqrt() + tau)
        assert distance(joined(round.server.parameters), x) < 100 * ROUNDING


@pytest.mark.parametrize("name", ["Adam", "Yogi", "Adagrad"])
@pytest.mark.parametrize("initial", [None, 0.0, 0.04])
def test_initial_second_moments_match_papers_and_libraries(name: str, initial: float | None) -> None:
    """τ² in Reddi et al., 0 in Flower and FLamby, without correction of bias."""
    data, tau, rate = linear_clients(SIZES), 1e-3, 0.1
    make: Any = {"Adam": partial(ft.fedadam, bias_correction=False), "Yogi": ft.fedyogi, "Adagrad": ft.fedadagrad}[name]
    local = ft.least_squares(linear())
    x = joined(local.parameters)
    m, v = torch.zeros_like(x), torch.full_like(x, tau**2 if initial is None else initial)
    for round in ft.Run(make(local, lr=rate, eps=tau, initial=initial), ft.InProcess(data)).rounds(4):
        m, v = moved(name, m, v, x, data)
        x = x + rate * m / (v.sqrt() + tau)
        assert distance(joined(round.server.parameters), x) < 100 * ROUNDING


@pytest.mark.parametrize("library", ["FLamby", "Flower"])
@pytest.mark.parametrize("name", ["Adam", "Yogi", "Adagrad"])
def test_rounds_are_those_of_libraries(library: str, name: str) -> None:
    """FLamby: strategies/fed_opt.py; Flower: server/strategy; both from m = v = 0 and without correction of bias."""
    beta1, beta2, tau = (0.9, 0.999, 1e-8) if library == "FLamby" else (0.9, 0.99, 1e-3)
    data, local, rate = linear_clients(SIZES), ft.least_squares(linear()), 0.1
    if name == "Adagrad":
        beta1 = beta1 if library == "FLamby" else 0.0
        algorithm = ft.fedadagrad(local, lr=rate, beta=beta1, eps=tau, initial=0.0)
    elif name == "Adam":
        algorithm = ft.fedadam(local, lr=rate, betas=(beta1, beta2), eps=tau, bias_correction=False, initial=0.0)
    else:
        algorithm = ft.fedyogi(local, lr=rate, betas=(beta1, beta2), eps=tau, initial=0.0)
    x = joined(local.parameters)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for round in ft.Run(algorithm, ft.InProcess(data)).rounds(5):
        delta, _ = moved("Adagrad", m, v, x, data)
        m = beta1 * m + (1 - beta1) * delta
        if name == "Adagrad":
            v = v + delta * delta
        elif name == "Adam":
            v = beta2 * v + (1 - beta2) * delta * delta
        else:
            v = v - (1 - beta2) * delta**2 * torch.sign(v - delta**2)
        x = x + rate * m / (v.sqrt() + tau)
        assert distance(joined(round.server.parameters), x) < 100 * ROUNDING  # g / √v


def test_an_initial_moment_is_checked() -> None:
    with pytest.raises(ValueError, match="pass bias_correction=False"):
        ft.fedadam(sgd(0.1), initial=0.0)
    with pytest.raises(ValueError, match="Expected an initial second moment of at least 0"):
        ft.fedyogi(sgd(0.1), initial=-1.0)


def test_gradient_descent_of_step_one_is_fedavg() -> None:
    data, local = linear_clients(SIZES), sgd(0.1, epochs=1, batch_size=4)
    ours = ft.run(ft.fedopt(local, lambda p: SGD(p, lr=1.0)), ft.InProcess(data), cohort=3, rounds=4).last
    plain = ft.run(ft.fedavg(local), ft.InProcess(data), cohort=3, rounds=4).last
    assert distance(ours.server.parameters, plain.server) < ROUNDING
    assert all(not parts for parts in ours.server.optimizer.values())


def test_the_mean_change_is_minus_the_gradient() -> None:
    data, local = linear_clients(SIZES), sgd(0.1)
    round = ft.Run(ft.fedopt(local, lambda p: SGD(p, lr=2.0)), ft.InProcess(data)).step()
    x = joined(local.parameters).requires_grad_()
    systems = [moments(*rows) for rows in data]
    losses = torch.stack([(x * (a @ x)).sum() / 2 - (b * x).sum() for a, b in systems])
    (gradient,) = torch.autograd.grad((COUNTS / COUNTS.sum()) @ losses, x)
    assert distance(joined(round.server.parameters) - x.detach(), -0.2 * gradient) < ROUNDING


def test_momentum_reaches_the_fixed_point_of_fedprox() -> None:
    data, local = linear_clients([30, 12, 50, 9]), ft.least_squares(linear())
    plain = ft.run(ft.fedprox(local, 1.0), ft.InProcess(data), rounds=110).last
    heavy = ft.fedopt(local, lambda p: SGD(p, lr=0.5, momentum=0.5), mu=1.0)
    assert distance(ft.run(heavy, ft.InProcess(data), rounds=110).last.server.parameters, plain.server) < ROUNDING


def test_the_order_of_the_clients_does_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([3, 5, 0, 1, 4, 2])
    algorithm = ft.fedadam(sgd(0.1, steps=3), lr=0.1)
    one = ft.run(algorithm, ft.InProcess(data), rounds=4).last
    two = ft.run(algorithm, ft.InProcess(data.select(order)), rounds=4).last
    assert distance(one.server, two.server) < 100 * ROUNDING


def test_only_answers_count_and_no_answers_mean_no_step() -> None:
    data, local = linear_clients(SIZES), sgd(0.1, steps=2)
    start = tree.map(lambda leaf: leaf + 2, local.parameters)
    lost = ft.Faults(after=lambda keys, ids: (ids == 1) | (ids == 4))
    some = ft.run(ft.fedyogi(local), ft.InProcess(data), start, faults=lost, rounds=3).last
    others = ft.run(ft.fedyogi(local), ft.InProcess(data.select([0, 2, 3, 5])), start, rounds=3).last
    assert distance(some.server, others.server) < 100 * ROUNDING
    nobody = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 1.0))
    silent = ft.run(ft.fedyogi(local), ft.InProcess(data), start, faults=nobody, rounds=3).last
    assert same_bits(silent.server.parameters, start)
    assert int(silent.server.steps) == 0


def test_averaged_buffers_are_averaged() -> None:
    module = torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(1, dtype=torch.float64))
    local, data = sgd(0.05, module, buffers="average"), ft.InProcess(linear_clients([5, 9, 4, 17]))
    ours, plain = (ft.Run(make(local), data).step().server for make in (ft.fedadam, ft.fedavg))
    assert "1.running_var" not in ours.optimizer
    assert distance(ours.parameters["1.running_var"], plain["1.running_var"]) < ROUNDING


def test_parameter_groups_and_frozen_ones() -> None:
    local = sgd(0.1)

    def groups(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return SGD([{"params": [bias], "lr": 1.0}, {"params": [weight], "lr": 0.5}], momentum=0.9)

    data = ft.InProcess(linear_clients(SIZES))
    ours, plain = ft.Run(ft.fedopt(local, groups), data).step(), ft.Run(ft.fedavg(local), data).step()
    assert distance(ours.server.parameters["bias"], plain.server["bias"]) < ROUNDING
    half = (local.parameters["weight"] + plain.server["weight"]) / 2
    assert distance(ours.server.parameters["weight"], half) < ROUNDING


def test_what_cannot_be_saved_or_run_is_refused() -> None:
    with pytest.raises(TypeError, match="Expected an optimiser that needs no closure, but got LBFGS"):
        ft.fedopt(sgd(0.1), lambda p: torch.optim.LBFGS(list(p)))
    with pytest.raises(TypeError, match=r"Expected a torch\.optim\.Optimizer, but got NoneType"):
        ft.fedopt(sgd(0.1), lambda p: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="Expected lr > 0, eps > 0 and betas"):
        ft.fedyogi(sgd(0.1), lr=-1.0)


CASES: dict[str, Case] = {
    # What the server's optimiser holds is one wait more than usual.
    "fedadagrad": Case(lambda: ft.fedadagrad(sgd(0.1, steps=2)), waits=5),
    "fedadam": Case(lambda: ft.fedadam(sgd(0.1, steps=2)), waits=5),
    "fedopt": Case(lambda: ft.fedopt(sgd(0.1, steps=2), lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)), waits=5),
    "fedyogi": Case(lambda: ft.fedyogi(sgd(0.1, steps=2)), waits=5),
}
