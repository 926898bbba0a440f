"""Attributes in which a module keeps something from step to step, which all of its clients would share.

One object trains many clients, so a count, a running mean or a cache that is an attribute of Python cannot be a
client's own. Which attributes a step changes is seen by comparing them before and after. Each that changed is replaced
by an object that raises where it is used, and another step shows whether the module reads it. What is only stored
(`self.last = …`, a list that grows for a hook) stays allowed, and so does a cache that every client would fill alike.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fedtorch.expected import loaded
from fedtorch.federation.solvers.host_state import equal_or_nan
from fedtorch.federation.solvers.numbers import ARITHMETIC, READING
from fedtorch.federation.solvers.training_metrics import CollectionRecorder, MetricRecorder

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "builtins", "abc", "typing")
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, tuple)
_DEPTH = 3  # of plain objects and containers within attributes
_TABLES = frozenset(("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"))
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_WRITES = ("append", "appendleft", "extend", "add", "update", "clear", "__setitem__", "__setattr__")
_READS = READING | {"__delitem__", "__call__", "__getattr__", "__enter__", "__exit__"}

Slot = tuple[Any, Any]  # (a dict, or a cell of a closure; the key in it)


class StateRead(TypeError):
    """A module reads what it has kept from another step."""


class _Kept:
    """Stands in an attribute for what an earlier step has left there.

    Writing to it does nothing, and arithmetic gives another one, for a count that is only kept changes no number. To
    compare it, to convert it or to give it to an operation of torch raises.
    """

    def __init__(self, path: str, touched: list[str]) -> None:
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_touched", touched)

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        object.__getattribute__(self, "_touched").append(object.__getattribute__(self, "_path"))
        raise StateRead(object.__getattribute__(self, "_path"))

    def _write(self, *_: Any, **__: Any) -> None:
        return None

    def _kept(self, *_: Any) -> _Kept:
        return self

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        from torch.utils._pytree import tree_leaves

        kept = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        kept._raise()


for _name in _READS:
    setattr(_Kept, _name, _Kept._raise)
for _name in ARITHMETIC:
    setattr(_Kept, _name, _Kept._kept)
for _name in _WRITES:
    setattr(_Kept, _name, _Kept._write)


class PythonState:
    """The attributes of a module, of its classes, of its loss and of what their functions close over.

    Args:
        module: whose state.
        loss: of a module that is no LightningModule.
    """

    def __init__(self, module: nn.Module, loss: Any = None) -> None:
        self._module, self._loss = module, loss

    def snapshot(self) -> dict[tuple[int, Any], tuple[str, Slot, Any, Any]]:
        """Return (path, slot, value, copy of its content) of every attribute."""
        seen: set[int] = set()
        return {
            (id(place), key): (path, (place, key), value, _content(value))
            for path, place, key, value in self._walk(seen)
        }

    def _walk(self, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
        usual = _usual(_is_lightning(self._module))
        for name, part in self._module.named_modules():
            if isinstance(part, (MetricRecorder, CollectionRecorder)):
                continue
            prefix = f"{name}." if name else ""
            table = {key: value for key, value in vars(part).items() if key not in usual and key != "forward"}
            yield from _entries(prefix, vars(part), table, seen, 0)
            yield from _entries(prefix, part._modules, dict(part._modules), seen, 0)
            for kind in type(part).__mro__:
                if _library(kind):
                    continue
                own = {k: v for k, v in vars(kind).items() if not k.startswith("__") and not _is_code(v)}
                yield from _entries(f"{kind.__name__}.", kind, own, seen, 0)
                for function in (v for v in vars(kind).values() if isinstance(v, types.FunctionType)):
                    yield from _closed_over(function, seen)
        if self._loss is not None:
            if isinstance(self._loss, types.FunctionType):
                yield from _closed_over(self._loss, seen)
                yield from _entries(f"{self._loss.__name__}.", vars(self._loss), dict(vars(self._loss)), seen, 0)
            elif not isinstance(self._loss, (nn.Module, types.BuiltinFunctionType)) and hasattr(self._loss, "__dict__"):
                yield from _entries("loss.", vars(self._loss), dict(vars(self._loss)), seen, 0)
            elif isinstance(self._loss, nn.Module):
                yield from PythonState(self._loss)._walk(seen)


def changed(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, tuple[str, Slot, Any]]:
    """Return (path, slot, value before) of the attributes that are not what they were."""
    found = {}
    for key, (path, slot, value, content) in after.items():
        old = before.get(key)
        if old is None or not (old[2] is value or _equal(old[2], value)) or not _equal(old[3], content):
            found[key] = path, slot, None if old is None else old[2]
    return found


def refuse_read(name: str, paths: Sequence[str]) -> NoReturn:
    """Raise TypeError for a module that reads what it keeps from step to step."""
    raise TypeError(
        f"Expected steps that depend on tensors alone, but {name} keeps {', '.join(sorted(set(paths)))} from step to "
        "step and reads it, so that all clients would share it, such as a count; ask self.global_step or "
        "self.current_epoch, keep it in a buffer with buffers='local', or use ft.lightning_fit, where each client has "
        "a module of its own"
    )


def refuse_late(name: str, before: dict[Any, Any], after: dict[Any, Any], known: frozenset[str]) -> None:
    """Raise StateRead for attributes that steps change, but not the first ones, which `refuse_kept` looks at.

    Args:
        name: of the module.
        before, after: snapshots of a `PythonState` around steps.
        known: paths of what the first steps change.
    """
    inside = lambda path: any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in known)
    late = changed(before, {key: entry for key, entry in after.items() if not inside(entry[0])})
    if late:
        raise StateRead(
            f"Expected steps that change in Python what the first ones change, but {name} changes "
            f"{', '.join(sorted({path for path, *_ in late.values()}))} in a later step, which all clients would "
            "share; keep it in a buffer with buffers='local', or use ft.lightning_fit"
        )


def refuse_shared_counts(name: str, before: dict[Any, Any], after: dict[Any, Any], template: dict[Any, Any]) -> None:
    """Raise StateRead for numbers that a copy of a module has changed where all of the copies find them.

    Args:
        name: of the module.
        before, after: snapshots of the copy's `PythonState` around its steps.
        template: that of the module that copies are made of.
    """
    late = changed(before, {key: entry for key, entry in after.items() if key in template})
    counts = sorted(path for path, slot, old in late.values() if isinstance(old, (bool, int, float)))
    if counts:
        raise StateRead(
            f"Expected fits that change their own copy of {name} alone, but a fit changes {', '.join(counts)}, which "
            "the copies of all clients share, such as a count; keep it as an attribute of the module, or in a buffer"
        )


def refuse_kept(make: Callable[[], Any], name: str) -> frozenset[str]:
    """Return the paths of what steps of a fresh module change, unless one reads what an earlier one has kept.

    Args:
        make: returns a fresh copy as (its `PythonState`, a function that takes a step of client 0, 1 or 2 on it).
        name: of the module.

    Raises:
        TypeError: a step reads it; the message names the attribute and the ways out.
    """
    state, step = make()
    start = state.snapshot()
    try:
        step(0)
        middle = state.snapshot()
        written = changed(start, middle)
        if not written:
            return frozenset()
        step(1)
        again = changed(middle, state.snapshot())
        rest = {key: entry for key, entry in written.items() if key not in again}
        alike, same_step = _filled_alike(make, state, step, rest) if rest else (True, True)
        if not alike:
            again = {**again, **rest}
        paths = frozenset(path for path, *_ in (*written.values(), *again.values()))
        touched: list[str] = []
        for path, slot, _ in again.values():
            _put(slot, _Kept(path, touched))
        try:
            if again:
                step(1)
        except Exception:  # also where it was given to what takes no such object
            refuse_read(name, touched or [path for path, *_ in again.values()])
        if touched or not same_step:  # `is None` cannot be seen, but the step is another one
            refuse_read(name, touched or [path for path, *_ in rest.values()])
        return paths
    finally:
        _restore(start)


def _restore(start: dict[Any, Any]) -> None:
    """Put attributes back to where they were, for classes, closures and files are the user's own."""
    for _, slot, value, content in start.values():
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(content)
        elif isinstance(value, deque):
            value.clear()
            value.extend(content)
        place, key = slot
        if isinstance(place, list):
            continue  # its content is what it was
        now = place.get(key) if isinstance(place, dict) else getattr(place, key, None)
        if now is not value:
            _put(slot, value)


