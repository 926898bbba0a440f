"""The suite on several interpreters, with the newest release of every dependency: `make test-matrix`.

Each interpreter has an environment of its own in `.venv-matrix`, without constraints: pip takes the newest releases
that `pyproject.toml` admits, and upgrades what is there. Interpreters that are not found, or do not run, are named and
left out; it ends with 1 if any of them was asked for by name, if none was found, or where anything fails. This runs on
any Python without packages.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / ".venv-matrix"
VERSION = "import sys; print('{}.{}'.format(*sys.version_info))"


class Outcome(NamedTuple):
    """What came of an interpreter."""

    name: str
    what: str
    good: bool
    seconds: float = 0.0
    newer: str = ""


def version(name: str) -> str | None:
    """Major and minor version of an interpreter, such as 3.12; None if there is none of this name that runs."""
    python = shutil.which(name)
    done = python and subprocess.run([python, "-c", VERSION], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done and done.returncode == 0 else None


def environment(python: str, version: str) -> Path:
    """The interpreter of this one's environment, made unless it is there."""
    folder = ENVIRONMENTS / version
    if not (folder / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def install(python: Path, wanted: Sequence[str]) -> None:
    """The newest releases of everything, and what is wanted besides."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--upgrade", "--upgrade-strategy", "eager"]
    subprocess.run([*pip, "pip"], check=True, cwd=ROOT)
    subprocess.run([*pip, *wanted, "--editable", ".[dev]"], check=True, cwd=ROOT)


def installed(python: Path) -> dict[str, str]:
    """Releases by name, in small letters."""
    command = [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(listed)}


def newer(found: dict[str, str], constraints: str) -> list[str]:
    """What differs from the constraints, as `torch 2.14.1 (2.13.0)`."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE))
    pinned = {name.lower().replace("_", "-"): release for name, release in pinned.items()}
    same = lambda name: found[name].partition("+")[0] == pinned[name]
    return [f"{name} {found[name]} ({pinned[name]})" for name in sorted(pinned) if name in found and not same(name)]


def one(name: str, version: str, wanted: Sequence[str], arguments: str) -> Outcome:
    """The suite on one interpreter."""
    began = time.monotonic()
    other = ""
    try:
        at = environment(name, version)
        print(f"\n{name}: the newest releases into {at.parents[1].relative_to(ROOT)}", flush=True)
        install(at, wanted)
        other = ", ".join(newer(installed(at), (ROOT / "constraints.txt").read_text()))
        print(f"{name}: other than in constraints.txt: {other or 'nothing'}", flush=True)
        suite = ["make", "--no-print-directory", "suite", f"BIN={at.parent}", f"PYTEST_ARGS={arguments}"]
        code = subprocess.run(suite, cwd=ROOT, check=False).returncode
        what = "passed" if code == 0 else "failed"
    except (OSError, subprocess.CalledProcessError) as error:
        what = f"not tried: {error}"
    return Outcome(name, what, what == "passed", time.monotonic() - began, other)


def run(pythons: Sequence[str], wanted: Sequence[str], arguments: str, asked_for: bool) -> list[Outcome]:
    """All interpreters, one after the other."""
    outcomes = []
    for name in pythons:
        found = version(name)
        if found is None:
            what = "not found: put it on PATH, or name it with make test-matrix PYTHONS=/path/to/python"
            outcomes.append(Outcome(name, what, not asked_for))
            print(f"{name}: {what}", flush=True)
        else:
            outcomes.append(one(name, found, wanted, arguments))
    return outcomes


def code(outcomes: Sequence[Outcome]) -> int:
    """0 if something was tried and all is good."""
    return 0 if any(each.seconds for each in outcomes) and all(each.good for each in outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite everywhere, and says at the end where it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", required=True, help="interpreters, by name or path, with spaces between")
    parser.add_argument("--asked-for", action="store_true", help="a missing interpreter is an error")
    parser.add_argument("--with", dest="wanted", default="", help="requirements besides, such as torch==2.14.1")
    parser.add_argument("--pytest-args", default="", help="of pytest, for a part of the suite")
    options = parser.parse_args(argv)
    outcomes = run(options.pythons.split(), options.wanted.split(), options.pytest_args, options.asked_for)
    print()
    for each in outcomes:
        print(f"{each.name:24} {each.what}" + (f" in {each.seconds:.0f} s; {each.newer}" if each.seconds else ""))
    return code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
