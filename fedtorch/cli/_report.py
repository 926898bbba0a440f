"""`fedtorch report`: the page of a run, see `fedtorch.report`.

fedtorch report DIR [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    report = commands.add_parser("report", help="make a page of what happened in a run")
    report.set_defaults(run=_render)
    report.add_argument("folder", metavar="DIR", type=Path, help="with what ft.report leaves, or a checkpoint")
    report.add_argument("--out", metavar="FILE", type=Path, help="where the page goes; default: report.html in DIR")


def _render(options: argparse.Namespace) -> None:
    from fedtorch.report.folder import render

    print(render(options.folder, options.out))
