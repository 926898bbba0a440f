"""Check that a module's code is a straight line of known calls, so that it does the same whenever it is called.

Such code has no branch or loop, stores nothing but local variables, and reads nothing but its arguments, its
submodules and torch. Nobody has to call it again to know what it does. Anything else is not a straight line, also where
it would do no harm.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Collection, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fedtorch.expected import loaded

_READING = "BINARY_SLICE BINARY_SUBSCR LOAD_ATTR LOAD_CONST LOAD_FAST LOAD_GLOBAL LOAD_METHOD LOAD_SMALL_INT"
_BUILDING = "BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SLICE BUILD_TUPLE UNPACK_SEQUENCE"
_CALLS = "CALL CALL_KW KW_NAMES PRECALL PUSH_NULL RETURN_CONST RETURN_VALUE"
_OF_LOCALS = "LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST STORE_FAST STORE_FAST_LOAD_FAST"
_OTHERS = "STORE_FAST_STORE_FAST CACHE COPY NOP NOT_TAKEN POP_TOP RESUME SWAP"
# Instructions of Python 3.11 to 3.14 that neither branch nor store anything but local variables.
_STEPS = frozenset(" ".join((_READING, _BUILDING, _CALLS, _OF_LOCALS, _OTHERS)).split())
_LAZY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NAMESPACES = (torch, nn, F)
_RESHAPING = "detach flatten functional nn ravel reshape reshape_as squeeze unsqueeze view view_as"
_SHAPES = frozenset(_RESHAPING.split(" "))  # of tensors and of namespaces
_SAID = frozenset(("log", "log_dict"))  # of a LightningModule
_CALLING = ("__call__", "__getattr__", "__getattribute__", "_call_impl", "_wrapped_call_impl")


class StraightLine(NamedTuple):
    """The functions of a module that is a straight line, and what they find in the namespaces of their files."""

    functions: list[tuple[type, str, Any, Any]]  # class, name, function and its code
    globals: list[tuple[Mapping[str, Any], str, Any]]

    def holds(self) -> bool:
        """Return whether functions and namespaces are what they were."""
        same = all(getattr(kind, name) is f and f.__code__ is code for kind, name, f, code in self.functions)
        return same and all(_global(space, name) is value for space, name, value in self.globals)


def straight_line(module: nn.Module, known: Collection[type], losses: Mapping[Any, Any]) -> StraightLine | None:
    """Return the code of a module, None unless it is a straight line.

    Args:
        module: whose submodules are of `known` classes or are straight lines too.
        known: classes whose code is known.
        losses: functions that it may call, by themselves.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 1)
        ...     def forward(self, x):
        ...         return self.layer(x)[..., 0]
        >>> class Counting(Net):
        ...     def forward(self, x):
        ...         self.calls = 1
        ...         return super().forward(x)
        >>> [straight_line(made(), {nn.Linear}, {}) is not None for made in (Net, Counting)]
        [True, False]
    """
    parts = list(module.modules())
    if any(_hooked(part) for part in parts):
        return None
    own = [part for part in parts if type(part) not in known]
    if any("forward" in vars(part) for part in parts) or not all(map(_called_as_usual, own)):
        return None
    line = StraightLine([], [])
    todo = [("forward", part) for part in own]
    if isinstance(module, loaded("lightning.pytorch", "LightningModule")) and module in own:
        todo.append(("training_step", module))
    seen = set()
    while todo:
        name, part = todo.pop()
        function = getattr(type(part), name)
        if (name, type(part)) in seen or function is getattr(_base(part), name, None):
            continue
        seen.add((name, type(part)))
        if type(function) is not FunctionType or name in vars(part):
            return None
        line.functions.append((type(part), name, function, function.__code__))
        named = _names(function, losses, line.globals)
        if named is None:
            return None
        for called in named:
            found = _called(called, own, losses)
            if found is None:
                return None
            todo += found
    return line


def _names(
    function: FunctionType, losses: Mapping[Any, Any], globals: list[tuple[Mapping[str, Any], str, Any]]
) -> set[str] | None:
    """Return the attributes that a function reads, and note its globals; None unless it is a straight line."""
    code, named = function.__code__, set()
    if code.co_freevars or code.co_cellvars or code.co_flags & _LAZY:
        return None
    for each in dis.get_instructions(function):
        if each.opname == "LOAD_GLOBAL":
            value = _global(function.__globals__, each.argval)
            if not any(value is space for space in _NAMESPACES) and not _among(value, losses):
                return None
            globals.append((function.__globals__, each.argval, value))
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            named.add(each.argval)
        elif each.opname not in _STEPS and not (each.opname == "BINARY_OP" and each.argrepr == "[]"):
            return None
    return named


def _called(name: str, own: list[nn.Module], losses: Mapping[Any, Any]) -> list[tuple[str, nn.Module]] | None:
    """Return the methods that an attribute of this name can be; None if it can be what is not known."""
    found: list[tuple[str, nn.Module]] = []
    if name in _SAID:
        return found
    holders = [part for part in own if hasattr(part, name)]
    if name in _SHAPES or any(loss.__name__ == name for loss in losses):
        if not holders:
            return found
    elif not holders:
        return None
    for part in holders:
        if name in part._modules or (name in vars(part) and _among(vars(part)[name], losses)):
            continue
        if getattr(type(part), name, None) is getattr(_base(part), name, None):
            return None  # of nn.Module or LightningModule
        found.append((name, part))
    return found


def _among(value: Any, losses: Mapping[Any, Any]) -> bool:
    return any(value is loss for loss in losses)


def _base(part: nn.Module) -> type:
    """Return the class of torch or Lightning that a module's is derived from."""
    lightning = loaded("lightning.pytorch", "LightningModule")
    return lightning if isinstance(part, lightning) else nn.Module


def _called_as_usual(part: nn.Module) -> bool:
    """Return whether a module of a user's class is called, and its attributes are looked up, as those of any class."""
    base = _base(part)
    return all(getattr(type(part), name, None) is getattr(base, name, None) for name in _CALLING)


def _global(space: Mapping[str, Any], name: str) -> Any:
    return space[name] if name in space else getattr(builtins, name, None)


def _hooked(part: nn.Module) -> bool:
    """Return whether hooks are registered on a module."""
    return any(bool(value) for name, value in vars(part).items() if name.endswith("_hooks"))
