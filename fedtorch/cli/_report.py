"""`fedtorch report`: the page of a run, see `fedtorch.report`; `fedtorch status`: the progress of a run over sites.

fedtorch report DIR [--out FILE]
fedtorch status DIR [--watch]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from fedtorch.cli._terminal import printable

_EVERY = 2.0  # seconds between two printed states


def add(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    report = commands.add_parser("report", help="make a page about a run")
    report.set_defaults(run=_render)
    report.add_argument("folder", metavar="DIR", type=Path, help="folder with the files of ft.report, or a checkpoint")
    status = commands.add_parser("status", help="show the progress of a run over sites, and which sites are late")
    status.set_defaults(run=_show)
    status.add_argument(
        "folder", metavar="DIR", type=Path, help="folder of the server's ft.Remote(checkpoint=), or its file"
    )
    status.add_argument("--watch", action="store_true", help="show it every two seconds, until the run is over")
    report.add_argument("--out", metavar="FILE", type=Path, help="file for the page; default: report.html in DIR")


def _render(options: argparse.Namespace) -> None:
    from fedtorch.report.folder import render

    print(render(options.folder, options.out))


def _show(options: argparse.Namespace) -> None:
    from fedtorch.sites.rounds import status

    while True:
        texts = [printable(status.in_words(path)) for path in status.status_files(options.folder)]
        print("\n".join(texts), flush=True)
        if not options.watch or all(": over, " in each for each in texts):
            return
        time.sleep(_EVERY)
        print()
