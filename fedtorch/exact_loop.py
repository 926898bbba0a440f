"""Call the C program of `fedtorch.exact`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import choice, compiled

_SOURCE = Path(__file__).with_suffix(".c")
_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


def program(tensors: Sequence[Tensor]) -> ctypes.CDLL | None:
    """Return the library where there is one and it knows these tensors, else None."""
    if not choice.plain(tensors) or any(tensor.dtype != torch.float64 for tensor in tensors):
        return None
    library = compiled.library(_SOURCE)
    if library is not None and library.limbs.argtypes is None:
        library.limbs.argtypes = (_ADDRESS, _NUMBER, _NUMBER, _ADDRESS)
        library.products.argtypes = (_ADDRESS, _ADDRESS, _NUMBER, _ADDRESS, _ADDRESS)
        library.values.argtypes = (_ADDRESS, _NUMBER, _ADDRESS)
        library.about.argtypes = (*(_ADDRESS,) * 4, _NUMBER, _ADDRESS)
        library.limbs.restype = library.products.restype = None
    return library


def limbs(library: ctypes.CDLL, terms: Sequence[Tensor], size: int) -> Tensor:
    """Return the sum of terms of one shape in limbs, `(..., size)`."""
    out = torch.empty((*terms[0].shape, size), dtype=torch.float64, device="cpu")
    for number, term in enumerate(terms):
        kept = term.contiguous()
        library.limbs(kept.data_ptr(), kept.numel(), number, out.data_ptr())
    return out


def products(library: ctypes.CDLL, weight: Tensor, value: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return w·x and w·x² as terms, of tensors of one shape."""
    first = torch.empty((2, *weight.shape), dtype=torch.float64, device="cpu")
    second = torch.empty((4, *weight.shape), dtype=torch.float64, device="cpu")
    weight, value = weight.contiguous(), value.contiguous()
    places = (tensor.data_ptr() for tensor in (first, second))
    library.products(weight.data_ptr(), value.data_ptr(), weight.numel(), *places)
    return first.unbind(), second.unbind()


def values(library: ctypes.CDLL, total: Tensor) -> Tensor | None:
    """Return the values of sums, None where one is not finite."""
    out = torch.empty(total.shape[:-1], dtype=torch.float64, device="cpu")
    kept = total.contiguous()
    return None if library.values(kept.data_ptr(), out.numel(), out.data_ptr()) else out


def about(library: ctypes.CDLL, totals: Sequence[Tensor]) -> Tensor | None:
    """Return the three moments `(3, ...)`, None where a sum is not finite."""
    out = torch.empty((3, *totals[0].shape[:-1]), dtype=torch.float64, device="cpu")
    kept = [total.contiguous() for total in totals]
    places = (tensor.data_ptr() for tensor in kept)
    return None if library.about(*places, out.numel() // 3, out.data_ptr()) else out
