"""Every test here runs the programs: in Triton's interpreter on the CPU, or compiled where there is a CUDA device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fedtorch.programs import choice


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All are tests of the device where there is one, and of nothing without Triton."""
    missing = pytest.mark.skip(reason="needs Triton; install fedtorch[triton]")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            if torch.cuda.is_available():
                item.add_marker(pytest.mark.gpu)
            if importlib.util.find_spec("triton") is None:
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run on whatever tensors a test has."""
    monkeypatch.setenv(choice.VARIABLE, "on" if torch.cuda.is_available() else "interpret")


@pytest.fixture
def device() -> str:
    """Where the tests' tensors are."""
    return "cuda" if torch.cuda.is_available() else "cpu"
