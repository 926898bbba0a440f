"""Client drift: which of the FedAvg family reaches the pooled optimum when clients differ.

Least squares on clients with different numbers of rows, different scales of the features and different answers. Every
client takes ten gradient steps a round. What is left of the distance to the least squares fit of all rows together is
shown over the rounds, when everybody takes part and when a tenth does. FedAvg and FedProx stop at a fixed point of
their own, and wander around it with small cohorts; SCAFFOLD and FedDyn go to the pooled optimum; Ditto's shared model
is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common

FEATURES, STEPS, RATE = 5, 10, 0.05


def problem(clients: int, seed: int) -> ft.data.FederatedData:
    """Clients of 10 to 60 rows whose features differ in scale and whose coefficients differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = []
    for _ in range(clients):
        size = int(torch.randint(10, 61, (), generator=generator))
        x = draw(size, FEATURES) * (0.3 * draw(FEATURES)).exp()
        rows.append((x, x @ (1 + draw(FEATURES)) + 0.1 * draw(size)))
    return ft.data.from_tensors(rows)


def algorithms() -> dict[str, ft.Algorithm]:
    """The family by name, all from zero."""
    local = ft.least_squares(common.linear_module(FEATURES), steps=STEPS, lr=RATE)
    return {
        "FedAvg": ft.fedavg(local),
        "FedProx": ft.fedprox(local, 1.0),
        "Ditto (shared)": ft.ditto(local, 1.0),
        "SCAFFOLD": ft.scaffold(local),
        "FedDyn": ft.feddyn(local, 5.0),
    }


def errors(algorithm: ft.Algorithm, data: ft.data.FederatedData, cohort: int | None, rounds: int, seed: int) -> Tensor:
    """‖θ − θ*‖ / ‖θ*‖ after every round, θ* being the least squares fit of all rows, `(rounds,)`."""
    x, y = data.rows
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    found = []
    run = ft.Run(algorithm, ft.InProcess(data), cohort=cohort, seed=seed)
    for _ in run.rounds(rounds):
        found.append((run.global_module().get_parameter("weight")[0].detach() - best).norm() / best.norm())
    return torch.stack(found)


STYLES: dict[str, dict[str, Any]] = {
    "FedAvg": {"linewidth": 5, "alpha": 0.35},
    "Ditto (shared)": {"linestyle": "--"},
}


def draw(curves: dict[str, dict[str, Tensor]]) -> Figure:
    """The errors over the rounds, a panel per participation."""
    figure, axes = common.subplots(1, len(curves), figsize=(10, 4), sharey=True)
    for axis, (title, lines) in zip(axes, curves.items()):
        for i, (name, values) in enumerate(lines.items()):
            every = max(1, len(values) // 100)  # readable where the cohort's noise is large
            at = torch.arange(every - 1, len(values), every)
            axis.plot(at + 1, values[at], color=f"C{i}", label=name, **{"linewidth": 1.5, **STYLES.get(name, {})})
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("communication round")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative distance to the pooled optimum")
    axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run all algorithms at both participations, print the final errors and draw their course."""
    options = common.arguments(__doc__).parse_args(argv)
    clients, cohort = (10, 2) if options.smoke else (40, 4)
    settings = {
        "all clients": (None, 20 if options.smoke else 100),
        f"{cohort} of {clients} clients": (cohort, 60 if options.smoke else 1000),
    }
    curves: dict[str, dict[str, Tensor]] = {title: {} for title in settings}
    rows, lines = [], []
    for name, algorithm in algorithms().items():
        line = [name]
        for title, (size, rounds) in settings.items():
            runs = [errors(algorithm, problem(clients, s), size, rounds, s) for s in range(options.seeds)]
            curves[title][name] = runs[0]
            rows.append(common.row(name, f"relative error, {title}", [float(run[-1]) for run in runs]))
            line.append(f"{rows[-1].ours:.1e}")
        lines.append(line)
    columns = ["relative error after", *(f"{rounds} rounds, {title}" for title, (_, rounds) in settings.items())]
    common.show("Distance to the pooled optimum of heterogeneous least squares", columns, lines)
    common.finish("fedavg_family", rows, options, lambda: {"fedavg_family": draw(curves)})


if __name__ == "__main__":
    main()
