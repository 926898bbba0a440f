"""Runs benchmarks one after the other and writes each one's table to `experiments/benchmarks/results/<name>.md`.

A benchmark in parts has a section for each of them on its page. `python -m experiments.benchmarks fedlin -- --part HM1`
measures one and replaces only its section. The notes at the end of a page are kept.

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
from experiments.result_pages import NOTES, check_small

NAMES = (
    "audit",
    "core",
    "fedlin",
    "fedmgp",
    "gibbs",
    "gpu",
    "gtv",
    "installation",
    "kills",
    "loaders",
    "mixed",
    "modules",
    "privacy",
    "ragged",
    "remote",
    "remote_flower",
    "robust",
    "robust_peers",
    "scaling",
    "vfl",
    "vfl_split",
)
RESULTS = Path(__file__).parent / "results"
HEADING = "\n## "


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


def is_wide(name: str) -> bool:
    """Return whether a benchmark's tables have a column for each figure, and what they mean below the title."""
    return getattr(importlib.import_module(f"experiments.benchmarks.{name}"), "WIDE", False)


def wide(rows: Sequence[dict]) -> list[str]:
    """Return a table with a line for each setting and a column for each figure."""
    columns = list(dict.fromkeys(row["metric"] for row in rows))
    figures = {(row["setting"], row["metric"]): row["ours"] for row in rows}
    lines = [
        [setting, *(common.number(figures.get((setting, column)), None, ".3g") for column in columns)]
        for setting in dict.fromkeys(row["setting"] for row in rows)
    ]
    return table(["", *columns], lines)


def section(name: str, rows: Sequence[dict], about: Sequence[str]) -> str:
    """Return the table of rows below what is said about their measurement."""
    if is_wide(name):
        return "\n".join([*about, "", *wide(rows)])
    lines = [[row["setting"], row["metric"], common.number(row["ours"], row.get("sd"), ".4g")] for row in rows]
    return "\n".join([*about, "", *table(["setting", "figure", "measured"], lines)])


def sections(page: str) -> dict[str, str]:
    """Return a page's sections by part, without its title and notes; what is under no heading is that of ""."""
    first, *others = page.partition(NOTES)[0].split(HEADING)
    texts = {
        "": first.partition("\n")[2],
        **{part: text for part, _, text in (each.partition("\n") for each in others)},
    }
    return {part: text.strip() for part, text in texts.items() if text.strip()}


def markdown(name: str, rows: Sequence[dict], options: Sequence[str], load_before: float, before: str = "") -> str:
    """Return a benchmark's page, a section a part; `--part` keeps the other sections of the page `before`."""
    command = " ".join(["python -m experiments.benchmarks", name, *(["--", *options] if options else [])])
    about = [f"`{command}` on", *circumstances(load_before)]
    by_part: dict[str, list[dict]] = {}
    for row in rows:
        by_part.setdefault(row.get("part") or "", []).append(row)
    kept = sections(before) if any(option.partition("=")[0] == "--part" for option in options) else {}
    texts = {**kept, **{part: section(name, measured, about) for part, measured in by_part.items()}}
    if is_wide(name):
        meaning = (importlib.import_module(f"experiments.benchmarks.{name}").__doc__ or "").partition("\n")[2].strip()
        texts = {**texts, "": meaning}
    ordered = sorted(texts.items(), key=lambda each: bool(each[0]))
    headed = [f"## {part}\n\n{text}" if part else text for part, text in ordered]
    return "\n\n".join([f"# {title(name)}", *headed]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the tables")
    given = list(sys.argv[1:] if argv is None else argv)
    options = given[given.index("--") + 1 :] if "--" in given else []
    arguments = parser.parse_args(given[: given.index("--")] if "--" in given else given)
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"Expected benchmarks of {', '.join(NAMES)}, but got {', '.join(unknown)}")
    try:
        check_small("--smoke" in options, arguments.results)
    except ValueError as error:
        parser.error(str(error))
    for name in arguments.names or NAMES:
        before = os.getloadavg()[0]
        rows = measure(name, options)
        file = arguments.results / f"{name}.md"
        if not rows:  # no device, or no peers
            reason = getattr(importlib.import_module(f"experiments.benchmarks.{name}"), "UNMEASURED", None)
            if reason is not None and not file.exists():
                common.write_results(file, f"# {title(name)}\n\n{reason}\n")
            continue
        page = file.read_text() if file.exists() else ""
        common.write_results(file, markdown(name, rows, options, before, page))


if __name__ == "__main__":
    main()
