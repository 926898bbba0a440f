"""Resolves what pages call by name: names of the package, arguments, files, commands and their options.

A page's code cells run when the pages are built; what is printed in `inline code` or in a console block does not, and
is read here. What a name means is found in this order: what the page imports; `ft`, `nn`, `F` and `L`; `run`, `data`
and `exchange` as values of their classes; modules of the package by their last name, where a package hands them out or
the page has their whole name; what the package defines. A chain that starts so must lead somewhere, and a call of what
it leads to may have no other keywords. Of other values that a page mentions the members must be defined somewhere.
A word by itself must stand in some program of the repository or in a block of the page. `NAME` and `<name>` stand for
anything, `my_…` for what is the reader's, `…` for what is left out, single letters for mathematics; a command of
another program is not looked at. Docstrings of what is public are read like pages, for their chains of names alone.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import public

from fedtorch.cli._main import COMMANDS
from support.repository import classes, file_names, files, members, modules, options_of_programs, words

ROOT = Path(__file__).parents[2]
MADE = tuple(line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if "*" not in line)
FENCED = re.compile(r"^(```+|:::+)([^\n]*)\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PYTHON, CONSOLE = re.compile(r"\{code-cell\}|python"), re.compile(r"console|bash|sh\b")
VALUES = {  # what pages call values of these classes
    "run": ("fedtorch", "Run"),
    "data": ("fedtorch.data", "FederatedData"),
    "exchange": ("fedtorch.federation.exchanges.exchange", "Exchange"),
}
ALIASES = {"ft": "fedtorch", "fedtorch": "fedtorch", "nn": "torch.nn", "F": "torch.nn.functional", "L": "lightning"}
PLACEHOLDER = re.compile(r"<\w+>|\b[A-Z]{2,}\b|…|\.\.\.")
FILE = re.compile(r"[\w.<>*/-]+(/|\.(py|pyi|md|toml|yaml|html|jsonl?|txt|safetensors))|[\w.<>*-]*/[\w.<>*/-]+\.\w+")
OWN = re.compile(r"my_")  # the reader's
MISSING = object()


def pages() -> list[Path]:
    """What people read: documentation, and the pages beside the code."""
    found = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("experiments/**/*.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
    return sorted(page for page in found if not page.relative_to(ROOT).as_posix().startswith(MADE))


@functools.cache
def is_installed(name: str) -> bool:
    """Whether there is a package or module of this name."""
    return name.isidentifier() and importlib.util.find_spec(name) is not None


def member(value: Any, name: str) -> Any:
    """An attribute, a submodule or a declared field; MISSING if there is none."""
    if inspect.ismodule(value) and not hasattr(value, name):
        try:
            return importlib.import_module(f"{value.__name__}.{name}")
        except ImportError:
            return MISSING
    if inspect.isclass(value) and not hasattr(value, name):
        source = inspect.getsource(value)
        return None if re.search(rf"\b(self\.)?{name}\s*[:=]", source) else MISSING
    return getattr(value, name, MISSING)


class Page:
    """A page, and what its blocks import and mention."""

    def __init__(self, path: Path) -> None:
        self._read(path.read_text())
        self.imports = dict(self._imports())

    def _read(self, text: str) -> None:
        self.text = text
        self.blocks = [(kind.strip(), body) for _, kind, body in FENCED.findall(text)]
        prose = FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
        self.spans = [" ".join(span.split()).replace("\\|", "|") for span in SPAN.findall(prose)]
        self.words = set(re.findall(r"[\w.]+", "\n".join(body for _, body in self.blocks)))
        self.words |= {word.partition(".")[0] for word in self.words} | {word.rpartition(".")[2] for word in self.words}

    def _imports(self) -> Iterator[tuple[str, Any]]:
        for kind, body in self.blocks:
            for line in re.findall(r"^(?:from \S+ )?import .*$", body, re.MULTILINE) if PYTHON.search(kind) else ():
                node = ast.parse(line.partition("#")[0].removesuffix("(").strip() or "0").body[0]
                if isinstance(node, ast.Import):
                    for name in node.names:
                        whole = importlib.import_module(name.name if name.asname else name.name.partition(".")[0])
                        yield name.asname or whole.__name__, whole
                elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("fedtorch", "torch"):
                    for name in node.names:
                        yield name.asname or name.name, member(importlib.import_module(str(node.module)), name.name)

    def unresolved(self) -> list[str]:
        """What stands for nothing, with what is wrong about it."""
        commands = [
            line.lstrip("$ ").partition("  #")[0].strip()
            for kind, body in self.blocks
            if CONSOLE.search(kind)
            for line in body.replace("\\\n", " ").splitlines()
        ]
        wrong = [f"{text}: {what}" for text in self.spans for what in self.wrong(text)]
        wrong += [f"{text}: {what}" for text in commands for what in command(text.split(), self) or ()]
        for kind, body in self.blocks:
            if PYTHON.search(kind) and "code-cell" not in kind:
                wrong += [
                    f"{name}: {what}" for name in re.findall(r"\bft(?:\.\w+)+", body) for what in self.wrong(name)
                ]
        return list(dict.fromkeys(wrong))

    def wrong(self, text: str) -> list[str]:
        """What is wrong about a span."""
        found = command(text.split(), self)
        if found is not None:
            return found
        if FILE.fullmatch(text) or text in MADE:
            return [] if self.has_file(text) else ["no such file"]
        if re.fullmatch(r"\w+(/\w+)+|--[\w-]+( [\w:]+)?|\.\w+", text):
            return self.words_of(re.findall(r"\w[\w-]*", text)[:1] if text.startswith("--") else text.split("/"))
        try:
            tree = ast.parse(self.as_python(text))
        except SyntaxError:
            chains = [chain.split(".") for chain in re.findall(r"\b(?:ft|fedtorch)(?:\.\w+)+", text)]
            return [f"no {'.'.join(chain)}" for chain in chains if self.value(chain) is MISSING]
        return [what for node in ast.walk(tree) for what in self.of_node(node)]

    def as_python(self, text: str) -> str:
        """A span as an expression; arguments become those of a call."""
        text = text.replace("…", "...")
        text = re.sub(r"=\s*$", "=...", text)
        return f"_({text})" if re.match(r"\w+\s?=[^=]", text) else text

    def of_node(self, node: ast.AST) -> list[str]:
        """What is wrong about a part of an expression, its own parts aside."""
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node).split(".")
            is_chain = all(part.isidentifier() for part in chain)
            return [f"no {'.'.join(chain)}"] if is_chain and self.value(chain) is MISSING else []
        if isinstance(node, ast.Name):
            return self.words_of([node.id])
        if isinstance(node, ast.Call):
            return self.keywords(node)
        return []

    def keywords(self, node: ast.Call) -> list[str]:
        """The keywords of a call that what is called does not take."""
        names = [keyword.arg for keyword in node.keywords if keyword.arg]
        chain = ast.unparse(node.func).split(".")
        if chain == ["_"]:
            return self.words_of(names)
        called = self.value(chain)
        try:
            parameters = inspect.signature(called).parameters
        except (TypeError, ValueError):
            return self.words_of(names)
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return []
        return [f"{'.'.join(chain)} has no argument {name}" for name in names if name not in parameters]

    def value(self, chain: list[str]) -> Any:
        """What a chain of names leads to; None where that is not known, MISSING where it leads nowhere."""
        roots = list(self.roots(chain[0]))
        for root in roots:
            for name in chain[1:]:
                root = member(root, name) if root is not MISSING and root is not None else root
            if root is not MISSING:
                return root
        is_value = chain[0] not in {**self.imports, **ALIASES} and (chain[0] in self.words or not roots)
        is_value = is_value and (chain[0] in self.words or not _is_module(chain[0]))
        is_known = chain[-1] in members() or (len(chain) == 1 and chain[-1] in words())
        return None if is_value and is_known else MISSING

    def roots(self, name: str) -> Iterator[Any]:
        """What a name may mean."""
        if name in self.imports:
            yield self.imports[name]
        elif name in ALIASES:
            yield importlib.import_module(ALIASES[name])
        elif name in VALUES:
            home, kind = VALUES[name]
            yield member(importlib.import_module(home), kind)
        else:
            for module in modules().get(name, ()):
                if module in self.text or _is_handed_out(module):
                    yield importlib.import_module(module)
            for module in classes().get(name, ()):
                yield member(importlib.import_module(module), name)
            if name not in modules() and is_installed(name):
                yield importlib.import_module(name)

    def words_of(self, names: list[str]) -> list[str]:
        """Which of some words no program has."""
        known = words(), self.words, ALIASES, options_of_programs()  # not joined: these are many
        has = lambda n: any(n in some for some in known) or is_installed(n)
        is_known = lambda n: len(n) == 1 or PLACEHOLDER.fullmatch(n) or OWN.match(n) or has(n)
        return [f"no {name}" for name in names if not is_known(name)]

    def has_file(self, text: str) -> bool:
        """Whether the repository has it, makes it, or a program or a block of the page names it."""
        if text.startswith(MADE) or text in file_names() or {text, text.removesuffix("/")} & self.words:
            return True
        wanted = [re.sub(r"<\w+>", "*", text), PLACEHOLDER.sub("*", text)]
        return any(fnmatch(f"/{path}", f"*/{each}") for path in files() for each in wanted)


def _is_module(name: str) -> bool:
    """Whether modules of the package are called so, and nothing that it defines."""
    return name not in classes() and any(module.startswith("fedtorch") for module in modules().get(name, ()))


def _is_handed_out(module: str) -> bool:
    """Whether a stub hands out a module of the package; experiments are commands, which are."""
    return not module.startswith("fedtorch") or module in public.handed_out()


class Docstrings(Page):
    """The docstrings of a module: those of what is public there."""

    CHAIN = re.compile(r"(?<![\w.`])`([A-Za-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`(?!`)")

    def __init__(self, module: str, texts: list[str]) -> None:
        home = importlib.import_module(module)
        self._read("\n".join(texts))
        tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(home)).readline)
        ours = {name for name, value in vars(home).items() if getattr(value, "__name__", "").startswith("fedtorch.")}
        self.words |= {token.string for token in tokens if token.type == tokenize.NAME} - ours
        self.imports = {name: value for name, value in vars(home).items() if name not in ours and name[:2] != "__"}

    def unresolved(self) -> list[str]:
        """Chains that stand for nothing."""
        chains = dict.fromkeys(self.CHAIN.findall(self.text))
        own = lambda chain: chain[0] in self.imports or chain[0] in modules() or chain[0] in ALIASES
        return [
            chain
            for chain in chains
            if own(chain.split(".")) and not FILE.fullmatch(chain) and self.value(chain.split(".")) is MISSING
        ]


@functools.cache
def docstrings() -> dict[str, list[str]]:
    """The texts of what is public by the module that defines it."""
    found: dict[str, list[str]] = {}
    for value in public.classes_and_functions().values():
        texts = found.setdefault(value.__module__, [importlib.import_module(value.__module__).__doc__ or ""])
        texts.append(inspect.getdoc(value) or "")
        if inspect.isclass(value):
            texts += [inspect.getdoc(part) or "" for name, part in vars(value).items() if not name.startswith("_")]
    return found


@functools.cache
def parser() -> argparse.ArgumentParser:
    """That of `fedtorch`."""
    found = argparse.ArgumentParser(prog="fedtorch")
    commands = found.add_subparsers()
    for each in COMMANDS:
        each.add(commands)
    return found


def command(line: list[str], page: Page) -> list[str] | None:
    """What is wrong about a command; None if it is none that is known here."""
    while line and re.match(r"[A-Z_]+=", line[0]):  # the environment
        line = line[1:]
    of_program = {"make": of_make, "fedtorch": of_fedtorch, "python": of_python, "pip": of_pip, "…": of_rest}
    if not line or line[0] not in of_program or len(line) == 1:
        return None
    return of_program[line[0]](line[1:], page)


def of_make(line: list[str], _: Page) -> list[str]:
    """Targets, and the variables that are set for them."""
    text = (ROOT / "Makefile").read_text()
    names = [word.partition("=")[0] for word in line]
    return [f"no target {name}" for name in names if not re.search(rf"^{re.escape(name)}\s*[:?]", text, re.MULTILINE)]


def of_fedtorch(line: list[str], _: Page) -> list[str]:
    """Subcommands and options, those of Lightning's command line aside."""
    at = parser()
    for word in line:
        choices = next((a.choices for a in at._actions if isinstance(a, argparse._SubParsersAction)), None)
        if choices is None or PLACEHOLDER.fullmatch(word):
            break
        if word not in choices and not word.startswith("-"):
            return [f"no command {word}"]
        at = choices.get(word, at)
    if line[0] in ("fit", "validate", "test", "predict"):
        return []
    given = [word.strip("[]").partition("=")[0] for word in line if word.strip("[]").startswith("--")]
    return [f"no option {word}" for word in given if word not in at._option_string_actions]


