"""Predictions of stacked clients in evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedtorch import functional, stacked_layers, tree
from fedtorch.tree import Tree


def predictor(module: nn.Module, batched: Callable[[], bool] = lambda: True) -> Callable[[Tree, Tree], Tree]:
    """Return (tensors `(K, ...)`, inputs `(K, N, ...)`) -> outputs `(K, N, ...)` of `module` in evaluation mode.

    Args:
        module: called as `module(inputs)`, or as `module(**inputs)` with rows that are dicts of its arguments.
        batched: returns whether it is called on all clients together; otherwise it is client by client.
    """
    template = copy.deepcopy(module).eval()

    def one(tensors: Tree, inputs: Tree) -> Tree:
        return functional_call(template, tensors, *functional.arguments(template, inputs))

    def together(tensors: Tree, inputs: Tree, at: Tensor | None) -> Tree:
        some = (tensors, inputs) if at is None else tree.take((tensors, inputs), at.to(tree.leaves(inputs)[0].device))
        with stacked_layers.StackedOperations():
            return vmap(one, randomness="error")(*some)

    def alone(tensors: Tree, inputs: Tree) -> Tree:
        # A module may keep what it has computed in evaluation mode, as those of GPyTorch do: a new one for everybody.
        positional, named = functional.arguments(template, inputs)
        return functional.with_tensors(template, tensors)(*positional, **named)

    def predict(tensors: Tree, inputs: Tree) -> Tree:
        leaf = tree.leaves(inputs)[0]
        first = next(template.parameters(), None)
        if first is not None and first.device != leaf.device:
            template.to(leaf.device)
        with torch.no_grad():
            if len(leaf) and batched():
                return stacked_layers.by_branches(partial(together, tensors, inputs), _joined)
            count = max(len(leaf), 1)  # without clients, one of zeros tells the shape
            if not len(leaf):
                tensors, inputs = tree.map(lambda x: x.new_zeros(1, *x.shape[1:]), (tensors, inputs))
            outputs = tree.stack([alone(*tree.map(lambda x, k=k: x[k], (tensors, inputs))) for k in range(count)])
            return tree.take(outputs, slice(0, len(leaf)))

    return predict


def _joined(parts: list[Tree], places: Tensor) -> Tree:
    outputs = tree.concatenate(parts)
    return tree.take(outputs, places.to(tree.leaves(outputs)[0].device))
