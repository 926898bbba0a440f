"""`import fedtorch` loads what every program needs, and the rest when somebody asks for it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import fedtorch as ft

LATER = (
    "lightning",
    "torchmetrics",
    "pandas",
    "sklearn",
    "scipy",
    "pyro",
    "gpytorch",
    "networkx",
    "triton",
    "cryptography",
    "grpc",
)
PROGRAM = f"""
import sys
import fedtorch as ft

print("torch" in sys.modules)
import torch
ft.fedavg, ft.vfl, ft.plots, ft.data.digits()
print([name for name in {LATER} if name in sys.modules])
ft.gradient_descent(torch.nn.Linear(2, 1), epochs=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.Adam)
from fedtorch.metrics.stacked import as_stacked
as_stacked(ft.metrics.accuracy())
print([name for name in ("lightning", "torchmetrics") if name in sys.modules])
print(ft.Federation.__name__, ft.vfl.SplitNetwork.__name__, "lightning" in sys.modules)
"""


def test_what_takes_long_is_loaded_when_somebody_asks_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "[]", "[]", "Federation SplitNetwork True"]


def test_names_that_come_later_are_names_like_any_other() -> None:
    names = ("SplitNetwork", "StackedEarlyStopping", "VerticalLoader")
    assert set(names) <= set(dir(ft.vfl))
    for name in names:
        assert getattr(ft.vfl, name).__name__ == name


@pytest.mark.parametrize("package", [ft, ft.vfl])
def test_names_that_are_not_there(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Federated'"):
        package.Federated  # noqa: B018


def test_the_table_of_contents_names_what_there_is() -> None:
    for name in dir(ft):
        assert getattr(ft, name) is not None


def test_every_name_of_the_table_of_contents_has_an_example() -> None:
    assert [name for name in dir(ft) if ">>>" not in (inspect.getdoc(getattr(ft, name)) or "")] == []
