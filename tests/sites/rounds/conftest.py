"""What tests of sites share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedtorch.sites.rounds import _pseudonyms


@pytest.fixture
def same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites have the same secret each time, so that what is at chance does not fail a test once in many times."""
    monkeypatch.setattr(_pseudonyms, "secrets", SimpleNamespace(token_hex=lambda size: "5c" * size))
