"""Libraries that take seconds to import, asked for what they hold only where somebody has imported them."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str, name: str) -> Any:
    """The class `name` of `module`, for `isinstance`, where somebody has imported it; else (), which nothing is."""
    return getattr(sys.modules.get(module), name, ())
