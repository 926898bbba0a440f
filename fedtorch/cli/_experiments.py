"""`fedtorch experiments`: the tables and figures of a checkout, which has them in its folder `experiments`.

fedtorch experiments list
fedtorch experiments run NAME [--smoke] [--seeds N] [--json FILE] [--out DIR] …

The main setting of most of them is a file besides, for `fedtorch fit --config`: that of `fedlin.school` is
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
    """A table or figure that can be made again."""

    name: str
    what: str
    config: Path | None


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    experiments = commands.add_parser("experiments", help="the tables and figures of a checkout")
    actions = experiments.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="what there is, and whether its main setting is a file").set_defaults(run=_list)
    run = actions.add_parser("run", help="make one: print its table beside the published figures")
    run.set_defaults(run=_run)
    run.add_argument("name", metavar="NAME", help="as `fedtorch experiments list` names it")
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="of the experiment: --smoke, --seeds N, --out DIR, --help …"
    )


def checkout() -> Path:
    """Return the folder that has `experiments`: the current one, or that of the package where it runs from a checkout.

    Raises:
        FileNotFoundError: neither has it, as experiments are no part of a wheel.
    """
    for folder in (Path.cwd(), Path(__file__).parents[2]):
        if (folder / "experiments" / "common.py").is_file() and (folder / "fedtorch").is_dir():
            return folder
    raise FileNotFoundError(
        f"Expected the folder experiments/ of a checkout in {Path.cwd()}, but there is none, and an installed package "
        "does not have it; get the sources of the project and call this from their folder"
    )


def experiments(folder: Path) -> list[Experiment]:
    """List all that have a `main`, by name (`fedlin.school`); their files are read and not run."""
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
