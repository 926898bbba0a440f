"""Two versions of fedtorch side by side: `python -m experiments.benchmarks.against --old CHECKOUT`.

Each version runs the work of `workloads` in a process of its own, both are kept alive, and they take turns, one after
the other and beginning with each in turn, so that the ratios hold when the machine's speed drifts. The first turn warms
up. A process may be some per cent faster than another of the same program for as long as it lives, so that there are
several sittings with new processes. A ratio is the median over pairs of turns of all sittings, beside its quartiles;
"apart" is by how much the numbers found differ, relative to the old ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from experiments import common
from experiments.benchmarks.against import workloads
from experiments.benchmarks.parts import measure

HERE = Path(__file__).parents[3]
COLUMNS = ["workload", "old, s", "new, s", "new / old", "its quartiles", "apart"]


class Worker:
    """A version of fedtorch in a process of its own, to be used in a `with` statement, which waits until it is ready.

    Args:
        checkout: a folder that has the package `fedtorch`.
        small: whether its work is.

    Raises:
        ValueError: the folder has no such package.
    """

    def __init__(self, checkout: Path, small: bool) -> None:
        if not (checkout / "fedtorch" / "__init__.py").is_file():
            raise ValueError(f"Expected a folder that has the package fedtorch, but {checkout} has not")
        self._checkout, program = checkout, Path(__file__).with_name("workloads.py")
        command = [sys.executable, "-P", str(program), *["--smoke"] * small]  # -P: only the checkout to import from
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Worker:
        imported = Path(self._answer()["version"])
        if imported.resolve() != (self._checkout / "fedtorch").resolve():
            raise RuntimeError(f"Expected fedtorch to be imported from {self._checkout}, but it was from {imported}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def do(self, name: str) -> dict:
        """Run a workload once: its `seconds` and `value`, or its `error`."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Expected an answer of the worker, but it ended with {self._process.wait()}")
        return json.loads(line)


Turn = tuple[dict, dict]  # what the old and the new version answer


class Compared(NamedTuple):
    """A workload in both versions."""

    old: float  # median seconds
    new: float
    ratio: float  # new / old: the median over pairs
    quartiles: tuple[float, float]  # of the ratio
    apart: float  # |new − old| / |old| of what was found


def take_turns(name: str, old: Worker, new: Worker, repeat: int) -> list[Turn]:
    """Run a workload in turns, of which the first warms up and does not count; none if a version cannot do it."""
    turns = []
    for i in range(repeat + 1):
        order = (old, new) if i % 2 else (new, old)
        answers = {worker: worker.do(name) for worker in order}
        for worker, which in ((old, "old"), (new, "new")):
            if "error" in answers[worker]:
                sys.stderr.write(f"{name}, {which} version:\n{answers[worker]['error']}")
                return []
        turns.append((answers[old], answers[new]))
    return turns[1:]


def summary(turns: Sequence[Turn]) -> Compared:
    """Of a workload."""
    seconds = [(a["seconds"], b["seconds"]) for a, b in turns]
    ratios = [b / a for a, b in seconds]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    before, after = (turn["value"] for turn in turns[-1])
    apart = abs(after - before) / max(abs(before), 1e-300)
    old, new = (statistics.median(each) for each in zip(*seconds))
    return Compared(old, new, statistics.median(ratios), (low, high), apart)


def cells(name: str, found: Compared) -> list[str]:
    """A line of the table."""
    low, high = found.quartiles
    figures = [f"{found.old:.3g}", f"{found.new:.3g}", f"{found.ratio:.3f}", f"{low:.3f} to {high:.3f}"]
    return [name, *figures, f"{found.apart:.1g}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Compare all workloads, or some, and print a Markdown table; end with 1 if a version cannot do one."""
    parser = common.arguments(__doc__)
    parser.add_argument("--old", type=Path, required=True, metavar="CHECKOUT", help="the folder of the other version")
    parser.add_argument("--sittings", type=int, default=3, metavar="N", help="of new processes (default 3)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="turns of a sitting (default 5)")
    parser.add_argument("--only", default="", metavar="TEXT", help="workloads whose name has it")
    options = parser.parse_args(argv)
    sittings, repeat = (1, 1) if options.smoke else (options.sittings, options.repeat)
    turns: dict[str, list[Turn]] = {name: [] for name in workloads.WORKLOADS if options.only in name}
    load = os.getloadavg()[0]
    for _ in range(sittings):
        old, new = (Worker(checkout.resolve(), options.smoke) for checkout in (options.old, HERE))  # start together
        with old, new:
            for name, so_far in turns.items():
                so_far += take_turns(name, old, new, repeat)
    done = {name: summary(of) for name, of in turns.items() if of}
    lines = [cells(name, found) for name, found in done.items()]
    print("\n".join([*measure.circumstances(load), "", *measure.table(COLUMNS, lines)]))
    figures = {
        name: {"old, s": found.old, "new, s": found.new, "new / old": found.ratio, "apart": found.apart}
        for name, found in done.items()
    }
    rows = [common.Row(name, metric, value) for name, of in figures.items() for metric, value in of.items()]
    common.finish("benchmarks.against", rows, options)
    if len(done) < len(turns):
        sys.exit(f"Expected both versions to do every workload, but they cannot do {', '.join(turns.keys() - done)}")


if __name__ == "__main__":
    main()
