"""The transforms of `torch.func` in which an operation is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

_MAPS = torch._C._functorch


def belongs_to_clients(tensor: Tensor | None) -> bool:
    """Return whether a tensor has a value for each client or example of a `vmap`, or is otherwise transformed."""
    return tensor is not None and _MAPS.is_functorch_wrapped_tensor(tensor)


def differentiated() -> bool:
    """Return whether a transform other than `vmap` is active, such as `torch.func.grad`, which needs plain operations.

    Example:
        >>> torch.vmap(lambda x: x * differentiated())(torch.ones(1))
        tensor([0.])
        >>> torch.func.grad(lambda x: x * differentiated())(torch.tensor(2.0))
        tensor(1.)
    """
    transforms = _MAPS.get_interpreter_stack() or ()
    return any(transform.key() != _MAPS.TransformType.Vmap for transform in transforms)


def inside(tensor: Tensor) -> Tensor:
    """Return the tensor of all clients inside of transforms."""
    while _MAPS.is_functorch_wrapped_tensor(tensor):
        tensor = _MAPS.get_unwrapped(tensor)
    return tensor


def over_clients() -> bool:
    """Return whether one `vmap` is active and no other transform."""
    transforms = _MAPS.get_interpreter_stack() or ()
    return len(transforms) == 1 and transforms[0].key() == _MAPS.TransformType.Vmap


def outside(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return a function of tensors `(K, ...)` of all clients, evaluated outside of the one `vmap` that is active.

    Example:
        >>> total = lambda x: outside(lambda rows: rows.cumsum(0), x)
        >>> torch.vmap(total)(torch.ones(3, 2))
        tensor([[1., 1.],
                [2., 2.],
                [3., 3.]])
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level, size = interpreter.level(), interpreter.batch_size()
    stacked = [None if tensor is None else _in_front(tensor, level, size) for tensor in tensors]
    with interpreter.lower():
        outputs = function(*stacked)
    return _MAPS._add_batch_dim(outputs, 0, level)


def _in_front(tensor: Tensor, level: int, size: int) -> Tensor:
    inside, dim = _MAPS._unwrap_batched(tensor, level)
    return inside.expand(size, *inside.shape) if dim is None else inside.movedim(dim, 0)
