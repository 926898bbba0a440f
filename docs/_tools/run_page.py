"""Run the code cells of pages, each page in a namespace of its own: `make page PAGE=docs/start.md`.

Outputs are printed, and the first error ends it. Whether links and the text are right only `make docs` says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from public import CELL


def run(page: Path) -> None:
    """Run the cells of a page in their order; raise the error of the first that fails."""
    shell = InteractiveShell()
    for number, cell in enumerate(CELL.findall(page.read_text()), 1):
        print(f"-- {page}, cell {number}", flush=True)
        lines = [line for line in cell.splitlines() if not line.startswith(":")]  # without options
        shell.run_cell("\n".join(lines)).raise_error()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
