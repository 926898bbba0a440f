"""The cost of a round against the number of clients and of processes: a linear model, 40 rows and 5 full-batch steps.

`clients` stacks them in one process. `processes` has one and two of them, started by torchrun with one thread each,
which take turns: with the same clients in all ("strong") and with the same clients each ("weak"). Seconds are those of
the quickest round, for the machine may have other work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure, scaling_ranks

WAYS = {"stacked": False, "compile=True": True}


def clients(counts: Sequence[int]) -> list[common.Row]:
    """A round of so many clients in this process."""
    rows = []
    for name, compile in WAYS.items():
        for count in counts:
            run = scaling_ranks.linear_run(ft.InProcess(scaling_ranks.linear_data(count)), compile)
            seconds = scaling_ranks.least_round(run, 100 if count < 10_000 else 10)
            rows.append(common.Row(f"{count} clients, {name}", "s a round", seconds))
            rows.append(common.Row(f"{count} clients, {name}", "µs a round and client", seconds / count * 1e6))
    return rows


def processes(counts: Sequence[int], repeat: int) -> list[common.Row]:
    """A round over one and two processes."""
    found, rows = scaling_ranks.least(repeat, [*counts, 2 * counts[-1]]), []
    for count in counts:
        one, two = (found[ranks][f"{count} clients"] for ranks in (1, 2))
        setting = f"{count} clients in one and in two processes"
        rows += [
            common.Row(setting, "s a round, one process", one),
            common.Row(setting, "s a round, two processes", two),
            common.Row(setting, "times faster with two (at most 2)", one / two),
        ]
    one, two = found[1][f"{counts[-1]} clients"], found[2][f"{2 * counts[-1]} clients"]
    rows.append(common.Row(f"{counts[-1]} clients in each process", "part of the speed that two keep", one / two))
    for numbers in scaling_ranks.SUMS:
        milliseconds = 1000 * found[2][f"sum of {numbers}"]
        rows.append(common.Row(f"sum of {numbers} numbers over two processes", "ms", milliseconds))
    return rows


def draw(rows: Sequence[common.Row]) -> Figure:
    """Seconds of a round, and of a round per client, on logarithmic axes."""
    figure, axes = common.subplots(1, 2, figsize=(8, 3.4))
    for each, metric in zip(axes, ("s a round", "µs a round and client")):
        for name in WAYS:
            mine = [row for row in rows if row.setting.endswith(f"clients, {name}") and row.metric == metric]
            points = [(int(row.setting.split()[0]), row.ours) for row in mine]
            each.loglog(*zip(*points), marker="o", label=name)
        each.set_xlabel("clients")
        each.set_ylabel(metric)
    axes[0].legend(frameon=False)
    return figure


def parts(small: bool) -> measure.Parts:
    """The parts by name."""
    return {
        "clients": partial(clients, [10, 100] if small else [10, 100, 1000, 10_000, 100_000]),
        "processes": partial(processes, [20, 40] if small else [100, 1000, 10_000], 1 if small else 5),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and draws it."""
    measure.run("scaling", __doc__, parts, argv, draw={"scaling": draw})


if __name__ == "__main__":
    main()
