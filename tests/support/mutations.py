"""Change one thing in the core at a time and see whether tests near it notice: `python -m support.mutations`.

Of each file of `CORE` three changes are made: an operator or comparison for its neighbour, a number for the next one, a
statement left out. Digests of functions' names and texts decide which; what is changed elsewhere leaves them as they
are. `--list` shows them. A copy of the repository is changed, never the repository.

    PYTHONPATH=tests python -m support.mutations --out before.json
    PYTHONPATH=tests python -m support.mutations --before before.json

The second call, after tests have been taken away, ends with an error if one is no longer noticed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EACH = 3  # changes of a file
CORE = {  # and the tests near, besides the examples in the file itself
    "tree.py": "test_tree.py",
    "wire.py": "test_wire.py",
    "exact.py": "test_exact.py",
    "linalg.py": "test_linalg.py",
    "random/draws.py": "random",
    "federation/algorithms/fedavg.py": "federation/algorithms/test_fedavg.py",
    "federation/algorithms/scaffold.py": "federation/algorithms/test_scaffold.py",
    "federation/algorithms/gibbs.py": "federation/algorithms/test_gibbs.py models/gibbs",
    "federation/algorithms/gtv.py": "federation/algorithms/gtv",
    "federation/exchanges/exchange.py": "federation/exchanges",
    "federation/exchanges/robust/krum.py": "federation/exchanges/test_robust.py",
    "federation/runs/run.py": "federation/runs/test_run.py federation/runs/test_exports.py",
    "federation/runs/cohorts.py": "federation/runs/test_cohorts.py",
    "federation/runs/faults.py": "federation/runs/test_faults.py federation/runs/test_partial_work.py",
    "federation/solvers/least_squares.py": "federation/solvers/test_least_squares.py",
    "models/gaussian.py": "models/test_gaussian_inverses.py federation/algorithms/ep",
    "models/low_rank.py": "models/test_low_rank.py models/test_matrix_normal_program.py",
    "networks/solvers/fedgd.py": "networks/test_solvers.py",
    "trust/privacy/accounting/renyi.py": "trust/privacy/accounting",
    "sites/secure/shamir.py": "sites/secure",
    "sites/secure/grid.py": "sites/secure/test_exact_sums.py sites/secure/test_secure_sums.py",
    "sites/rounds/policy.py": "sites/rounds/test_private.py sites/rounds/test_minimum.py sites/rounds/test_faults.py",
    "sites/rounds/past_sums.py": "sites/rounds/test_past_sums.py sites/rounds/test_minimum.py",
    "federation/algorithms/ep/estimates.py": "federation/algorithms/test_maximum_likelihood.py",
    "federation/algorithms/ep/hierarchical.py": "federation/algorithms/ep inference",
    "federation/populations/in_process.py": "federation/populations",
    "federation/solvers/descent.py": "federation/solvers/descent federation/solvers/test_clip_and_precision.py",
    "federation/solvers/linear_steps.py": "federation/solvers/test_linear_steps.py",
    "data/formulas/design.py": "data/formulas",
    "data/formulas/coding.py": "data/formulas",
    "vfl/nodes/iteration.py": "vfl/nodes vfl/test_split.py",
    "vfl/fit/bound.py": "vfl/fit/test_sfvi.py",
}
EQUIVALENT = {  # changes that are none, and why
    "linalg.py:square_root: failed > 0 -> failed >= 0 (1)": "a root by eigenvectors is as good as a Cholesky factor",
}

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


class Mutation(NamedTuple):
    """A piece of a file, between offsets, and what takes its place."""

    file: str  # below fedtorch/
    function: str
    start: int
    end: int
    before: str
    after: str
    number: int  # of such pieces in the function

    @property
    def name(self) -> str:
        """What it is called, whatever else is in its file."""
        return f"{self.file}:{self.function}: {' '.join(self.before.split())} -> {self.after} ({self.number})"

    def applied(self, text: str) -> str:
        """The file's text with it."""
        return text[: self.start] + self.after + text[self.end :]


