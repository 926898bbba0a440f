"""What the experiments share: arguments, result rows over seeds, tables, figures, clocks and the machine's name."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import resource
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import fedtorch as ft
from experiments import result_pages
from experiments.result_pages import write_results as write_results

T = TypeVar("T")
SMOKE = "smoke: no result"  # on figures of `--smoke`
EARLIER = "What calls before had kept is not in these seconds."


@dataclass(frozen=True)
class Row:
    """One figure: ours beside the published one."""

    setting: str
    metric: str
    ours: float
    sd: float | None = None
    published: float | None = None
    published_sd: float | None = None
    repeats: int | None = None  # of which `ours` is the mean
    part: str | None = None  # of a benchmark in parts
    decimals: int | None = None  # of the published figure as it was printed


class Published(NamedTuple):
    """A published figure and its standard deviation."""

    figure: float
    sd: float


def published(text: str) -> Published:
    """Read a figure as it is printed; of a standard deviation that is printed as zero half of its last digit is taken.

    >>> published("0.081 ± 0.001")
    Published(figure=0.081, sd=0.001)
    >>> published("0.050 ± 0.000")
    Published(figure=0.05, sd=0.0005)
    """
    figure, sd = re.split(" ± ", text)
    return Published(float(figure), float(sd) or 0.5 * 10.0 ** -len(sd.partition(".")[2]))


def of_part(name: str, rows: Sequence[Row]) -> list[Row]:
    """Say of rows which part of a benchmark measured them."""
    return [replace(row, part=name) for row in rows]


def linear_module(features: int) -> nn.Linear:
    """A linear model of float64 without intercept that starts at zero."""
    linear = nn.Linear(features, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    return linear


def linear_descent(
    features: int, *, steps: int, lr: float, weight_decay: float = 0.0, batch_size: int | None = None
) -> ft.LocalSolver:
    """Gradient steps on the mean squared error of `linear_module`."""
    return ft.gradient_descent(
        linear_module(features),
        steps=steps,
        batch_size=batch_size,
        loss=lambda output, y: (output[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay),
    )


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation of repetitions; None of a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def standard_error(values: Sequence[float]) -> float | None:
    """That of the mean of independent repetitions; None of a single one."""
    sd = spread(values)
    return None if sd is None else sd / len(values) ** 0.5


def row(
    setting: str,
    metric: str,
    values: Sequence[float],
    published: float | Published | None = None,
) -> Row:
    """One figure of repetitions: their mean and standard deviation."""
    figure, sd = published if isinstance(published, Published) else (published, None)
    return Row(setting, metric, float(np.mean(values)), spread(values), figure, sd, len(values))


def by_metric(runs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Each metric's values over the repetitions."""
    return {metric: [run[metric] for run in runs] for metric in runs[0]}


def over_seeds(
    setting: str, runs: Sequence[Mapping[str, float]], published: Mapping[str, float | Published | None] | None = None
) -> list[Row]:
    """A row for each metric of repeated runs, beside what is published of it."""
    known = published or {}
    return [row(setting, metric, values, known.get(metric)) for metric, values in by_metric(runs).items()]


def number(value: float | None, spread: float | None = None, form: str = ".3f") -> str:
    """A number of a table and its spread, of which None is left out."""
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if spread is None else f" ± {spread:{form}}")


def kept(folder: Path | None, name: str, make: Callable[[], T]) -> T:
    """What `make` computes (tensors and numbers in tuples, lists and dictionaries), from its file in the folder where a
    call before has done so; without a folder always anew."""
    if folder is None:
        return make()
    file = folder / f"{name}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        begun = file.with_suffix(f".{os.getpid()}")  # so that a call that is stopped leaves no half of a file
        torch.save(make(), begun)
        begun.replace(file)
    found: T = torch.load(file, weights_only=True)
    return found


def mean_with_error(values: Sequence[float], form: str = ".3f") -> str:
    """The mean of repetitions and its standard error, as a table has them."""
    return number(float(np.mean(values)), standard_error(values), form)


