"""`fedtorch record`: runs on record, see `fedtorch.trust.record`.

fedtorch record verify FILE …
"""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Adds the command to a parser's."""
    record = commands.add_parser("record", help="runs on record")
    actions = record.add_subparsers(required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="find what was changed")
    verify.add_argument("files", nargs="+", metavar="FILE", help="a record, the JSON file beside a checkpoint")
    verify.set_defaults(run=_verify_all)


def _verify_all(options: argparse.Namespace) -> int:
    return max([_verify(file) for file in options.files])


def _verify(file: str) -> int:
    from fedtorch.trust import record

    try:
        checks = record.verify(file)
    except (OSError, ValueError) as error:
        print(f"fedtorch: {error}", file=sys.stderr)
        return 1
    print(file)
    for check in checks:
        print(f"  {'ok' if check.holds else 'NOT SO':7} {check.name:11} {check.message}")
    return 0 if all(check.holds for check in checks) else 1
