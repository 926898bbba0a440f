"""What the experiments share: arguments, result rows, tables and the machine's name."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One figure: ours beside the published one."""

    setting: str
    metric: str
    ours: float
    sd: float | None = None
    published: float | None = None


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every experiment has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the same code path, small, in seconds")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="repetitions (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for standard output")
    parser.add_argument("--out", type=Path, metavar="DIR", help="draw the figures into this folder")
    return parser


def write(name: str, rows: Sequence[Row], target: str | None) -> None:
    """Writes the rows as JSON to a file, or to standard output for `-`."""
    if target is None:
        return
    text = json.dumps({"experiment": name, "rows": [asdict(row) for row in rows]}, indent=1)
    if target == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(target).write_text(text + "\n")


def show(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Prints a table to standard error, the first column to the left, the others to the right."""
    cells = [list(columns), *(list(line) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    cells.insert(1, ["-" * width for width in widths])
    text = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in cells
    ]
    sys.stderr.write("\n".join(["", title, "", *text, ""]) + "\n")


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


def save(figure: Figure, folder: Path, name: str) -> Path:
    """Writes a figure as `<folder>/<name>.png`, and closes it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def show_path(path: Path) -> None:
    """Says where a figure is."""
    sys.stderr.write(f"figure: {path}\n")
