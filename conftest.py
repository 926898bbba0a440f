"""Modules of the package are imported as users import them, before pytest takes their examples.

By itself pytest would load a module that is called like what its package hands out once more, and put it in the place
of that: `ft.inference.ranef` would be a module in the examples of `fedtorch/inference/ranef.py`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).parent


def pytest_collect_file(file_path: Path) -> None:
    """Import a module of the package by its name, unless it is a program."""
    if file_path.suffix == ".py" and file_path.is_relative_to(ROOT / "fedtorch") and file_path.stem != "__main__":
        parts = file_path.relative_to(ROOT).with_suffix("").parts
        importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
