"""Stacks of several clients' batches with the same shapes; ragged batches are padded separately first.

A batch is padded to its own longest row, as by a `collate_fn`. A client's training and dropout draws therefore do not
depend on the clients beside it.

>>> import torch
>>> batches = [{"words": [torch.tensor([1, 2]), torch.tensor([3])]}, {"words": torch.tensor([[4, 5], [7, 8]])}]
>>> clients, rows = alike(batches, {"words": 0}, {"mask": "words"})[0]
>>> clients, rows["words"][0], rows["mask"][0]
([0, 1], tensor([[1, 2],
        [3, 0]]), tensor([[ True,  True],
        [ True, False]]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree

_ADVICE = "give pad= to from_loaders, or call the loss client by client: batched=False"


class NotTensors(TypeError):
    """A batch contains something else than tensors."""


def alike(batches: Sequence[Any], pad: Tree, mask: Mapping[Any, Any] | None = None) -> list[tuple[list[int], Tree]]:
    """Return batches in stacks `(K, B, ...)` of equal shapes, with their positions.

    Args:
        batches: of some clients.
        pad: the padding value of each leaf, in the structure of a batch; None for a leaf that is not padded. None for
            all: batches of tensors, unchanged.
        mask: name or position of an added mask, and of the leaf that it describes.

    Raises:
        TypeError: a batch is not of tensors, or of another structure than `pad`.
    """
    rows = [_tensors(batch, "") if pad is None else _filled(batch, pad, mask or {}) for batch in batches]
    groups: dict[Any, list[int]] = {}
    for place, each in enumerate(rows):
        groups.setdefault(tree.layout(each), []).append(place)
    return [(places, tree.stack([rows[place] for place in places])) for places in groups.values()]


def _grown(leaves: list[Tensor], fill: Any) -> list[Tensor]:
    """Pad tensors of as many dimensions to one shape, at their ends."""
    shape = [max(sizes) for sizes in zip(*(leaf.shape for leaf in leaves))]
    if all(list(leaf.shape) == shape for leaf in leaves):
        return leaves
    grown = [leaf.new_full(shape, fill) for leaf in leaves]
    for whole, leaf in zip(grown, leaves):
        whole[tuple(slice(size) for size in leaf.shape)] = leaf
    return grown


def _filled(batch: Any, pad: Tree, mask: Mapping[Any, Any]) -> Tree:
    """Return a batch as tensors, with padded lists and their masks."""
    masks = {}
    for name, leaf in mask.items():
        value = _child(batch, leaf, "mask=")
        ones = [torch.ones_like(row, dtype=torch.bool) for row in value] if isinstance(value, (list, tuple)) else None
        masks[name] = torch.ones_like(value, dtype=torch.bool) if ones is None else torch.stack(_grown(ones, False))
    rows = _fill(batch, pad, "")
    if not masks:
        return rows
    return {**rows, **masks} if isinstance(rows, Mapping) else (*rows, *masks.values())


def _fill(value: Any, pad: Tree, path: str) -> Tree:
    """Return a part of a batch as tensors, in the structure of `pad`."""
    if isinstance(pad, Mapping):
        _check(isinstance(value, Mapping), value, "a dict", path)
        filled = {name: _fill(_child(value, name, path), each, f"{path}.{name}") for name, each in pad.items()}
        _check_named([f"{path}.{name}"[1:] for name in value if name not in pad])
        return filled
    if isinstance(pad, (tuple, list)):
        _check(isinstance(value, (tuple, list)) and len(value) == len(pad), value, f"a tuple of {len(pad)}", path)
        return tuple(_fill(part, each, f"{path}.{i}") for i, (part, each) in enumerate(zip(value, pad)))
    if pad is not None and isinstance(value, (list, tuple)):
        _check(all(isinstance(row, Tensor) for row in value), value, "a tensor for each row", path)
        return torch.stack(_grown(list(value), pad))
    return _tensors(value, path)


def is_dense(leaf: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested."""
    return leaf.layout is torch.strided and not leaf.is_nested


def _tensors(value: Any, path: str) -> Tree:
    """Return a batch as a tree of tensors."""
    if value is None or (isinstance(value, Tensor) and is_dense(value)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _tensors(child, f"{path}.{name}") for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        children = [_tensors(child, f"{path}.{i}") for i, child in enumerate(value)]
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    raise NotTensors(
        f"Expected batches of tensors, to train clients together, but got {_kind(value)} in "
        f"{path[1:] or 'a batch'!r}; {_ADVICE}"
    )


def _kind(value: Any) -> str:
    sparse = isinstance(value, Tensor) and value.layout is not torch.strided
    return "a sparse tensor" if sparse else "a nested tensor" if isinstance(value, Tensor) else type(value).__name__


def _child(value: Any, name: Any, path: str) -> Any:
    """Return an entry of a batch."""
    try:
        return value[name]
    except (KeyError, IndexError, TypeError):
        raise TypeError(f"Expected {name!r} in a batch, as {path.strip('.') or 'pad='} says, but got none") from None


def _check_named(others: Sequence[str]) -> None:
    if others:
        raise TypeError(
            f"Expected pad= with a value for every entry of a batch, but got none for {others}; give the value that "
            "fills it up, or None for a tensor that is as it is, and leave out in collate_fn what is not needed"
        )


def _check(right: bool, value: Any, expected: str, path: str) -> None:
    if not right:
        raise TypeError(
            f"Expected {expected} in {path[1:] or 'a batch'!r}, as pad= says, but got {type(value).__name__}; pad= has "
            "the structure of a batch"
        )
