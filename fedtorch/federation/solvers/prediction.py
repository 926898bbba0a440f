"""Predictions of stacked clients in evaluation mode.

Clients are stacked with others of the same number of rows, because a module may couple the rows of a call. If a row's
prediction is known to depend on that row alone, the predictor is `Rowwise`, and clients of any sizes share a stack,
padded with zeros. The first stack of every shape of a row is compared with two of its clients alone; if they differ, or
`vmap` cannot run the module, clients are evaluated one by one from then on.

Every call starts from the client's own tensors, and changes neither them nor the module's Python state. Clients that
are predicted one by one all draw from the same state of torch's generators, so that none depends on the others.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedtorch import functional, stacked_layers, tree
from fedtorch._devices import generators, restored
from fedtorch.federation.solvers.step_check import relative_gap, tolerance
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
Predict = Callable[[Tree, Tree], Tree]  # (tensors (K, ...), inputs (K, N, ...)) -> outputs (K, N, ...)


@dataclass(frozen=True)
class Predictor:
    """A predictor of stacked clients.

    Attributes:
        function: (tensors `(K, ...)`, inputs `(K, N, ...)`) -> outputs `(K, N, ...)`.
        writes: names of buffers that calls have written; each call gets fresh copies of them.
    """

    function: Predict
    writes: set[str] = field(default_factory=set)

    def __call__(self, tensors: Tree, inputs: Tree) -> Tree:
        """Return the outputs."""
        return self.function(tensors, inputs)


class Rowwise(Predictor):
    """A predictor whose prediction for a row depends on that row alone.

    Example:
        >>> import torch
        >>> scaled = Rowwise(lambda tensors, inputs: tensors["w"][:, None] * inputs)
        >>> scaled({"w": torch.tensor([2.0])}, torch.tensor([[1.0, 3.0]]))
        tensor([[2., 6.]])
    """


def shared_sizes(predict: Predict, counts: Tensor, width: int) -> Iterator[tuple[Tensor, int]]:
    """Yield clients that a predictor takes together, `(M,)` places, and the rows of each: all, of a `Rowwise` one.

    Args:
        predict: the predictor.
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
    for count in sorted(counts.unique().tolist(), key=lambda count: count == 0):  # clients without rows last
        yield (counts == count).nonzero()[:, 0], count


