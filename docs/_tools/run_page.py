"""Run the code cells of pages, each page in a namespace of its own: `make page PAGE=docs/start.md`.

The first error ends it. Only `make docs` says whether links and the text are right, and shows what cells evaluate to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from public import CELL, NOT_PYTHON


def run(page: Path) -> None:
    """Run the cells of a page in their order, without their options and commands to the notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(CELL.findall(page.read_text()), 1):
        text = "\n".join("" if NOT_PYTHON.match(line) else line for line in cell.splitlines())
        exec(compile(text, f"{page}, cell {number}", "exec"), names)


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in sys.argv[1:]:
        run(Path(name))
