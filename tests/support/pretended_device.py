"""A device that is pretended: tensors say that they are on `far:0`, their numbers are the CPU's.

Operations refuse tensors of both places as CUDA does, so that a place which mixes them fails without a GPU. Numbers of
one element go with a device, CPU indices select from its tensors, and `numpy()` of its tensors is refused. Every number
that is read from the device, and every copy to the host, is counted by the line of the package that waits for it.

It says nothing of what needs a device: CUDA graphs, streams, pinned memory, collectives, mixed precision's numbers,
compiled programs. `"far"` is no `"cuda"`: branches on that name are not taken.

A process that knows the device behaves otherwise elsewhere, so that tests have it in another one, `device_worker`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "far"
_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}
_ANY_PLACE = {"aten::_to_copy", "aten::to", "aten::copy_", "aten::set_", "aten::lift_fresh"}
_INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class MixedDevices(RuntimeError):
    """Tensors of two devices meet."""


class Far(torch.Tensor):
    """A tensor whose numbers `elem` are on the CPU and whose device is the pretended one."""

    __slots__ = ("elem",)  # not among the attributes that a tensor carries
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Far:
        kinds = {"dtype": elem.dtype, "device": torch.device(NAME, 0), "requires_grad": elem.requires_grad}
        if elem.layout == torch.strided:
            kinds |= {"strides": elem.stride(), "storage_offset": elem.storage_offset(), "layout": elem.layout}
        return torch.Tensor._make_wrapper_subclass(cls, elem.size(), **kinds)

    def __init__(self, elem: torch.Tensor) -> None:
        self.elem = elem

    def __repr__(self) -> str:
        return f"Far({self.elem})"

    @property
    def data(self) -> torch.Tensor:
        """What `torch.Tensor.data` is; setting it gives this tensor the numbers of another, in the same memory."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Far) -> None:
        torch.Tensor.data.__set__(self, other)
        self.elem = other.elem

    def tolist(self) -> Any:
        _count()
        return self.elem.detach().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(operation, args, kwargs or {})


class _Pretend(TorchDispatchMode):
    """Makes tensors on the device, and looks at all operations."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(operation, args, kwargs or {})


_KERNELS = torch.library.Library("aten", "IMPL")
_waits: Counter[str] = Counter()


@contextlib.contextmanager
def pretended() -> Iterator[Counter[str]]:
    """Let there be the device; yields how often each line of the package waited for it."""
    register()
    made = torch.tensor, torch.Tensor.new_tensor, torch.as_tensor

    def tensor(values: Any, *, device: Any = None, requires_grad: bool = False, **kinds: Any) -> torch.Tensor:
        return made[0](values, **kinds).to(device).requires_grad_(requires_grad)

    def new_tensor(self: torch.Tensor, values: Any, *, device: Any = None, **kinds: Any) -> torch.Tensor:
        return tensor(values, device=self.device if device is None else device, **{"dtype": self.dtype, **kinds})

    def as_tensor(values: Any, *, device: Any = None, **kinds: Any) -> torch.Tensor:
        if isinstance(values, torch.Tensor):
            return values.to(device=device, **kinds)
        return made[2](values, **kinds).to(device)

    torch.tensor, torch.Tensor.new_tensor, torch.as_tensor = tensor, new_tensor, as_tensor
    _waits.clear()
    try:
        with _Pretend():
            yield _waits
    finally:
        torch.tensor, torch.Tensor.new_tensor, torch.as_tensor = made


@cache
def register() -> None:
    """Tell torch of the device, once in a process and before its first backward pass."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    # Autograd's gradients and indices by a list are made below the modes of Python: the device has to know how.
    _KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
    _KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **other: Any) -> Far:
    return Far(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _numbers(target).copy_(_numbers(source))
    return target


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _called(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the numbers, where its tensors may meet; return tensors on the device where it would."""
    name, device, flat = operation._schema.name, kwargs.get("device"), tree_leaves((args, kwargs))
    far = [leaf for leaf in flat if isinstance(leaf, Far)]
    near = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Far)]
    if far and near and name not in _ANY_PLACE:
        _check(name, args, far, near)
    if far and (name in _READS or (name == "aten::_to_copy" and device is not None and not _is_far(device))):
        _count()
    if name == "aten::copy_" and far and not isinstance(args[0], Far):
        _count()
    on_device = bool(far) if device is None else _is_far(device)
    given = kwargs if device is None else {**kwargs, "device": torch.device("cpu")}
    if _is_far(device):
        given.pop("pin_memory", None)
    out = operation(*tree_map(_numbers, args), **tree_map(_numbers, given))
    if "out" in kwargs:
        return kwargs["out"]
    if operation._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and name.endswith("_"):
        return args[0]
    return tree_map(lambda leaf: _far(leaf) if on_device else leaf, out)


def _check(name: str, args: Any, far: list[Far], near: list[torch.Tensor]) -> None:
    """Refuse tensors of two places, but for numbers of one element and indices."""
    bad = [leaf for leaf in near if leaf.dim() > 0]
    if name in _INDEXING:
        bad = [leaf for leaf in bad if leaf is args[2]] if len(args) > 2 else []
        bad = bad if isinstance(args[0], Far) else [args[0]]
    if bad:
        shapes = [[tuple(leaf.shape) for leaf in leaves] for leaves in (far, near)]
        raise MixedDevices(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and cpu! in {name}: {shapes[0]} on the device, {shapes[1]} on the CPU"
        )


def _numbers(leaf: Any) -> Any:
    return leaf.elem if isinstance(leaf, Far) else leaf


def _far(leaf: Any) -> Any:
    return Far(leaf) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Far) else leaf


def _count() -> None:
    lines = [line for line in traceback.extract_stack() if "/fedtorch/" in line.filename]
    if lines:
        _waits[f"{lines[-1].filename.rpartition('/fedtorch/')[2]}: {lines[-1].line}"] += 1
