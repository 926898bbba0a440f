"""Packages with the names of their stub, imported on first use, and modules whose `dir` has public names only."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, for the names that `__init__.pyi` beside `file` imports.

    A name is imported on first use. A name equal to that of a submodule is imported at once, because Python would bind
    the submodule to that name on its import.
    """
    homes = declared(package, Path(file).with_suffix(".pyi"))

    def get(name: str) -> Any:
        if name not in homes:
            near = difflib.get_close_matches(name, homes, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module, attribute = homes[name]
        if module != package and hasattr(importlib.import_module(module), attribute):
            value = getattr(importlib.import_module(module), attribute)
        else:
            value = importlib.import_module(f"{module}.{attribute}")
        setattr(sys.modules[package], name, value)
        return value

    for name, (module, _) in homes.items():
        if f"{module}.".startswith(f"{package}.{name}."):
            get(name)
    return get, lambda: sorted(homes)


def only(names: Sequence[str]) -> Callable[[], list[str]]:
    """Return a module's `__dir__` for its `__all__`, so that completion offers neither what it imports nor its helpers.

    >>> only(["weights", "distances"])()
    ['distances', 'weights']
    """
    return lambda: sorted(names)


def declared(package: str, stub: Path) -> dict[str, tuple[str, str]]:
    """Return each name that a package's stub imports, with the module and the name there: `from .a import b as b`."""
    parts = package.split(".")
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            homes |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return homes
