"""Pages that are made of what stands elsewhere: the reference of the docstrings, results of what scripts have measured.

A Sphinx extension. It writes the pages before Sphinx reads them, links each public name to the examples elsewhere that
use it, and says at the end which public names no page has.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import re
import sys
import textwrap
import tokenize
from operator import eq
from pathlib import Path
from types import ModuleType
from typing import Any

from public import classes_and_functions, contents, examples, modules, public
from sphinx.util import logging

import fedtorch

HERE = Path(__file__).parents[1]
LOGGER = logging.getLogger(__name__)
NEAREST = 4  # of all docstrings whose examples use a name, how many its text links to

# page: (title, what it is about, modules and packages whose modules are on it, in this order)
AREAS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "runs": (
        "Runs and populations",
        "Begin, step, stop, save, evaluate; where clients run; who is asked, and what goes wrong.",
        (
            "fedtorch.federation.algorithm",
            "fedtorch.federation.runs.run",
            "fedtorch.federation.populations.in_process",
            "fedtorch.federation.populations.distributed",
            "fedtorch.sites",
            "fedtorch.federation.lightning.federation",
            "fedtorch.federation.exchanges.exchange",
            "fedtorch.federation.exchanges.star",
            "fedtorch.federation.exchanges.rows",
            "fedtorch.federation.exchanges.graph",
            "fedtorch.federation.runs.cohorts",
            "fedtorch.federation.runs.faults",
        ),
    ),
    "federation": (
        "Around a run",
        "History, evaluation, tuning, checkpoints, progress.",
        ("fedtorch.federation", "fedtorch.history", "fedtorch.progress"),
    ),
    "algorithms": (
        "Algorithms",
        "What clients and server compute. Each module's text has the formula and the source.",
        ("fedtorch.federation.algorithms", "fedtorch.federation.runs.recipes"),
    ),
    "solvers": (
        "Local solvers",
        "How a client solves its own problem.",
        ("fedtorch.federation.solvers", "fedtorch.optimisers"),
    ),
    "models": ("Models", "Modules and samplers that know nothing of federation.", ("fedtorch.models",)),
    "networks": ("Networks", "Graphs of clients, their learning and their solvers.", ("fedtorch.networks",)),
    "vertical": ("Vertical federation", "Different features of the same rows.", ("fedtorch.vfl",)),
    "trust": (
        "Trust",
        "Privacy, secure sums, robustness, attacks, fairness, records.",
        ("fedtorch.trust", "fedtorch.federation.exchanges.robust"),
    ),
    "inference": (
        "Inference",
        "Effects of sites, predictions, contrasts, tables, comparison of fitted models.",
        ("fedtorch.inference",),
    ),
    "data": ("Data", "Federated data, partitioners, real data sets.", ("fedtorch.data",)),
    "plots": (
        "Metrics, plots, reports and the command line",
        "",
        ("fedtorch.metrics", "fedtorch.plots", "fedtorch.report", "fedtorch.cli"),
    ),
    "foundations": (
        "Foundations",
        "Trees, randomness, the wire, kernels: what everything else stands on.",
        ("fedtorch",),
    ),
}


def assigned() -> dict[str, list[str]]:
    """The modules of every page: each on the first page that names it or, else, the longest part of its name."""
    left, pages = modules(), {page: [] for page in AREAS}
    for page, (_, _, names) in AREAS.items():
        pages[page] += [name for name in names if name in left and not _is_package(name)]
        left = [name for name in left if name not in pages[page]]
    parts = sorted(((name, page) for page, (_, _, names) in AREAS.items() for name in names), key=lambda p: -len(p[0]))
    for module in left:
        page = next(page for name, page in parts if f"{module}.".startswith(f"{name}."))
        pages[page].append(module)
    return pages


def write(_: Any = None) -> None:
    """Write the pages, and leave those that have not changed as they are."""
    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    documented = classes_and_functions()
    index = ["# Reference", "", "Every public name, from its docstring.", "", "```{toctree}", ":maxdepth: 1", ""]
    for page, names in assigned().items():
        title, about, _ = AREAS[page]
        index.append(page)
        lines = [f"# {title}", "", about, ""]
        for name in names:
            shown = ", ".join(
                each for each, _ in public(importlib.import_module(name)) if f"{name}.{each}" in documented
            )
            members = f"   :members: {shown}\n   :show-inheritance:\n" if shown else "   :no-members:\n"
            lines += [f"## {name.removeprefix('fedtorch.')}", "", "```{eval-rst}", f".. automodule:: {name}", members]
            lines += ["```", ""]
        _write(folder / f"{page}.md", lines)
    index += ["```", "", "## `import fedtorch as ft`", "", "| | |", "| --- | --- |"]
    for name, home in contents():
        value = getattr(fedtorch, name)
        role = "mod" if isinstance(value, ModuleType) else "class" if inspect.isclass(value) else "func"
        first = re.sub(r":math:`([^`]*)`", r"$\1$", (inspect.getdoc(value) or "").partition("\n")[0])
        first = first if "$" in first else first.replace("|", "\\|")
        index.append(f"| {{py:{role}}}`ft.{name} <{home}>` | {first} |")
    _write(folder / "index.md", index)


def write_results(_: Any = None) -> None:
    """Makes pages of the results that experiments and benchmarks have written."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    index = ["# Results", "", "What runs found, as the scripts wrote it, with machine and command.", ""]
    for title, place in (("Experiments", "results"), ("Benchmarks", "benchmarks/results")):
        index += ["```{toctree}", f":caption: {title}", ":maxdepth: 1", ""]
        for path in sorted((HERE.parent / "experiments" / place).glob("*.md")):
            page = f"{title.lower()}_{path.stem}"
            index.append(page)
            _write(folder / f"{page}.md", path.read_text().splitlines())
        index += ["```", ""]
    _write(folder / "index.md", index)


