"""Call the C program of `fedtorch.kernels.gibbs_sweeps`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import choice, compiled

_SOURCE = Path(__file__).with_suffix(".c")
_NUMBER = ctypes.c_int64
_TILE = 8  # problems that go side by side
_READ = ("gram", "estimate", "least", "degrees", "centre", "shared", "scale", "w_in", "u_in", "noise_in", "keys")
_WRITTEN = ("delta", "w", "u", "noise")


class _Problem(ctypes.Structure):
    """`Problem` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("chains", "size", "sweeps")),
        *((name, ctypes.c_void_p) for name in (*_READ, *_WRITTEN)),
    )


def program() -> ctypes.CDLL | None:
    """Return the library, None where there is none."""
    library = compiled.library(_SOURCE)
    if library is not None and library.likelihoods.argtypes is None:
        library.likelihoods.argtypes = (*(ctypes.c_void_p,) * 4, *(_NUMBER,) * 3, *(ctypes.c_void_p,) * 2)
    return library


def likelihoods(gram: Tensor, estimate: Tensor, place: Tensor, noise: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return score and packed information of `_interweaving.linear`, None where the program does not know the tensors.

    Args:
        gram: X'X, `(K, p, p)`.
        estimate: least squares, `(K, p)`.
        place: `(K, C, p)`.
        noise: 1/σ², `(K, C)`.
    """
    given = gram, estimate, place, noise
    if not choice.plain(given) or any(tensor.dtype != torch.float64 for tensor in given):
        return None
    library = program()
    if library is None:
        return None
    clients, chains, p = place.shape
    kept = [tensor.contiguous() for tensor in given]
    score = torch.empty(place.shape, dtype=torch.float64, device="cpu")
    packed = torch.empty((clients, chains, p * (p + 1) // 2), dtype=torch.float64, device="cpu")
    library.likelihoods(*(tensor.data_ptr() for tensor in kept), *place.shape, score.data_ptr(), packed.data_ptr())
    return score, packed


def run(library: ctypes.CDLL, read: Sequence[Tensor], written: Sequence[Tensor], sweeps: int) -> None:
    """Do all sweeps of all chains.

    Args:
        library: the program.
        read: in the order of `_READ`, all float64 but the keys.
        written: contiguous, in the order of `_WRITTEN`.
        sweeps: of each.

    Raises:
        MemoryError: there is not enough.
    """
    clients, chains, size = written[0].shape
    kept = [tensor.contiguous() for tensor in read]  # to the end
    problem = _Problem(chains, size, sweeps, *(tensor.data_ptr() for tensor in (*kept, *written)))
    whole = clients * chains
    tiles = -(-whole // _TILE)
    call = lambda begin, end: library.gibbs_sweeps(
        ctypes.byref(problem), _NUMBER(_TILE * begin), _NUMBER(min(_TILE * end, whole))
    )
    failed = compiled.in_threads(call, tiles, compiled.ENOUGH)
    if any(failed):
        raise MemoryError(f"no memory for the {2 * size**2} numbers of a problem's matrices")
