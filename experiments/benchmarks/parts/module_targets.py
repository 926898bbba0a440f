"""What rounds were meant to take, what they take, and what they take at best.

At best is, by setting: of what is compared with a loop and of rounds in milliseconds, the operations of the round by
themselves (`floors`); of one by one, those of the loop; with dropout, that the masks are drawn and nothing is
multiplied; of the first round in a fresh process, that torch and lightning are imported.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import fedtorch as ft
from experiments import common
from experiments.benchmarks import fedlin, scaling
from experiments.benchmarks.parts import floors, measure, scaling_ranks
from experiments.benchmarks.parts.kinds import BATCH, KINDS, STEPS, TARGETED, ways_of
from fedtorch.models.linear import LinearHead

FASTER = {  # times as fast as a plain loop
    ("perceptron, 64-128-10", 'batched="auto"'): 6.5,
    ("two convolutions, 8 × 8", 'batched="auto"'): 5,
    ("Transformer layer", 'batched="auto"'): 6,
    ("GRU", 'batched="auto"'): 8,
    ("LSTM", 'batched="auto"'): 5,
}
COMPILED = {
    "perceptron, 64-128-10": 12,
    "linear, 8-1, 20 full batches": 40,
    "Transformer layer": 6,
    "two convolutions, 8 × 8": 6,
}
_IMPORTS = ("", "import fedtorch")


def lines(setting: str, goal: float, reached: float, best: float | None) -> list[common.Row]:
    """A line of the table."""
    rows = [common.Row(setting, "to reach", goal), common.Row(setting, "reached", reached)]
    return rows if best is None else [*rows, common.Row(setting, "at best", best)]


def others(clients: int, repeat: int, small: bool) -> list[common.Row]:
    """What is no way of a kind."""
    rows = [row for name in COMPILED for row in compiled(name, clients, repeat)]
    rows += dropout(clients, repeat)
    rows += few_clients(5 if small else 100)
    return [*rows, *matrix_normal(repeat, small), *starts(1 if small else 5)]


def compiled(name: str, clients: int, repeat: int) -> list[common.Row]:
    """`compile=True` beside a loop."""
    kind = {**KINDS, **TARGETED}[name]
    loop, runs = ways_of(kind, clients, {"compiled": {"compile": True}})
    run = runs["compiled"]
    run.step()
    alone = floors.recorded(run.step)
    ways: dict[str, Callable[[], object]] = {"loop": loop, "ours": run.step, "alone": alone.again}
    times = measure.interleaved(ways, repeat, warm=2, clock=time.process_time)
    ratio = lambda way: measure.ratio(times["loop"], times[way])
    return lines(f"{name}, compile=True, × a plain loop", COMPILED[name], ratio("ours"), ratio("alone"))


def dropout(clients: int, repeat: int) -> list[common.Row]:
    """A perceptron with dropout beside the same without."""
    name, settings = "perceptron, 64-128-10", {"ours": {"batched": True}}
    plain, drawing = (ways_of(kind, clients, settings) for kind in (KINDS[name], TARGETED[f"{name}, dropout"]))
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(clients))

    def draws() -> None:
        for step in range(STEPS):
            ft.random.bernoulli(ft.random.fold_in(keys, step), 0.5, (BATCH, 128))

    ways: dict[str, Callable[[], object]] = {
        "without": plain.runs["ours"].step,
        "with": drawing.runs["ours"].step,
        "draws": draws,
    }
    times = measure.interleaved(ways, 2 * repeat, warm=2, clock=time.process_time)
    least = [a + b for a, b in zip(times["without"], times["draws"])]
    reached = measure.ratio(times["with"], times["without"])
    return lines(f"{name} with dropout, × the time without", 1.3, reached, measure.ratio(least, times["without"]))


def few_clients(repeat: int) -> list[common.Row]:
    """A round of ten clients of a linear model, five full-batch steps."""
    rows = []
    for way, settings in scaling.WAYS.items():
        run = scaling_ranks.linear_run(ft.InProcess(scaling_ranks.linear_data(10)), **settings)
        run.step()
        alone = floors.recorded(run.step)
        ways: dict[str, Callable[[], object]] = {"round": run.step, "alone": alone.again}
        times = measure.medians(measure.interleaved(ways, repeat, warm=3, clock=time.process_time))
        rows += lines(f"10 linear clients, {way}, ms a round", 1.5, 1e3 * times["round"], 1e3 * times["alone"])
    return rows


def matrix_normal(repeat: int, small: bool) -> list[common.Row]:
    """HM1 beside a loop over devices by the gradient's bare formula."""
    count, rows, features, rounds = (10, 20, 8, 2) if small else (100, 200, 8, fedlin.ROUNDS)
    x, y = fedlin.devices(count, rows, features)
    local = ft.least_squares(LinearHead(features, intercept=False, dtype=x.dtype), steps=fedlin.STEPS)
    data = ft.data.from_tensors(list(zip(x, y)))
    whole = lambda: ft.run(ft.matrix_normal(local), ft.InProcess(data), rounds=rounds)
    alone = floors.recorded(whole)
    ways = {"formula": lambda: fedlin.formula_loop(x, y, rounds), "ours": whole, "alone": alone.again}
    times = measure.interleaved(ways, repeat, warm=1, clock=time.process_time)
    ratio = lambda way: measure.ratio(times["formula"], times[way])
    return lines(f"HM1, {count} devices, {rounds} rounds, × a loop of the formula", 40, ratio("ours"), ratio("alone"))


def starts(repeat: int) -> list[common.Row]:
    """Imports, and the README's first round, in fresh processes."""
    spent = [{program: _started(program) for program in _IMPORTS} for _ in range(repeat)]
    beyond = lambda program: 1e3 * statistics.median(each[program] - each[""] for each in spent)
    said = {row.setting.removeprefix("a fresh process, until the end of "): row.ours for row in scaling.start()}
    first, libraries = said["first round"], said["torch and lightning"]
    rows = lines("import fedtorch, processor ms", 40, beyond("import fedtorch"), None)
    return [*rows, *lines("the README's first round in a fresh process, processor s", 3, first, libraries)]


def _started(program: str) -> float:
    """Processor seconds of a fresh interpreter that runs a program."""
    told = f"{program}\nimport time; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])
