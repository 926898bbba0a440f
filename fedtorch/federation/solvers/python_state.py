"""Detection of Python attributes in which a module stores state between steps, which its clients would share.

One object trains many clients, so a count, a running mean or a cache in a Python attribute cannot be a client's own.
Attributes that a step changes are found by a comparison before and after. Each of these is replaced by an object that
raises on use, in every later step. Attributes that are only written (`self.last = …`, a list that grows in a hook) stay
allowed, and so does a cache with the same content for every client.
"""

from __future__ import annotations

import functools
import operator
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedtorch import functional
from fedtorch.expected import loaded
from fedtorch.federation.solvers.host_state import equal_or_nan
from fedtorch.federation.solvers.training_metrics import CollectionRecorder, MetricRecorder

# Python's operations on numbers, for objects that stand in for one.
_BOTH_WAYS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_COMPARED = "lt le gt ge eq ne"
_READ = "bool int float complex index len iter next contains getitem format str round trunc floor ceil"
ARITHMETIC = frozenset(
    [f"__{side}{name}__" for name in _BOTH_WAYS.split() for side in ("", "r")]
    + [f"__{name}__" for name in ["neg", "pos", "abs", "invert"]]
)
READING = frozenset(f"__{name}__" for name in (*_COMPARED.split(), *_READ.split()))
NUMBER_OPERATIONS = ARITHMETIC | READING


_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "builtins", "abc", "typing")
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, tuple)
_DEPTH = 3  # depth of plain objects and containers within attributes
_TABLES = frozenset(("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"))
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_WRITES = ("append", "appendleft", "extend", "add", "update", "clear")
_READS = READING - {"__getitem__"} | {"__delitem__", "__call__", "__enter__", "__exit__"}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Slot = tuple[Any, Any]  # (a dict, or a cell of a closure; the key in it)
Snapshot = dict[tuple[int, Any], tuple[str, Slot, Any, Any]]


class StateRead(TypeError):
    """A module reads state that it has stored in another step."""


