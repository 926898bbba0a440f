"""The parser of the command `fedtorch`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fedtorch.cli import (
    _data as data,
    _experiments as experiments,
    _fit as fit,
    _launch as launch,
    _record as record,
    _report as report,
    _sites as sites,
)
from fedtorch.cli._misspelt import Parser

COMMANDS = (fit, experiments, data, report, record, sites, launch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, by default those of the process, and return its exit code."""
    parser = Parser(prog="fedtorch", description="Federated modelling on PyTorch and Lightning")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except argparse.ArgumentError as error:
        print(f"fedtorch: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"fedtorch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
