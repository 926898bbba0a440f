"""A device that is pretended: tensors say that they are on `far:0`, their numbers are the CPU's.

Operations refuse tensors of both places as CUDA does, so that a place which mixes them fails without a GPU. Numbers of
one element go with a device, CPU indices select from its tensors, and `numpy()` of its tensors is refused. It draws
from a generator of its own, and refuses those of the CPU. Counted by the line of the package are waits, that is numbers
that are read and copies to the host, and operations in float64.

It says nothing of what needs a device: CUDA graphs, streams, pinned memory, collectives, mixed precision's numbers,
compiled programs. `"far"` is no `"cuda"`: branches on that name are not taken.

A process that knows the device behaves otherwise elsewhere, so that tests have it in another one, `device_worker`.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import fedtorch

NAME = "far"
_PACKAGE = f"{Path(fedtorch.__file__).parent}/"
_READS = {  # the host waits for their results, or for the sizes of these
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::_linalg_check_errors",
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
}
_ANY_PLACE = {"aten::_to_copy", "aten::to", "aten::copy_", "aten::set_", "aten::lift_fresh"}
_INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


Line = tuple[str, int]  # file of the package, number


@dataclass
class Seen:
    """What operations on the device were, by line of the package that called them."""

    waits: Counter[Line] = field(default_factory=Counter)  # numbers that were read, copies to the host
    doubles: Counter[Line] = field(default_factory=Counter)  # operations with numbers in float64, of more than one

    def clear(self) -> None:
        self.waits.clear()
        self.doubles.clear()


def by_text(lines: Counter[Line]) -> dict[str, int]:
    """How often each line was, by its file and what stands there."""
    found: Counter[str] = Counter()
    for (file, number), count in lines.items():
        found[f"{file}: {linecache.getline(_PACKAGE + file, number).strip()}"] += count
    return dict(found)


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
        _note(_seen.waits)
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


class FarGenerator(torch.Generator):
    """A generator of the device."""

    def __new__(cls) -> FarGenerator:
        made = super().__new__(cls, "cpu")
        _generators.append(made)  # kept, so that no other is taken for it
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def __deepcopy__(self, memo: Any) -> FarGenerator:
        return FarGenerator().set_state(self.get_state())


class _EitherGenerator(type):
    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return FarGenerator() if _is_far(device) else _GENERATOR(device)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(metaclass=_EitherGenerator):
    """`torch.Generator` of either place."""


class _Backend(_DummyBackendModule):
    """What is `torch.far`."""

    default_generators: tuple[torch.Generator, ...] = ()

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None:
        self.default_generators[0].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_KERNELS = torch.library.Library("aten", "IMPL")
_FALLBACKS = torch.library.Library("_", "IMPL")
_GENERATOR = torch.Generator
_generators: list[torch.Generator] = []
_seen = Seen()


@contextlib.contextmanager
def pretended() -> Iterator[Seen]:
    """Let there be the device; yields what operations on it were."""
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
    torch.Generator = _Generator
    _seen.clear()
    try:
        with _Pretend():
            yield _seen
    finally:
        torch.tensor, torch.Tensor.new_tensor, torch.as_tensor = made
        torch.Generator = _GENERATOR


@cache
def register() -> None:
    """Tell torch of the device, once in a process and before its first backward pass."""
    backend = _Backend()
    backend.default_generators = (FarGenerator(),)
    _setup_privateuseone_for_python_backend(NAME, backend)
    # Autograd's gradients and indices by a list are made below the modes of Python: the device has to know how.
    _KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
    _KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")
    _FALLBACKS.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast is on, and casts nothing


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **other: Any) -> Far:
    return Far(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _numbers(target).copy_(_numbers(source))
    return target


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


class _Facts(NamedTuple):
    """What is asked of an operation at every call."""

    name: str
    in_place: bool
    random: bool


@cache
def _facts(operation: Any) -> _Facts:
    name = operation._schema.name
    random = torch.Tag.nondeterministic_seeded in operation.tags
    return _Facts(name, operation._schema.is_mutable and name.endswith("_"), random)


def _called(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on the numbers, where its tensors may meet; return tensors on the device where it would."""
    (name, in_place, random), device = _facts(operation), kwargs.get("device")
    flat = [*_leaves(args), *_leaves(tuple(kwargs.values()))]
    far = [leaf for leaf in flat if isinstance(leaf, Far)]
    near = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Far)]
    if far and near and name not in _ANY_PLACE:
        _check(name, args, far, near)
    if far and _waits(name, device, args):
        _note(_seen.waits)
    on_device = bool(far) if device is None else _is_far(device)
    given = kwargs if device is None else {**kwargs, "device": torch.device("cpu")}
    if _is_far(device):
        given.pop("pin_memory", None)
    generator = next((leaf for leaf in flat if isinstance(leaf, _GENERATOR)), None)
    if generator is not None and on_device != any(generator._cdata == each._cdata for each in _generators):
        raise RuntimeError(f"Expected a generator of the place of the tensors in {name}, but got one of the other")
    with _own_draws() if on_device and random and generator is None else contextlib.nullcontext():
        out = operation(*_mapped(_numbers, args), **{key: _mapped(_numbers, value) for key, value in given.items()})
    if on_device and (any(map(_is_double, far)) or any(map(_is_double, _leaves(out)))):
        _note(_seen.doubles)
    if "out" in kwargs:
        return kwargs["out"]
    if in_place and args and isinstance(args[0], torch.Tensor):
        return args[0]
    return _mapped(_far, out) if on_device else out


def _waits(name: str, device: Any, args: Any) -> bool:
    """Whether the host waits for an operation on the device."""
    if name == "aten::_to_copy":
        return device is not None and not _is_far(device)
    if name == "aten::copy_":
        return not isinstance(args[0], Far)
    if name in _INDEXING:
        return any(isinstance(index, Far) and index.dtype == torch.bool for index in args[1])
    return name in _READS


def _leaves(value: Any) -> Iterator[Any]:
    """What lists and tuples of an operation's arguments hold: they have no other containers, and many have none."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(function, part) for part in value])
    return function(value)


@contextlib.contextmanager
def _own_draws() -> Iterator[None]:
    """Let the CPU's operations draw from the device's generator."""
    (own,), shared = getattr(torch, NAME).default_generators, torch.default_generator
    before = shared.get_state()
    shared.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(shared.get_state())
        shared.set_state(before)


def _is_double(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float64, torch.complex128) and leaf.numel() > 1


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


def _note(lines: Counter[Line]) -> None:
    """Count the line of the package that is running, or for which a tree is walked through."""
    frame = sys._getframe(1)
    while frame is not None and (
        not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_filename == _PACKAGE + "tree.py"
    ):
        frame = frame.f_back
    if frame is not None:
        lines[frame.f_code.co_filename.removeprefix(_PACKAGE), frame.f_lineno] += 1
