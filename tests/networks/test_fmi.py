"""The weather assignment of the book: its FedGD figures, and the optimum of the same objective."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from sklearn.model_selection import train_test_split
from support.oracles.closed_forms import client_tensors
from torch import Tensor

import fedtorch as ft
from fedtorch.data.datasets import weather
from fedtorch.networks import solvers

Rows = list[tuple[Tensor, Tensor]]


def splits() -> tuple[Rows, Rows]:
    """Each station's rows, four fifths to train and one fifth to validate, as the assignment splits them."""
    given = os.environ.get("FEDTORCH_DATA_DIR")
    if not given or not (Path(given) / "fmi_weather").is_dir():
        pytest.skip("needs the folder fmi_weather in FEDTORCH_DATA_DIR")
    training, validation = [], []
    for x, y in weather.fmi_weather(torch.float64):
        parts = train_test_split(x.numpy(), y.numpy(), test_size=0.2, random_state=1)
        x_training, x_validation, y_training, y_validation = map(torch.from_numpy, parts)
        training.append((x_training, y_training))
        validation.append((x_validation, y_validation))
    return training, validation


def mean_error(rows: Rows, w: Tensor) -> float:
    """The mean over stations of their mean squared errors."""
    return float(torch.stack([(y - x @ w[i]).square().mean() for i, (x, y) in enumerate(rows)]).mean())


def test_the_published_figures_and_the_optimum() -> None:
    training, validation = splits()
    network = ft.Network.k_nearest(weather.fmi_coordinates(), 3)
    assert network.components.number == 3
    problem = solvers.linear_problem(ft.data.from_tensors(training), network, 0.5)
    found = solvers.fedgd(problem, rate=0.1, rounds=1000, tolerance=0)
    # 1000 rounds of sums in another order: some thousand roundings
    assert mean_error(training, found.parameters) == pytest.approx(21.065277715408104, rel=1e-12)
    assert mean_error(validation, found.parameters) == pytest.approx(21.336245897848386, rel=1e-12)
    best = solvers.direct(problem)
    assert best.converged
    assert mean_error(validation, best.parameters) == pytest.approx(10.02, abs=0.005)
    assert problem.objective(best.parameters) < problem.objective(found.parameters)
    assert float(best.parameters[:, 6].abs().max()) < 1e-9  # the minute is always 0: least norm, not NaN
    quick = solvers.conjugate_gradient(problem)
    assert quick.converged
    assert float((quick.parameters - best.parameters).norm() / best.parameters.norm()) < 1e-6
    local = solvers.chebyshev(problem, tolerance=1e-7)
    assert local.converged
    assert mean_error(validation, local.parameters) == pytest.approx(10.02, abs=0.05)


def test_the_same_figures_come_out_of_the_round_loop() -> None:
    training, validation = splits()
    network = ft.Network.k_nearest(weather.fmi_coordinates(), 3)
    module = torch.nn.Linear(7, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.zero_()
    local = ft.gradient_descent(
        module,
        steps=1,
        loss=lambda output, y: (output[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    algorithm = ft.gtv(local, network, 0.5)
    final = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(training)), rounds=100).last
    w = torch.stack(
        [client_tensors(final.clients, algorithm.outbox(final.server), k)["weight"][0] for k in range(len(network))]
    )
    problem = solvers.linear_problem(ft.data.from_tensors(training), network, 0.5)
    expected = solvers.fedgd(problem, rate=0.1, rounds=100, tolerance=0).parameters
    assert mean_error(validation, w) == pytest.approx(mean_error(validation, expected), rel=1e-12)
