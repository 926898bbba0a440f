"""Robust aggregates of 256 messages of 10⁵ numbers beside FedAvg's, and beside a median and a sort of the same numbers.

Every figure is the median over repetitions in which all ways run one after the other in the same process. The median
and the sort are `torch.median` and `torch.sort` of a transposed copy, in which the numbers of a coordinate lie side by
side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure
from experiments.robustness import all_rules
from fedtorch.federation.exchanges.exchange import Exchange, Mean
from fedtorch.federation.exchanges.robust.exchange import star


def ways(messages: int, numbers: int, faulty: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    value = ft.random.normal(ft.random.key(0), (messages, numbers))
    message, transposed = Mean({"w": value}, torch.ones(messages)), value.T.contiguous()

    def aggregate(exchange: Exchange) -> object:
        return exchange.finish(exchange.merge([exchange.gather(message, slice(0, messages))]))

    rules = all_rules(messages, faulty, trusted=0)
    exchanges = {name: ft.star() if rule is None else star(rule) for name, rule in rules.items()}
    made = {name: lambda exchange=exchange: aggregate(exchange) for name, exchange in exchanges.items()}
    return {**made, "torch.median": lambda: transposed.median(-1), "torch.sort": lambda: transposed.sort(-1)}


def costs(messages: int, numbers: int, repetitions: int) -> list[common.Row]:
    """Seconds of every way, and how often FedAvg's fit into them."""
    times = measure.interleaved(ways(messages, numbers, messages // 5), repetitions)
    middle = measure.medians(times)
    setting = f"{messages} messages × {numbers} numbers"
    rows = [common.Row(setting, f"{name}, milliseconds", 1e3 * value) for name, value in middle.items()]
    pairs = [(name, "FedAvg") for name in times] + [("median", "torch.median"), ("trimmed mean", "torch.sort")]
    rows += [common.Row(setting, f"{slow} / {fast}", measure.ratio(times[slow], times[fast])) for slow, fast in pairs]
    return rows


def parts(small: bool) -> dict[str, Callable[[], list[common.Row]]]:
    """What is measured, by name."""
    size = (24, 500, 1) if small else (256, 100_000, 5)
    return {"costs": lambda: costs(*size)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all rules."""
    measure.run("robust", __doc__, parts, argv)


if __name__ == "__main__":
    main()
