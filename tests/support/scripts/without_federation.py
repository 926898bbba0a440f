"""Imports modules of the package anew, in a process that refuses `fedtorch.federation`.

Usage: without_federation.py MODULE…
"""

from __future__ import annotations

import importlib
import sys


def main(names: list[str]) -> None:
    """Import the modules of these names."""
    for loaded in [name for name in sys.modules if name.partition(".")[0] == "fedtorch"]:
        del sys.modules[loaded]
    sys.modules["fedtorch.federation"] = None  # type: ignore[assignment]
    for name in names:
        importlib.import_module(name)


if __name__ == "__main__":
    main(sys.argv[1:])