def unpadded(predict: Predict, tensors: Tree, inputs: Tree, mask: Tensor) -> Tree:
    """Return predictions `(K, N, ...)` of clients without padding in their inputs, zero outside the mask `(K, N)`.

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
        batch = tree.map(lambda leaf, width=width: leaf[:, width], tree.take(inputs, rows))
        outputs = predict(tree.take(tensors, rows), batch)
        parts.append(tree.map(lambda leaf, inside=mask[rows]: _filled(leaf, inside), outputs))
        order.append(places)
    return tree.take(tree.concatenate(parts), torch.cat(order).argsort().to(mask.device))


def _filled(leaf: Tensor, mask: Tensor) -> Tensor:
    """Return outputs `(K, M, ...)` of the first rows with zeros for the others, and outside the mask `(K, N)`."""
    full = leaf.new_zeros(*mask.shape, *leaf.shape[2:])
    full[:, : leaf.shape[1]] = leaf
    return full.masked_fill(~tree.along(mask, full), 0)


def predictor(module: nn.Module, batched: Callable[[], bool] = lambda: True, rowwise: bool = False) -> Predictor:
    """Return (tensors `(K, ...)`, inputs `(K, N, ...)`) -> outputs `(K, N, ...)` of `module` in evaluation mode.

    Args:
        module: called as `module(inputs)`, or as `module(**inputs)` with rows that are dicts of its arguments.
        batched: returns whether the predictor may call all clients together; otherwise it goes client by client.
        rowwise: whether the output for a row depends on that row alone; then the predictor is `Rowwise`.
    """
    template, name = functional.copied(module).eval(), type(module).__name__
    own_buffers = [name for name, _ in template.named_buffers()]
    checked: set[Any] = set()  # shapes of rows
    writes: set[str] = set()
    stacks = [True]  # until a stack differs, or fails

    def written(tensors: Tree, names: Iterable[str]) -> Tree:
        """Return the tensors with copies of the named ones, in which the module may write."""
        return {**tensors, **{name: tensors[name].clone() for name in names if name in tensors}}

    def anew(tensors: Tree) -> nn.Module:
        """Return a module that may write in its buffers, and cache computations, as GPyTorch's do."""
        return functional.with_tensors(template, {**written(dict(template.named_buffers()), own_buffers), **tensors})

    def together(tensors: Tree, inputs: Tree, at: Tensor | None) -> Tree:
        some = (tensors, inputs) if at is None else tree.take((tensors, inputs), at.to(tree.leaves(inputs)[0].device))
        form: list[Tree] = []
        new = anew({})

        def one(tensors: Tree, inputs: Tree) -> tuple[Tensor, ...]:
            output = _as_tree(functional_call(new, tensors, *functional.arguments(new, inputs)), name)
            form[:] = [output]
            return tuple(tree.leaves(output))

        with stacked_layers.StackedOperations():
            leaves = vmap(one, randomness="error")(written(some[0], own_buffers), some[1])
        return tree.refill(form[0], leaves)

    def alone(tensors: Tree, inputs: Tree) -> Tree:
        positional, named = functional.arguments(template, inputs)
        fresh_module = anew(written(tensors, tensors))
        before = {name: (buffer, buffer._version) for name, buffer in fresh_module.named_buffers()}
        output = _as_tree(fresh_module(*positional, **named), name)
        after = dict(fresh_module.named_buffers())
        writes.update(n for n, (b, version) in before.items() if after.get(n) is not b or b._version != version)
        return output

    def each(tensors: Tree, inputs: Tree) -> Tree:
        """Return the outputs of clients one by one, each with draws from the same generator state."""
        device, outputs = tree.leaves(inputs)[0].device, []
        count, drawn = len(tree.leaves(inputs)[0]), generators(device)
        for k in range(count):
            with restored(drawn) if k + 1 < count else nullcontext():  # the last client moves the generators
                outputs.append(alone(*tree.map(lambda x, k=k: x[k], (tensors, inputs))))
        try:
            return tree.stack(outputs)
        except (RuntimeError, ValueError) as error:
            shapes = [[tuple(leaf.shape) for leaf in tree.leaves(output)] for output in outputs]
            raise UnlikeOutputs(
                f"Expected outputs of {name} that have one shape for clients of as many rows, a prediction for each "
                f"row, but got {shapes[0]} and {next((s for s in shapes if s != shapes[0]), 'others')}; return one for "
                "every row, or evaluate each client by run.client_module(client)"
            ) from error

    def stacked(tensors: Tree, inputs: Tree) -> tuple[Tree, str]:
        """Return the outputs of clients together; or None, and why they cannot be had."""
        try:
            return stacked_layers.by_branches(partial(together, tensors, inputs), _joined), ""
        except Exception as error:  # from `vmap`, or from the rows: then the loop raises it too
            return None, str(error).splitlines()[0] if str(error) else type(error).__name__

    def predict(tensors: Tree, inputs: Tree) -> Tree:
        leaf = tree.leaves(inputs)[0]
        first = next(template.parameters(), None)
        if first is not None and first.device != leaf.device:
            template.to(leaf.device)
        with torch.no_grad():
            if not len(leaf):  # one row of zeros shows the shape
                one = tree.map(lambda x: x.new_zeros(1, *x.shape[1:]), (tensors, inputs))
                return tree.take(each(*one), slice(0, 0))
            if len(leaf) == 1 or not (batched() and stacks[-1]):
                return each(tensors, inputs)
            outputs, why = stacked(tensors, inputs)
            if outputs is None:
                outputs = each(tensors, inputs)  # raises the error of the rows, if there is one
                _LOG.info("the clients of %s are predicted one by one: %s", name, why)
                stacks.append(False)
                return outputs
            shape = tuple((part.shape[2:], part.dtype) for part in tree.leaves(inputs))
            if shape in checked:
                return outputs
            checked.add(shape)
            if _agree(outputs, lambda k: alone(*tree.map(lambda x: x[k], (tensors, inputs))), len(leaf)):
                return outputs
            stacks.append(False)
            _LOG.warning("stacked predictions of %s differ from those of single clients; predicting one by one", name)
            return each(tensors, inputs)

    return Rowwise(predict, writes) if rowwise else Predictor(predict, writes)


class UnlikeOutputs(ValueError):
    """A module's outputs for clients cannot be stacked."""


def _as_tree(output: Any, name: str) -> Tree:
    """Return an output of a module as a tree; dataclasses become dicts, as all mappings do.

    Raises:
        UnlikeOutputs: it contains something else than tensors and None.

    Example:
        >>> _as_tree([torch.ones(1), None], "Net")
        (tensor([1.]), None)
    """
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return {key: _as_tree(value, name) for key, value in output.items()}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: _as_tree(getattr(output, field.name), name) for field in dataclasses.fields(output)}
    if isinstance(output, (list, tuple)):
        parts = [_as_tree(part, name) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
    raise UnlikeOutputs(
        f"Expected outputs of {name} in evaluation that are tensors and None, in dicts, lists, tuples or dataclasses, "
        f"but got {type(output).__name__}; return a tensor instead"
    )


def _agree(outputs: Tree, alone: Callable[[int], Tree], count: int) -> bool:
    """Return whether the floating-point outputs of the last two of `count` clients equal those of each alone."""
    for k in range(max(0, count - 2), count):
        for whole, single in zip(tree.leaves(outputs), tree.leaves(alone(k))):
            if single.is_floating_point() and relative_gap(whole[k], single) > tolerance(single.dtype):
                return False
    return True


def _joined(parts: list[Tree], places: Tensor) -> Tree:
    outputs = tree.concatenate(parts)
    return tree.take(outputs, places.to(tree.leaves(outputs)[0].device))
