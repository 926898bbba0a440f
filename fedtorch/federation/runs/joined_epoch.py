"""What a module knows after its evaluation steps on the batches of all clients.

Each client is evaluated by a copy of the module. The copies' metrics are joined, and so are lists that their steps have
filled, such as `self.outputs.append(...)`, so that `on_validation_epoch_end` can be asked what it would have logged of
all rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch.expected import loaded
from fedtorch.metrics.joined import JoinedStates, metrics_in
from fedtorch.tree import Tree

_PLAIN = (bool, int, float, str, Tensor)


class JoinedEpoch:
    """Joins what a module knows after its steps for each client.

    Args:
        template: the module before any step.
        module: which evaluates the clients in turn.
        hooked: whether a hook at the end asks for more than metrics.

    Attributes:
        whole: whether nothing but metrics and lists has changed, so that what is joined is all there is.
    """

    def __init__(self, template: nn.Module, module: nn.Module, hooked: bool) -> None:
        self._template, self._hooked, self.whole = template, hooked, True
        collection = loaded("torchmetrics", "MetricCollection")
        self._collections: list[Any] = [part for part in module.modules() if isinstance(part, collection)]
        self._metrics = dict(metrics_in(module))
        self._states = {name: JoinedStates() for name in self._metrics}
        parts = dict(template.named_modules())
        plain = [name for name in parts if not _of_metrics(name, parts)]
        self._parts = {name: (parts[name], module.get_submodule(name)) for name in plain}
        self._grown: dict[tuple[str, str], Any] = {}
        self._tensors: Tree = None
        self._rows = 0

    def add(self, tensors: dict[str, Tensor], rows: int, changed: bool) -> None:
        """Take in the module after its steps with these tensors on so many rows.

        Args:
            tensors: of the client.
            rows: that it has seen.
            changed: whether tensors of its own, such as buffers, have changed.
        """
        for collection in self._collections:
            list(collection.items(keep_base=True, copy_state=False))  # those of a group share one state
        for name, states in self._states.items():
            states.add(self._metrics[name])
        if not self._hooked:
            return
        for name, (before, after) in self._parts.items():
            self._take(name, before.__dict__, after.__dict__)
        self.whole = self.whole and not changed
        numbers = {n: leaf for n, leaf in tensors.items() if leaf.is_floating_point() or leaf.is_complex()}
        shares = tree.scale(tree.wide(numbers), rows)
        self._tensors = shares if self._tensors is None else tree.add(self._tensors, shares)
        self._rows += rows

    def _take(self, part: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        for name in after.keys() - _OF_MODULES:
            grown = self._grown.get((part, name))
            joined = self._joined(grown, before.get(name), after[name])
            if isinstance(joined, (list, dict)):
                self._grown[part, name] = joined

    def _joined(self, grown: Any, old: Any, new: Any) -> Any:
        """Return what has grown so far, with what a client's steps have made of `old` besides."""
        if isinstance(new, list):
            old = old or []
            self.whole = self.whole and all(_same(a, b) for a, b in zip(old, new) if isinstance(b, _PLAIN))
            grown = list(old) if grown is None else grown
            grown.extend(new[len(old) :])
            return grown
        if isinstance(new, dict):
            old, joined = old or {}, copy.copy(new)
            for key, value in new.items():
                joined[key] = self._joined((grown or {}).get(key), old.get(key), value)
            return joined
        if isinstance(new, _PLAIN):
            self.whole = self.whole and _same(old, new)
        return new

    def knows(self, name: str) -> bool:
        """Return whether a metric's states, or those of a metric in it, have been joined."""
        return any(states.updates for each, states in self._states.items() if f"{each}.".startswith(f"{name}."))

    def metric(self, name: str) -> Any:
        """Return a copy of a metric that has seen all rows."""
        metric: Any = self._template.get_submodule(name)
        return self._write(name, copy.deepcopy(metric))

    def module(self) -> nn.Module:
        """Return a copy that has seen all rows; its tensors are the clients' means, weighted by rows."""
        tensors = functional.buffers(self._template)
        named = {**dict(self._template.named_parameters()), **tensors}
        tensors.update({name: (total / self._rows).to(named[name].dtype) for name, total in self._tensors.items()})
        module = functional.with_tensors(self._template, tensors)
        self._write("", module)
        for (part, name), grown in self._grown.items():
            setattr(module.get_submodule(part), name, grown)
        return module

    def _write(self, inside: str, module: Any) -> Any:
        """Give the joined states to the metrics of a part of the module."""
        for name, metric in list(metrics_in(module)):
            full = ".".join(filter(None, (inside, name)))
            if full in self._states:
                self._states[full].write(metric)
        return module


_OF_MODULES = set(vars(nn.Module()))


def _of_metrics(name: str, parts: dict[str, nn.Module]) -> bool:
    """Return whether a part is a metric, or inside of one."""
    kinds = loaded("torchmetrics", "Metric"), loaded("torchmetrics", "MetricCollection")
    owners = name.split(".")
    return any(
        isinstance(parts[".".join(owners[:i])], kind) for i in range(1, len(owners) + 1) for kind in kinds if name
    )


def _same(old: Any, new: Any) -> bool:
    if isinstance(new, Tensor):
        return isinstance(old, Tensor) and old.shape == new.shape and torch.equal(old, new)
    return type(old) is type(new) and bool(old == new)
