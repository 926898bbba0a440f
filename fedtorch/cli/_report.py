"""`fedtorch report`: the page of a run, see `fedtorch.report`; `fedtorch status`: how far one over sites is.

fedtorch report DIR [--out FILE]
fedtorch status DIR [--watch]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

_EVERY = 2.0  # seconds between two states that are printed


def add(commands: Any) -> None:
    """Add the commands to a parser's."""
    report = commands.add_parser("report", help="make a page of what happened in a run")
    report.set_defaults(run=_render)
    report.add_argument("folder", metavar="DIR", type=Path, help="with what ft.report leaves, or a checkpoint")
    status = commands.add_parser("status", help="say how far a run over sites is, and which of them are late")
    status.set_defaults(run=_say)
    status.add_argument("folder", metavar="DIR", type=Path, help="of the run's checkpoint on the server, or that file")
    status.add_argument("--watch", action="store_true", help="say it every two seconds, until the run is over")
    report.add_argument("--out", metavar="FILE", type=Path, help="where the page goes; default: report.html in DIR")


def _render(options: argparse.Namespace) -> None:
    from fedtorch.report.folder import render

    print(render(options.folder, options.out))


def _say(options: argparse.Namespace) -> None:
    from fedtorch.sites.rounds import status

    while True:
        said = [status.in_words(path) for path in status.status_files(options.folder)]
        print("\n".join(said), flush=True)
        if not options.watch or all(": over, " in each for each in said):
            return
        time.sleep(_EVERY)
        print()
