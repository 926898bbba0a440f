"""One copy of a module that evaluates clients in turn, and begins anew with each.

Copying a module with its metrics for every client costs more than a small client's evaluation. What steps change is put
back instead: attributes, buffers, and the states of metrics.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import functional
from fedtorch.expected import loaded

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, type)
_FIXED = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, nn.Module, Tensor, *_FUNCTIONS)
_OF_MODULES = set(vars(nn.Module()))


class WorkingCopy:
    """A copy of a module that others' tensors are put into.

    Args:
        template: what it is like before any step; it stays so.
        trainer: what it finds as its trainer.

    Attributes:
        module: the copy.

    Example:
        >>> class Counting(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.seen = nn.Parameter(torch.zeros(1)), []
        ...     def forward(self, x):
        ...         self.seen.append(x)
        ...         return self.weight * x
        >>> working = WorkingCopy(Counting(), trainer=None)
        >>> with working.holding({"weight": torch.tensor([2.0])}) as module:
        ...     module(3.0), module.seen
        (tensor([6.]), [3.0])
        >>> working.module.seen
        []
    """

    def __init__(self, template: nn.Module, trainer: Any) -> None:
        self.module: Any = functional.with_tensors(template, functional.buffers(template))  # shares its parameters
        self.module.trainer = trainer
        self._trainer = trainer
        self._swap: functional.Swap | None = None
        metric, collection = loaded("torchmetrics", "Metric"), loaded("torchmetrics", "MetricCollection")
        parts = list(self.module.modules())
        self._metrics = [part for part in parts if isinstance(part, (metric, collection))]
        inside = {id(part) for each in self._metrics for part in each.modules()}
        self._parts = [part for part in parts if id(part) not in inside]

    def _remember(self, names: list[str]) -> functional.Swap:
        """Keep what the module is like before any step."""
        now = [{name: vars(part)[name] for name in vars(part).keys() - _OF_MODULES} for part in self._parts]
        tensors = [value for each in now for value in each.values() if isinstance(value, Tensor)]
        watched = [*self.module.buffers(), *tensors]
        self._watched = [(tensor, tensor.detach().clone(), tensor._version) for tensor in watched]
        # Other attributes may change inside: they are copied, but for these.
        kept = {id(each): each for each in [*self.module.modules(), *self.module.parameters(), *watched, self._trainer]}
        self._kept: dict[int, Any] = kept
        changing = [{name: value for name, value in each.items() if not isinstance(value, _FIXED)} for each in now]
        self._attributes, self._changing = now, copy.deepcopy(changing, dict(kept))
        return functional.Swap(self.module, names)

    @contextmanager
    def holding(self, tensors: dict[str, Tensor]) -> Iterator[Any]:
        """Give the module with these tensors; afterwards it is as before."""
        with self.anew(list(tensors)) as swap, swap(list(tensors.values())):
            yield self.module

    @contextmanager
    def anew(self, names: Sequence[str] = ()) -> Iterator[functional.Swap]:
        """Give what puts tensors into the module, in the order of the first names; afterwards it is as before."""
        if self._swap is None:
            self._swap = self._remember(list(names))
        try:
            yield self._swap
        finally:
            self._restore()

    def _restore(self) -> None:
        for metric in self._metrics:
            metric.reset()
        for number, (tensor, before, version) in enumerate(self._watched):
            if tensor._version != version:
                tensor.copy_(before)
                self._watched[number] = (tensor, before, tensor._version)
        fresh = copy.deepcopy(self._changing, dict(self._kept))
        for part, old, again in zip(self._parts, self._attributes, fresh):
            attributes: dict[str, Any] = part.__dict__
            for name in attributes.keys() - old.keys() - _OF_MODULES:
                del attributes[name]
            attributes.update(old)
            attributes.update(again)
