"""Rules by which `torch.vmap` evaluates operations of torch that it cannot batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

_KEY = torch._C.DispatchKey.FuncTorchBatched
_KEYS = (_KEY.name, "FuncTorchBatchedDecomposition")
# Of draws, vmap takes note also where no tensor is batched.
_OUTSIDE = torch._C.DispatchKeySet(_KEY).add(torch._C.DispatchKey.FuncTorchVmapMode)
_LIBRARIES = {name: torch.library.Library(name, "FRAGMENT") for name in ("aten", "fedtorch")}

# (what vmap is told, at which dimension each tensor has the batch, the operation's arguments) -> results, batch first
Rule = Callable[[VmapInfo, Any, tuple[Any, ...]], Any]


def has_rule(operation: Any, keys: Sequence[str] = _KEYS) -> bool:
    """Return whether `torch.vmap` knows how to evaluate an overload in `torch.ops.aten`."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key) for key in keys)


def register(operation: Any, rule: Rule, composite: bool = False) -> None:
    """Let `torch.vmap` evaluate an operation by `rule`, unless torch knows how.

    Args:
        operation: an overload in `torch.ops.aten`, or in `torch.ops.fedtorch`.
        rule: is called outside of this vmap with all arguments of the schema, in its order.
        composite: whether torch evaluates it by its parts, and is to where the rule returns NotImplemented only.
    """
    if has_rule(operation, _KEYS[:1] if composite else _KEYS):
        return
    schema = operation._schema.arguments
    single = len(operation._schema.returns) == 1

    def evaluate(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        rest = schema[len(args) :]
        whole = (*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest))
        interpreter: Any = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        arguments, dims = _unwrapped(whole, level)
        info = VmapInfo(interpreter.batch_size(), interpreter.randomness())
        with torch._C._ExcludeDispatchKeyGuard(_OUTSIDE):
            results = rule(info, dims, arguments)
        if results is NotImplemented:
            return operation.decompose(*args, **kwargs)
        wrapped = tuple(torch._C._functorch._add_batch_dim(result, 0, level) for result in results)
        return wrapped[0] if single else wrapped

    _LIBRARIES[operation.namespace].impl(operation.name(), evaluate, _KEY.name, with_keyset=True)


def _unwrapped(values: Sequence[Any], level: int) -> tuple[Any, Any]:
    """Return (arguments outside of a vmap, at which dimension each tensor has the batch), in lists where they are.

    torch has the same for any containers, which takes longer than a small operation.
    """
    unwrap = torch._C._functorch._unwrap_batched
    found = [
        unwrap(value, level)
        if isinstance(value, Tensor)
        else _unwrapped(value, level)
        if isinstance(value, list)
        else (value, None)
        for value in values
    ]
    kind = type(values)
    return kind(value for value, _ in found), kind(dim for _, dim in found)  # type: ignore[call-arg]


def in_front(info: VmapInfo, tensor: Tensor, dim: int | None) -> Tensor:
    """Return a tensor with the batch as its first dimension; expanded, if it has none."""
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def all_in_front(info: VmapInfo, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Return `in_front` of each."""
    return [in_front(info, tensor, dim) for tensor, dim in zip(tensors, dims)]
