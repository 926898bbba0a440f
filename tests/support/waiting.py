"""Counts where the host would wait for a device, on the CPU: every number read from what a device would hold."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
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
        for leaf in tree.leaves(given):
            self._hold(leaf)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = any(self._holds(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if operation is READ and ours:
            lines = [line for line in traceback.extract_stack() if "/fedtorch/" in line.filename]
            self.read[f"{lines[-1].filename.rpartition('/fedtorch/')[2]}: {lines[-1].line}"] += 1
        found = operation(*args, **(kwargs or {}))
        if ours:
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self._hold(leaf)
        return found

    def _hold(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided and tensor.numel():
            storage = tensor.untyped_storage()
            self.held[storage.data_ptr()] = storage

    def _holds(self, tensor: Tensor) -> bool:
        return (
            tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self.held
        )
