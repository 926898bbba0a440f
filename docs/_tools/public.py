"""What is public, and where its runnable examples are.

Public is what the stub of a package, its `__init__.pyi`, hands out. Where that is a module, what the module names in
`__all__` is public. Examples are those of docstrings, which `make test` runs, and the cells of the pages, which `make
docs` runs.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fedtorch
from fedtorch import _lazy

HERE = Path(__file__).parents[1]
INSIDE = {"benchmarks", "baselines.py", "oracles.py"}  # experiments that time, or rebuild, parts of the package
MADE = ("_build", "_tools", "reference", "results")  # folders whose pages others make
CELL = re.compile(r"```\{code-cell\}[^\n]*\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_PYTHON = re.compile(r"[:%!]")  # how options of a cell and commands to the notebook begin
CHAIN = re.compile(r"(?<!python -m )\b(?:ft|fedtorch)(?:\.\w+)+")


def stubs() -> dict[str, Path]:
    """Return the packages that have a stub, each with its file."""
    root = Path(fedtorch.__file__).parent
    return {".".join(stub.parent.relative_to(root.parent).parts): stub for stub in sorted(root.rglob("__init__.pyi"))}


@functools.cache
def packages() -> dict[str, list[str]]:
    """Return the packages that have a stub, each with the names that it hands out."""
    return {package: sorted(_lazy.declared(package, stub)) for package, stub in stubs().items()}


@functools.cache
def handed_out() -> dict[str, list[str]]:
    """Return every package with a stub, and every module that one hands out, with the names that are public there."""
    found = dict(packages())
    for package, names in packages().items():
        for value in (getattr(_module(package), name) for name in names):
            if isinstance(value, ModuleType) and value.__name__ not in found:
                found[value.__name__] = list(getattr(value, "__all__", ()))
    return found


@functools.cache
def declared() -> dict[str, Any]:
    """Return what is public, modules aside, by the full name of its definition."""
    found: dict[str, tuple[str, Any]] = {}
    for module, names in handed_out().items():
        for name in names:
            value = getattr(_module(module), name)
            if not isinstance(value, ModuleType):
                home = str(getattr(value, "__module__", ""))
                is_ours = home.startswith("fedtorch.") and getattr(_module(home), name, None) is value
                found.setdefault(f"{home if is_ours else module}.{name}", value)
    return found


def classes_and_functions() -> dict[str, Any]:
    """Return what is public and has a text of its own: no alias of a type such as `Tensor | slice`."""
    is_ours = lambda value: (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__[:8] == "fedtorch"
    return {home: value for home, value in declared().items() if is_ours(value)}


def modules() -> list[str]:
    """Return the modules by name that the reference has: those that hand out, and those that define, what is public."""
    homes = (name.rpartition(".")[0] for name in declared())
    return sorted({*handed_out(), *homes} - {"fedtorch"})


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public names that a module defines, and what they are."""
    for home, value in declared().items():
        place, _, name = home.rpartition(".")
        if place == module.__name__:
            yield name, value


def contents() -> list[tuple[str, str]]:
    """Return the names that `fedtorch` itself hands out, each with the name of its definition."""
    places = {id(value): home for home, value in declared().items()}
    values = {name: getattr(fedtorch, name) for name in packages()["fedtorch"]}
    named = {name: value.__name__ for name, value in values.items() if isinstance(value, ModuleType)}
    return sorted((name, named.get(name) or places[id(value)]) for name, value in values.items())


def undeclared(chain: str) -> str | None:
    """Return the part of a chain such as `fedtorch.data.digits` that no stub hands out, or None."""
    at, known = "fedtorch", handed_out()
    for part in chain.split(".")[1:]:
        inside = f"{at}.{part}"
        if part in known.get(at, ()):
            value = getattr(_module(at), part)
            if not isinstance(value, ModuleType) or not value.__name__.startswith("fedtorch"):
                return None
            at = value.__name__
        elif any(f"{module}.".startswith(f"{inside}.") for module in known):
            at = inside
        else:
            return None if part.startswith("__") else inside
    return None


def chains(source: str) -> set[str]:
    """Return the names of the package that a program imports, and the chains that begin with one of them."""
    nodes, called = list(ast.walk(ast.parse(source))), {}
    for node in nodes:
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == "fedtorch"]
            called |= {alias.asname or "fedtorch": alias.name if alias.asname else "fedtorch" for alias in ours}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedtorch":
            called |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = (re.sub(r"^\w+", lambda m: called.get(m[0], ""), ast.unparse(node)) for node in nodes if _is_chain(node))
    return {*called.values(), *(chain for chain in found if chain.startswith("fedtorch."))}


def _is_chain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def used_by_page(text: str) -> set[str]:
    """Return the chains that a page has: in its cells and blocks of Python, and wherever one begins with `fedtorch`."""
    blocks = [body for kind, body in BLOCK.findall(text) if "python" in kind or "code-cell" in kind]
    program = "\n".join(line for body in blocks for line in body.splitlines() if not NOT_PYTHON.match(line))
    return {*chains(program), *(re.sub(r"^ft\b", "fedtorch", chain) for chain in CHAIN.findall(text))}


@functools.cache
def uses() -> dict[str, set[str]]:
    """Return the chains that pages, experiments and their configurations use, without what is built of parts inside."""
    root = HERE.parent
    experiments = [path for path in (root / "experiments").rglob("*.py") if not INSIDE & {*path.parts}]
    pages = [path for path in HERE.rglob("*.md") if path.relative_to(HERE).parts[0] not in MADE]
    configurations = (root / "experiments").rglob("*.yaml")
    found = {path: chains(path.read_text()) for path in experiments}
    found |= {path: used_by_page(path.read_text()) for path in [root / "README.md", *pages, *configurations]}
    return {path.relative_to(root).as_posix(): names for path, names in sorted(found.items())}


@functools.cache
def examples() -> dict[str, list[str]]:
    """Return every public class and function, and where a runnable example uses it: itself, its module, pages.

    A name's own docstring counts when it has an example, whatever the example calls: that of a class that a function
    returns calls the function.
    """
    homes = classes_and_functions()
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
    """Return the public names that no runnable example uses."""
    return [name for name, places in examples().items() if not places]


def _docstrings(homes: dict[str, Any]) -> Iterator[tuple[str, str, ModuleType]]:
    """Yield (whose it is, the text, the module that it is in); a method's text is that of its class."""
    for module in modules():
        yield module, _module(module).__doc__ or "", _module(module)
    for name, value in homes.items():
        module = _module(value.__module__)
        yield name, value.__doc__ or "", module
        for part, member in vars(value).items() if inspect.isclass(value) else ():
            if not part.startswith("_"):
                yield name, getattr(inspect.unwrap(getattr(member, "__func__", member)), "__doc__", None) or "", module


def _used(source: str, known: dict[str, Any], names: dict[int, str]) -> list[str]:
    """Return the public names that a program uses which starts with what is `known`, its module's names."""
    values = dict(known)
    for node in ast.walk(ast.parse(source)):
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

    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name | ast.Attribute))
    found = (names.get(id(value(node))) for node in nodes)
    return list(dict.fromkeys(name for name in found if name))


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)
