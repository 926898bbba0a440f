"""What the benchmarks share: ways timed in turns, ratios of pairs, parts in processes of their own, and Markdown."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

import fedtorch as ft
from experiments import common
from experiments.result_pages import table as table

Parts = dict[str, Callable[[], list[common.Row]]]


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    repeat: int,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every way in each repetition; in a repetition all run one after the other, the first do not count."""
    times = [{name: common.seconds(work, clock) for name, work in ways.items()} for _ in range(warm + repeat)]
    return common.by_metric(times[warm:])


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of every way."""
    return {name: statistics.median(each) for name, each in times.items()}


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """How many times longer: the median over pairs of one repetition, so that drifts cancel."""
    return statistics.median(a / b for a, b in zip(slow, fast))


def round_seconds(run: ft.Run, count: int) -> list[float]:
    """Seconds of each of the next rounds."""
    return [common.seconds(run.step) for _ in range(count)]


def in_own_process(module: str, *options: str) -> list[common.Row]:
    """The rows of a benchmark in a fresh process, so that its memory is its own."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [sys.executable, "-m", module, *options, "--json", str(target)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        return [common.Row(**row) for row in json.loads(target.read_text())["rows"]]


def run(
    name: str,
    description: str | None,
    parts: Callable[[bool], Parts],
    argv: Sequence[str] | None,
    own_processes: bool = False,
    draw: Mapping[str, Callable[[Sequence[common.Row]], Figure]] | None = None,
) -> None:
    """The program of a benchmark in parts: measures all or one of them, prints and writes their rows.

    Args:
        name: of the module in this package.
        description: what `--help` says.
        parts: whether small -> the parts by name.
        argv: the arguments.
        own_processes: whether each part runs in one, where all are measured.
        draw: figures of the rows by name, which `--out` saves where all parts are measured.
    """
    parser = common.arguments(description)
    parser.add_argument("--part", choices=sorted(parts(True)), help="one part only")
    options = parser.parse_args(argv)
    chosen, module = parts(options.smoke), f"experiments.benchmarks.{name}"
    with common.quiet():
        if options.part:
            rows = common.of_part(options.part, chosen[options.part]())
        elif own_processes:
            small = ["--smoke"] * options.smoke
            rows = [row for part in chosen for row in in_own_process(module, "--part", part, *small)]
        else:
            rows = [row for part, measure in chosen.items() for row in common.of_part(part, measure())]
    common.show_rows(f"{name} ({common.machine()})", rows, ".4g")
    figures = {} if options.part else draw or {}
    common.finish(f"benchmarks.{name}", rows, options, lambda: {title: each(rows) for title, each in figures.items()})


def circumstances(load_before: float) -> list[str]:
    """Where and when it was measured, and how busy the machine was: two lines that end a sentence."""
    return [
        f"{common.machine()}; {time.strftime('%Y-%m-%d')};",
        f"load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after, this work included.",
    ]
