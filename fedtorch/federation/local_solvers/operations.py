"""What a computation does, as a value: the same for computations that do the same, whatever Python code they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operations"]


class Operations(TorchDispatchMode):
    """A context that takes down the tensor operations in it, with all their arguments.

    It sees them below autograd and `vmap`, so that backward passes are taken down too. A tensor that comes out of an
    earlier operation is told by which it is; any other by its numbers.

    Attributes:
        reads: whether a tensor's value was turned into a Python number, on which the code may then depend.

    Example:
        >>> import torch
        >>> from fedtorch.federation.local_solvers.operations import Operations
        >>> def taken(factor):
        ...     with Operations() as operations:
        ...         torch.ones(2).mul(factor)
        ...     return operations.digest()
        >>> taken(2.0) == taken(2.0), taken(2.0) == taken(3.0)
        (True, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._hash = hashlib.blake2b(digest_size=16)
        self._known: dict[int, tuple[int, Tensor]] = {}  # by id; held, so that no other tensor gets the same one
        self.reads = False

    def __torch_dispatch__(
        self, fn: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads = self.reads or fn is torch.ops.aten._local_scalar_dense.default
        self._take((str(fn), args, kwargs or {}))
        result = fn(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, Tensor):
                self._remember(value)
        return result

    def digest(self) -> str:
        """Of all operations so far; the same for the same operations on the same numbers."""
        return self._hash.hexdigest()

    def _remember(self, value: Tensor) -> None:
        self._known.setdefault(id(value), (len(self._known), value))

    def _take(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._hash.update(f"{value.dtype}{tuple(value.shape)}{value.stride()}".encode())
            if id(value) in self._known:
                self._hash.update(f"number {self._known[id(value)][0]};".encode())
            else:
                numbers = value.detach().cpu().contiguous().flatten()
                self._hash.update(numbers.view(torch.uint8).numpy().tobytes() if len(numbers) else b"")
                self._remember(value)
        elif isinstance(value, (list, tuple)):
            self._hash.update(f"{len(value)}(".encode())
            for part in value:
                self._take(part)
        elif isinstance(value, Mapping):
            self._take(list(value.items()))
        else:
            self._hash.update(f"{type(value).__name__}:{value!r};".encode())