def changed(node: ast.AST) -> str | None:
    """What takes the place of a node, None if it is left as it is."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.unparse(ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return f"({ast.unparse(ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))})"
    if isinstance(node, ast.BoolOp):
        return f"({ast.unparse(ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return str(node.value + 1)
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return "pass"
    return None


def pieces(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function that can be changed: no annotations, no inner functions, not what errors say."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.JoinedStr)):
                yield child
                yield from pieces(child)


def mutations(file: str) -> list[Mutation]:
    """The changes of a file, as digests order them."""
    text = (ROOT / "fedtorch" / file).read_text()
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    offset = lambda line, column: len(text.encode()[: lines[line - 1] + column].decode())
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        seen: dict[tuple[str, str], int] = {}
        for node in pieces(function):
            after = changed(node)
            if after is not None:
                assert isinstance(node, (ast.expr, ast.stmt))
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
                before = text[start:end]
                seen[before, after] = seen.get((before, after), 0) + 1
                found.append(Mutation(file, function.name, start, end, before, after, seen[before, after]))
    return sorted(found, key=lambda each: hashlib.sha256(each.name.encode()).hexdigest())


def chosen() -> list[Mutation]:
    """All that are tried."""
    of_file = lambda file: [each for each in mutations(file) if each.name not in EQUIVALENT]
    return [each for file in CORE for each in of_file(file)[:EACH]]


def copied(folder: Path) -> None:
    """Copy what git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def passing(folder: Path, file: str, longest: float, keep: bool = False) -> tuple[bool, float]:
    """Whether a file's examples and the tests near it pass within so many seconds, and how long they took.

    Args:
        folder: a copy of the repository.
        file: below fedtorch/.
        longest: seconds.
        keep: whether bytecode is kept, as of what is not changed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "" if keep else "1"}
    began = time.monotonic()
    try:
        files = [f"fedtorch/{file}", *(f"tests/{each}" for each in CORE[file].split())]
        done = subprocess.run([*command, *files], cwd=folder, env=environment, capture_output=True, timeout=longest)
    except subprocess.TimeoutExpired:
        return False, longest
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"Expected tests of {file}, but pytest says: {done.stdout.decode()[-500:]}")
    return done.returncode == 0, time.monotonic() - began


def tried(wanted: Sequence[Mutation]) -> dict[str, bool]:
    """Whether each is noticed; it is said as soon as it is known."""
    noticed = {}
    with TemporaryDirectory() as place:
        folder = Path(place)
        copied(folder)
        for file in dict.fromkeys(each.file for each in wanted):
            passes, seconds = passing(folder, file, 1800.0, keep=True)
            if not passes:
                raise SystemExit(f"Expected tests of {file} to pass as it is; see tests {CORE[file]}")
            target = folder / "fedtorch" / file
            text = target.read_text()
            for each in (one for one in wanted if one.file == file):
                target.write_text(each.applied(text))
                noticed[each.name] = not passing(folder, file, 60 + 5 * seconds)[0]
                print("noticed " if noticed[each.name] else "SURVIVED", each.name, flush=True)
            target.write_text(text)
    return noticed


def lost(before: Mapping[str, bool], now: Mapping[str, bool]) -> list[str]:
    """The names of those that were noticed before."""
    return [name for name, found in now.items() if not found and before.get(name)]


def main(argv: Sequence[str] | None = None) -> None:
    """Try them and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show them only")
    parser.add_argument("--files", nargs="+", choices=CORE, default=list(CORE), metavar="FILE", help="of these only")
    parser.add_argument("--out", type=Path, help="keep which were noticed")
    parser.add_argument("--before", type=Path, help="what has been kept")
    options = parser.parse_args(argv)
    wanted = [each for each in chosen() if each.file in options.files]
    if options.list:
        print("\n".join(each.name for each in wanted))
        return
    noticed = tried(wanted)
    print(f"{sum(noticed.values())} of {len(noticed)} noticed")
    if options.out:
        options.out.write_text(json.dumps(noticed, indent=1) + "\n")
    gone = lost(json.loads(options.before.read_text()), noticed) if options.before else []
    if gone:
        raise SystemExit("Expected to be noticed as before: " + "; ".join(gone))


if __name__ == "__main__":
    main()
