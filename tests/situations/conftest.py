"""Cases of Pyro leave its store of parameters as other tests expect it."""

from __future__ import annotations

from collections.abc import Iterator

import pyro
import pytest


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    """Empty Pyro's store of parameters after a case."""
    yield
    pyro.clear_param_store()
