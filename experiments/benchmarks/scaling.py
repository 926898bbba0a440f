"""The cost of a round against the number of clients and of processes: a linear model, 40 rows and 5 full-batch steps.

`clients` has them in one process: by a program of the CPU, which takes a linear model's steps, and
with a branch in the module's code, so that it takes the stacked steps of any module. `few` asks a hundred of them.
`roofline` sets a round by the program beside a pass over the clients' rows in memory, beside the two that each of five
stacked steps needs, and beside the matrix products of these alone. `start` is the processor time of a fresh process up
to the end of the first round of the README's first example. `processes` has one and two of them, started by torchrun
with one thread each, which take turns: with the same clients in all ("strong") and with the same clients each ("weak").
Beside them are two processes that share no more than the machine and never meet, each with its half of the clients: how
much faster these are is what the machine has to give, and what a single round's fixed cost leaves of it.
Seconds are those of the quickest round, for the machine may have other work, and the processor's but for `processes`.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure, scaling_ranks

README = Path(__file__).parents[2] / "README.md"
TIMED = "import time\ndef said(name): print('until the end of', name, time.process_time(), flush=True)"
SPENT, SPENT_EACH = "processor s a round", "processor µs a round and client"
WAYS: dict[str, dict[str, Any]] = {
    **scaling_ranks.WAYS,
    "compile=True": {"module": scaling_ranks.Branching, "compile": True},
}
MEETINGS = {  # what a rank of two tells of a round
    "processor time": "processor s a round, one of two processes",
    "in collectives": "s a round in collectives, one of two processes",
    "collectives": "collectives a round",
    "bytes": "bytes a round in collectives",
}


def clients(counts: Sequence[int]) -> list[common.Row]:
    """A round of so many clients in this process."""
    rows = []
    for name, settings in WAYS.items():
        for count in counts:
            run = scaling_ranks.linear_run(ft.InProcess(scaling_ranks.linear_data(count)), **settings)
            seconds = scaling_ranks.least_round(run, 100 if count < 10_000 else 10, time.process_time)
            rows.append(common.Row(f"{count} clients, {name}", SPENT, seconds))
            rows.append(common.Row(f"{count} clients, {name}", SPENT_EACH, seconds / count * 1e6))
    return rows


def processes(counts: Sequence[int], repeat: int) -> list[common.Row]:
    """A round over one and two processes."""
    found, rows = scaling_ranks.least(repeat, [*counts, 2 * counts[-1]]), []
    for count, way in itertools.product(counts, scaling_ranks.WAYS):
        name = scaling_ranks.titled(count, way)
        one, two = (found[ranks][name] for ranks in (1, 2))
        apart = found[2][f"{name}, {scaling_ranks.APART}"]
        setting = f"{name}, in one and in two processes"
        rows += [
            common.Row(setting, "s a round, one process", one),
            common.Row(setting, "s a round, two processes", two),
            common.Row(setting, "s a round, two processes that do not meet", apart),
            common.Row(setting, "times faster with two (at most 2)", one / two),
            common.Row(setting, "times faster with two that do not meet", one / apart),
            common.Row(setting, "part of that which two that meet keep", apart / two),
        ]
        for metric, unit in MEETINGS.items():
            rows.append(common.Row(setting, unit, found[2][f"{name}, {metric}"]))
    for way in scaling_ranks.WAYS:
        one, title = found[1][scaling_ranks.titled(counts[-1], way)], scaling_ranks.titled(2 * counts[-1], way)
        two, apart = found[2][title], found[2][f"{title}, {scaling_ranks.APART}"]
        setting = f"{counts[-1]} clients, {way}, in each process"
        rows.append(common.Row(setting, "part of the speed that two keep", one / two))
        rows.append(common.Row(setting, "part of the speed that two that do not meet keep", one / apart))
    for numbers in scaling_ranks.SUMS:
        milliseconds = 1000 * found[2][f"sum of {numbers}"]
        rows.append(common.Row(f"sum of {numbers} numbers over two processes", "ms", milliseconds))
    return rows


def few(counts: Sequence[int]) -> list[common.Row]:
    """A round of a hundred of so many clients, by processor time."""
    rows = []
    for count in counts:
        run = scaling_ranks.linear_run(ft.InProcess(scaling_ranks.linear_data(count)), cohort=min(count, 100))
        times = measure.interleaved({"round": run.step}, 20, 3, time.process_time)
        rows.append(common.Row(f"100 of {count} clients", SPENT, measure.medians(times)["round"]))
    return rows


def roofline(count: int) -> list[common.Row]:
    """What bounds a round of so many clients, by processor time."""
    data = scaling_ranks.linear_data(count)
    run, steps = scaling_ranks.linear_run(ft.InProcess(data)), scaling_ranks.STEPS
    x = data.stack(range(count)).batch[0]
    weights, residuals = x.new_ones(count, x.shape[2], 1), x.new_ones(count, x.shape[1], 1)
    ways: dict[str, Callable[[], object]] = {
        "a round": run.step,
        "a pass over the rows": x.sum,
        "two passes a step over the rows": lambda: [x.sum() for _ in range(2 * steps)],
        "the products of its steps": lambda: [(x.bmm(weights), x.transpose(1, 2).bmm(residuals)) for _ in range(steps)],
    }
    times = measure.medians(measure.interleaved(ways, 5, 2, time.process_time))
    metric = "processor µs a client"
    return [common.Row(f"{count} clients, {name}", metric, times[name] / count * 1e6) for name in ways]


def start() -> list[common.Row]:
    """The first round of the README's first example in a fresh process, whose imports are part of it."""
    example = README.read_text().split("```python\n")[1].split("```")[0]
    program = [TIMED]
    for line in example.replace("max_epochs=50", "max_epochs=1, logger=False, enable_checkpointing=False").splitlines():
        program.append(line)
        program += ["said('torch and lightning')"] * (line == "import torch")
    command = [sys.executable, "-W", "ignore", "-c", "\n".join([*program, "said('first round')"])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=README.parent, timeout=600)
    said = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith("until "))
    return [common.Row(f"a fresh process, {name}", "processor s", float(value)) for name, value in said.items()]


def draw(rows: Sequence[common.Row]) -> Figure:
    """Seconds of a round, and of a round per client, on logarithmic axes."""
    figure, axes = common.subplots(1, 2, figsize=(8, 3.4))
    for each, metric in zip(axes, (SPENT, SPENT_EACH)):
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
        "few": partial(few, [100, 1000] if small else [10_000, 1_000_000]),
        "roofline": partial(roofline, 100 if small else 100_000),
        "start": start,
        "clients": partial(clients, [10, 100] if small else [10, 100, 1000, 10_000, 100_000]),
        "processes": partial(processes, [20, 40] if small else [100, 1000, 10_000], 1 if small else 5),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and draws it."""
    measure.run("scaling", __doc__, parts, argv, draw={"scaling": draw})


if __name__ == "__main__":
    main()
