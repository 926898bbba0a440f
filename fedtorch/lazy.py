"""Libraries that take seconds to import, loaded when they are first needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def loaded(module: str, name: str) -> Any:
    """The class `name` of `module`, for `isinstance`, where somebody has imported it; else (), which nothing is."""
    return getattr(sys.modules.get(module), name, ())


def attributes(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`, which import what `homes` names when somebody asks for it.

    Args:
        package: `__name__` of the package.
        homes: public name -> the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})
