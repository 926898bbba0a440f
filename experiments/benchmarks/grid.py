"""A grid of hyperparameters against the same settings run one after another: ratios in pairs, in one process.

Both sides build, train and score every setting on the same rows. The scores of both must agree, and the largest
difference is shown beside the ratio.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import fedtorch as ft
from experiments import common
from experiments.common import seconds
from fedtorch.federation.evaluation import evaluate

RATES = [0.01, 0.03, 0.1, 0.3]
PULLS = [0.0, 0.01, 0.1, 1.0]


class Case(NamedTuple):
    """One grid."""

    name: str
    build: Callable[..., ft.Algorithm]
    settings: dict[str, list[Any]]
    clients: int


def cases(clients: int, values: int = 4) -> list[Case]:
    """What people tune: learning rate and pull on two models and with client states, so many values of each."""

    def local(module: nn.Module, make: Callable[..., torch.optim.Optimizer], lr: float) -> ft.LocalSolver:
        return ft.gradient_descent(
            module,
            epochs=1,
            batch_size=16,
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters: make(parameters, lr=lr),
        )

    def linear(lr: float) -> ft.LocalSolver:
        return local(nn.Linear(64, 10), torch.optim.SGD, lr)

    def perceptron(lr: float) -> ft.LocalSolver:
        module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        return local(module, torch.optim.Adam, lr / 30)

    rates, pulls = RATES[-values:], PULLS[-values:]
    both = {"lr": rates, "mu": pulls}
    return [
        Case("FedProx, linear 64-10, SGD", lambda lr, mu: ft.fedprox(linear(lr), mu), both, clients),
        Case("FedProx, 64-128-10, Adam", lambda lr, mu: ft.fedprox(perceptron(lr), mu), both, clients),
        Case("SCAFFOLD, linear 64-10, SGD", lambda lr: ft.scaffold(linear(lr)), {"lr": rates}, clients),
        Case(
            "Ditto, linear 64-10, SGD",
            lambda lr, strength: ft.ditto(linear(lr), strength),
            {"lr": rates, "strength": pulls},
            clients,
        ),
    ]


def measure(case: Case, rounds: int, repeat: int) -> list[common.Row]:
    """The ratio of both ways, and how far their scores are apart."""
    data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.5, minimum=10), clients=case.clients, seed=0)
    training, validation = data.split(0.7, seed=0)
    population, metric = ft.InProcess(training), ft.metrics.cross_entropy()
    tried = [dict(zip(case.settings, values)) for values in itertools.product(*case.settings.values())]
    found: dict[str, list[float]] = {}

    def together() -> None:
        result = ft.grid(
            case.build,
            case.settings,
            population,
            validation=validation,
            metric=metric,
            largest_is_best=False,
            rounds=rounds,
            progress=False,
        )
        assert result.stacks == (len(tried),)
        found["grid"] = [score.overall for score in result.scores]

    def in_turn() -> None:
        found["in turn"] = []
        for setting in tried:
            torch.manual_seed(0)
            algorithm = case.build(**setting)
            *_, final = ft.run(algorithm, population, rounds=rounds)
            assert algorithm.local is not None
            outbox, predict = algorithm.outbox(final.server), algorithm.local.predict
            score = evaluate(final.clients, outbox, predict, validation, {"": metric})[""]
            found["in turn"].append(score.overall)

    pairs = [(seconds(in_turn), seconds(together)) for _ in range(repeat + 1)][1:]  # the first is warm-up
    apart = max(abs(a - b) for a, b in zip(found["grid"], found["in turn"]))
    name = f"{case.name}: {len(tried)} settings × {case.clients} clients × {rounds} rounds"
    return [
        common.Row(name, "one after another, s", statistics.median(a for a, _ in pairs)),
        common.Row(name, "grid, s", statistics.median(b for _, b in pairs)),
        common.Row(name, "times faster", statistics.median(a / b for a, b in pairs)),
        common.Row(name, "largest difference of a score", apart),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all grids and prints the table."""
    options = common.arguments(__doc__ or "").parse_args(argv)
    rounds, repeat, sizes, values = (2, 1, [5], 2) if options.smoke else (20, 3, [20, 100], 4)
    rows = [row for clients in sizes for case in cases(clients, values) for row in measure(case, rounds, repeat)]
    table = [[row.ours for row in rows[i : i + 4]] for i in range(0, len(rows), 4)]
    lines = [[row.setting, *(f"{value:.3g}" for value in line)] for row, line in zip(rows[::4], table)]
    common.show(f"Grids ({common.machine()})", ["", "in turn, s", "grid, s", "times faster", "difference"], lines)
    common.write("benchmarks.grid", rows, options.json)


if __name__ == "__main__":
    main()
