"""Programs in C, where there is a compiler, and without."""

from __future__ import annotations

import pytest

from fedtorch.dispatch import choice


@pytest.fixture(params=["on", "off"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With programs and without."""
    monkeypatch.setenv(choice.VARIABLE, request.param)
    return request.param
