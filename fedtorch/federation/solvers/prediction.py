"""Predictions of stacked clients in evaluation mode.

Clients are stacked with those of as many rows, for a module may couple the rows that it is given. Where it is known
that the prediction for a row depends on that row alone, the predictor is `Rowwise`, and clients of any sizes share a
stack, filled up with zeros. The first stack of every shape of a row is held against two of its clients alone; where
they differ, clients go one by one from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedtorch import functional, stacked_layers, tree
from fedtorch.federation.solvers.step_check import relative_gap, tolerance
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
Predict = Callable[[Tree, Tree], Tree]  # (tensors (K, ...), inputs (K, N, ...)) -> outputs (K, N, ...)


@dataclass(frozen=True)
class Rowwise:
    """A predictor whose prediction for a row depends on that row alone.

    Attributes:
        function: (tensors `(K, ...)`, inputs `(K, N, ...)`) -> outputs `(K, N, ...)`.

    Example:
        >>> import torch
        >>> scaled = Rowwise(lambda tensors, inputs: tensors["w"][:, None] * inputs)
        >>> scaled({"w": torch.tensor([2.0])}, torch.tensor([[1.0, 3.0]]))
        tensor([[2., 6.]])
    """

    function: Predict

    def __call__(self, tensors: Tree, inputs: Tree) -> Tree:
        """Return the outputs."""
        return self.function(tensors, inputs)


def shared_sizes(predict: Predict, counts: Tensor, width: int) -> Iterator[tuple[Tensor, int]]:
    """Yield clients that a predictor takes together, `(M,)` places, and the rows of each: all, of a `Rowwise` one.

    Args:
        predict: whose calls they are.
        counts: `(K,)` rows of the clients.
        width: N rows that they have with padding.

    Example:
        >>> import torch
        >>> [(rows.tolist(), count) for rows, count in shared_sizes(lambda tensors, x: x, torch.tensor([2, 3, 2]), 3)]
        [([0, 2], 2), ([1], 3)]
    """
    counts = counts.cpu()
    if isinstance(predict, Rowwise) or not len(counts):
        yield torch.arange(len(counts)), width
        return
    for count in sorted(counts.unique().tolist(), key=lambda count: count == 0):  # those without rows at the end
        yield (counts == count).nonzero()[:, 0], count


def unpadded(predict: Predict, tensors: Tree, inputs: Tree, mask: Tensor) -> Tree:
    """Return predictions `(K, N, ...)` of clients, zero outside the mask `(K, N)`, none of which has seen padding.

    Example:
        >>> import torch
        >>> centred = lambda tensors, x: x - x.mean(1, keepdim=True)
        >>> unpadded(centred, {}, torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]]))
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """
    order, parts = [], []
    for places, count in shared_sizes(predict, mask.sum(1), mask.shape[1]):
        rows, width = places.to(mask.device), slice(0, max(count, 1))
        own = tree.map(lambda leaf, width=width: leaf[:, width], tree.take(inputs, rows))
        outputs = predict(tree.take(tensors, rows), own)
        parts.append(tree.map(lambda leaf, inside=mask[rows]: _filled(leaf, inside), outputs))
        order.append(places)
    return tree.take(tree.concatenate(parts), torch.cat(order).argsort().to(mask.device))


def _filled(leaf: Tensor, mask: Tensor) -> Tensor:
    """Return outputs `(K, M, ...)` of the first rows with zeros for the others, and outside the mask `(K, N)`."""
    full = leaf.new_zeros(*mask.shape, *leaf.shape[2:])
    full[:, : leaf.shape[1]] = leaf
    return full.masked_fill(~tree.along(mask, full), 0)


def predictor(
    module: nn.Module, batched: Callable[[], bool] = lambda: True, rowwise: bool = False
) -> Predict | Rowwise:
    """Return (tensors `(K, ...)`, inputs `(K, N, ...)`) -> outputs `(K, N, ...)` of `module` in evaluation mode.

    Args:
        module: called as `module(inputs)`, or as `module(**inputs)` with rows that are dicts of its arguments.
        batched: returns whether it is called on all clients together; otherwise it is client by client.
        rowwise: whether the output for a row depends on that row alone; then the predictor is `Rowwise`.
    """
    template = functional.copied(module).eval()
    checked: set[Any] = set()  # shapes of rows
    stacks = [True]  # until a stack is found to differ

    def together(tensors: Tree, inputs: Tree, at: Tensor | None) -> Tree:
        some = (tensors, inputs) if at is None else tree.take((tensors, inputs), at.to(tree.leaves(inputs)[0].device))
        new = functional.with_tensors(template, {})  # which may keep what it computes

        def one(tensors: Tree, inputs: Tree) -> Tree:
            return functional_call(new, tensors, *functional.arguments(new, inputs))

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
            if len(leaf) and batched() and stacks[-1]:
                outputs = stacked_layers.by_branches(partial(together, tensors, inputs), _joined)
                shape = tuple((part.shape[2:], part.dtype) for part in tree.leaves(inputs))
                if shape in checked or len(leaf) == 1:
                    return outputs
                checked.add(shape)
                if _agree(outputs, lambda k: alone(*tree.map(lambda x: x[k], (tensors, inputs))), len(leaf)):
                    return outputs
                stacks.append(False)
                name = type(module).__name__
                _LOG.warning("stacked predictions of %s differ from those of clients alone, who go one by one", name)
            count = max(len(leaf), 1)  # without clients, one of zeros tells the shape
            if not len(leaf):
                tensors, inputs = tree.map(lambda x: x.new_zeros(1, *x.shape[1:]), (tensors, inputs))
            outputs = tree.stack([alone(*tree.map(lambda x, k=k: x[k], (tensors, inputs))) for k in range(count)])
            return tree.take(outputs, slice(0, len(leaf)))

    return Rowwise(predict) if rowwise else predict


def _agree(outputs: Tree, alone: Callable[[int], Tree], count: int) -> bool:
    """Return whether the floating-point outputs of the last two of `count` clients are those of each alone."""
    for k in range(max(0, count - 2), count):
        for whole, own in zip(tree.leaves(outputs), tree.leaves(alone(k))):
            if own.is_floating_point() and relative_gap(whole[k], own) > tolerance(own.dtype):
                return False
    return True


def _joined(parts: list[Tree], places: Tensor) -> Tree:
    outputs = tree.concatenate(parts)
    return tree.take(outputs, places.to(tree.leaves(outputs)[0].device))
