"""What each algorithm's test file says of it, as its `CASES`, for tests that hold of all algorithms.

`tests/test_conformance.py` takes the cases of every `test_*.py` in `tests/federation/algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import fedtorch as ft
from fedtorch.tree import Tree

SIZES = [5, 2, 9, 4, 17, 6]  # rows of the clients, each of three features and a response
CLIENTS = len(SIZES)
USUAL = 4  # waits of a device in a round, or fewer
FOLDER = Path(__file__).parents[1] / "federation" / "algorithms"


class Case(NamedTuple):
    """An algorithm over small clients, in the dtype of `closed_forms.NUMBERS`."""

    make: Callable[[], ft.Algorithm]
    start: Tree = None  # parameters, of an algorithm without a local solver
    rows: Callable[[ft.data.FederatedData], ft.data.FederatedData] = lambda data: data  # its clients' from linear ones
    waits: int = USUAL  # of a device in a round; where they are more than usual, a comment says what for


def pool(data: ft.data.FederatedData) -> ft.data.FederatedData:
    """One client with all rows."""
    return data.pool()


def every_case() -> dict[str, Case]:
    """The cases of all algorithms, by the algorithm's name."""
    found: dict[str, Case] = {}
    for path in FOLDER.rglob("test_*.py"):
        if "CASES: dict[str, Case]" in path.read_text():
            cases = import_module(".".join(path.relative_to(FOLDER.parents[1]).with_suffix("").parts)).CASES
            assert not found.keys() & cases.keys(), f"two files have a case of {sorted(found.keys() & cases.keys())}"
            found |= cases
    return dict(sorted(found.items()))
