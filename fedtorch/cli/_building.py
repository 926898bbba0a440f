"""Build what a configuration names: `class_path` is called with `init_args`, the innermost first.

>>> built({"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}})
Linear(in_features=2, out_features=1, bias=True)
>>> built({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}).keywords  # the rest comes later
{'lr': 0.1}
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def built(value: Any, where: str = "") -> Any:
    """Return the value with every `class_path` in it called; one that lacks arguments becomes a `functools.partial`.

    Raises:
        ValueError: what was called refuses its arguments; the message says where in the configuration.
    """
    made = {key: built(part, f"{where}.{key}" if where else str(key)) for key, part in parts(value)}
    if isinstance(value, list):
        return list(made.values())
    if not is_call(value):
        return made if isinstance(value, Mapping) else value
    function, arguments = named(value["class_path"], where), made.get("init_args") or {}
    arguments = {**arguments, **(made.get("dict_kwargs") or {})}
    called = signature(function)
    try:
        if called is not None:
            called.bind(**arguments)
    except TypeError:
        return functools.partial(function, **arguments)
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} (in {where})") from error


def named(path: str, where: str = "") -> Callable[..., Any]:
    """Return the function or class of a dotted path, which may lead through classes.

    Raises:
        ValueError: there is none.
    """
    place = f" as class_path of {where}" if where else " as class_path"
    parts = path.split(".")
    try:
        value = importlib.import_module(parts[0])
    except ImportError as error:
        raise ValueError(f"Expected a package{place}, but got {parts[0]!r}: {error}") from error
    for i, name in enumerate(parts[1:], 1):
        value = _attribute(value, ".".join(parts[:i]), name, place)
    if not callable(value):
        raise ValueError(f"Expected a function or a class{place}, but got {path!r}, which is neither")
    return value


def _attribute(owner: Any, path: str, name: str, place: str) -> Any:
    if not hasattr(owner, name) and inspect.ismodule(owner):
        try:
            importlib.import_module(f"{path}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{path}.{name}":
                raise
    try:
        return getattr(owner, name)
    except AttributeError:
        there: Sequence[str] = [known for known in dir(owner) if not known.startswith("_")]
        like = difflib.get_close_matches(name, there, n=8, cutoff=0.5) or there
        raise ValueError(f"Expected a name in {path}{place}, but got {name!r}; like it are {', '.join(like)}") from None


def signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a callable, None where it is written in C and has none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def is_call(value: Any) -> bool:
    """Return whether a value of a configuration names something to be called."""
    return isinstance(value, Mapping) and "class_path" in value


def parts(value: Any) -> list[tuple[Any, Any]]:
    """Return what is directly within a value, by its key or place."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []
