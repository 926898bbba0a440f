"""Names in configuration files and options: each is refused at its full path, before anything is parsed or built.

A file says `algorithm.init_args.local.init_args.epochs`, an option `--algorithm.local.epochs`. What there is follows
from the functions that the file names, the arguments of the Trainer and those of the federation.

>>> check({"class_path": "torch.nn.Linear", "init_args": {"in_feature": 2}}, "module")
Traceback (most recent call last):
ValueError: Expected init_args of torch.nn.Linear in module among ['in_features', ...], but got 'in_feature'...
>>> check({"algorithm": {"class_path": "fedtorch.fedavgg"}})
Traceback (most recent call last):
ValueError: Expected a name in fedtorch as class_path of algorithm, but got 'fedavgg'; like it are fedavg, ...
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import lightning as L
import yaml

from fedtorch.cli._building import is_call, named, parts, signature
from fedtorch.cli._misspelt import did_you_mean

_CALL = ("class_path", "init_args", "dict_kwargs")
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")  # of a function or a class
_ELSEWHERE = {
    "rounds": "trainer.max_epochs",
    "seed": "seed_everything",
    "callbacks": "trainer.callbacks",
}  # of `ft.run`
_HOMES = (L.pytorch.callbacks, L.pytorch.loggers, L.pytorch.strategies, L.pytorch.profilers)  # of classes by last name


def check(value: Any, where: str = "") -> None:
    """Refuse what the names of a configuration do not stand for, before anything is built.

    Raises:
        ValueError: a path to nothing, or an argument that its function does not take; the message says what there is.
    """
    for key, part in parts(value):
        check(part, f"{where}.{key}" if where else str(key))
    if not is_call(value):
        return
    path = value["class_path"]
    names, begin = _arguments(path, where), f"{where}." if where else ""
    known = [f"{begin}{key}" for key in _CALL] + [f"{begin}init_args.{name}" for name in names or ()]
    for key in value:
        if key not in _CALL:
            raise ValueError(
                f"Expected class_path and init_args of {path} in {where or 'the file'}, but got "
                f"{key!r}{did_you_mean(f'{begin}{key}', known)}"
            )
    for name in value.get("init_args") or ():
        if names is not None and name not in names:
            raise ValueError(
                f"Expected init_args of {path} in {where or 'the file'} among {names}, but got "
                f"{name!r}{did_you_mean(f'{begin}init_args.{name}', known)}"
            )


def check_keys(content: Any, keys: Sequence[str], file: Any) -> None:
    """Refuse keys at the top of a file, and of its `trainer`, that are none.

    Raises:
        ValueError: the message says what there is.
    """
    if not isinstance(content, dict):
        raise ValueError(f"Expected keys among {list(keys)} in {file}, but got {content!r}")
    known = [*keys, *(f"trainer.{name}" for name in _trainer())]
    for key in content:
        if str(key).split(".")[0] not in keys:
            raise ValueError(
                f"Expected keys among {list(keys)} in {file}, but got {str(key).split('.')[0]!r}"
                f"{_elsewhere(str(key)) or did_you_mean(str(key), known)}"
            )
    for key in [*content, *(f"trainer.{key}" for key in content.get("trainer") or ())]:
        if str(key).startswith("trainer.") and str(key).split(".")[1] not in _trainer():
            raise ValueError(f"Expected arguments of a Trainer in {file}, but got {key}{did_you_mean(str(key), known)}")


def check_options(arguments: Sequence[str], content: Mapping[str, Any], others: Sequence[str]) -> None:
    """Refuse options that are none.

    Args:
        arguments: of the command.
        content: of its files, with the keys that no file has.
        others: options besides the keys.

    Raises:
        ValueError: the message says what was meant.
    """
    root = _Names([*content, *others], {key: _names(value, key) for key, value in content.items()})
    given = {name: _names(value, name) for name, value in (content.get("trainer") or {}).items()}
    root.below["trainer"] = _Names(_trainer(), given)
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        option, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not option:
            continue
        path = [name for name in option.removesuffix("+").split(".") if name not in _CALL]
        wrong = root.first_unknown(path)
        if wrong is not None:
            known = [f"--{each}" for each in root.options()]
            part, rest = ".".join(path[: wrong + 1]), "".join(f".{name}" for name in path[wrong + 1 :])
            meant = _elsewhere(option, "--") or did_you_mean(f"--{part}", known)
            raise ValueError(
                f"Expected an option, but got --{option}{meant.removesuffix('?')}{(rest + '?') * bool(meant)}"
            )
        root.take(path, value if equals else following)


class _Names(NamedTuple):
    """What can be named within a value: the arguments of what it calls, None where nobody can tell before parsing."""

    known: Sequence[str] | None
    below: dict[str, _Names]

    def first_unknown(self, path: Sequence[str]) -> int | None:
        """Return the place in a path of the first name that is none; None where there is none such."""
        if not path or self.known is None:
            return None
        if path[0] not in self.known:
            return 0
        wrong = self.below[path[0]].first_unknown(path[1:]) if path[0] in self.below else None
        return None if wrong is None else wrong + 1

    def options(self) -> Iterator[str]:
        """Return the paths of all names."""
        for name in self.known or ():
            yield name
            yield from (f"{name}.{each}" for each in (self.below[name].options() if name in self.below else ()))

    def take(self, path: Sequence[str], text: str, where: str = "") -> None:
        """Put what an option says below a path, where later options look for their own."""
        if not path:
            return
        where, old = f"{where}.{path[0]}".lstrip("."), self.below.get(path[0], _Names(None, {}))
        self.below[path[0]] = old
        if path[1:]:
            old.take(path[1:], text, where)
        elif _PATH.fullmatch(text):
            with nullcontext() if old.known is not None else suppress(ValueError):
                self.below[path[0]] = _Names(_arguments(text, where), old.below)
        elif text.startswith("{"):
            with suppress(yaml.YAMLError):
                self.below[path[0]] = _names(yaml.safe_load(text), where)


def _names(value: Any, where: str) -> _Names:
    """Return what can be named within a value; of a list, within its last."""
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, str) and "." in value and _PATH.fullmatch(value):
        with suppress(ValueError):
            return _Names(_arguments(value, where), {})
    if not is_call(value):
        return _Names(None, {})
    below = {name: _names(part, f"{where}.{name}") for name, part in (value.get("init_args") or {}).items()}
    return _Names(_arguments(value["class_path"], where), below)


def _arguments(path: Any, where: str) -> list[str] | None:
    """Return the names of a function's arguments; None where it takes any, or cannot tell."""
    path = str(path)
    homes = [home for home in _HOMES if hasattr(home, path)]  # Lightning's are known by their last names
    if "." not in path and not homes:
        return None
    called = signature(getattr(homes[0], path) if homes else named(path, where))
    if called is None or any(p.kind is p.VAR_KEYWORD for p in called.parameters.values()):
        return None
    return [p.name for p in called.parameters.values() if p.kind is not p.VAR_POSITIONAL]


def _trainer() -> list[str]:
    return list(inspect.signature(L.Trainer).parameters)


def _elsewhere(name: str, dashes: str = "") -> str:
    like = difflib.get_close_matches(name, _ELSEWHERE, n=1, cutoff=0.8)
    return f"; did you mean {dashes}{_ELSEWHERE[like[0]]}?" if like else ""
