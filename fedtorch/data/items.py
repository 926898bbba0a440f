"""The items of a map-style `torch.utils.data.Dataset`, read when they are needed.

`partition` of such a data set gives every client item numbers; `read` turns them into rows once, and `ft.lazy_loading`
in every round, so that random transforms stay random.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtorch.data.federated import FederatedData
from fedtorch.data.sources import stack_items
from fedtorch.tree import Tree


def items(dataset: Any, numbers: Tensor) -> Tree:
    """Return the items of these numbers `(n,)`, stacked `(n, ...)`."""
    return stack_items([dataset[i] for i in numbers.tolist()])


def read(data: FederatedData, dataset: Any, seed: int = 0) -> FederatedData:
    """Read the rows of clients with item numbers, once; for evaluation, and if all rows fit in memory.

    Args:
        data: from `partition(dataset, …)`.
        dataset: map-style; the same, or one of the same items with other transforms.
        seed: of random transforms.

    Example:
        >>> import torch
        >>> from fedtorch.data import iid, partition, read
        >>> class Squares(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 6
        ...     def __getitem__(self, i):
        ...         return torch.tensor([float(i)]), i**2
        >>> numbers = partition(Squares(), iid(), clients=2, seed=0)
        >>> numbers
        FederatedData(2 clients, 6 rows, 3–3 per client, fields int64 ())
        >>> read(numbers, Squares())
        FederatedData(2 clients, 6 rows, 3–3 per client, fields 0: float32 (1,), 1: int64 ())
    """
    with seeded(seed):
        return data.map(lambda numbers: items(dataset, numbers))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's generators on the CPU, and restore them afterwards."""
    before = torch.default_generator.get_state(), python_random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    python_random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        python_random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002
