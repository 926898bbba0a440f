"""The weighted median and the weighted trimmed mean of M messages, coordinate by coordinate, without sorting them.

A program holds all messages of some coordinates in registers, as integers in their order, and finds the values at which
the summed weight passes a threshold by bisection of those integers: 32 passes in float32, 64 in float64, over what has
been read once. A trimmed mean needs two such values and one sum. Weights are summed in float64.

Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018, Definitions 1 and 2; selection by the bits of a number as in Alabi et al., "Fast k-selection algorithms for
graphics processing units", JEA 17, 2012. Bound: one read of the messages. Not measured yet.

Differentiable by its reference only, which runs where a gradient is asked for. Programs know float32 and float64 and
up to 1024 messages; distances between messages, as Krum needs them, are a matrix product and are left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedtorch.dispatch.choice import FLOATS, program
from fedtorch.dispatch.launch import launch, power_of_two

MOST = 1024  # messages
_SIZE = 2**15  # bytes of a program's messages
_SLACK = 1e-12  # rounding of the summed weights must not decide which value is in the middle


def median(value: Tensor, share: Tensor) -> Tensor:
    """Return the weighted median of every coordinate, the middle between two values that halve the weight.

    Args:
        value: `(M, ...)`, M > 0.
        share: the messages' weights `(M,)` in float64, of sum 1.

    Returns:
        `(...)` in float64.
    """
    programs = _programs(value, share)
    if programs:
        return _launched(programs.median, value, share)
    ordered, _, above = _ordered(value, share)
    low = (above < 0.5 - _SLACK).sum(0).clamp(max=len(value) - 1)
    high = (above < 0.5 + _SLACK).sum(0).clamp(max=len(value) - 1)
    return 0.5 * (ordered.gather(0, low[None]) + ordered.gather(0, high[None]))[0]


def trimmed_mean(value: Tensor, share: Tensor, fraction: float) -> Tensor:
    """Return the mean of every coordinate without the lowest and the highest `fraction` of the weight.

    Args:
        value: `(M, ...)`, M > 0.
        share: the messages' weights `(M,)` in float64, of sum 1.
        fraction: at least 0 and below one half.

    Returns:
        `(...)` in float64.
    """
    programs = _programs(value, share)
    if programs:
        return _launched(programs.trimmed_mean, value, share, fraction)
    ordered, weights, above = _ordered(value, share)
    kept = (above.clamp(max=1 - fraction) - (above - weights).clamp(min=fraction)).clamp(min=0)
    return torch.where(kept > 0, kept * ordered, 0.0).sum(0) / (1 - 2 * fraction)


def _programs(value: Tensor, share: Tensor) -> Any:
    return program("fedtorch.kernels.programs.order_statistics", (value, share), FLOATS, fits=0 < len(value) <= MOST)


def _launched(kernel: Any, value: Tensor, share: Tensor, *numbers: float) -> Tensor:
    messages, size = len(value), value[0].numel()
    out = value.new_empty(value.shape[1:], dtype=torch.float64)
    rows = power_of_two(messages)
    columns = min(max(_SIZE // value.element_size() // rows, 1), 256)
    tensors = (out, value.contiguous(), share.to(torch.float64).contiguous())
    tile = {"MESSAGES": rows, "COLUMNS": columns, **_integers(value.dtype)}
    launch(kernel, -(-size // columns), *tensors, messages, size, *numbers, **tile, warps=8)
    return out


def _integers(dtype: torch.dtype) -> Mapping[str, int]:
    """Return the integer dtype of the width of a dtype."""
    bits = torch.finfo(dtype).bits
    return {"LARGEST": 2 ** (bits - 1) - 1, "BITS": bits}


def _ordered(value: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values in ascending order, their weights, the weights summed up to each), `(M, ...)`."""
    ordered, order = value.to(torch.float64).sort(0)
    weights = share[order]
    return ordered, weights, weights.cumsum(0)
