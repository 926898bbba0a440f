"""Call the C program of what the server of HM1 computes; see `fedtorch.models.low_rank`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import choice, compiled

MOST = 64  # directions of a covariance; of more torch is faster
_SOURCE = Path(__file__).with_suffix(".c")
_NUMBER, _ADDRESS, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Majorised(ctypes.Structure):
    """`Majorised` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("units", "width", "directions", "row", "column")),
        ("accuracy", _REAL),
        *((name, _ADDRESS) for name in ("multiple", "vectors", "values", "theta", "precision", "shift")),
    )


class _Renewed(ctypes.Structure):
    """`Renewed` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("units", "width", "answered")),
        ("pooling", _REAL),
        *((name, _ADDRESS) for name in ("ids", "change", "fresh_residual", "fresh_freedom", "fresh_spread", "noise")),
        *((name, _ADDRESS) for name in ("theta", "residual", "freedom", "spread", "known", "heard", "numbers")),
    )


def program(tensors: Sequence[Tensor]) -> ctypes.CDLL | None:
    """Return the library where there is one and it knows float64 numbers like these, else None."""
    if not choice.plain(tensors) or any(tensor.dtype != torch.float64 for tensor in tensors):
        return None
    library = compiled.library(_SOURCE)
    if library is not None and library.factored.argtypes is None:
        library.factored.argtypes = (_ADDRESS, _NUMBER, _NUMBER, _NUMBER, *(_ADDRESS,) * 3)
        library.noise_variance.argtypes = (_ADDRESS, _ADDRESS, _NUMBER, _REAL, _ADDRESS)
        library.priors.argtypes = (*(_ADDRESS,) * 3, _NUMBER, _NUMBER, _REAL, *(_ADDRESS,) * 3)
        library.noise_variance.restype = library.priors.restype = None
    return library


def factored(library: ctypes.CDLL, multiple: Tensor, factor: Tensor, rank: int) -> tuple[Tensor, ...] | None:
    """Return multiple, vectors and values of `LowRank.from_factor`; None where the factor is not finite.

    Raises:
        MemoryError: there is not enough.
    """
    units, count = factor.shape
    multiple, factor = multiple.clone(), factor.contiguous()
    vectors, values = factor.new_empty(rank, units).mT, factor.new_empty(rank)
    out = multiple.data_ptr(), vectors.data_ptr(), values.data_ptr()
    failed = library.factored(factor.data_ptr(), units, count, rank, *out)
    if failed > 1:
        raise MemoryError(f"no memory for the {units} rows of a factor")
    return None if failed else (multiple, vectors, values)


def majorised(
    library: ctypes.CDLL, multiple: Tensor, vectors: Tensor, values: Tensor, theta: Tensor, accuracy: float
) -> tuple[Tensor, Tensor]:
    """Return the precisions `(K,)` and shifts `(K, d)` of `low_rank.majorised`.

    Raises:
        MemoryError: there is not enough.
    """
    kept = multiple, vectors, values.contiguous(), theta.contiguous()
    precision, shift = theta.new_empty(len(theta)), torch.empty_like(kept[3])
    places = (tensor.data_ptr() for tensor in (*kept, precision, shift))
    if library.majorised(
        ctypes.byref(_Majorised(*theta.shape, vectors.shape[1], *vectors.stride(), accuracy, *places))
    ):
        raise MemoryError(f"no memory for the {len(theta)} rows of a covariance")
    return precision, shift


def noise_variance(library: ctypes.CDLL, residual: Tensor, freedom: Tensor, pooling: float) -> Tensor:
    """Return each device's noise variance, `(K,)`."""
    kept, out = (residual.contiguous(), freedom.contiguous()), torch.empty_like(residual)
    library.noise_variance(kept[0].data_ptr(), kept[1].data_ptr(), len(residual), pooling, out.data_ptr())
    return out


def priors(
    library: ctypes.CDLL, told: Sequence[Tensor], heard: Tensor | None, pooling: float, prior: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what devices are sent: noise variances, precisions `(K,)` and shifts `(K, d)`.

    Args:
        library: the program.
        told: residuals and degrees of freedom, `(K,)`.
        heard: `(K,)` bool, which devices have been heard; None if that does not matter.
        pooling: degrees of freedom of all devices' noise in that of each.
        prior: precisions and shifts of those of which all is known.
    """
    residual, freedom = (tensor.contiguous() for tensor in told)
    variance = torch.empty_like(residual)
    precision, shift = (tensor.clone(memory_format=torch.contiguous_format) for tensor in prior)
    known = None if heard is None else heard.contiguous()
    places = (residual.data_ptr(), freedom.data_ptr(), None if known is None else known.data_ptr())
    out = (tensor.data_ptr() for tensor in (variance, precision, shift))
    library.priors(*places, *shift.shape, pooling, *out)
    return variance, precision, shift


def renewed(
    library: ctypes.CDLL,
    server: Sequence[Tensor],
    heard: Tensor,
    ids: Tensor,
    told: Sequence[Tensor],
    noise: Tensor | None,
    pooling: float,
) -> tuple[Tensor, ...]:
    """Return what the server makes of the devices that answered.

    Args:
        library: the program.
        server: Θ `(K, d)`, and the residuals, degrees of freedom and spreads `(K,)` of all devices.
        heard: which of them have been heard, `(K,)` bool.
        ids: that answered, `(M,)`.
        told: their change of Θ `(M, d)`, residuals, degrees of freedom and spreads `(M,)`.
        noise: variances `(K,)` if they are given.
        pooling: degrees of freedom of all devices' noise in that of each.

    Returns:
        `server` anew, `heard` anew, Θ with zeros in rows that have not been heard, and four numbers: whether the noise
        variances are finite, Σθ² of those heard, how many they are, and the typical variance of a coefficient.

    Raises:
        IndexError: one that answered is not among the devices.
        MemoryError: there is not enough.
    """
    theta, residual, freedom, spread, heard = (
        tensor.clone(memory_format=torch.contiguous_format) for tensor in (*server, heard)
    )
    known, numbers = torch.empty_like(theta), theta.new_empty(4)
    kept = [tensor.contiguous() for tensor in (ids, *told)]
    given = noise if noise is None else noise.contiguous()
    inputs = (*(tensor.data_ptr() for tensor in kept), None if given is None else given.data_ptr())
    out = (theta, residual, freedom, spread, known, heard, numbers)
    sizes = (*theta.shape, len(ids), pooling)
    failed = library.renewed(ctypes.byref(_Renewed(*sizes, *inputs, *(tensor.data_ptr() for tensor in out))))
    if failed > 1:
        raise MemoryError(f"no memory for the {len(theta)} devices")
    if failed:
        raise IndexError(f"Expected numbers of {len(theta)} devices, but got {int(ids.min())} to {int(ids.max())}")
    return theta, residual, freedom, spread, heard, known, numbers
