"""Suggestions for misspelt options, keys and commands.

>>> did_you_mean("trainer.max_epoch", ["cohort", "trainer.max_epochs", "algorithm.local.epochs"])
'; did you mean trainer.max_epochs?'
>>> did_you_mean("epochs", ["cohort", "trainer.max_epochs", "algorithm.local.epochs"])  # its path is missing
'; did you mean algorithm.local.epochs?'
>>> did_you_mean("colour", ["metrics", "data"])
''
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known dotted names most similar to `name`, to append to an error, or ""."""
    parts, paths = name.split("."), [each.split(".") for each in known]
    for i, part in enumerate(parts):
        beside = sorted({path[i] for path in paths if path[:i] == parts[:i] and path[i:]})
        if part in beside:
            continue
        near = difflib.get_close_matches(part, beside, n=1, cutoff=0.6 if i else 0.75)
        if near:
            return f"; did you mean {'.'.join([*parts[:i], near[0], *parts[i + 1 :]])}?"
        break
    ends = {path[-1] for path in paths}
    like = [parts[-1]] if parts[-1] in ends else difflib.get_close_matches(parts[-1], ends, n=3, cutoff=0.7)
    near = sorted({".".join(path) for path in paths if path[-1] in like})[:3]
    return f"; did you mean {' or '.join(near)}?" if near else ""


class Parser(argparse.ArgumentParser):
    """A parser that suggests options and commands for misspelt ones; so do the parsers of its commands."""

    def error(self, message: str) -> NoReturn:
        """Exit with the usage, the message and a suggestion."""
        wrong = re.search(r"invalid choice: '(\S+)'|unrecognized arguments: (--[^\s=]+)", message)
        super().error(message + (did_you_mean(wrong[1] or wrong[2], _names(self)) if wrong else ""))


def _names(parser: argparse.ArgumentParser) -> Iterable[str]:
    """Yield the options and commands of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        for name, command in action.choices.items() if isinstance(action.choices, dict) else ():
            yield from (name, *_names(command))
