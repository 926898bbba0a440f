"""Advice for users of stacked clients after an error of torch, in one table by the error's text."""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch
from torch import nn

from fedtorch import tree

_LABELS = "give class labels as int64, for example y.long()"
_WORDS = "give numbers of words or classes as int64, for example x.long()"
_FROZEN = (
    "set requires_grad of what is to be trained before the local solver is made, with a learning rate of 0 as long as "
    "it is to stay"
)
_IN_PLACE = "change a copy of the batch or parameter, x = x.clone(), and not itself"
# A pattern in torch's error, and the advice; the first match is used.
_TABLE = (
    (r"out of range|out of bounds", "classes and tokens are numbered from 0 to one less than the module has"),
    (r"expected scalar type Long but found|nll_loss.*not implemented|target dtype to be Long", _LABELS),
    (r"Expected floating point type for target with class prob", _LABELS),
    (r"Expected tensor for argument #1 'indices'|expected.*indices.*(Int|Long)", _WORDS),
    (r"embedding.*(Float|Double|Short|Char|Byte)", _WORDS),
    (r"gather\(\): Expected dtype int64|index.*dtype", _LABELS),
    (r"does not require grad", _FROZEN),
    (r"[Uu]ninitialized|LazyModule", "call the module once on a batch, so that its lazy layers have parameters"),
    (
        r"escaped from inside a function being vmapped|function being transformed by a functorch",
        "use batched='auto' or batched=False, which call the loss client by client",
    ),
    (r"sparse", "make the layer without sparse=True, whose gradients stacked clients cannot have"),
    (
        r"ParameterList|deepcopy protocol",
        "make the module anew, and call it under torch.no_grad() only before it is given",
    ),
    (r"more than 1 value per channel", "pass drop_last=True, or a batch_size that leaves no batch of one row"),
    (r"modified by an inplace operation|a view of a leaf|leaf Variable that requires grad", _IN_PLACE),
)


def explained(error: Exception, module: nn.Module, batch: Any, dtype: torch.dtype) -> str:
    """Return torch's error with the layer that raised it, and the remedy.

    Args:
        error: of a training step.
        module: the trained module.
        batch: its batch.
        dtype: of the module.

    Example:
        >>> error = IndexError("index out of range in self")
        >>> explained(error, nn.Linear(1, 1), torch.ones(1, 1), torch.float32)
        'index out of range in self; classes and tokens are numbered from 0 to one less than the module has'
    """
    layer = _layer(error, module)
    return f"{f'in {layer}: ' if layer else ''}{error}; {_advice(error, batch, dtype)}"


def of_torch(error: Exception) -> bool:
    """Return whether an error is torch's, or of the same kind: not raised by a line of this package.

    Example:
        >>> of_torch(ValueError())
        False
    """
    if type(error) not in (RuntimeError, IndexError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [frame for frame in frames if frame.f_code.co_name != "__torch_function__"]  # these pass calls on
    return bool(called) and called[-1].f_globals.get("__name__", "").split(".")[0] != __name__.split(".")[0]


def _layer(error: Exception, module: nn.Module) -> str:
    """Return the name of the innermost part of a module in which an error was raised, "" if none is known."""
    names = {id(part): name for name, part in module.named_modules() if name}
    part_name, trace = "", error.__traceback__
    while trace is not None:
        part = trace.tb_frame.f_locals.get("self")
        if id(part) in names and isinstance(part, nn.Module):
            part_name = f"{names[id(part)]} ({type(part).__name__})"
        trace = trace.tb_next
    return part_name


def _advice(error: Exception, batch: Any, dtype: torch.dtype) -> str:
    message = str(error)
    for pattern, advice in _TABLE:
        if re.search(pattern, message):
            return advice
    try:
        leaves = tree.leaves(batch)
    except TypeError:
        leaves = []
    if any((leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype != dtype for leaf in leaves):
        return f"convert them with data.to(dtype={dtype}), or the module with module.to(…)"
    return "change the rows, the module's inputs or the loss, or use ft.lightning_fit"
