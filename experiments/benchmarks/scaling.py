"""The cost of a round against the number of clients: a linear model, 40 rows and 5 full-batch steps each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure

import fedtorch as ft
from experiments import common
from experiments.benchmarks import core, measure


def seconds_per_round(clients: int, compile: bool) -> float:
    """The median of some rounds after a round of warm-up."""
    key = ft.random.key(0)
    x = ft.random.normal(key, (clients * 40, 8))
    y = x.sum(-1) + ft.random.normal(ft.random.fold_in(key, 1), (clients * 40,))
    data = ft.data.FederatedData((x, y), torch.full((clients,), 40))
    run = ft.Run(ft.fedavg(ft.gradient_descent(core.Linear(), steps=5, compile=compile)), ft.InProcess(data))
    count = 20 if clients < 10_000 else 5
    return statistics.median(measure.round_seconds(run, count + 1)[1:])


def draw(counts: Sequence[int], found: dict[str, list[float]]) -> Figure:
    """Seconds of a round, and of a round per client, on logarithmic axes."""
    figure, (whole, each) = common.subplots(1, 2, figsize=(8, 3.4))
    for name, seconds in found.items():
        whole.loglog(counts, seconds, marker="o", label=name)
        each.loglog(counts, [s / k for s, k in zip(seconds, counts)], marker="o", label=name)
    for axes, label in ((whole, "seconds per round"), (each, "seconds per round and client")):
        axes.set_xlabel("clients")
        axes.set_ylabel(label)
    whole.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and draws it."""
    options = common.arguments(__doc__).parse_args(argv)
    counts = [10, 100] if options.smoke else [10, 100, 1000, 10_000, 100_000]
    names = {"stacked": False, "compile=True": True}
    with common.quiet():
        found = {name: [seconds_per_round(k, compile) for k in counts] for name, compile in names.items()}
    rows, lines = [], []
    for i, k in enumerate(counts):
        lines.append([f"{k}"])
        for name in names:
            seconds = found[name][i]
            rows.append(common.Row(f"{k} clients, {name}", "s a round", seconds))
            rows.append(common.Row(f"{k} clients, {name}", "µs a round and client", seconds / k * 1e6))
            lines[-1] += [f"{seconds:.3g}", f"{seconds / k * 1e6:.3g}"]
    columns = ["clients", *(f"{name}, {unit}" for name in names for unit in ("s a round", "µs a client"))]
    common.show(f"A round of 5 full-batch steps of a linear model ({common.machine()})", columns, lines)
    common.finish("benchmarks.scaling", rows, options, lambda: {"scaling": draw(counts, found)})


if __name__ == "__main__":
    main()