def _filled_alike(
    make: Callable[[], Any], state: Any, step: Callable[[int], Any], rest: dict[Any, Any]
) -> tuple[bool, bool]:
    """Return whether other clients fill the same caches, and whether their steps are the same with them and without."""
    values = {path: value for path, _, value, _ in state.snapshot().values()}
    alike = same_step = True
    for client in (1, 2):
        other, fresh = make()
        try:
            alone = fresh(client)
        except Exception:  # of a module that takes no other number of rows
            if client == 2:
                continue
            raise
        by_path = {path: value for path, _, value, _ in other.snapshot().values()}
        alike &= all(path in by_path and _equal(by_path[path], values.get(path)) for path, *_ in rest.values())
        same_step &= _equal(alone, step(client))
    return alike, same_step


def _entries(
    prefix: str, place: Any, table: dict[str, Any], seen: set[int], depth: int
) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, value in table.items():
        yield f"{prefix}{key}", place, key, value
        yield from _within(f"{prefix}{key}", value, seen, depth)


def _within(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """Return what a value refers to: the attributes of a plain object, the elements of a container, a function's."""
    function = getattr(value, "__func__", getattr(value, "func", value))  # of a method, or of a partial
    if isinstance(function, types.FunctionType):
        yield from _closed_over(function, seen)
    simple = isinstance(value, (*_SIMPLE, Tensor, nn.Module, type, types.ModuleType)) or _is_code(value)
    if simple or depth >= _DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        table = {key: each for key, each in pairs if not isinstance(each, _SIMPLE)}
        for key, each in table.items():
            yield f"{path}[{key!r}]", value, key, each
            yield from _within(f"{path}[{key!r}]", each, seen, depth + 1)
    elif hasattr(value, "__dict__") and not _library(type(value)):
        yield from _entries(f"{path}.", vars(value), dict(vars(value)), seen, depth + 1)


def _closed_over(function: types.FunctionType, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Return what a function closes over, and what it names of its file: values, objects, classes and functions."""
    if id(function) in seen or _installed(function.__module__):
        return
    seen.add(id(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if id(cell) not in seen and name != "__class__":
            seen.add(id(cell))
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if not _is_code(value) and not isinstance(value, nn.Module):
                yield f"{function.__name__}.{name}", cell, "cell_contents", value
            yield from _within(f"{function.__name__}.{name}", value, seen, 0)
    places = [function.__globals__]
    for name in function.__code__.co_names:
        for place in [place for place in places if name in place]:
            value = place[name]
            if isinstance(value, types.ModuleType):
                places += [] if _installed(value.__name__) else [vars(value)]
            elif isinstance(value, type):
                if id(value) not in seen and not _installed(value.__module__):
                    seen.add(id(value))
                    own = {k: v for k, v in vars(value).items() if not k.startswith("__") and not _is_code(v)}
                    yield from _entries(f"{value.__name__}.", value, own, seen, 0)
            elif _is_code(value):
                yield from _within(name, value, seen, 0)
            elif not isinstance(value, nn.Module) and not _library(type(value), but=("builtins",)):
                yield from _entries("", place, {name: value}, seen, 0)


def _put(slot: Slot, value: Any) -> None:
    place, key = slot
    if isinstance(place, (dict, list)):
        place[key] = value
    else:
        setattr(place, key, value)


def _library(kind: type, but: Sequence[str] = ()) -> bool:
    root = kind.__module__.split(".")[0]
    return root in _LIBRARIES and root not in but


def _installed(name: str | None) -> bool:
    """Return whether a module of Python is a library, or this package, whose state is none of the user's."""
    root = (name or "").split(".")[0]
    path = getattr(sys.modules.get(name or ""), "__file__", None)
    return root in (*_LIBRARIES, __name__.split(".")[0]) or (path or "").startswith(_INSTALLED)


def _is_code(value: Any) -> bool:
    kinds = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, classmethod, staticmethod, property)
    return isinstance(value, kinds)


@functools.cache
def _usual(lightning: bool) -> frozenset[str]:
    """Return the names of attributes that torch and Lightning keep on every module."""
    own = vars(loaded("lightning.pytorch", "LightningModule")()) if lightning else {}
    names = {*vars(nn.Module()), *own, *_TABLES, "log", "log_dict", "trainer", "_trainer", "_fabric"}
    return frozenset(names - {"training"})


def _is_lightning(module: nn.Module) -> bool:
    return isinstance(module, loaded("lightning.pytorch", "LightningModule"))


def _content(value: Any) -> Any:
    """Return a copy of a container or the version of a tensor, by which a change in place is seen."""
    if isinstance(value, Tensor):
        return None if torch._C._functorch.is_functorch_wrapped_tensor(value) else value._version
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, set, deque)):
        return list(value)
    if isinstance(value, (*_SIMPLE, nn.Module, type, types.ModuleType)) or _is_code(value):
        return None
    kind = type(value)
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return None if plain and hasattr(value, "__dict__") else _reduced(value, _DEPTH)


def _reduced(value: Any, depth: int) -> Any:
    """Return the content of an object that has no attributes to look at, as a copy of it would be made of."""
    if isinstance(value, _SIMPLE) or callable(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_reduced(each, depth) for each in value]
    if isinstance(value, dict):
        return {key: _reduced(each, depth) for key, each in value.items()}
    if depth == 0 or _library(type(value), but=("builtins",)):
        return None
    with warnings.catch_warnings(action="ignore"):  # Python will not copy iterators of itertools from 3.14 on
        try:
            parts = value.__reduce_ex__(2)
        except Exception:  # it cannot be copied, and says so in its own way
            return None
    return [_reduced(each, depth - 1) for each in parts] if isinstance(parts, tuple) else None


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same, tensors to the bit."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
            return False
        if one.dtype != other.dtype or any(map(torch._C._functorch.is_functorch_wrapped_tensor, (one, other))):
            return False
        return bool(equal_or_nan(one, other).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (*_SIMPLE, set)):
        return bool(one == other) or (one != one and other != other)
    return False