class _Kept:
    """Stand-in for the value that an earlier step has left in an attribute.

    Writes go to the original value, and arithmetic returns another stand-in, because a count that is only stored
    changes no number. Its elements and attributes are stand-ins too. Comparison, conversion, calls and operations of
    torch raise.
    """

    def __init__(self, path: str, value: Any, read: Callable[[str], NoReturn]) -> None:
        for name, each in (("_path", path), ("_value", value), ("_read", read)):
            object.__setattr__(self, name, each)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # `isinstance` sees the original's class
        return type(_value_of(self))

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        read: Callable[[str], NoReturn] = object.__getattribute__(self, "_read")
        read(object.__getattribute__(self, "_path"))

    def _of(self, value: Any) -> _Kept:
        """Return the stand-in in a value, or from which it was computed."""
        return _Kept(object.__getattribute__(self, "_path"), value, object.__getattribute__(self, "_read"))

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        value = getattr(_value_of(self), name)
        return _writing(value) if name in _WRITES else _Kept._of(self, value)

    def __getitem__(self, key: Any) -> Any:
        return _Kept._of(self, _value_of(self)[_value_of(key)])

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_value_of(self), name, _value_of(value))

    def __setitem__(self, key: Any, value: Any) -> None:
        _value_of(self)[_value_of(key)] = _value_of(value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        from torch.utils._pytree import tree_leaves

        slot_value = next(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is _Kept)
        _Kept._raise(slot_value)


def _value_of(value: Any) -> Any:
    return object.__getattribute__(value, "_value") if type(value) is _Kept else value


def refuse_stand_in(value: Any) -> None:
    """Raise StateRead for a stand-in, or a value computed from one."""
    if type(value) is _Kept:
        _Kept._raise(value)


def _writing(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that writes its arguments, and returns None."""

    def write(*args: Any, **named: Any) -> None:
        function(*map(_value_of, args), **{name: _value_of(value) for name, value in named.items()})

    return write


def _computing(name: str) -> Callable[..., _Kept]:
    """Return an operation that computes on Python numbers, and leaves other values unchanged."""
    swapped = name.startswith("__r") and name != "__rshift__"
    operation = getattr(operator, f"__{name.strip('_')[swapped:]}__", divmod)

    def compute(self: _Kept, *others: Any) -> _Kept:
        values = [_value_of(each) for each in (self, *others)]
        if any(isinstance(each, Tensor) and each.requires_grad for each in values):  # it is part of a loss
            _Kept._raise(self)
        if all(isinstance(each, (int, float, complex)) for each in values):
            values[0] = operation(*(reversed(values) if swapped else values))
        return _Kept._of(self, values[0])

    return compute


for _name in _READS:
    setattr(_Kept, _name, _Kept._raise)
for _name in ARITHMETIC:
    setattr(_Kept, _name, _computing(_name))


class KeptSlots:
    """Attributes that calls write and later calls must not read.

    Args:
        refuse: raises for the path of one that is read.
    """

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        self._slots: dict[tuple[int, Any], tuple[str, Slot]] = {}
        self._refuse = refuse
        self._touched: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, attributes: Mapping[Any, tuple[str, Slot, Any]]) -> None:
        """Add attributes, as `changed` returns them."""
        self._slots |= {key: (path, slot) for key, (path, slot, _) in attributes.items()}

    def hide(self) -> None:
        """Replace the present values by stand-ins that raise on use."""
        for path, slot in self._slots.values():
            value = _held(slot)
            if value is not None and type(value) is not _Kept:
                _put(slot, _Kept(path, value, self._read))

    def show(self) -> None:
        """Restore the values; raise if one was read and the error was caught."""
        for _, slot in self._slots.values():
            value = _held(slot)
            if type(value) is _Kept:
                _put(slot, _value_of(value))

    def check(self) -> None:
        """Raise if one was read, also where the error was caught."""
        if self._touched:
            self._refuse(self._touched[0])

    def _read(self, path: str) -> NoReturn:
        self._touched.append(path)
        self._refuse(path)


class PythonState:
    """Python state outside of the clients' tensors that steps could change.

    These are the attributes of a module, of its parameters and classes, of its loss, hooks and maker of optimisers, the
    closures of their functions, and other modules found there, with their parameters and buffers.

    Args:
        module: the module to inspect.
        loss: for a module that is not a LightningModule.
        make: parameters -> its optimiser, if it is given.
    """

    def __init__(self, module: nn.Module, loss: Any = None, make: Any = None) -> None:
        self._module, self._functions = module, {"loss": loss, "optimizer": make}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: a tensor, and its last seen copy

    def snapshot(self) -> Snapshot:
        """Return (path, slot, value, copy of its content) of every attribute; a tensor is copied when it changes."""
        attributes: Snapshot = {}
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for path, place, key, value in self._walk():
            content = _content(value)
            if isinstance(value, Tensor) and content is not None and content[0] is value:
                known = copies.get(id(value)) or self._copies.get(id(value))
                if known is None or not _equal(known[1], value):
                    known = value, value.detach().clone()
                copies[id(value)] = known
                content = known[1], *content[1:]
            attributes[id(place), key] = path, (place, key), value, content
        self._copies = copies
        return attributes

    @contextmanager
    def left_alone(self, before: Snapshot | None = None) -> Iterator[None]:
        """Restore state outside the module, such as a closure's, the loss's or a global; see `restore`.

        Args:
            before: snapshot to restore after an error only; None: restore the present state in any case.
        """
        start = self.snapshot() if before is None else before
        try:
            yield
        except BaseException:
            self.restore(start)
            raise
        if before is None:
            self.restore(start)

    def restore(self, before: Snapshot, own: bool = False) -> None:
        """Restore state outside the module, because classes, closures and files are the user's; with `own`, the
        module's too.

        Args:
            before: an earlier snapshot.
            own: whether attributes of the module are put back that there were.
        """
        parts = {id(vars(part)) for part in self._module.modules()}
        new = {key for key in self._places() if key not in before and key[0] not in parts}
        _restore({key: entry for key, entry in before.items() if own or key[0] not in parts})
        for key, place in self._places().items() if new else ():
            if key in new and isinstance(place, dict):
                place.pop(key[1], None)

    def _places(self) -> dict[tuple[int, Any], Any]:
        """Return the container of every attribute, by the key that snapshots have for the attribute."""
        return {(id(place), key): place for _, place, key, _ in self._walk()}

    def _walk(self) -> Iterator[tuple[str, Any, Any, Any]]:
        seen = {id(part) for part in self._module.modules()}
        yield from _of_module("", self._module, seen)
        for name, function in self._functions.items():
            if isinstance(function, types.FunctionType):
                yield from _closed_over(function, seen)
            elif not _is_code(function):
                yield from _within(name, function, seen, 0)


def _of_module(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield a module's attributes; also its parameters and buffers if it is not one of `seen`."""
    start = f"{path}." if path else ""
    for name, part in module.named_modules():
        if isinstance(part, (MetricRecorder, CollectionRecorder)) or (path and id(part) in seen):
            continue
        seen.add(id(part))
        prefix, usual = f"{start}{name}." if name else start, _usual(type(part))  # type: ignore[arg-type]
        table = {key: value for key, value in vars(part).items() if key not in usual and key != "forward"}
        yield from _entries(prefix, vars(part), table, seen, 0)
        if part._modules:
            yield from _entries(prefix, part._modules, dict(part._modules), seen, 0)
        for tensors in (part._parameters, part._buffers) if path else ():
            yield from _entries(prefix, tensors, dict(tensors), seen, 0)
        for key, parameter in part._parameters.items():
            # Torch marks parameters of custom classes, such as quantised ones, by `_is_param`.
            entries = {} if parameter is None else {k: v for k, v in vars(parameter).items() if k != "_is_param"}
            if entries:
                yield from _entries(f"{prefix}{key}.", vars(parameter), entries, seen, 0)
            if parameter is not None and parameter._backward_hooks:
                yield from _hooked(f"{prefix}{key}", parameter._backward_hooks, seen)
        for key in _HOOKS:
            if vars(part)[key]:
                yield from _hooked(prefix, vars(part)[key], seen)
        for kind in type(part).__mro__ if not _library(type(part)) else ():  # bases of a library's are a library's
            if _library(kind):
                continue
            entries = {k: v for k, v in vars(kind).items() if not k.startswith("__") and not _is_code(v)}
            yield from _entries(f"{kind.__name__}.", kind, entries, seen, 0)
            for value in vars(kind).values():
                if isinstance(value, property):
                    functions = [value.fget, value.fset]
                else:
                    functions = [value.__func__ if isinstance(value, (staticmethod, classmethod)) else value]
                for function in functions:
                    if isinstance(function, types.FunctionType):
                        yield from _closed_over(function, seen)


def _hooked(path: str, hooks: Mapping[Any, Any], seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the state of hooks."""
    for hook in hooks.values():
        yield from _within(f"{path.rstrip('.')} hook", hook, seen, 0)


def changed(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, tuple[str, Slot, Any]]:
    """Return (path, slot, value before) of the changed attributes."""
    differences = {}
    for key, (path, slot, value, content) in after.items():
        old = before.get(key)
        if old is None or not (old[2] is value or _equal(old[2], value)) or not _equal(old[3], content):
            differences[key] = path, slot, None if old is None else old[2]
    return differences


def refuse_read(name: str, paths: Sequence[str]) -> NoReturn:
    """Raise StateRead for a module that reads its state of earlier steps."""
    raise StateRead(
        f"Expected steps that depend on tensors alone, but {name} keeps {', '.join(sorted(set(paths)))} from step to "
        "step and reads it, so that all clients would share it, such as a count; ask self.global_step or "
        "self.current_epoch, keep it in a buffer with buffers='local', or use ft.lightning_fit, where each client has "
        "a module of its own"
    )


@contextmanager
def hidden(loss: Any, before: Mapping[Any, Any], name: str) -> Iterator[None]:
    """Let steps inside raise StateRead if they read an attribute that each of them changes.

    Args:
        loss: a `StackedLoss`.
        before: a snapshot of the `PythonState` of its module.
        name: name of the module.
    """
    read_back = {key: entry[:3] for key, entry in before.items() if entry[0] in loss.rewritten}
    if not read_back:
        yield
        return
    slots = loss.slots = KeptSlots(lambda path: refuse_read(name, [path]))
    slots.add(read_back)
    try:
        yield
        slots.check()
    finally:
        slots.show()
        loss.slots = None


def refuse_late(name: str, before: dict[Any, Any], after: dict[Any, Any], known: frozenset[str]) -> None:
    """Raise StateRead for attributes changed by later steps, but not by the first ones, which `refuse_kept` checks.

    Args:
        name: name of the module.
        before, after: snapshots of a `PythonState` around steps.
        known: paths that the first steps change.
    """
    inside = lambda path: any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in known)
    late = changed(before, {key: entry for key, entry in after.items() if not inside(entry[0])})
    if late:
        raise StateRead(
            f"Expected steps that change in Python what the first ones change, but {name} changes "
            f"{', '.join(sorted({path for path, *_ in late.values()}))} in a later step, which all clients would "
            "share; keep it in a buffer with buffers='local', or use ft.lightning_fit"
        )


def refuse_shared(name: str, path: str) -> NoReturn:
    """Raise StateRead for a fit that reads state left by another client's fit."""
    raise StateRead(
        f"Expected fits that read their own copy of {name} alone, but a fit reads {path}, which an earlier fit has "
        "changed and the copies of all clients share, such as a count; keep it as an attribute of the module, or in a "
        "buffer"
    )


def refuse_kept(make: Callable[[], Any], name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths that the steps of a fresh module change, and those that every step changes.

    Args:
        make: returns a fresh copy as (its `PythonState`, a function that takes a step of client 0, 1 or 2 on it).
        name: name of the module.

    Raises:
        StateRead: a step reads state of an earlier one; the message names the attribute and the remedies.
    """
    state, step = make()
    start = state.snapshot()
    try:
        step(0)
        middle = state.snapshot()
        written = changed(start, middle)
        if not written:
            return frozenset(), frozenset()
        step(1)
        again = changed(middle, state.snapshot())
        rest = {key: entry for key, entry in written.items() if key not in again}
        alike, same_step = _filled_alike(make, state, step, rest) if rest else (True, True)
        if not alike:
            again = {**again, **rest}
        paths = frozenset(path for path, *_ in (*written.values(), *again.values()))
        read = KeptSlots(lambda path: refuse_read(name, [path]))
        read.add(again)
        read.hide()
        try:
            if again:
                step(1)
        except Exception:  # also from functions that reject a stand-in
            read.check()
            refuse_read(name, [path for path, *_ in again.values()])
        finally:
            read.show()
        read.check()
        if not same_step:
            refuse_read(name, [path for path, *_ in rest.values()])
        return paths, frozenset(path for path, *_ in again.values())
    finally:
        state.restore(start, own=True)


def _restore(start: Snapshot) -> None:
    """Restore attributes."""
    for _, slot, value, content in start.values():
        if isinstance(value, (list, dict, set, deque)):
            _refill(value, content)
        elif isinstance(value, Tensor) and content is not None and not _equal(_content(value), content):
            before, trains = content
            if not isinstance(before, Tensor):
                continue
            if value.shape == before.shape:
                value.detach().copy_(before)
            else:
                value.data = before.clone()
            value.requires_grad_(trains)
        place, key = slot
        if isinstance(place, list):
            continue  # it is restored with its content
        if _held((place, key)) is not value:
            _put(slot, value)


def _refill(value: Any, content: list[Any]) -> None:
    """Restore a container's content if it has changed; some, such as settings, are read-only."""
    now = _content(value)
    if len(now) == len(content) and all(_same_parts(one, other) for one, other in zip(now, content)):
        return
    if isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)


def _same_parts(one: Any, other: Any) -> bool:
    """Return whether two items are the same object, or are pairs that hold the same objects."""
    pairs = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2
    return one is other or (pairs and one[0] is other[0] and one[1] is other[1])


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
    """Return the objects that a value refers to: attributes of an object, elements of a container, a function's
    closure.
    """
    function = getattr(value, "__func__", getattr(value, "func", value))  # of a method, or of a partial
    if isinstance(function, types.FunctionType):
        yield from _closed_over(function, seen)
    if isinstance(value, types.MethodType):
        yield from _within(path, value.__self__, seen, depth)
    elif isinstance(value, functools.partial):
        for given in (value.args, value.keywords):
            yield from _within(path, given, seen, depth)
    if isinstance(value, nn.Module) and id(value) not in seen:
        yield from _of_module(path, value, seen)
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
    elif isinstance(value, (tuple, set, deque)):
        for number, each in enumerate(value):
            if not isinstance(each, _SIMPLE):
                yield from _within(f"{path}[{number}]", each, seen, depth + 1)
    elif hasattr(value, "__dict__") and not _library(type(value)):
        yield from _entries(f"{path}.", vars(value), dict(vars(value)), seen, depth + 1)


def _closed_over(function: types.FunctionType, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield a function's closure, and the globals that it names: values, objects, classes and functions."""
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
    if vars(function):
        yield from _entries(f"{function.__name__}.", vars(function), dict(vars(function)), seen, 0)
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(function.__defaults__ or ()) :]
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"{function.__name__}.{names[number]}", function, number, value
        yield from _within(f"{function.__name__}.{names[number]}", value, seen, 0)
    yield from _entries(f"{function.__name__}.", function.__kwdefaults__, dict(function.__kwdefaults__ or {}), seen, 0)
    places = [function.__globals__]
    for name in function.__code__.co_names:
        for place in [place for place in places if name in place]:
            value = place[name]
            if isinstance(value, types.ModuleType):
                places += [] if _installed(value.__name__) else [vars(value)]
            elif isinstance(value, type):
                if id(value) not in seen and not _installed(value.__module__):
                    seen.add(id(value))
                    entries = {k: v for k, v in vars(value).items() if not k.startswith("__") and not _is_code(v)}
                    yield from _entries(f"{value.__name__}.", value, entries, seen, 0)
            elif _is_code(value) or isinstance(value, nn.Module):
                yield from _within(name, value, seen, 0)
            elif isinstance(value, Tensor) or not _library(type(value), but=("builtins",)):
                yield from _entries("", place, {name: value}, seen, 0)


def _held(slot: Slot) -> Any:
    """Return the present value of a slot, None if it is empty."""
    place, key = slot
    if isinstance(place, dict):
        return place.get(key)
    if isinstance(place, list):
        return place[key] if key < len(place) else None
    if isinstance(place, types.CellType):
        return functional.content_of(place)
    if isinstance(place, types.FunctionType):
        return (place.__defaults__ or ())[key]
    return getattr(place, key, None)


def _put(slot: Slot, value: Any) -> None:
    place, key = slot
    if isinstance(place, (dict, list)):
        place[key] = value
    elif isinstance(place, types.FunctionType):
        defaults = list(place.__defaults__ or ())
        defaults[key] = value
        place.__defaults__ = tuple(defaults)
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
def _usual(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of attributes that torch and Lightning keep on every module of a class."""
    lightning = loaded("lightning.pytorch", "LightningModule")
    of_lightning = vars(lightning()) if issubclass(kind, lightning) else {}
    names = {*vars(nn.Module()), *of_lightning, *_TABLES, "log", "log_dict", "trainer", "_trainer", "_fabric"}
    return frozenset(names - {"training"})


def _content(value: Any) -> Any:
    """Copy a container so that changes in place show; for a tensor, return it and whether it is trained."""
    if isinstance(value, Tensor):
        unmade = isinstance(value, (UninitializedBuffer, UninitializedParameter))
        if unmade or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return None
        numbers = value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized
        return value if numbers else value._version, value.requires_grad
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
    """Return the content of an object without attributes, as `copy` would use it."""
    if isinstance(value, _SIMPLE) or callable(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_reduced(each, depth) for each in value]
    if isinstance(value, dict):
        return {key: _reduced(each, depth) for key, each in value.items()}
    if isinstance(value, Tensor) and not value.is_inference():
        return value._version
    if depth == 0 or _library(type(value), but=("builtins",)):
        return None
    with warnings.catch_warnings(action="ignore"):  # Python will not copy iterators of itertools from 3.14 on
        try:
            parts = value.__reduce_ex__(2)
        except Exception:  # it cannot be copied; any error is possible
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
