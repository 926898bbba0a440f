"""Counts where the host would wait for a device, on the CPU: every number read from what a device would hold."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedtorch import tree
from fedtorch.tree import Tree

READ = torch.ops.aten._local_scalar_dense.default  # item, bool, int, float


class Waiting(TorchDispatchMode):
    """Follows what is computed from given tensors, and counts by line of the package where a number of it is read.

    What is computed from them stays "on the device", copies too; so several reads of one copy count as several. Sizes,
    identities and steps, which the host has, are not given and are not counted.

    Args:
        given: trees that the device holds.
    """

    def __init__(self, *given: Tree) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}  # storages by address; held, so that no address comes twice
        self.read: Counter[str] = Counter()
        self._lists = _Lists(self)
        for leaf in tree.leaves(given):
            self._hold(leaf)

    def __enter__(self) -> Waiting:
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def note(self) -> None:
        """Counts the line of the package that is running."""
        lines = [line for line in traceback.extract_stack() if "/fedtorch/" in line.filename]
        self.read[f"{lines[-1].filename.rpartition('/fedtorch/')[2]}: {lines[-1].line}"] += 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = any(self.holds(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if operation is READ and ours:
            self.note()
        found = operation(*args, **(kwargs or {}))
        if ours:
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self._hold(leaf)
        return found

    def holds(self, tensor: Tensor) -> bool:
        """Whether a device would hold this tensor."""
        return (
            tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self.held
        )

    def _hold(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided and tensor.numel():
            storage = tensor.untyped_storage()
            self.held[storage.data_ptr()] = storage


class _Lists(TorchFunctionMode):
    """Tells `Waiting` of `tolist` and `numpy`, which are no operations."""

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self.waiting = waiting

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.tolist, Tensor.numpy) and self.waiting.holds(args[0]):
            self.waiting.note()
        return function(*args, **(kwargs or {}))
