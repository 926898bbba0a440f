"""A grid gives for every setting what an ordinary run of that setting gives, stacked or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from closed_forms import ROUNDING, last, linear, linear_clients, mean_squared_error
from small_federations import Classifier, classes
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.evaluation import evaluate

SIZES = [5, 9, 4, 14, 7, 9]
DATA = linear_clients(SIZES)
TRAINING, VALIDATION = DATA.split(0.7, seed=3)
Optimizer = Callable[[Any], torch.optim.Optimizer]


def descent(optimizer: Optimizer, module: nn.Module | None = None, **arguments: Any) -> ft.LocalSolver:
    """Two passes in minibatches of four."""
    return ft.gradient_descent(
        linear() if module is None else module,
        **{"epochs": 2, "batch_size": 4, "loss": mean_squared_error, "optimizer": optimizer, **arguments},
    )


def sgd(lr: float) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def searched(build: Callable[..., ft.Algorithm], settings: dict[str, Sequence[Any]], **arguments: Any) -> ft.Grid:
    """A grid over the linear clients, scored by squared errors."""
    given = {"validation": VALIDATION, "metric": ft.metrics.mean_squared_error(), "rounds": 4, "seed": 5}
    given["population"] = ft.InProcess(TRAINING)
    population = {**given, **arguments}.pop("population")
    rest = {name: value for name, value in {**given, **arguments}.items() if name != "population"}
    return ft.grid(build, settings, population, **{"largest_is_best": False, "progress": False, **rest})


def alone(algorithm: ft.Algorithm, rounds: int = 4, **arguments: Any) -> ft.Score:
    """The score of an ordinary run."""
    given = {"validation": VALIDATION, "metric": ft.metrics.mean_squared_error(), "population": ft.InProcess(TRAINING)}
    given.update(arguments)
    validation, metric, population = (given.pop(name) for name in ("validation", "metric", "population"))
    final = last(ft.run(algorithm, population, rounds=rounds, seed=5, **given))
    assert algorithm.local is not None
    outbox = algorithm.outbox(final.server)
    return evaluate(final.clients, outbox, algorithm.local.predict, validation, {"": metric})[""]


def assert_same(result: ft.Grid, build: Callable[..., ft.Algorithm], rounding: float = ROUNDING, **kwargs: Any) -> None:
    assert len({score.overall for score in result.scores}) == len(result.settings)  # settings make a difference
    for setting, score in zip(result.settings, result.scores):
        expected = alone(build(**setting), **kwargs)
        assert score.overall == pytest.approx(expected.overall, rel=rounding, abs=rounding), setting
        torch.testing.assert_close(score.clients, expected.clients, rtol=rounding, atol=rounding, equal_nan=True)


class Lit(Classifier):
    """The classifier with dropout, whose learning rate and decay are its own."""

    def __init__(self, lr: float, gamma: float = 0.9, dropout: float = 0.2) -> None:
        super().__init__()
        self.lr, self.gamma = lr, gamma
        self.body[2] = nn.Dropout(dropout)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)]


LR = {"lr": [0.01, 0.03, 0.1]}
CASES: dict[str, tuple[Callable[..., ft.Algorithm], dict[str, list[Any]]]] = {
    "fedavg, SGD": (lambda lr: ft.fedavg(descent(sgd(lr))), LR),
    "fedavg, momentum": (
        lambda lr, momentum: ft.fedavg(descent(lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum))),
        {"lr": [0.01, 0.03], "momentum": [0.0, 0.9]},
    ),
    "fedavg, Adam": (lambda lr: ft.fedavg(descent(lambda p: torch.optim.Adam(p, lr=lr))), LR),
    "fedavg, different optimisers": (
        lambda make: ft.fedavg(descent(lambda p: make(p, lr=0.05))),
        {"make": [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad]},
    ),
    "fedavg, kept moments": (
        lambda lr: ft.fedavg(descent(lambda p: torch.optim.Adam(p, lr=lr), reset="never", steps=3, epochs=None)),
        LR,
    ),
    "fedavg, all rows": (lambda lr: ft.fedavg(descent(sgd(lr), steps=3, epochs=None, batch_size=None)), LR),
    "fedavg, the server's step": (lambda lr: ft.fedavg(descent(sgd(0.05)), lr=lr), {"lr": [0.5, 1.0]}),
    "fedavg, projected": (
        lambda most: ft.fedavg(
            descent(sgd(0.05), project=lambda p: {n: leaf.clamp(-most, most) for n, leaf in p.items()})
        ),
        {"most": [0.2, 0.6]},
    ),
    "fedprox": (lambda lr, mu: ft.fedprox(descent(sgd(lr)), mu), {"lr": [0.01, 0.1], "mu": [0.0, 0.3, 3.0]}),
    "scaffold": (lambda lr: ft.scaffold(descent(sgd(lr))), LR),
    "ditto": (
        lambda lr, strength: ft.ditto(descent(sgd(lr)), strength),
        {"lr": [0.01, 0.1], "strength": [0.1, 1.0]},
    ),
    "fedadam": (lambda lr: ft.fedadam(descent(sgd(0.05)), lr=lr), LR),
    "feddyn": (lambda alpha: ft.feddyn(descent(sgd(0.03)), alpha), {"alpha": [1.0, 3.0]}),
    "personal layers": (lambda lr: ft.personal_layers(descent(sgd(lr)), "bias"), LR),
    "separate": (lambda lr: ft.separate(descent(sgd(lr))), LR),
}


@pytest.mark.parametrize("cohort", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_setting_is_an_ordinary_run(case: str, cohort: int | None) -> None:
    build, settings = CASES[case]
    result = searched(build, settings, cohort=cohort)
    assert result.stacks == (len(result.settings),)
    assert_same(result, build, cohort=cohort)


def test_settings_of_a_lightning_module_with_dropout_and_a_schedule() -> None:
    data = classes()
    population, metric = ft.InProcess(data), ft.metrics.cross_entropy()
    arguments = {"population": population, "validation": data, "metric": metric}

    def build(lr: float, gamma: float) -> ft.Algorithm:
        return ft.fedavg(ft.gradient_descent(Lit(lr, gamma), epochs=2, batch_size=4))

    result = searched(build, {"lr": [0.05, 0.2], "gamma": [0.9, 0.3]}, **arguments)
    assert result.stacks == (4,)
    assert_same(result, build, 1e-4, **arguments)  # float32: a hundred steps of 1e-7 each, and a margin


def test_modules_that_differ_are_not_stacked() -> None:
    data = classes()
    arguments = {"population": ft.InProcess(data), "validation": data, "metric": ft.metrics.cross_entropy()}

    def build(lr: float, dropout: float) -> ft.Algorithm:
        return ft.fedavg(ft.gradient_descent(Lit(lr, dropout=dropout), epochs=1, batch_size=4))

    result = searched(build, {"lr": [0.05, 0.2], "dropout": [0.1, 0.3]}, **arguments)
    assert result.stacks == (2, 2)
    assert_same(result, build, 1e-4, **arguments)  # float32, as above


@pytest.mark.parametrize(
    ("build", "settings", "stacks"),
    [
        (
            lambda delta: ft.fedavg(
                descent(sgd(0.1), loss=lambda o, y: nn.functional.huber_loss(o[:, 0], y, delta=delta))
            ),
            {"delta": [0.1, 2.0]},
            (1, 1),
        ),
        (lambda size: ft.fedavg(descent(sgd(0.1), batch_size=size)), {"size": [2, 4]}, (1, 1)),
        (lambda epochs: ft.fedavg(descent(sgd(0.1), epochs=epochs)), {"epochs": [1, 2]}, (1, 1)),
        (lambda mu: ft.fedprox(ft.least_squares(linear()), mu), {"mu": [0.1, 1.0]}, (1, 1)),
        (
            lambda algorithm: algorithm(descent(sgd(0.03))),
            {"algorithm": [ft.fedavg, ft.scaffold, ft.separate, lambda local: ft.ditto(local, 1.0)]},
            (4,),
        ),
    ],
)
def test_what_is_stacked(build: Any, settings: Any, stacks: Any) -> None:
    result = searched(build, settings)
    assert result.stacks == stacks
    assert_same(result, build)
