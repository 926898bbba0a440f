"""Call the C program of the global variables of a Gibbs sampler; see `fedtorch.models.gibbs`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import choice, compiled

_SOURCE = Path(__file__).with_suffix(".c")
_NUMBER, _ADDRESS, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Slabs(ctypes.Structure):
    """`Slabs` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("chains", "size", "shared")),
        *((name, _REAL) for name in ("spike", "shape", "rate", "a", "b")),
        *((name, _ADDRESS) for name in ("variance_in", "inclusion_in", "estimate", "precision", "keys")),
        *((name, _ADDRESS) for name in ("theta", "included", "variance", "inclusion")),
    )


class _Levels(ctypes.Structure):
    """`Levels` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("chains", "size", "turns")),
        *((name, _REAL) for name in ("loosest", "bound")),
        *(
            (name, _ADDRESS)
            for name in ("clients", "energy", "rate", "auxiliary", "precision_in", "factors_in", "keys")
        ),
        *((name, _ADDRESS) for name in ("precision", "factors")),
    )


class _Scales(ctypes.Structure):
    """`Scales` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("chains", "size", "parts", "points")),
        *((name, _REAL) for name in ("finest", "bound")),
        *((name, _ADDRESS) for name in ("clients", "weight", "estimate", "scatter")),
        *((name, _ADDRESS) for name in ("precision_in", "share", "prior", "keys", "precision")),
    )


def program(keys: Tensor, numbers: Sequence[Tensor]) -> ctypes.CDLL | None:
    """Return the library where there is one and it knows keys and float64 numbers like these, else None."""
    if not choice.plain((keys, *numbers)) or any(tensor.dtype != torch.float64 for tensor in numbers):
        return None
    library = compiled.library(_SOURCE)
    if library is not None and library.move.argtypes is None:
        library.move.argtypes = (*(_ADDRESS,) * 6, _NUMBER, _NUMBER, _ADDRESS)
    return library


def move(library: ctypes.CDLL, numbers: Sequence[Tensor]) -> Tensor:
    """Return θ `(C, p)` of `_interweaving.move`.

    Args:
        library: the program.
        numbers: score, packed information, θ, centre, prior precisions and standard normal numbers, a row a chain.

    Raises:
        MemoryError: there is not enough.
    """
    out = torch.empty(numbers[0].shape, dtype=torch.float64, device="cpu")
    kept = [tensor.contiguous() for tensor in numbers]
    if library.move(*(tensor.data_ptr() for tensor in kept), *out.shape, out.data_ptr()):
        raise MemoryError(f"no memory for the {out.shape[-1] ** 2} numbers of a chain's matrix")
    return out


def spike_and_slab(
    prior: tuple[float, float, float, float, float], shared: bool, keys: Tensor, numbers: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """Return θ, γ, η and ρ after one step of `global_priors.spike_and_slab`, None where there is no program.

    Args:
        prior: c₀, the shape and rate of η, and both parameters of ρ.
        shared: whether one η is of all coefficients.
        keys: `(C,)`.
        numbers: η `(C, p)` or `(C, 1)`, ρ `(C,)`, the estimate and its precision `(C, p)`.
    """
    library = program(keys, numbers)
    if library is None:
        return None
    variance, inclusion, estimate, _ = kept = [tensor.contiguous() for tensor in numbers]
    keys = keys.contiguous()
    out = tuple(torch.empty_like(part) for part in (estimate, estimate, variance, inclusion))
    places = (tensor.data_ptr() for tensor in (*kept, keys, *out))
    library.spike_and_slab(ctypes.byref(_Slabs(*estimate.shape, shared, *prior, *places)))
    return out


def levels(
    library: ctypes.CDLL, numbers: Sequence[Tensor], keys: Tensor, turns: int, limits: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return 1/τ² `(C, p)` and factors `(C, 2, p)` of `_levels.move`.

    Args:
        library: the program.
        numbers: clients `(C,)`, energy, rate, auxiliary and 1/τ² `(C, p)`, factors `(C, 2, p)`.
        keys: `(C,)`.
        turns: how many rounds of draws.
        limits: the largest factor, and of |log τ²|.
    """
    kept = [tensor.contiguous() for tensor in (*numbers, keys)]
    out = torch.empty_like(kept[4]), torch.empty_like(kept[5])
    places = (tensor.data_ptr() for tensor in (*kept, *out))
    library.levels(ctypes.byref(_Levels(*out[0].shape, turns, *limits, *places)))
    return out


def scales(
    library: ctypes.CDLL, numbers: Sequence[Tensor], keys: Tensor, points: int, limits: tuple[float, float]
) -> Tensor:
    """Return 1/τ² `(C, p)` of `_scales.draw`.

    Args:
        library: the program.
        numbers: clients `(C, 1)`, weight, estimate, scatter and 1/τ² `(C, p)`, shares and precisions of the components,
            which broadcast to `(k, C, p)`.
        keys: `(C,)`.
        points: of a lattice.
        limits: the finest spacing, and of |log τ²|.
    """
    *heard, share, prior = numbers
    shape = heard[4].shape
    wide = [tensor.expand(len(prior), *shape) for tensor in (share, prior)]
    kept = [tensor.contiguous() for tensor in (*heard, *wide, keys)]
    out = torch.empty(shape, dtype=torch.float64, device="cpu")
    places = (tensor.data_ptr() for tensor in (*kept, out))
    library.scales(ctypes.byref(_Scales(*shape, len(prior), points, *limits, *places)))
    return out
