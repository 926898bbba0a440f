"""What is public, and where its runnable examples are.

Public is what has no underscore, neither its own name nor any module on the way to it. Examples are those of
docstrings, which `make test` runs, and the cells of the pages, which `make docs` runs.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fedtorch

HERE = Path(__file__).parents[1]
# What several packages of the project share, and its users do not call.
SHARED = (
    "fedtorch.chained_log",
    "fedtorch.dispatch.launch",
    "fedtorch.federation.budget",
    "fedtorch.federation.exchanges.messages",
    "fedtorch.federation.populations.clients",
    "fedtorch.federation.populations.population",
    "fedtorch.federation.populations.state_table",
    "fedtorch.federation.runs.deliveries",
    "fedtorch.protocol.bounded_streams",
    "fedtorch.sites.audit.recording",
    "fedtorch.sites.envelopes.keyring",
    "fedtorch.sites.envelopes.letters",
    "fedtorch.sites.identity.certificates",
    "fedtorch.sites.rounds.fingerprint",
    "fedtorch.sites.rounds.frames",
    "fedtorch.sites.rounds.plan",
    "fedtorch.sites.rounds.sites",
    "fedtorch.sites.streams.grpc_settings",
    "fedtorch.sites.streams.idle",
    "fedtorch.trust.privacy.accounting.spending",
    "fedtorch.vfl.fit.adam",
    "fedtorch.vfl.fit.bound",
    "fedtorch.vfl.fit.captured",
    "fedtorch.vfl.model.checks",
)
MADE = ("_build", "_tools", "reference", "results")  # folders whose pages others make
CELL = re.compile(r"```\{code-cell\}[^\n]*\n(.*?)```", re.DOTALL)
NOT_PYTHON = re.compile(r"[:%!]")  # how options of a cell and commands to the notebook begin


def modules() -> list[str]:
    """All modules of the package by name, but for private ones and those that need Triton to be imported."""
    found = [module.name for module in pkgutil.walk_packages(fedtorch.__path__, "fedtorch.")]
    hidden = ("._", "fedtorch.kernels.programs", "fedtorch.random.philox_program")
    return sorted(name for name in found if name not in SHARED and not any(part in name for part in hidden))


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Names and objects that a module defines and that have no underscore."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if own and not name.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value)):
            yield name, value


def contents() -> list[tuple[str, str]]:
    """(name in `fedtorch`, where it is defined) as `fedtorch/__init__.pyi` has them."""
    found = []
    for node in ast.parse(Path(fedtorch.__file__).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                home = ".".join(part for part in ("fedtorch", node.module) if part)
                found.append((alias.asname or alias.name, f"{home}.{alias.name}"))
    return sorted(found)


@functools.cache
def examples() -> dict[str, list[str]]:
    """Every public name, and where it is used by a runnable example: itself, other docstrings, pages.

    A name's own docstring counts when it has an example, whatever the example calls: that of a class that a function
    returns calls the function.
    """
    homes = {f"{module}.{name}": value for module in modules() for name, value in public(_module(module))}
    names = {id(value): name for name, value in homes.items()}
    found: dict[str, list[str]] = {name: [] for name in homes}
    for place, text, module in _docstrings(homes):
        if ">>>" in text:
            source = "".join(example.source for example in doctest.DocTestParser().get_examples(text))
            for name in dict.fromkeys([*([place] if place in found else []), *_used(source, vars(module), names)]):
                found[name] += [place] if place not in found[name] else []
    for page in sorted(HERE.rglob("*.md")):
        place = page.relative_to(HERE).with_suffix("").as_posix()
        if place.split("/")[0] not in MADE:
            lines = "\n".join(CELL.findall(page.read_text())).splitlines()
            for name in _used("\n".join(line for line in lines if not NOT_PYTHON.match(line)), {}, names):
                found[name].append(place)
    return {name: sorted(places, key=lambda place: place != name) for name, places in found.items()}


def without_example() -> list[str]:
    """The public names that no runnable example uses."""
    return [name for name, places in examples().items() if not places]


def _docstrings(homes: dict[str, Any]) -> Iterator[tuple[str, str, ModuleType]]:
    """(whose it is, the text, the module that it is in); a method's text is that of its class."""
    for module in modules():
        yield module, _module(module).__doc__ or "", _module(module)
    for name, value in homes.items():
        module = _module(value.__module__)
        yield name, value.__doc__ or "", module
        for part, member in vars(value).items() if inspect.isclass(value) else ():
            if not part.startswith("_"):
                yield name, getattr(inspect.unwrap(getattr(member, "__func__", member)), "__doc__", None) or "", module


def _used(source: str, known: dict[str, Any], names: dict[int, str]) -> list[str]:
    """Which public names a program uses that starts with what is `known`: what it has imported and calls by a name."""
    nodes = list(ast.walk(ast.parse(source)))
    values = dict(known)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fedtorch":
                    values[alias.asname or "fedtorch"] = _module(alias.name if alias.asname else "fedtorch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedtorch":
            for alias in node.names:
                values[alias.asname or alias.name] = getattr(_module(str(node.module)), alias.name, None) or _module(
                    f"{node.module}.{alias.name}"
                )

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return values.get(node.id)
        owner = value(node.value) if isinstance(node, ast.Attribute) else None
        is_ours = isinstance(owner, ModuleType) and owner.__name__.startswith("fedtorch")
        return getattr(owner, node.attr, None) if is_ours and isinstance(node, ast.Attribute) else None

    found = (names.get(id(value(node))) for node in nodes if isinstance(node, ast.Name | ast.Attribute))
    return list(dict.fromkeys(name for name in found if name))


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)
