"""Trees: the structure of parameters, states and messages.

A *tree* is a tensor, `None`, or a dict, tuple or `NamedTuple` of trees. Flattened it is a `dict[str, Tensor]` whose
names are paths, as in a state dict. Trees form a vector space: `add`, `subtract` and `scale` act leaf by leaf. In a
*stacked* tree every leaf carries the clients in front, `(K, ...)`.

>>> import torch
>>> from fedtorch import tree
>>> parameters = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
>>> sorted(tree.flatten({"layer": parameters}))
['layer.bias', 'layer.weight']
>>> tree.scale(tree.stack([parameters, parameters]), torch.tensor([1.0, 5.0]))["weight"][:, 0, 0]
tensor([1., 5.])
>>> [leaf.shape for leaf in tree.leaves(parameters)]
[torch.Size([2, 3]), torch.Size([2])]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from fedtorch._lazy import only

__all__ = ["Tree", "add", "concatenate", "leaves", "map", "scale", "stack", "subtract", "take"]
__dir__ = only(__all__)

Tree = Any
Rows = Tensor | slice
Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]  # name, dtype and shape of every leaf


def _children(node: Tree) -> list[tuple[str, Tree]]:
    if isinstance(node, dict):
        return [(str(name), child) for name, child in node.items()]
    if hasattr(node, "_fields"):
        return list(zip(node._fields, node))
    if isinstance(node, tuple):
        return [(str(i), child) for i, child in enumerate(node)]
    raise _no_tree(node)


def _no_tree(node: Any) -> TypeError:
    return TypeError(
        f"Expected a tree of tensors (Tensor, None, dict, tuple or NamedTuple), but got {type(node).__name__}; "
        "turn arrays and numbers into tensors and lists into tuples first"
    )


def _rebuild(node: Tree, children: Sequence[Tree]) -> Tree:
    if isinstance(node, dict):
        return dict(zip(node, children))
    if hasattr(node, "_fields"):
        return type(node)(*children)
    return tuple(children)


def _names(node: Tree) -> Any:
    """Return the names that must agree between the nodes of trees of one structure."""
    if isinstance(node, dict):
        return node.keys()
    return getattr(node, "_fields", len(node) if isinstance(node, tuple) else type(node))


def _describe(node: Tree) -> str:
    if isinstance(node, dict):
        return f"a dict with keys {sorted(node, key=str)}"
    if isinstance(node, tuple) and not hasattr(node, "_fields"):
        return f"a tuple of {len(node)}"
    return "None" if node is None else f"a {type(node).__name__}"


def map(function: Callable[..., Any], first: Tree, *others: Tree, is_leaf: type | tuple[type, ...] = Tensor) -> Tree:
    """Apply `function` to corresponding leaves of trees of one structure.

    Args:
        function: takes one leaf of each tree.
        first: the tree whose structure the result has; `None` stays `None`.
        others: trees of the same structure.
        is_leaf: classes that count as leaves besides tensors, for example a `NamedTuple`.

    Raises:
        ValueError: the structures differ; the message names the keys.
    """
    if not others:
        return _each(function, first, (Tensor, is_leaf))
    leaf = isinstance(first, (Tensor, is_leaf))
    for other in others:
        if leaf and isinstance(other, (Tensor, is_leaf)):
            continue
        if _names(first) != _names(other) or leaf:
            raise ValueError(f"Expected trees of one structure, but got {_describe(first)} beside {_describe(other)}")
    if leaf:
        return function(first, *others)
    if first is None:
        return None
    if isinstance(first, dict):
        return {k: map(function, v, *(o[k] for o in others), is_leaf=is_leaf) for k, v in first.items()}
    if not isinstance(first, tuple):
        raise _no_tree(first)
    return _rebuild(first, [map(function, *each, is_leaf=is_leaf) for each in zip(first, *others)])


def _each(function: Callable[..., Any], node: Tree, kinds: tuple[Any, ...]) -> Tree:
    """Return `map` over one tree whose structure no other has."""
    if isinstance(node, kinds):
        return function(node)
    if isinstance(node, dict):
        return {name: _each(function, child, kinds) for name, child in node.items()}
    if isinstance(node, tuple):
        return _rebuild(node, [_each(function, child, kinds) for child in node])
    if node is not None:
        raise _no_tree(node)
    return None


def items(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over (path, leaf), depth first in the tree's own order.

    Example:
        >>> [(path, tuple(leaf.shape)) for path, leaf in items(({"w": torch.ones(2, 3), "b": None}, torch.ones(4)))]
        [('0.w', (2, 3)), ('1', (4,))]
    """
    if tree is None:
        return
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    for name, child in _children(tree):
        yield from items(child, f"{prefix}.{name}" if prefix else name)


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, depth first."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (dict, tuple)):
        return [leaf for child in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(child)]
    if tree is not None:
        raise _no_tree(tree)
    return []


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Return the tree as a flat `dict[str, Tensor]` with path names joined by dots.

    Raises:
        ValueError: two leaves have the same path (a key with a dot in it hides another).
    """
    flat: dict[str, Tensor] = {}
    _flatten(tree, prefix, flat)
    return flat


def _flatten(node: Tree, path: str, flat: dict[str, Tensor]) -> None:
    """Add the leaves of a node to the flat ones."""
    if isinstance(node, Tensor):
        if path in flat:
            raise ValueError(f"Expected distinct paths, but two leaves are called {path!r}; rename one of the keys")
        flat[path] = node
    elif node is not None:
        fields = getattr(node, "_fields", None)
        each = node.items() if isinstance(node, dict) else _children(node) if fields is None else zip(fields, node)
        for name, child in each:
            _flatten(child, f"{path}.{name}" if path else str(name), flat)


def layout(tree: Tree) -> Layout:
    """Return name, dtype and shape of every leaf.

    Example:
        >>> layout({"w": torch.ones(2, 3)})
        (('w', torch.float32, torch.Size([2, 3])),)
    """
    return tuple((name, leaf.dtype, leaf.shape) for name, leaf in flatten(tree).items())


def row_layout(tree: Tree) -> Layout:
    """Return the layout of one client's tree, of a stacked tree whose leaves are `(K, ...)`.

    Raises:
        ValueError: a leaf has no leading dimension.

    Example:
        >>> row_layout({"w": torch.ones(50, 2, 3)})  # of 50 clients
        (('w', torch.float32, torch.Size([2, 3])),)
    """
    flat = flatten(tree)
    for name, leaf in flat.items():
        if not leaf.ndim:
            raise ValueError(f"Expected a stacked tree with leaves (K, ...), but got a scalar in {name!r}")
    return tuple((name, leaf.dtype, leaf.shape[1:]) for name, leaf in flat.items())


def unflatten(flat: Mapping[str, Tensor], like: Tree, prefix: str = "") -> Tree:
    """Return the inverse of `flatten`: the values of `flat` in the structure of `like`.

    Raises:
        KeyError: a leaf of `like` has no value in `flat`; extra values are ignored.

    Example:
        >>> parameters = {"layer": {"w": torch.ones(2)}, "scale": (torch.zeros(1),)}
        >>> unflatten({"scale.0": torch.tensor([5.0]), "layer.w": torch.tensor([1.0, 2.0])}, like=parameters)
        {'layer': {'w': tensor([1., 2.])}, 'scale': (tensor([5.]),)}
    """
    if like is None:
        return None
    if isinstance(like, Tensor):
        if prefix not in flat:
            raise KeyError(f"Expected a tensor called {prefix!r}, but got {sorted(flat)}")
        return flat[prefix]
    if isinstance(like, dict):
        return {n: unflatten(flat, c, f"{prefix}.{n}" if prefix else str(n)) for n, c in like.items()}
    children = [unflatten(flat, c, f"{prefix}.{name}" if prefix else name) for name, c in _children(like)]
    return _rebuild(like, children)


def refill(like: Tree, leaves: Sequence[Tensor]) -> Tree:
    """Return a tree of the structure of `like` with other leaves, in the order of `leaves(like)`.

    Example:
        >>> parameters = {"w": torch.ones(2), "b": torch.ones(1)}
        >>> refill(parameters, [leaf.numel() * leaf for leaf in leaves(parameters)])
        {'w': tensor([2., 2.]), 'b': tensor([1.])}
    """
    remaining = iter(leaves)
    return map(lambda _: next(remaining), like)


@overload
def along(vector: Tensor, leaf: Tensor) -> Tensor: ...
@overload
def along(vector: float, leaf: Tensor) -> float: ...
def along(vector: Tensor | float, leaf: Tensor) -> Tensor | float:
    """Return `vector` `(K,)`, or of more leading dimensions, shaped to go with `leaf` `(K, ...)`; numbers pass.

    Example:
        >>> along(torch.tensor([1.0, 2.0]), torch.ones(2, 3, 4)).shape  # one number a client
        torch.Size([2, 1, 1])
    """
    if not isinstance(vector, Tensor) or vector.ndim == 0:
        return vector
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - vector.ndim))


def where(condition: Tensor, first: Tree, second: Tree) -> Tree:
    """Return rows of `first` where the condition, `(K,)` or `()` for all, holds, and of `second` elsewhere.

    Example:
        >>> before, after = {"w": torch.zeros(3, 2)}, {"w": torch.ones(3, 2)}
        >>> where(torch.tensor([True, False, True]), after, before)["w"][:, 0]  # client 1 did not answer
        tensor([1., 0., 1.])
    """
    return map(lambda a, b: torch.where(torch.as_tensor(along(condition, a)), a, b), first, second)


def add(first: Tree, second: Tree) -> Tree:
    """Return `first + second`, leaf by leaf."""
    return map(torch.add, first, second)


def subtract(first: Tree, second: Tree) -> Tree:
    """Return `first − second`, leaf by leaf."""
    return map(torch.sub, first, second)


def scale(tree: Tree, factor: Tensor | float) -> Tree:
    """Return `factor · tree`; a factor `(K,)` scales the clients of a stacked tree, each leaf keeping its dtype."""
    if isinstance(factor, Tensor):
        return map(lambda leaf: leaf * along(factor.to(leaf.device, leaf.dtype), leaf), tree)
    return map(lambda leaf: leaf * factor, tree)


def add_scaled(tree: Tree, direction: Tree, factor: float | Tensor = 1.0) -> Tree:
    """Return `tree + factor · direction`, computed in the wider dtype and returned in the dtype of `tree`.

    Example:
        >>> parameters, gradient = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([10.0, -10.0])}
        >>> add_scaled(parameters, gradient, -0.1)
        {'w': tensor([0., 3.])}
    """
    return map(lambda a, b: (a + along(factor, b) * b).to(a.dtype), tree, direction)


def zeros_like(tree: Tree) -> Tree:
    """Return zeros in the structure, dtypes and devices of `tree`.

    Example:
        >>> zeros_like({"w": torch.ones(2), "count": torch.tensor(7)})
        {'w': tensor([0., 0.]), 'count': tensor(0)}
    """
    return map(torch.zeros_like, tree)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of one structure as one tree, `(K, ...)`."""
    return map(lambda *each: torch.stack(each), trees[0], *trees[1:])


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Concatenate stacked trees along the clients.

    Example:
        >>> first, second = {"w": torch.zeros(2, 3)}, {"w": torch.ones(4, 3)}  # blocks of 2 and 4 clients
        >>> concatenate([first, second])["w"].shape
        torch.Size([6, 3])
    """
    return map(lambda *each: torch.cat(each), trees[0], *trees[1:])


def expand(tree: Tree, count: int) -> Tree:
    """Return the same tree for `count` clients, `(count, ...)`, as views that share one memory: read only."""
    return map(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def take(tree: Tree, rows: Rows) -> Tree:
    """Return rows of a stacked tree: a copy for indices, a view for a slice.

    Example:
        >>> clients = {"w": torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])}
        >>> take(clients, torch.tensor([2, 0]))["w"][:, 0], take(clients, slice(1, 3))["w"][:, 0]
        (tensor([2., 0.]), tensor([1., 2.]))
    """
    if isinstance(rows, slice):
        return map(lambda leaf: leaf[rows], tree)
    return map(lambda leaf: leaf.index_select(0, rows.to(leaf.device)), tree)


def to(tree: Tree, *args: Any, **kwargs: Any) -> Tree:
    """Apply `Tensor.to` to every leaf.

    Example:
        >>> half = to({"w": torch.ones(3), "b": torch.ones(1)}, torch.bfloat16)
        >>> half["w"].dtype, nbytes(half)
        (torch.bfloat16, 8)
    """
    return map(lambda leaf: leaf.to(*args, **kwargs), tree)


def wide(tree: Tree) -> Tree:
    """Return every leaf in the widest dtype of its kind: complex leaves as complex128, all others as float64.

    Example:
        >>> [leaf.dtype for leaf in leaves(wide((torch.ones(1), torch.ones(1, dtype=torch.complex64))))]
        [torch.float64, torch.complex128]
    """
    return map(lambda leaf: leaf.to(torch.complex128 if leaf.is_complex() else torch.float64), tree)


def as_real(tree: Tree) -> Tree:
    """Return complex leaves `(...)` as pairs of their real and imaginary parts, `(..., 2)`; others as they are.

    Example:
        >>> as_real({"w": torch.tensor([1 + 2j]), "b": torch.ones(1)})
        {'w': tensor([[1., 2.]]), 'b': tensor([1.])}
    """
    return map(lambda leaf: torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf, tree)


def from_real(pairs: Tree, like: Tree) -> Tree:
    """Return the inverse of `as_real`: pairs `(..., 2)` as complex numbers where `like` has complex leaves.

    Example:
        >>> parameters = {"w": torch.tensor([1 + 2j]), "b": torch.ones(1)}
        >>> from_real(as_real(parameters), like=parameters)
        {'w': tensor([1.+2.j]), 'b': tensor([1.])}
    """
    return map(lambda pair, old: torch.complex(pair[..., 0], pair[..., 1]) if old.is_complex() else pair, pairs, like)


def nbytes(tree: Tree) -> int:
    """Return bytes that the leaves' elements occupy."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))
