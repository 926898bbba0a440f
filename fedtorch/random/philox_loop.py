"""Call the C program of `fedtorch.random.philox`, which draws and makes keys on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import compiled

_SOURCE = Path(__file__).with_suffix(".c")
_NUMBER, _ADDRESS, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_FORMS = ("BITS", "INTEGERS", "COINS", "UNIFORM", "UNIFORM_WIDE", "NORMAL", "NORMAL_WIDE", "EXPONENTIAL")
_CODES = {name: code for code, name in enumerate((*_FORMS, "EXPONENTIAL_WIDE"))}
_WRITTEN = {"BITS": torch.int64, "INTEGERS": torch.int64, "COINS": torch.bool}  # the others: as wide as their names say


def program() -> ctypes.CDLL | None:
    """Return the library, None where there is none."""
    library = compiled.library(_SOURCE)
    if library is not None and library.draw.argtypes is None:
        library.draw.argtypes = (_NUMBER, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, _ADDRESS)
        library.fold.argtypes = (*(_ADDRESS, _NUMBER, _NUMBER) * 2, _NUMBER, _NUMBER, _ADDRESS)
        library.gammas.argtypes = (_ADDRESS, _ADDRESS, _NUMBER, _NUMBER, _NUMBER, _REAL, _ADDRESS)
        for function in (library.draw, library.fold, library.gammas):
            function.restype = None
    return library


def draw(
    library: ctypes.CDLL, form: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype, argument: int
) -> Tensor:
    """Return numbers of a form, `(*key.shape, *shape)`.

    Args:
        library: the program.
        form: `BITS`, `INTEGERS`, `COINS`, `UNIFORM`, `NORMAL` or `EXPONENTIAL`.
        key: `(...)`.
        shape: of one key's numbers.
        dtype: of the result; floating-point numbers of another width than float64 are made as float32.
        argument: the threshold of coins, the digits of uniform numbers.
    """
    written = _WRITTEN.get(form) or (torch.float64 if dtype == torch.float64 else torch.float32)
    code = _CODES[f"{form}_WIDE" if written == torch.float64 else form]
    out = torch.empty((*key.shape, *shape), dtype=written, device="cpu")
    keys = key.contiguous()
    library.draw(code, keys.data_ptr(), keys.numel(), math.prod(shape), argument, out.data_ptr())
    return out if written == dtype else out.to(dtype)


def fold(library: ctypes.CDLL, key: Tensor, data: Tensor | int) -> Tensor:
    """Return new keys of keys and int64 numbers that broadcast."""
    if isinstance(data, int):
        out, keys = torch.empty_like(key, memory_format=torch.contiguous_format), key.contiguous()
        number = _NUMBER(data)  # its lower 64 bits
        library.fold(keys.data_ptr(), 0, 1, ctypes.addressof(number), 0, 0, 1, keys.numel(), out.data_ptr())
        return out
    keys, numbers = torch.broadcast_tensors(key, data)
    out = torch.empty(keys.shape, dtype=torch.int64, device="cpu")
    if keys.ndim > 2:
        keys, numbers = keys.reshape(-1), numbers.reshape(-1)
    rows, columns = (1,) * (2 - keys.ndim) + tuple(keys.shape)
    (key_row, key_column), (row, column) = [(0, 0, *part.stride())[-2:] for part in (keys, numbers)]
    places = keys.data_ptr(), numbers.data_ptr(), out.data_ptr()
    library.fold(places[0], key_row, key_column, places[1], row, column, rows, columns, places[2])
    return out


def gamma(library: ctypes.CDLL, keys: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gamma numbers of keys `(Q,)` and shape parameters `(Q, n)` in float64, as `philox.gamma` does."""
    out = torch.empty(a.shape, dtype=torch.float64, device="cpu")
    same = not any(a.stride())
    given, keys = a if same else a.contiguous(), keys.contiguous()
    smallest = torch.finfo(dtype).tiny
    library.gammas(keys.data_ptr(), given.data_ptr(), int(not same), *a.shape, smallest, out.data_ptr())
    return out if dtype == torch.float64 else out.to(dtype)
