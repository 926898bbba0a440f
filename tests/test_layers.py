"""Imports of the package go one way: down the layers, in no circle, and never to another module's private names
or to another package's private modules.

Imports inside functions and under `TYPE_CHECKING` count like any other. `fedtorch/__init__.py`, the table of contents,
is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.processes import TESTS, Process

import fedtorch as ft

ROOT = Path(ft.__file__).parent
LAYERS = (
    {
        "_lazy",
        "tree",
        "optimisers",
        "progress",
        "random",
        "exact",
        "programs",
        "_devices",
        "_files",
        "tables",
        "functional",
        "linalg",
        "_safetensors_header",
        "wire",
        "metrics",
        "module_randomness",
        "stacked_layers",
        "expected",
        "history",
        "captured",
        "chained_log",
        "_representation",
        "_untrained",
        "learns",
        "checkpoint",
        "checkpoint_io",
    },
    {"data"},
    {"models", "networks", "protocol"},
    {"federation", "vfl"},
    {"inference"},
    {"sites"},
    {"trust"},
    {"plots", "report", "cli"},
)


def name_of(path: Path) -> str:
    parts = ("fedtorch", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source(path: Path) -> ast.Module:
    """Return a module's program; of a package that has a stub also what the stub imports, whoever asks for it when."""
    stub = path.with_suffix(".pyi")
    program = ast.parse(path.read_text() + (stub.read_text() if stub.exists() else ""))
    for node in ast.walk(program) if stub.exists() else ():
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            node.module, node.level = ".".join([name_of(path), *([node.module] if node.module else [])]), 0
    return program


SOURCES = {name_of(path): source(path) for path in sorted(ROOT.rglob("*.py"))}
# Of each module what imports and what takes a name from something: walks over whole programs take seconds.
MODULES = {
    name: [node for node in ast.walk(source) if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute)]
    for name, source in SOURCES.items()
    if name != "fedtorch"
}


def imports(name: str) -> Iterator[tuple[str, str, str]]:
    """(module, the name taken from it or "", what it is called here) of all imports from the package."""
    for node in MODULES[name]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in SOURCES:
                    yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"Expected absolute imports, but got a relative one in {name}"
            for alias in node.names if node.module in SOURCES else ():
                inner, called = f"{node.module}.{alias.name}", alias.asname or alias.name
                yield (inner, "", called) if inner in SOURCES else (str(node.module), alias.name, called)


EDGES = {(name, module) for name in MODULES for module, _, _ in imports(name)}


def layer(module: str) -> int:
    (found,) = (i for i, packages in enumerate(LAYERS) if module.split(".")[1] in packages)
    return found


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """The sets of two nodes or more that reach each other."""
    reached: dict[str, set[str]] = {}
    for first, second in edges:
        reached.setdefault(first, set()).add(second)
    growing = True
    while growing:
        growing = False
        for found in reached.values():
            more = set().union(*(reached.get(node, set()) for node in found)) - found
            found |= more
            growing = growing or bool(more)
    together = {
        frozenset(other for other in found if name in reached.get(other, ()))
        for name, found in reached.items()
        if name in found
    }
    return sorted(sorted(circle) for circle in together)


def test_every_module_has_a_layer() -> None:
    assert [name for name in MODULES if not any(name.split(".")[1] in packages for packages in LAYERS)] == []


def test_nothing_imports_the_table_of_contents() -> None:
    assert [name for name, module in EDGES if module == "fedtorch"] == []


def test_arrows_point_down() -> None:
    assert sorted((name, module) for name, module in EDGES if layer(name) < layer(module)) == []


def test_no_circle_of_modules() -> None:
    assert circles(EDGES) == []


def test_no_circle_of_packages() -> None:
    top = {(name.split(".")[1], module.split(".")[1]) for name, module in EDGES}
    assert circles({(first, second) for first, second in top if first != second}) == []


def belongs(module: str, name: str) -> bool:
    """Whether `name` may import `module`: a private one belongs to the package that it lies in."""
    parts = module.split(".")
    owners = [".".join(parts[:i]) for i, part in enumerate(parts) if part.startswith("_")]
    return all(f"{name}.".startswith(f"{owner}.") for owner in owners)


def test_a_private_module_belongs_to_its_package() -> None:
    assert belongs("fedtorch.trust.privacy._checks", "fedtorch.trust.privacy.noise")
    assert belongs("fedtorch._files", "fedtorch.trust.record")
    assert not belongs("fedtorch.trust.privacy._checks", "fedtorch.trust.attacks.split")


def test_no_private_names_of_other_modules() -> None:
    private = lambda found: found.startswith("_") and not found.startswith("__")
    found = []
    for name, nodes in MODULES.items():
        taken = [(module, part) for module, part, _ in imports(name)]
        called = {called: module for module, part, called in imports(name) if not part}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in called:
                taken.append((called[node.value.id], node.attr))
        found += [(name, f"{module}.{part}") for module, part in taken if private(part)]
        found += [(name, module) for module, _ in taken if not belongs(module, name)]
    assert found == []


def test_vertical_federation_needs_no_federation() -> None:
    """Each module of `fedtorch.vfl` is imported in a process that refuses `fedtorch.federation`."""
    names = [name for name in MODULES if name.startswith("fedtorch.vfl")]
    process = Process([str(TESTS / "support" / "scripts" / "without_federation.py"), *names])
    said = process.communicate(timeout=120)
    assert process.returncode == 0, said
