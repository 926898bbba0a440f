"""Which transforms of `torch.func` an operation is called in."""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Return the tensor of all clients that transforms have hidden."""
    while _MAPS.is_functorch_wrapped_tensor(tensor):
        tensor = _MAPS.get_unwrapped(tensor)
    return tensor