def _write(path: Path, lines: list[str]) -> None:
    text = "\n".join(lines).rstrip() + "\n"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _is_package(name: str) -> bool:
    return hasattr(importlib.import_module(name), "__path__")


def missing(documented: set[str]) -> list[str]:
    """Public modules and names of the package that are not among the documented ones."""
    return [name for name in [*modules(), *classes_and_functions()] if name not in documented]


def check(app: Any, _: Any) -> None:
    """Warns of every public name that no page has; under `-W` that is an error."""
    objects = app.env.domaindata["py"]["objects"]
    for name in missing(set(objects)):
        LOGGER.warning("no page has the public name %s", name)


def as_restructured_text(_: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read; here `Mean`s and |w| become what reStructuredText takes for the same."""
    in_math = None  # the indentation of a formula's directive
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if in_math is not None and line.strip() and indent <= in_math:
            in_math = None
        if line.lstrip().startswith(".. math::"):
            in_math = indent
        if in_math is None and not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(:math:`[^`]*`|``[^`]*``)", line)
            apart = [re.sub(r"(`[^`]+`)(\w?)", _apart, part) for part in parts[::2]]
            parts[::2] = [part.replace("|", "\\|") for part in apart]
            lines[i] = "".join(parts)


def _apart(match: re.Match[str]) -> str:
    """A quoted name and the letter after it, if there is one, which reStructuredText wants apart."""
    return match[1] + (f"\\ {match[2]}" if match[2] else "")


def fields(_: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Adds the fields of a tuple or a dataclass, with the comments that stand beside them in the source."""
    if what != "class" or not (hasattr(value, "_fields") or dataclasses.is_dataclass(value)):
        return
    text = inspect.getdoc(value) or ""
    is_told = lambda field: re.search(rf"^ *{field}\b[^:\n]*:", text, re.MULTILINE)
    shown = [found for found in _declared(value) if not found[0].startswith("_") and not is_told(found[0])]
    if hasattr(value, "_fields") or any(comment for _, _, comment in shown):
        made = [f"- ``{field}: {kind}``{_dash(comment)}" for field, kind, comment in shown]
        as_restructured_text(None, what, name, value, options, made)
        lines += ["", *made, ""]


def _declared(value: type) -> list[tuple[str, str, str]]:
    """(name, type, the comment behind it) of each field that a class declares."""
    source = textwrap.dedent(inspect.getsource(value))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)).body
    nodes = [node for node in body if isinstance(node, ast.AnnAssign)]
    return [(ast.unparse(n.target), ast.unparse(n.annotation), comments.get(n.end_lineno or 0, "")) for n in nodes]


def _dash(comment: str) -> str:
    parts = re.split(r"(`[^`]*`)", comment)
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
    return f" – {''.join(parts)}" if comment else ""


def without_aliases(_: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what says of a tuple's field nothing but its number; `fields` has said more."""
    return True if str(getattr(value, "__doc__", "")).startswith("Alias for field number") else None


def used_in(_: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Adds links to where else examples use the name: the docstrings nearest to it, and all pages."""
    places = [place for place in examples().get(name, []) if place != name]
    pages = [place for place in places if not place.startswith("fedtorch.")]
    nearness = lambda place: sum(map(eq, place.split("."), name.split(".")))
    docstrings = sorted((place for place in places if place not in pages), key=nearness, reverse=True)[:NEAREST]
    links = [f":py:{'mod' if place in sys.modules else 'obj'}:`~{place}`" for place in docstrings]
    links += [f":doc:`/{place}`" for place in pages]
    if links:
        lines += ["", f"*Used in* {', '.join(links)}", ""]


def setup(app: Any) -> dict[str, Any]:
    """What Sphinx calls."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("builder-inited", write)
    app.connect("builder-inited", write_results)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-process-docstring", fields, priority=550)
    app.connect("autodoc-skip-member", without_aliases)
    app.connect("autodoc-process-docstring", used_in, priority=600)  # after napoleon, whose sections it is not part of
    app.connect("env-updated", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
