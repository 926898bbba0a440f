"""Call the C program of `fedtorch.federation.exchanges.exchange.is_finite`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import choice, compiled

_SOURCE = Path(__file__).with_suffix(".c")
_MOST = 2**20  # numbers; more are worth several threads of torch
_KINDS = {torch.float64: 0, torch.float32: 1}
_WEIGHTS = 2


def finite(numbers: Sequence[Tensor], weights: Sequence[Tensor]) -> bool | None:
    """Return whether all are finite and no weight is negative; None where the program is not there or not for them."""
    tensors = (*numbers, *weights)
    counts = [tensor.numel() for tensor in tensors]
    if sum(counts) > _MOST or any(tensor.dtype not in _KINDS for tensor in tensors) or not choice.plain(tensors):
        return None
    library = compiled.library(_SOURCE)
    if library is None or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    size, kinds = len(tensors), [_KINDS[tensor.dtype] for tensor in tensors]
    for at in range(len(numbers), size):
        kinds[at] |= _WEIGHTS
    many = ctypes.c_int64 * size
    places = (ctypes.c_void_p * size)(*[tensor.data_ptr() for tensor in tensors])
    return bool(library.all_finite(places, many(*counts), many(*kinds), ctypes.c_int64(size)))
