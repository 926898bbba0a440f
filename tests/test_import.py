"""`import fedtorch` loads what every program needs, and the rest when somebody asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedtorch as ft

LATER = (
    "lightning",
    "torchmetrics",
    "matplotlib",
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
import torch
import fedtorch as ft

print([name for name in {LATER} if name in sys.modules])
ft.gradient_descent(torch.nn.Linear(2, 1), epochs=1, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.Adam)
ft.metrics.as_stacked(ft.metrics.accuracy())
print([name for name in ("lightning", "torchmetrics") if name in sys.modules])
print(ft.Federation.__name__, ft.vfl.SplitNetwork.__name__, "lightning" in sys.modules)
"""


def test_what_takes_long_is_loaded_when_somebody_asks_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "Federation SplitNetwork True"]


@pytest.mark.parametrize(
    ("package", "names"),
    [
        (ft, ("ClientSharding", "Federation", "RoundProgressBar", "Remote", "lightning_fit")),
        (ft.vfl, ("HierarchicalBayes", "SplitNetwork", "StackedEarlyStopping", "VerticalLoader")),
    ],
)
def test_names_that_come_later_are_names_like_any_other(package, names) -> None:
    assert set(names) <= set(dir(package))
    for name in names:
        assert getattr(package, name).__name__ == name
        assert vars(package)[name] is getattr(package, name)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Federated'"):
        package.Federated  # noqa: B018
