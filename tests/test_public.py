"""Every public name has an example that runs: of its own, or one that uses it, to which the reference links."""

from __future__ import annotations

import re
from pathlib import Path

import public

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_used_by_a_runnable_example() -> None:
    assert public.without_example() == []


def test_examples_are_found_where_they_are() -> None:
    found = public.examples()
    assert found["fedtorch.federation.algorithms.fedavg.fedavg"][0] == "fedtorch.federation.algorithms.fedavg.fedavg"
    assert "fedtorch.vfl" in found["fedtorch.vfl.rows.parties.align"]  # of the package's text
    assert "start" in found["fedtorch.federation.lightning.federation.Federation"]  # the page


def test_private_modules_are_not_public() -> None:
    assert not [name for name in public.examples() if "._" in name]


def test_pages_and_experiments_use_nothing_private() -> None:
    """Benchmarks of what is inside may."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in public.MADE]
    files = [ROOT / "README.md", *pages, *(ROOT / "experiments").glob("*.py"), *(ROOT / "experiments").rglob("*.yaml")]
    private = re.compile(r"fedtorch[\w.]*\._[a-z]\w*|from fedtorch[\w.]* import [^#\n]*\b_[a-z]")
    assert [(path.name, private.findall(path.read_text())) for path in files if private.search(path.read_text())] == []
