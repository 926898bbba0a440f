"""Data sets that ship inside scikit-learn, available without further files or a network.

Their files are read directly, without importing scikit-learn, which takes as long as the whole rest of a first round.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fedtorch.data.datasets._frames import scaled


def digits() -> tuple[Tensor, Tensor]:
    """Load 8 × 8 images of handwritten digits: x `(1797, 64)` float32 in [0, 1], y `(1797,)` int64 in 0…9.

    Source: Alpaydin and Kaynak (1998), UCI "Optical recognition of handwritten digits", as in scikit-learn.

    >>> import fedtorch as ft
    >>> x, y = ft.data.digits()
    >>> x.shape, y.shape, float(x.max())
    (torch.Size([1797, 64]), torch.Size([1797]), 1.0)
    """
    table = _table("digits.csv.gz", delimiter=",")
    x, y = table[:, :-1], table[:, -1]
    return torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y, dtype=torch.int64)


def breast_cancer(standardise: bool = True) -> tuple[Tensor, Tensor]:
    """Load cell nuclei of tumours: x `(569, 30)` float32, y `(569,)` int64, 1 for benign and 0 for malignant.

    Source: Wolberg, Mangasarian, Street (1993), UCI "Breast cancer Wisconsin (diagnostic)", as in
    scikit-learn.

    Args:
        standardise: whether each feature gets mean 0 and variance 1 over all rows.

    >>> import fedtorch as ft
    >>> x, y = ft.data.breast_cancer()
    >>> x.shape, int(y.sum())
    (torch.Size([569, 30]), 357)
    """
    table = _table("breast_cancer.csv", delimiter=",", skiprows=1)
    x, y = table[:, :-1], table[:, -1]
    return torch.tensor(scaled(x, standardise), dtype=torch.float32), torch.tensor(y, dtype=torch.int64)


def diabetes(standardise: bool = True) -> tuple[Tensor, Tensor]:
    """Load progression of diabetes after a year: x `(442, 10)` float32, y `(442,)` float32, a number in 25…346.

    Source: Efron, Hastie, Johnstone, Tibshirani (2004), "Least angle regression", as in scikit-learn; x is in
    the original units (age, sex, body mass index, blood pressure, six serum measurements) unless
    standardised.

    Args:
        standardise: whether each feature gets mean 0 and variance 1 over all rows.

    >>> import fedtorch as ft
    >>> x, y = ft.data.diabetes(standardise=False)
    >>> x.shape, float(y.min()), float(y.max())
    (torch.Size([442, 10]), 25.0, 346.0)
    """
    x, y = _table("diabetes_data_raw.csv.gz"), _table("diabetes_target.csv.gz")
    return torch.tensor(scaled(x, standardise), dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def _table(name: str, **options: Any) -> numpy.ndarray:
    """Return the numbers of a file of scikit-learn's."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return numpy.loadtxt(Path(package.origin).parent / "datasets" / "data" / name, **options)
