"""Vertical models on a device give the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch
from support import device_cases, splits
from support.oracles.closed_forms import distance

CLOSE = 1e-8  # float64 sums in another order, over three steps
DEVICE = pytest.mark.parametrize(
    "device",
    [
        "cpu",  # the way itself
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)


@DEVICE
@pytest.mark.parametrize("case", splits.CASES)
def test_split_networks(case, device) -> None:
    assert distance(device_cases.split(case, device), device_cases.split(case, "cpu")) < CLOSE


@DEVICE
def test_variational_inference(device) -> None:
    assert distance(device_cases.vertical(device), device_cases.vertical("cpu")) < CLOSE
