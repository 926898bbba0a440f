"""Builds wheel and sdist, compares them with the repository, installs the wheel and uses it: `make test-install`.

`python -m support.installs` installs into an environment that is empty, without constraints, from what the registry
serves: first PyTorch, then the wheel, then one extra after another, and uses each (`installed.py`). What each extra
would bring into an environment of its own is resolved too: pip takes an older release where a newer one does not fit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
USE = Path(__file__).parent / "scripts" / "installed.py"
SOURCES = ("fedtorch/", "tests/", "docs/", "experiments/")
FILES = {"README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "conftest.py"}
FILES |= {"constraints.txt", "constraints-newest.txt", "constraints-zoo.txt"}
USED = ("triton", "remote", "privacy", "tune", "export", "docs")  # the extras of people who use the package


def build(folder: Path) -> tuple[Path, Path]:
    """(wheel, sdist), of which the wheel is built from the sdist."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def tracked() -> set[str]:
    """The files that git knows."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(listed.stdout.splitlines())


def compare(wheel: Path, sdist: Path) -> None:
    """The wheel is the package and nothing else; the sdist has what documentation and tests need, too."""
    known = tracked()
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    same("wheel", inside, {name for name in known if name.startswith("fedtorch/")})
    wanted = {name for name in known if name.startswith(SOURCES)} | FILES
    made = {"PKG-INFO", "setup.cfg", "MANIFEST.in", "pyproject.toml"}
    same("sdist", {name for name in source - made if ".egg-info/" not in name}, wanted)
    print(f"wheel: {len(inside)} files, {wheel.stat().st_size / 1e6:.1f} MB; sdist: {len(source)} files", flush=True)


def same(what: str, found: set[str], wanted: set[str]) -> None:
    """Says how they differ."""
    if found != wanted:
        lacks, more = sorted(wanted - found), sorted(found - wanted)
        raise SystemExit(f"Expected the repository's files in the {what}, but it lacks {lacks} and has {more} as well")


def install(python: Path, *requirements: str) -> None:
    """Into the environment of an interpreter."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--quiet", *requirements], check=True)


def resolved(python: Path, requirement: str) -> dict[str, str]:
    """Releases by name, in small letters, that pip would take for a requirement into an empty environment."""
    command = [python, "-m", "pip", "install", "--quiet", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    report = subprocess.run([*command, requirement], check=True, capture_output=True, text=True).stdout
    found = [item["metadata"] for item in json.loads(report)["install"]]
    return {each["name"].lower(): each["version"] for each in found}


def main() -> None:
    """Everything, one after the other; ends at what does not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that the environment is made of")
    parser.add_argument("--torch", default="torch", help="what is asked of PyTorch, such as torch==2.13.0")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel, sdist = build(folder / "dist")
        compare(wheel, sdist)
        subprocess.run([options.python, "-m", "venv", folder / "venv"], check=True)
        python = folder / "venv" / "bin" / "python"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        missing = set(extras) - {*USED, "dev"}
        assert not missing, f"Expected a part of installed.py for every extra, but got none for {missing}"
        install(python, options.torch)
        install(python, str(wheel))
        subprocess.run([python, "-I", USE, "base"], check=True)
        for extra in USED:
            install(python, f"{wheel}[{extra}]")
            subprocess.run([python, "-I", USE, extra], check=True)
            versions = resolved(python, f"{wheel}[{extra}]")
            named = [name.partition(">")[0].partition("[")[0] for name in extras[extra]]
            print(f"  alone: {', '.join(f'{name} {versions[name]}' for name in named if name in versions)}", flush=True)
        subprocess.run([python, "-m", "pip", "check"], check=True)


if __name__ == "__main__":
    main()
