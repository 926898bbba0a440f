"""GPyTorch, imported without the deprecation notices that its compiled parts give with recent versions of PyTorch."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from fedtorch._lazy import only

__all__ = ["gpytorch"]
__dir__ = only(__all__)

with warnings.catch_warnings():
    for category in (DeprecationWarning, FutureWarning):  # of torch.jit.script, the latter from PyTorch 2.15 on
        warnings.simplefilter("ignore", category)
    gpytorch: Any = importlib.import_module("gpytorch")
    linear_operator: Any = importlib.import_module("linear_operator")
