"""Parameters that a loss reads, but that training does not change.

Solvers train copies of a module, with tensors of each client in place of its parameters. A loss that reads the original
module, as `lambda output, y: mse(output, y) + net.weight.square().sum()` does, or a parameter that the module stores in
a plain list, uses a constant value, and its penalty has no effect. The autograd graph of a loss shows its dependencies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import keystr, tree_flatten_with_path

_TABLES = ("_parameters", "_modules")
_SKIPPED = ("_buffers", "_fabric", "_trainer", *_TABLES)


class Remembered:
    """Weak references to the parameters of a user's module, as long as something else, such as a closure, holds them.

    Args:
        module: copies of it are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__
        registered = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
        held = {name: weakref.ref(tensor) for name, tensor in _held(module)}
        self._registered, self._held = registered, held

    def among(self, tensors: Mapping[int, Tensor]) -> tuple[list[str], list[str]]:
        """Return the names of parameters, and of tensors stored otherwise, that occur among given tensors."""
        alive = lambda names: [
            name for name, tensor in names.items() if tensor() is not None and id(tensor()) in tensors
        ]
        return alive(self._registered), alive(self._held)


def refuse_untrained(
    loss: Tensor, trained: Iterable[Tensor], module: nn.Module, original: Remembered | None = None
) -> None:
    """Raise ValueError if a loss depends on parameters of a module that are not among the trained tensors.

    Tensors that do not require a gradient are constants, and so are parameters of other modules, such as a teacher's.

    Args:
        loss: any tensor, computed with gradients.
        trained: leaves that may be read.
        module: its parameters must not be read outside of training, including those that are not registered.
        original: the user's module of which it is a copy, likewise.
    """
    known = {id(tensor) for tensor in trained}
    others = {id(leaf): leaf for leaf in _leaves(loss) if id(leaf) not in known}
    for each in (Remembered(module), original) if others else ():
        names, held = ([], []) if each is None else each.among(others)
        if each is not None and names:
            raise ValueError(
                f"Expected a loss of what is trained, but it depends on {_some(names)} of the {each.name} "
                "itself, where each client trains a tensor in its place: the term would have no effect; let forward "
                "or a LightningModule's training_step read it as an attribute of self, use the optimiser's "
                "weight_decay, or detach() what is meant as a constant"
            )
        if each is not None and held:
            raise ValueError(
                f"Expected a loss of what is trained, but it depends on {_some(held)} of {each.name}, "
                "which requires a gradient and is not registered as a parameter: it would be neither trained nor "
                "sent; make it an attribute of nn.Parameter, an nn.ParameterList, an nn.ModuleList or another "
                "submodule, or freeze it by requires_grad_(False)"
            )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that require a gradient and enter a loss."""
    waiting: list[Node | None] = [get_gradient_edge(loss).node] if loss.requires_grad else []
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        waiting.extend(following for following, _ in node.next_functions)


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a module's attributes, in any container, without buffers and a trainer's."""
    waiting: list[tuple[str, Any]] = [("", module)]
    seen: set[int] = set()
    while waiting:
        path, owner = waiting.pop(0)
        attributes = {name: value for name, value in vars(owner).items() if name not in _SKIPPED}
        for table in _TABLES:
            attributes.update(vars(owner).get(table) or {})
        leaves = [(n, keys, leaf) for n, value in attributes.items() for keys, leaf in tree_flatten_with_path(value)[0]]
        for attribute, keys, leaf in leaves:
            if id(leaf) in seen:
                continue
            seen.add(id(leaf))
            name = f"{path}{attribute}{keystr(keys)}"
            if isinstance(leaf, Tensor):
                yield name, leaf
            elif isinstance(getattr(leaf, "__dict__", None), dict) and not isinstance(leaf, ModuleType):
                waiting.append((f"{name}.", leaf))


def _some(names: list[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} and {len(names) - 1} more"
