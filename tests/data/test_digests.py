"""What is noted of clients' rows, and in which words it differs."""

from __future__ import annotations

import pytest
import torch

from fedtorch.data import FederatedData, from_tensors
from fedtorch.data.digests import different, noted


def rows(*counts: int) -> FederatedData:
    return from_tensors([(torch.arange(2.0 * n).reshape(n, 2), torch.zeros(n)) for n in counts])


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (rows(3, 2), rows(3, 2), None),
        (rows(3, 2), rows(3, 4), "client '1' has 4 rows and had 2"),
        (rows(3, 2), rows(3, 2, 1), "there are 3 clients and were 2"),
        (rows(3), rows(3, 3), "there are 2 clients and were 1"),
    ],
)
def test_numbers_of_clients_and_rows_are_compared(before: FederatedData, now: FederatedData, said: str | None) -> None:
    assert different(noted(before), noted(now), now.names) == said
