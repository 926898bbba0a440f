"""Say what a misspelt option was meant to be, at its full path.

>>> did_you_mean("--trainer.max_epoch", ["--cohort", "--trainer.max_epochs", "--algorithm.local.epochs"])
'; did you mean --trainer.max_epochs?'
>>> did_you_mean("--epochs", ["--cohort", "--trainer.max_epochs", "--algorithm.local.epochs"])  # its path is missing
'; did you mean --algorithm.local.epochs?'
>>> did_you_mean("--colour", ["--metrics", "--data"])
''
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_MOST = 3  # names that are suggested


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error: the known names that are most like one that is none, as a question."""
    known = list(dict.fromkeys(known))
    owner, _, last = name.rpartition(".")
    beside = {each: each[len(owner) :].lstrip(".") for each in known if each.rpartition(".")[0] == owner}
    near = difflib.get_close_matches(last, beside.values(), n=1, cutoff=0.6 if owner else 0.75)
    if near:
        near = [each for each, end in beside.items() if end == near[0]]
    else:  # its path is missing, or another one
        ends: dict[str, list[str]] = {}
        for each in known:
            ends.setdefault(each.lstrip("-").rpartition(".")[2], []).append(each)
        last = last.lstrip("-")
        likes = [last] if last in ends else difflib.get_close_matches(last, ends, n=_MOST, cutoff=0.7)
        near = [each for like in likes for each in ends[like]][:_MOST]
    return f"; did you mean {' or '.join([', '.join(near[:-1]), near[-1]] if near[1:] else near)}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Asks what a misspelt option or command was meant to be; so do the parsers of its commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, once the options' names are checked."""
        if args is not None and self.prefix_chars == "-":
            self._check_names(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with a message, after the usage."""
        wrong = re.search(r"invalid choice: '(\S+)'", message)
        if wrong:
            choices = [name for action in self._actions for name in action.choices or ()]
            message += did_you_mean(wrong[1], choices)
        super().error(message)

    def _check_names(self, arguments: Sequence[str]) -> None:
        """End where one is no option; what belongs to a command or to a program behind it is left to that."""
        known, rest = self._option_string_actions, iter(arguments)
        behind = any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)
        for argument in rest:
            if not argument.startswith("--"):
                if behind:
                    return
                continue
            name, equals, _ = argument.partition("=")
            if argument == "--":
                return
            near = [known[name]] if name in known else [known[each] for each in known if each.startswith(name)]
            if not near:
                self.error(f"expected an option of {self.prog}, but got {name}{did_you_mean(name, known)}")
            if near[0].nargs is None and not equals:
                next(rest, None)
