"""`fedtorch data`: list the data sets, show their licences, and get their files.

fedtorch data list
fedtorch data licences [NAME …]
fedtorch data get NAME …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtorch.data.catalogue import DataSet


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    data = commands.add_parser("data", help="the data sets that have loaders")
    actions = data.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="list the data sets, and whether their files are present").set_defaults(run=_list)
    licences = actions.add_parser("licences", help="show origins, licences and citations")
    licences.add_argument("names", nargs="*", metavar="NAME", help="a name from `fedtorch data list`; default: all")
    licences.set_defaults(run=partial(_each, _attribute))
    get = actions.add_parser("get", help="find or download the files, verify them, and show their origin")
    get.add_argument("names", nargs="+", metavar="NAME", help="a name from `fedtorch data list`")
    get.set_defaults(run=partial(_each, _get))


def _list(_: argparse.Namespace) -> int:
    from fedtorch.data.cache import data_sets

    rows = [("NAME", "FILES", "CLIENTS", "LICENCE", "WHAT")]
    rows += [(d.name, _files(d), d.clients, d.licence, d.what) for d in data_sets()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return 0


def _files(data_set: DataSet) -> str:
    from fedtorch.data.cache import is_present

    if not data_set.files:
        return "in scikit-learn"
    ready = [is_present(data_set, file) for file in data_set.files]
    if all(ready):
        return "at hand"
    return "download" if all(file.url or at_hand for file, at_hand in zip(data_set.files, ready)) else "by hand"


def _each(do: Callable[[DataSet], int], options: argparse.Namespace) -> int:
    """Call `do` with the named data sets, or all, and return its worst exit code."""
    from fedtorch.data.cache import data_sets
    from fedtorch.data.catalogue import describe

    try:
        chosen = [describe(name) for name in options.names] or data_sets()
    except ValueError as error:
        print(f"fedtorch: {error}", file=sys.stderr)
        return 2
    return max([do(data_set) for data_set in chosen])


def _attribute(data_set: DataSet) -> int:
    print(f"{data_set.name}: {data_set.what}")
    for label, value in (
        ("clients", data_set.clients),
        ("licence", data_set.licence),
        ("origin", data_set.page),
        ("citation", data_set.citation),
    ):
        print(f"  {label:9} {value}")
    return 0


def _get(data_set: DataSet) -> int:
    from fedtorch.data.cache import path
    from fedtorch.data.download import digest

    _attribute(data_set)
    if not data_set.files:
        print("  files     none: it ships inside scikit-learn")
    code = 0
    for file in data_set.files:
        try:
            file_path = path(data_set, file)
        except (OSError, ValueError) as error:
            print(f"fedtorch: {error}", file=sys.stderr)
            code = 1
        else:
            print(f"  {file.name}\n    path    {file_path}\n    sha256  {digest(file_path)} (verified)")
    return code
