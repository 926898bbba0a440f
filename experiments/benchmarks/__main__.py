"""Runs benchmarks one after the other and writes each one's table to `experiments/benchmarks/results/<name>.md`.

The notes below a table that was there are kept.

`python -m experiments.benchmarks gtv fedlin` runs these two; what comes after `--` goes to each of them, as in
`python -m experiments.benchmarks gtv -- --full`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments import common
from experiments.benchmarks.parts.measure import circumstances, table

NAMES = (
    "audit",
    "core",
    "fedlin",
    "fedmgp",
    "gibbs",
    "gpu",
    "gtv",
    "kills",
    "privacy",
    "remote",
    "remote_flower",
    "robust",
    "robust_peers",
    "scaling",
    "vfl",
    "vfl_split",
)
RESULTS = Path(__file__).parent / "results"


def measure(name: str, options: Sequence[str]) -> list[dict]:
    """The rows of one benchmark."""
    module = importlib.import_module(f"experiments.benchmarks.{name}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        module.main([*options, "--json", str(file)])
        return json.loads(file.read_text())["rows"]


def title(name: str) -> str:
    """What a benchmark measures."""
    module = importlib.import_module(f"experiments.benchmarks.{name}")
    return (module.__doc__ or name).strip().splitlines()[0]


def markdown(name: str, rows: Sequence[dict], options: Sequence[str], load_before: float) -> str:
    """A benchmark's table, and where it was measured."""
    command = " ".join(["python -m experiments.benchmarks", name, *(["--", *options] if options else [])])
    head = [f"# {title(name)}", "", f"`{command}` on", *circumstances(load_before), ""]
    lines = [[row["setting"], row["metric"], common.number(row["ours"], row.get("sd"), ".4g")] for row in rows]
    return "\n".join([*head, *table(["setting", "figure", "measured"], lines), ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the tables")
    given = list(sys.argv[1:] if argv is None else argv)
    options = given[given.index("--") + 1 :] if "--" in given else []
    arguments = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"Expected benchmarks of {', '.join(NAMES)}, but got {', '.join(unknown)}")
    for name in arguments.names or NAMES:
        before = os.getloadavg()[0]
        rows = measure(name, options)
        file = arguments.results / f"{name}.md"
        if not rows:  # no device, or no peers
            reason = getattr(importlib.import_module(f"experiments.benchmarks.{name}"), "UNMEASURED", None)
            if reason is not None and not file.exists():
                common.write_results(file, f"# {title(name)}\n\n{reason}\n")
            continue
        common.write_results(file, markdown(name, rows, options, before))


if __name__ == "__main__":
    main()
