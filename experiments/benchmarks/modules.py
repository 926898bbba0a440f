"""Modules of many kinds: rounds of FedAvg stacked, one by one and as `batched="auto"` chooses, beside a plain loop.

50 clients of 40 rows, five Adam steps of ten rows in a round, float32, one thread. All ways take turns in one process,
round by round; figures are ratios of processor time, medians over rounds with the least and the most of what
`batched="auto"` took.

What bounds them is measured beside them. *Operations alone* are those of the stacked round, called again one after the
other: no autograd, no `vmap`, nothing of a module or of fedtorch lies between them, so that what is missing to it is
what fedtorch and autograd take. *Products alone* are the products of matrices and convolutions among them. *The loop's
operations alone* are those of the plain loop, which clients one by one cannot pass. The *bound*
is that of the loop's own operations: its products at the pace of this processor's products, or the bytes of all
arguments and results at that of its memory, whichever takes longer. Stacked operations that find theirs in a cache may
pass it, as may those that are fewer.

*Peak memory* is what two rounds add to the peak of a process of their own, rows of clients included, after two rounds
of two clients have loaded what libraries load.

The last table has what was aimed at, what is *reached*, and what would be *at best*: of stacked and compiled rounds and
of rounds in milliseconds, were they their operations alone; of clients one by one, the loop's operations alone; with
dropout, were the masks drawn and nothing else done with them; of the first round in a fresh process (torch and
lightning included), were they imported and nothing else done.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments import common
from experiments.benchmarks.parts import floors, kernel_bounds, measure, memory, module_targets
from experiments.benchmarks.parts.cost_formulas import Device
from experiments.benchmarks.parts.kinds import CLIENTS, KINDS, ways_of

LOOP, AUTO = "plain loop", 'batched="auto"'
WAYS: dict[str, dict[str, Any]] = {
    "batched=True": {"batched": True},
    "batched=False": {"batched": False},
    AUTO: {"batched": "auto"},
}
ALONE = "operations alone"
PRODUCTS = "products alone"
LOOPED = "the loop's operations alone"
WIDE = True  # a line of a table for each setting, a column for each figure


@functools.cache
def processor(small: bool) -> Device:
    """This one, measured once."""
    return kernel_bounds.processor(small)


def bound(step: Callable[[], object], device: Device) -> float:
    """Seconds that the operations of a round take at least, where calls cost nothing."""
    with FlopCounterMode(display=False) as products:
        moved = kernel_bounds.spent(step).moved
    return device.bound(0, moved, products.get_total_flops(), double=False)


@functools.cache
def rows_of(name: str, clients: int, repeat: int) -> list[common.Row]:
    """How many times as fast as the loop each way is, and what bounds them."""
    loop, runs = ways_of(KINDS[name], clients, WAYS)
    ways: dict[str, Callable[[], object]] = {LOOP: loop, **{way: run.step for way, run in runs.items()}}
    for run in runs.values():
        run.step()
    stacked = floors.recorded(runs["batched=True"].step)
    ways |= {ALONE: stacked.again, PRODUCTS: stacked.products().again, LOOPED: floors.recorded(loop).again}
    times = measure.interleaved(ways, repeat, warm=1, clock=time.process_time)
    spent = measure.medians(times)[LOOP]
    rows = [common.Row(name, f"{LOOP}, ms", 1e3 * spent)]
    rows += [common.Row(name, way, measure.ratio(times[LOOP], times[way])) for way in WAYS]
    each = [a / b for a, b in zip(times[LOOP], times[AUTO])]
    rows += [common.Row(name, f"{AUTO}, least", min(each)), common.Row(name, f"{AUTO}, most", max(each))]
    rows += [common.Row(name, way, measure.ratio(times[LOOP], times[way])) for way in (ALONE, PRODUCTS, LOOPED)]
    least = bound(loop, processor(clients < CLIENTS))
    return [*rows, common.Row(name, "bound", spent / least)]


def kinds(clients: int, repeat: int, names: Sequence[str]) -> list[common.Row]:
    """All kinds, or some."""
    return [row for name in names for row in rows_of(name, clients, repeat)]


def memory_of(name: str, clients: int, way: str) -> float:
    """MiB that two rounds of a kind of modules add to the peak of a process, data included."""
    torch.set_num_threads(1)

    def rounds(of: int) -> object:
        loop, runs = ways_of(KINDS[name], of, {} if way == LOOP else {way: WAYS[way]})
        step = loop if way == LOOP else runs[way].step
        step(), step()
        return loop, runs

    return memory.added(lambda: rounds(2), lambda: rounds(clients))


def memories(clients: int, names: Sequence[str]) -> list[common.Row]:
    """Peaks of all kinds and ways."""
    return [common.Row(name, f"{way}, MiB", memory_of(name, clients, way)) for name in names for way in (LOOP, *WAYS)]


def targets(clients: int, repeat: int, small: bool) -> list[common.Row]:
    """What was aimed at, reached, and possible at best."""
    names = dict.fromkeys(name for name, _ in module_targets.FASTER)
    measured = kinds(clients, repeat, list(names))
    figures = {(row.setting, row.metric): row.ours for row in measured}
    rows = []
    for (name, way), goal in module_targets.FASTER.items():
        alone = figures[name, LOOPED] if way == "batched=False" else figures[name, ALONE]
        rows += module_targets.lines(f"{name}, {way}, × a plain loop", goal, figures[name, way], alone)
    return [*rows, *module_targets.others(clients, repeat, small)]


def parts(small: bool) -> measure.Parts:
    """The tables by name."""
    size = (4, 1) if small else (CLIENTS, 5)
    some = ["LSTM of 256 units", *(name for name, _ in module_targets.FASTER)] if small else list(KINDS)
    return {
        "Peak memory": functools.partial(memories, size[0], list(dict.fromkeys(some))),
        "Kinds of modules, × a plain loop": functools.partial(kinds, *size, list(dict.fromkeys(some))),
        "What was aimed at": functools.partial(targets, *size, small),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both tables, or one."""
    torch.set_num_threads(1)
    measure.run("modules", __doc__, parts, argv)


if __name__ == "__main__":
    main()
