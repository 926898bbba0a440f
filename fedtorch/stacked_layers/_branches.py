"""Code that branches on values (`if mask.all():`) under `torch.vmap`, for which a tensor of all clients has none.

If all clients have the same value they take the same branch, together. Otherwise they are divided into groups of equal
values, and each group is evaluated separately: every client takes its own branch. Values of floating-point tensors are
refused as by torch, because hardly two clients have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_TRUTHS = (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero)
_WHOLE = (Tensor.__int__, Tensor.__index__)
_NUMBERS = (Tensor.item, Tensor.tolist, *_WHOLE)
_PAIRS = (Tensor.equal, torch.equal)


class Divergence(RuntimeError):
    """Clients that branch differently.

    Attributes:
        groups: indices of clients that have the same value, `(n,)` each.
    """

    def __init__(self, groups: list[Tensor]) -> None:
        super().__init__(
            f"Expected {sum(map(len, groups))} clients that take one branch, but got {len(groups)} branches"
        )
        self.groups = groups


def by_branches(evaluate: Callable[[Tensor | None], T], join: Callable[[list[T], Tensor], T]) -> T:
    """Evaluate all clients together, or group by group of those that take the same branches.

    Args:
        evaluate: clients `(n,)`, None for all -> their results.
        join: results of the groups, one after the other, and each client's position among them -> that of all.

    Example:
        >>> from fedtorch.stacked_layers import StackedOperations
        >>> x = torch.tensor([1, -1, 2])
        >>> def sizes(at):
        ...     with StackedOperations():
        ...         return torch.vmap(lambda v: v if v > 0 else -v)(x if at is None else x[at])
        >>> by_branches(sizes, lambda parts, places: torch.cat(parts)[places])
        tensor([1, 1, 2])
    """
    return _evaluate(None, evaluate, join)


def _evaluate(at: Tensor | None, evaluate: Callable[..., T], join: Callable[[list[T], Tensor], T]) -> T:
    try:
        return evaluate(at)
    except Divergence as divergence:
        groups = divergence.groups
    parts = [_evaluate(some if at is None else at[some], evaluate, join) for some in groups]
    return join(parts, torch.cat(groups).argsort())


def _read(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the value that a function reads from a tensor, if all clients agree on it."""
    values = _values(func, args)
    if values is None:
        return func(*args, **kwargs)
    value: Any = _agreed(values).tolist()
    return int(value) if func in _WHOLE else value


def _values(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return each client's value `(K, ...)` of the read tensor; None if it is not a tensor of clients, or of floats."""
    if func in _PAIRS:
        first, second = args
        if first.shape != second.shape or not (_wrapped(first) or _wrapped(second)):
            return None
        return _clients((first == second).all())
    (tensor,) = args
    if func in _TRUTHS:
        tensor = tensor != 0
    if tensor.is_floating_point() or tensor.is_complex():
        return None
    if func is Tensor.tolist:
        return _clients(tensor)
    return _clients(tensor.reshape(())) if tensor.numel() == 1 else None


def _wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(tensor)


def _clients(tensor: Tensor) -> Tensor | None:
    """Return the tensor below one `vmap`, the clients in front; None without, or under several."""
    maps = torch._C._functorch
    if not maps.is_batchedtensor(tensor):
        return None
    inside = maps.get_unwrapped(tensor)
    return None if maps.is_functorch_wrapped_tensor(inside) else inside.detach().movedim(maps.maybe_get_bdim(tensor), 0)


def _agreed(values: Tensor) -> Tensor:
    """Return the value that all have."""
    if bool((values == values[:1]).all()):
        return values[0]
    _, code = values.cpu().unique(dim=0, return_inverse=True)
    raise Divergence([(code == group).nonzero()[:, 0] for group in range(int(code.max()) + 1)])


REPLACED: dict[Any, Callable[..., Any]] = {func: partial(_read, func) for func in (*_TRUTHS, *_NUMBERS, *_PAIRS)}
