"""What the repository has: its files, and the words of its programs."""

from __future__ import annotations

import builtins
import functools
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROSE_IN_CODE = re.compile(r'"""(?:.*?)"""|#[^\n]*|"[^"\n]* [^"\n]*"', re.DOTALL)


@functools.cache
def files() -> list[str]:
    """The files and folders of the repository, folders with a slash at the end."""
    found = []
    for folder, names, here in os.walk(ROOT):
        names[:] = [name for name in names if not name.startswith(".") and name not in ("__pycache__", "_build")]
        inside = Path(folder).relative_to(ROOT).as_posix()
        found += [f"{inside}/{name}".removeprefix("./") for name in here]
        found += [f"{inside}/{name}/".removeprefix("./") for name in names]
    return found


def sources() -> list[str]:
    """The text of the repository's programs."""
    names = (".py", ".pyi", "Makefile", "pyproject.toml")
    known = [path for path in files() if path.endswith(names) and path != "tests/test_page_names.py"]
    return [(ROOT / path).read_text() for path in known]


@functools.cache
def programs() -> str:
    """The repository's programs without comments, docstrings and sentences in strings."""
    return "\n".join(PROSE_IN_CODE.sub(" ", text) for text in sources())


@functools.cache
def file_names() -> set[str]:
    """Whatever programs write as the name of a file that has a suffix, docstrings included."""
    return {name for text in sources() for name in re.findall(r"[\w-]+\.[a-z]+\b", text)}


@functools.cache
def words() -> set[str]:
    """Every word of the programs, of Python and of its standard library."""
    return {*re.findall(r"\w+", programs()), *dir(builtins), *sys.stdlib_module_names}


@functools.cache
def members() -> set[str]:
    """Names that the programs define within something: functions, fields, parameters, keys."""
    defined = re.findall(r"\bdef (\w+)|\b(\w+)\s*[:=]|\bclass (\w+)", programs())
    return {name for names in defined for name in names}


@functools.cache
def modules() -> dict[str, list[str]]:
    """Modules of the package and of the experiments by their last name."""
    found: dict[str, list[str]] = {}
    for path in files():
        if path.startswith(("fedtorch/", "experiments/")) and path.endswith(".py"):
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found.setdefault(name.rpartition(".")[2], []).append(name)
    return found


@functools.cache
def classes() -> dict[str, list[str]]:
    """Modules of the package by the classes and functions that they define."""
    found: dict[str, list[str]] = {}
    for path in files():
        if path.startswith("fedtorch/") and path.endswith(".py") and "/programs/" not in path:
            for name in re.findall(r"^(?:class|def) (\w+)", (ROOT / path).read_text(), re.MULTILINE):
                found.setdefault(name, []).append(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return found


@functools.cache
def options_of_programs() -> set[str]:
    """The options of all programs, without the dashes."""
    return set(re.findall(r'"--([\w-]+)"', programs()))
