"""What an installation takes: its size, its time, the first import, and `make demo` with a C compiler and without.

- `size`: MB of what is installed for fedtorch without extras, how much less it would be if what only reports, figures,
  data sets and the command line need were an extra, and the seconds that `make demo` or `make test` needed to
  install it with those of the tests, where this environment is theirs.
- `import`: seconds until `import` is done in a fresh process; *first* without compiled bytecode of any module.
- `demo`: seconds of `make demo` in an environment that is there. *First* is with an empty cache of programs, *again*
  with the cache that this has left. Without a compiler PATH has every program of the machine's but compilers.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import fedtorch
from experiments import common
from experiments.benchmarks.parts import measure

OPTIONAL = {"arviz", "jsonargparse", "matplotlib", "networkx", "pooch"}
COMPILERS = re.compile(r"(.*-)?(cc|c89|c99|gcc|g\+\+|c\+\+|clang|clang\+\+|tcc|icc|icx)(-[\d.]+)?(\.exe)?")


def needed(name: str, without: Container[str] = ()) -> set[str]:
    """The distributions that one needs, it among them, without extras and without some."""
    found, left = set(), [name]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            wanted = map(Requirement, metadata.requires(each) or ())
            core = (one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""}))
            left += [one.name for one in core if one.name not in without]
    return {metadata.metadata(each)["Name"] for each in found}


def megabytes(name: str) -> float:
    """What a distribution's files take, bytecode left out."""
    files = [Path(str(file.locate())) for file in metadata.files(name) or ()]
    if name == "fedtorch":  # which may be installed in its place
        files = list(Path(fedtorch.__file__).parent.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc") / 1e6


def size() -> list[common.Row]:
    """MB of each large distribution and of all, and seconds to install them."""
    each = {name: megabytes(name) for name in needed("fedtorch")}
    named = sorted((name for name in each if each[name] >= 20 or name == "fedtorch"), key=lambda name: -each[name])
    rows = [common.Row(name, "MB", each[name]) for name in named]
    others = sum(size for name, size in each.items() if name not in named)
    rows += [common.Row(f"{len(each) - len(named)} others", "MB", others), common.Row("all", "MB", sum(each.values()))]
    spared = needed("fedtorch") - needed("fedtorch", OPTIONAL)
    only = f"of these, only for {', '.join(sorted(OPTIONAL))}"
    rows.append(common.Row(only, "MB", sum(each[name] for name in spared)))
    kept = Path(sys.prefix) / ".installed"  # the Makefile writes it
    seconds = kept.read_text().strip() if kept.exists() else ""
    return [*rows, common.Row("all, and what tests need", "s to install", float(seconds))] if seconds else rows


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program of Python, which must succeed."""
    subprocess.run([sys.executable, *command], env={**os.environ, **environment}, capture_output=True, check=True)


def imports(repeat: int) -> list[common.Row]:
    """Seconds until modules are imported, with bytecode and without."""
    ways = {name: partial(run, ["-c", f"import {name}"], {}) for name in ("torch", "fedtorch", "numba")}
    rows = [
        common.Row(f"import {name}", "s", seconds)
        for name, seconds in measure.medians(measure.interleaved(ways, repeat)).items()
    ]
    first = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            first.append(common.seconds(partial(run, ["-c", "import fedtorch"], {"PYTHONPYCACHEPREFIX": folder})))
    return [*rows, common.Row("import fedtorch", "first, s", statistics.median(first))]


@contextmanager
def without_compiler() -> Iterator[str]:
    """A PATH of this machine's programs but compilers."""
    with tempfile.TemporaryDirectory() as folder:
        for place in os.get_exec_path():
            for file in Path(place).iterdir() if Path(place).is_dir() else ():
                link = Path(folder) / file.name
                if not COMPILERS.fullmatch(file.name) and not link.is_symlink():
                    link.symlink_to(file)
        yield folder


def compiler(path: str | None = None) -> str | None:
    """The compiler that is found on a path, by default on PATH."""
    names = ("cc", "gcc", "clang", *(sysconfig.get_config_var("CC") or "").split()[:1])
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def demo(repeat: int, smoke: bool) -> list[common.Row]:
    """Seconds of `make demo`, in turns with a compiler and without."""
    times: dict[tuple[str, str], list[float]] = {}
    with without_compiler() as path:
        assert compiler(path) is None
        ways = {"with a C compiler": os.environ["PATH"]} if compiler() else {}
        for _ in range(repeat):
            for way, here in {**ways, "without": path}.items():
                with tempfile.TemporaryDirectory() as folder:
                    environment = {"PATH": here, "CC": "", "XDG_CACHE_HOME": folder}
                    command = ["-m", "experiments.quickstart", *["--smoke"] * smoke, "--out", folder]
                    for when in ("first, s", "again, s"):
                        times.setdefault((way, when), []).append(common.seconds(partial(run, command, environment)))
    return [common.Row(f"make demo, {way}", when, statistics.median(each)) for (way, when), each in times.items()]


def parts(smoke: bool) -> measure.Parts:
    """The tables by name."""
    return {
        "size": size,
        "import": partial(imports, 1 if smoke else 5),
        "demo": partial(demo, 1 if smoke else 3, smoke),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all tables, or one."""
    measure.run("installation", __doc__, parts, argv)


if __name__ == "__main__":
    main()
