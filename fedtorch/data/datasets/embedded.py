"""Data sets that ship inside scikit-learn, so that they are at hand without a file or a network."""

from __future__ import annotations

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
    from sklearn.datasets import load_digits  # here and below: it takes long to import

    x, y = load_digits(return_X_y=True)
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
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
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
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return torch.tensor(scaled(x, standardise), dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
