"""The command `fedtorch`: which data sets there are, getting their files, checking runs on record, and joining runs.

    fedtorch data list
    fedtorch data get NAME …
    fedtorch record verify FILE …
    fedtorch join HOST:PORT --data FILE, and what else sites and their servers need: see fedtorch.sites_cli

Exit codes: 0 when all is well, 1 when a file could not be had, has a wrong checksum or is not as it was written, 2 for
a wrong call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedtorch import sites_cli
from fedtorch.data.cache import path, present
from fedtorch.data.catalogue import DataSet, data_sets, describe
from fedtorch.data.download import digest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, those of the process unless given; returns the exit code."""
    options = _parser().parse_args(arguments)
    if hasattr(options, "do"):
        return sites_cli.run(options)
    if options.action == "verify":
        return max([_verify(file) for file in options.files])
    if options.action == "list":
        _list()
        return 0
    try:
        chosen = [describe(name) for name in options.names]
    except ValueError as error:
        print(f"fedtorch: {error}", file=sys.stderr)
        return 2
    return max([_get(data_set) for data_set in chosen])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedtorch", description="Federated modelling on PyTorch and Lightning")
    commands = parser.add_subparsers(required=True)
    data = commands.add_parser("data", help="the data sets that loaders exist for")
    actions = data.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="what there is, and what is at hand")
    get = actions.add_parser("get", help="find or download the files, verify them, say where they come from")
    get.add_argument("names", nargs="+", metavar="NAME", help="as `fedtorch data list` names it")
    record = commands.add_parser("record", help="runs on record, see fedtorch.trust.record")
    verify = record.add_subparsers(dest="action", required=True).add_parser("verify", help="find what was changed")
    verify.add_argument("files", nargs="+", metavar="FILE", help="a record, the JSON file beside a checkpoint")
    sites_cli.add_commands(commands)
    return parser


def _list() -> None:
    rows = [("NAME", "FILES", "CLIENTS", "LICENCE", "WHAT")]
    rows += [(d.name, _files(d), d.clients, d.licence, d.what) for d in data_sets()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _files(data_set: DataSet) -> str:
    if not data_set.files:
        return "in scikit-learn"
    here = [present(data_set, file) for file in data_set.files]
    if all(here):
        return "at hand"
    return "download" if all(file.url or at_hand for file, at_hand in zip(data_set.files, here)) else "by hand"


def _get(data_set: DataSet) -> int:
    print(f"{data_set.name}: {data_set.what}")
    for label, value in (
        ("clients", data_set.clients),
        ("licence", data_set.licence),
        ("origin", data_set.page),
        ("citation", data_set.citation),
    ):
        print(f"  {label:9} {value}")
    if not data_set.files:
        print("  files     none: it ships inside scikit-learn")
    code = 0
    for file in data_set.files:
        try:
            found = path(data_set, file)
        except (OSError, ValueError) as error:
            print(f"fedtorch: {error}", file=sys.stderr)
            code = 1
        else:
            print(f"  {file.name}\n    path    {found}\n    sha256  {digest(found)} (verified)")
    return code


def _verify(file: str) -> int:
    from fedtorch.trust import record  # with the federation, which data sets do without

    try:
        checks = record.verify(file)
    except (OSError, ValueError) as error:
        print(f"fedtorch: {error}", file=sys.stderr)
        return 1
    print(file)
    for check in checks:
        print(f"  {'ok' if check.holds else 'NOT SO':7} {check.name:11} {check.message}")
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
