"""What tests of `fedtorch.programs` share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fedtorch as ft
from fedtorch.programs import choice, launch as _launch


@contextmanager
def reference() -> Iterator[None]:
    """References run inside, whatever the device."""
    before = os.environ.get(choice.VARIABLE)
    os.environ[choice.VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[choice.VARIABLE]
        else:
            os.environ[choice.VARIABLE] = before


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch, at_least: int = 1) -> Iterator[list[str]]:
    """The operations whose programs run inside; fails if there are fewer, and so if the reference ran unseen."""
    seen: list[str] = []
    original = _launch.loaded

    def watched(operation: str, **options: Any) -> Any:
        seen.append(operation.rpartition(".")[2].removesuffix("_program"))
        return original(operation, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_launch, "loaded", watched)
        yield seen
    assert len(seen) >= at_least, f"Expected {at_least} launches of programs, but got {seen}"


def launched() -> set[str]:
    """Return the programs that `fedtorch.programs` and `fedtorch.random` launch, by module and name."""
    files = [
        *(Path(ft.__path__[0]) / "programs").glob("*.py"),
        *(Path(ft.__path__[0]) / name for name in ("random/philox.py", "models/gibbs/gibbs_sweeps.py")),
    ]
    called = re.compile(r"(?<![.\w])programs\.([a-z]\w*)\b")
    return {f"{file.stem}.{name}" for file in files for name in called.findall(file.read_text())}
