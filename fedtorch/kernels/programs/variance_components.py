"""Call the C program of `fedtorch.kernels.variance_components`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtorch.dispatch import compiled

_SOURCE = Path(__file__).with_suffix(".c")
_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_FEW = 2**12  # nodes, for which threads are not worth their start


class _Problem(ctypes.Structure):
    """`Problem` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("nodes", "size", "components", "width")),
        *((name, _NUMBER) for name in ("values_client", "values_node", "values_column")),
        *((name, _NUMBER) for name in ("inputs_client", "inputs_node", "inputs_column", "noise_client", "noise_node")),
        *((name, _ADDRESS) for name in ("values", "inputs", "noise", "rows", "columns", "root", "shared")),
        *((name, _ADDRESS) for name in ("origin", "centre", "slope", "weights", "log", "score", "information")),
    )


def library() -> ctypes.CDLL | None:
    """Return the library, None where there is none."""
    return compiled.library(_SOURCE)


def log_densities(model: Any) -> Tensor:
    """Return log |M| + u'M⁻¹u, `(K, R)`; see `fedtorch.kernels.variance_components.log_densities`."""
    log = model.root.new_empty(len(model.root), model.noise.shape[1])
    _run("log_densities", model, log=log)
    return log


def scores(model: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return M⁻¹u and Σ weights · M⁻¹; see `fedtorch.kernels.variance_components.scores`."""
    clients, size = model.centre.shape
    score = model.root.new_empty(clients, size, model.noise.shape[1])
    information = model.root.new_empty(clients, size, size)
    _run("scores", model, weights=weights.contiguous(), score=score, information=information)
    return score.mT, information


def _run(function: str, model: Any, **tensors: Tensor) -> None:
    """Call a function of the library for all clients, in as many threads as torch has.

    Raises:
        MemoryError: there is not enough.
    """
    clients, nodes = len(model.root), model.noise.shape[1]
    each = {name: getattr(model, name) for name in ("values", "inputs", "noise")}
    names = "rows", "columns", "root", "shared", "origin", "centre", "slope"
    whole = {name: getattr(model, name).contiguous() for name in names}  # kept to the end
    problem = _Problem(nodes, model.centre.shape[1], len(model.rows), model.inputs.shape[2])
    for name, tensor in {**each, **whole, **tensors}.items():
        setattr(problem, name, tensor.data_ptr())
    for name, tensor in each.items():
        for axis, stride in zip(("client", "node", "column"), tensor.stride()):
            setattr(problem, f"{name}_{axis}", stride)
    call = lambda begin, end: getattr(library(), function)(ctypes.byref(problem), _NUMBER(begin), _NUMBER(end))
    failed = compiled.in_threads(call, clients, nodes * compiled.ENOUGH // _FEW)
    if any(failed):
        raise MemoryError(f"no memory for the {len(model.rows)} variance components of a client")
