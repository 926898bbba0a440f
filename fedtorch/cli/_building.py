"""Build what a configuration names: `class_path` is called with `init_args`, the innermost first.

>>> built({"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}})
Linear(in_features=2, out_features=1, bias=True)
>>> built({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}).keywords  # the rest comes later
{'lr': 0.1}
>>> check({"algorithm": {"class_path": "fedtorch.fedavgg"}})
Traceback (most recent call last):
ValueError: Expected a name in fedtorch as class_path of algorithm, but got 'fedavgg'; like it are fedavg, ...
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def check(value: Any, where: str = "") -> None:
    """Refuse what the names of a configuration do not stand for, before anything is built.

    Raises:
        ValueError: a path to nothing, or an argument that its function does not take; the message says what there is.
    """
    for key, part in _parts(value):
        check(part, f"{where}.{key}" if where else str(key))
    if not _is_call(value) or "." not in str(value["class_path"]):
        return  # the parser knows some classes by their last name, such as Lightning's callbacks
    path = value["class_path"]
    signature = _signature(named(path, where))
    parameters = signature.parameters.values() if signature else ()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    open_ended = signature is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in value.get("init_args") or ():
        if name not in names and not open_ended:
            raise ValueError(f"Expected init_args of {path} in {where or 'the file'} among {names}, but got {name!r}")


def built(value: Any, where: str = "") -> Any:
    """Return the value with every `class_path` in it called; one that lacks arguments becomes a `functools.partial`.

    Raises:
        ValueError: what was called refuses its arguments; the message says where in the configuration.
    """
    parts = {key: built(part, f"{where}.{key}" if where else str(key)) for key, part in _parts(value)}
    if isinstance(value, list):
        return list(parts.values())
    if not _is_call(value):
        return parts if isinstance(value, Mapping) else value
    function, arguments = named(value["class_path"], where), parts.get("init_args") or {}
    arguments = {**arguments, **(parts.get("dict_kwargs") or {})}
    signature = _signature(function)
    try:
        if signature is not None:
            signature.bind(**arguments)
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


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a callable, None where it is written in C and has none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _is_call(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []
