"""`fedtorch fit` and `fedtorch validate`: a federation from a configuration file, see `docs/howto/configuration.md`.

fedtorch fit --config run.yaml [--cohort 10] [--trainer.max_epochs 50] [--ckpt_path last.ckpt]
fedtorch validate --config run.yaml --ckpt_path last.ckpt
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

WHAT = {
    "fit": "train what a configuration file says; `fedtorch fit --print_config` shows all there is to say",
    "validate": "score what a checkpoint holds, as the configuration file says",
}


def add(commands: Any) -> None:
    """Adds the commands to a parser's."""
    for name, what in WHAT.items():
        # A prefix that nobody types: options, --help included, are for the parser that knows them.
        parser = commands.add_parser(name, help=what, add_help=False, prefix_chars="\0")
        parser.set_defaults(run=partial(_run, name))
        parser.add_argument("arguments", nargs=argparse.REMAINDER)


def _run(name: str, options: argparse.Namespace) -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a module of the user's own may lie, as for `python -m`
    from fedtorch.cli.configuration import FederationCLI

    FederationCLI(name, options.arguments, WHAT[name])