class Parser(argparse.ArgumentParser):
    """A parser that keeps what it was given and when, for pages of results."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The options, with `given`, `title` and the clocks `began` besides."""
        options = super().parse_args(args, namespace)
        if options.smoke and getattr(options, "write", False):
            self.error("Expected --write without --smoke, for it writes the kept page; got both")
        try:
            result_pages.check_small(options.smoke, options.results)
        except ValueError as error:
            self.error(str(error))
        options.given = list(sys.argv[1:] if args is None else args)
        options.title = (self.description or "").strip().split("\n")[0].rstrip(".")
        options.began = time.perf_counter(), time.process_time()
        return options


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every experiment has."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the same code path, small, in seconds")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="repetitions (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for standard output")
    parser.add_argument("--out", type=Path, metavar="DIR", help="draw the figures into this folder")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep the rows here, and write the page of them")
    return parser


def write(name: str, rows: Sequence[Row], target: str | None) -> None:
    """Write the rows as JSON to a file, or to standard output for `-`."""
    if target is None:
        return
    text = json.dumps({"experiment": name, "rows": [asdict(row) for row in rows]}, indent=1)
    if target == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(target).write_text(text + "\n")


def this_run(name: str, rows: Sequence[Row], options: argparse.Namespace) -> dict[str, Any]:
    """What a page of results tells of a run: the command, where, when, how long, and what was found."""
    return {
        "command": shlex.join(["python", "-m", f"experiments.{name}", *options.given]),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": time.perf_counter() - options.began[0],
        "processor_seconds": time.process_time() - options.began[1],
        "seeds": options.seeds,
        **({} if getattr(options, "kept", None) is None else {"remark": EARLIER}),
        "rows": [{key: value for key, value in asdict(row).items() if value is not None} for row in rows],
    }


def show(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table to standard error, the first column to the left, the others to the right."""
    cells = [list(columns), *(list(line) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    cells.insert(1, ["-" * width for width in widths])
    text = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in cells
    ]
    sys.stderr.write("\n".join(["", title, "", *text, ""]) + "\n")


def show_rows(title: str, rows: Sequence[Row], form: str = ".3f") -> None:
    """Print rows: ours, and beside it the standard deviation and the published figure where any row has them.

    The setting is left out where there is but one, which the title names.
    """
    parts = [part for part in ("ours", "sd", "published") if any(getattr(row, part) is not None for row in rows)]
    names = ["metric"] if len({row.setting for row in rows}) == 1 else ["setting", "metric"]
    lines = [
        [getattr(row, name) for name in names] + [number(getattr(row, part), form=form) for part in parts]
        for row in rows
    ]
    show(title, [*("" for _ in names), *parts], lines)


def finish(
    name: str,
    rows: Sequence[Row],
    options: argparse.Namespace,
    draw: Callable[[], Mapping[str, Figure]] | None = None,
) -> None:
    """Write the rows where `--json` says, and their page with `--results`; with `--out` draw the figures, by name.

    Figures of `--smoke` say so on themselves.
    """
    write(name, rows, options.json)
    if options.results is not None:
        result_pages.add(options.results, name, options.title, this_run(name, rows, options))
    if options.out is not None and draw is not None:
        for title, figure in draw().items():
            if options.smoke:
                figure.text(0.5, 0.5, SMOKE, ha="center", va="center", fontsize=20, color="C3", alpha=0.5, rotation=15)
            show_path(save(figure, options.out, title))


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """What one call takes: by the wall's clock, or by `time.process_time` of all processors."""
    start = clock()
    work()
    return clock() - start


def peak_megabytes() -> float:
    """The most memory, in MiB, that this program has had so far.

    From `/proc` where there is one: what `getrusage` counts begins with the most that the parent had.
    """
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def machine() -> str:
    """This machine in words: processor, cores that may be used, PyTorch and its threads."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as cpu:
            name = next(line.split(":")[1].strip() for line in cpu if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{name}, {cores} cores{gpu}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning without its hints about hardware, loggers and its own deprecations."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".isinstance.treespec, LeafSpec.", category=FutureWarning)
            yield
    finally:
        log.setLevel(level)


def subplots(rows: int = 1, columns: int = 1, **settings: Any) -> tuple[Figure, Any]:
    """`plt.subplots` with a constrained layout, and axes without the frame's upper and right sides."""
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        return plt.subplots(rows, columns, layout="constrained", **settings)


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Write a figure as `<folder>/<name>.png`, and close it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def show_path(path: Path) -> None:
    """Say where a figure is."""
    sys.stderr.write(f"figure: {path}\n")
