"""Compile all programs in advance: `python -m fedtorch.programs`."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator

from fedtorch import programs
from fedtorch.programs.engine import Program


def every() -> Iterator[Program]:
    """Yield the programs of all operations."""
    for module in pkgutil.iter_modules(programs.__path__, f"{programs.__name__}."):
        if not module.name.endswith("__main__"):
            values = vars(importlib.import_module(module.name)).values()
            yield from (value for value in values if isinstance(value, Program) and value.signatures)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    logging.getLogger("fedtorch.programs.engine").setLevel(logging.ERROR)  # it would advise to run this module
    for each in dict.fromkeys(every()):
        each.compile()
        logging.info("%s is ready", each.name)
