"""`fedtorch experiments`: the tables and figures in the folder `experiments` of a checkout.

fedtorch experiments list
fedtorch experiments run NAME [--smoke] [--seeds N] [--json FILE] [--out DIR] …

The main setting of most experiments is also a file for `fedtorch fit --config`: that of `fedlin.school` is
`experiments/configs/fedlin_school.yaml`.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Experiment(NamedTuple):
    """A table or figure that can be reproduced."""

    name: str
    what: str
    config: Path | None


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    experiments = commands.add_parser("experiments", help="the tables and figures of a checkout")
    actions = experiments.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="list experiments, and whether the main setting is a file").set_defaults(run=_list)
    run = actions.add_parser("run", help="run one: print its table beside the published figures")
    run.set_defaults(run=_run)
    run.add_argument("name", metavar="NAME", help="a name from `fedtorch experiments list`")
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="its arguments: --smoke, --seeds N, --out DIR, --help …"
    )


def checkout() -> Path:
    """Return the folder with `experiments`: the current one, or that of the package in a checkout.

    Raises:
        FileNotFoundError: neither has it, because experiments are not part of a wheel.
    """
    for folder in (Path.cwd(), Path(__file__).parents[2]):
        if (folder / "experiments" / "common.py").is_file() and (folder / "fedtorch").is_dir():
            return folder
    raise FileNotFoundError(
        f"Expected the folder experiments/ of a checkout in {Path.cwd()}, but there is none, and an installed package "
        "does not have it; get the sources of the project and call this from their folder"
    )


def experiments(folder: Path) -> list[Experiment]:
    """Return all experiments with a `main`, sorted by name (`fedlin.school`); their files are read but not run."""
    root, experiments = folder / "experiments", []
    for file in [*root.glob("*.py"), *root.glob("*/*.py")]:
        parts = file.relative_to(root).with_suffix("").parts
        source = ast.parse(file.read_text())
        if "benchmarks" not in parts and any(_is_main(node) for node in source.body):
            what = (ast.get_docstring(source) or "").split("\n")[0]
            config = root / "configs" / f"{'_'.join(parts)}.yaml"
            experiments.append(Experiment(".".join(parts), what, config if config.is_file() else None))
    return sorted(experiments)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "main"


def _list(_: argparse.Namespace) -> None:
    for name, what, config in experiments(checkout()):
        print(f"{name:22} {'config' if config else '':8}{what}")


def _run(options: argparse.Namespace) -> int:
    folder = checkout()
    names = [experiment.name for experiment in experiments(folder)]
    if options.name not in names:
        print(f"fedtorch: Expected an experiment in {names}, but got {options.name!r}", file=sys.stderr)
        return 2
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.call([sys.executable, "-m", f"experiments.{options.name}", *options.arguments], env=environment)
