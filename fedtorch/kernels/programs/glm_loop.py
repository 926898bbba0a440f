"""Call the C program of `fedtorch.kernels.glm_loop`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import compiled
from fedtorch.kernels.optimiser_rules import Adam, Momentum, moments_of, rates_of

_SOURCE = Path(__file__).with_suffix(".c")
_REAL = {torch.float64: "double", torch.float32: "float"}
_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _Problem(ctypes.Structure):
    """`Problem` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("family", "rows", "features", "parameters", "classes")),
        *((name, _ADDRESS) for name in ("x", "y", "total", "precision", "shift", "theta", "told")),
        *((name, _NUMBER) for name in ("rule", "nesterov")),
        *((name, ctypes.c_double) for name in ("beta1", "beta2", "eps")),
        ("rate_step", _NUMBER),
        *((name, _ADDRESS) for name in ("rate", "mean", "square")),
    )


class _Steps(ctypes.Structure):
    """`Steps` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("first", "steps")),
        *((name, _ADDRESS) for name in ("place", "size")),
        *((name, _NUMBER) for name in ("place_step", "place_client", "size_step", "size_client")),
    )


def program(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library for tensors of a dtype, None where there is none."""
    return compiled.library(_SOURCE, REAL=_REAL[dtype]) if dtype in _REAL else None


def run(
    library: ctypes.CDLL,
    family: int,
    x: Tensor,
    y: Tensor,
    theta: Tensor,
    runs: Iterable[tuple[Tensor | None, Tensor]],
    lr: float,
    total: Tensor,
    pull: tuple[Tensor, Tensor] | None,
    rule: Momentum | Adam | None,
) -> tuple[Tensor, Tensor]:
    """Return the parameters `(K, p, C)` after all steps, and the sum `(K,)` of the mean losses, in float64.

    Args:
        library: of the dtype of `x`.
        family: its code.
        x, y, runs, lr, total, rule: as of `glm_loop`.
        theta: `(K, p, C)`.
        pull: (λ, h), `(K,)` and `(K, p, C)`, or None.

    Raises:
        MemoryError: there is not enough.
    """
    own, told = theta.mT.clone(memory_format=torch.contiguous_format), torch.zeros(len(theta), dtype=torch.float64)
    pulls = [None, None] if pull is None else [pull[0].to(x.dtype), pull[1].mT.to(x.dtype)]
    inputs = [None if part is None else part.contiguous() for part in (x, y, total.long(), *pulls)]  # kept to the end
    classes, parameters = own.shape[1:]
    sizes = family, x.shape[1], x.shape[2], parameters, classes
    code, nesterov, *numbers = _encoded(rule)
    rates = rates_of(rule, lr, total)
    moments = [torch.zeros_like(own) if i < moments_of(rule) else None for i in range(2)]
    addresses = _addresses(*inputs, own, told)
    after = _addresses(rates, *moments)
    problem = _Problem(*sizes, *addresses, code, nesterov, *numbers, rates.stride(0), *after)
    threads = max(1, min(torch.get_num_threads(), len(own)))
    ends = [len(own) * i // threads for i in range(threads + 1)]
    step = 0
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        for place, size in runs:
            size = size.long()
            if place is not None:
                place = place.long() if place.stride(2) == 1 else place.long().contiguous()
            chosen, strides = (None, (0, 0)) if place is None else (place.data_ptr(), place.stride()[:2])
            steps = _Steps(step, len(size), chosen, size.data_ptr(), *strides, *size.stride())
            call = lambda begin, end, to=steps: library.glm_loop(
                ctypes.byref(problem), ctypes.byref(to), _NUMBER(begin), _NUMBER(end)
            )
            failed = [call(*ends)] if pool is None else list(pool.map(call, ends[:-1], ends[1:]))
            if any(failed):
                raise MemoryError(f"no memory for the {classes * parameters} numbers of a gradient")
            step += len(size)
    return own.mT, told


def _encoded(rule: Momentum | Adam | None) -> tuple[int, int, float, float, float]:
    """Return rule, nesterov, beta1, beta2 and eps of the C file."""
    if rule is None:
        return 0, 0, 0.0, 0.0, 0.0
    if isinstance(rule, Momentum):
        return 1, int(rule.nesterov), rule.momentum, rule.dampening, 0.0
    return 2, 0, *rule.betas, rule.eps


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