def of_rest(line: list[str], _: Page) -> list[str]:
    """The end of a command whose beginning stands before."""
    return [f"no command {word}" for word in line[:1] if word not in words()]


def of_python(line: list[str], page: Page) -> list[str]:
    """A module and the options that its text has, or that of modules which it imports from; or a file."""
    if line[0] != "-m":
        return [] if line[0].startswith("-") or page.has_file(line[0]) else [f"no file {line[0]}"]
    name = line[1]
    shared = ["experiments.common", "experiments.benchmarks.parts.measure"]
    if not PLACEHOLDER.search(name):
        spec = importlib.util.find_spec(name)
        if spec is None:
            return [f"no module {name}"]
        shared.append(f"{name}.__main__" if spec.submodule_search_locations else name)
    if not name.startswith("experiments"):
        return []
    source = lambda each: Path(str(importlib.util.find_spec(each).origin)).read_text()
    shared += re.findall(r"^from (experiments\.[\w.]+) import", source(shared[-1]), re.MULTILINE)  # may add options
    text = "".join(map(source, shared))
    given = {word.strip("[]") for word in line[2:] if word.strip("[]").startswith("--") and word != "--"}
    return [f"no option {word}" for word in sorted(given) if f'"{word}"' not in text]


def of_pip(line: list[str], _: Page) -> list[str]:
    """Extras of this package."""
    extras = re.findall(r"fedtorch\[([\w,]+)\]", " ".join(line))
    text = (ROOT / "pyproject.toml").read_text()
    return [
        f"no extra {e}" for each in extras for e in each.split(",") if not re.search(rf"^{e} = ", text, re.MULTILINE)
    ]
