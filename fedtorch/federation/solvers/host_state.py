"""State and random draws of a user's module outside of its tensors, while it trains for many clients in turn.

Python's and NumPy's global generators are shared by all clients, as are Pyro's parameter store, and buffers and frozen
parameters that are not stacked. Each is compared around a step, and shared state raises an error that names it.
"""

from __future__ import annotations

import random as python_random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtorch._devices import every_generator
from fedtorch.expected import loaded


class SharedDraws(RuntimeError):
    """A module draws from Python's or NumPy's generator while its clients are stacked."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            f"Expected {type(module).__name__} to draw by torch, but it draws from Python's random or numpy.random, "
            "whose numbers stacked clients would share; draw with torch, or use batched=False or ft.lightning_fit"
        )


class HostGenerators:
    """Python's and NumPy's global generators."""

    @staticmethod
    def state() -> tuple[Any, Any]:
        """Return the state of both."""
        return python_random.getstate(), np.random.get_state()  # noqa: NPY002

    @staticmethod
    def restore(state: tuple[Any, Any]) -> None:
        """Restore both generators to a state."""
        python_random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002

    @classmethod
    def moved(cls, before: tuple[Any, Any]) -> bool:
        """Restore both generators to `before`; return whether a number was drawn since then."""
        python, numpy = cls.state()
        same = python == before[0] and numpy[2:] == before[1][2:] and np.array_equal(numpy[1], before[1][1])
        if not same:
            cls.restore(before)
        return not same

    @classmethod
    @contextmanager
    def seeded(cls, seed: int) -> Iterator[None]:
        """Seed both generators inside the context, and restore them afterwards."""
        before = cls.state()
        try:
            python_random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
        finally:
            cls.restore(before)


class SetGenerators:
    """Context that detects whether a user's code sets one of torch's global generators to a seed or a state.

    A comparison afterwards would miss a seed or state equal to the present one.

    Attributes:
        met: whether it did.
    """

    _SETTING = frozenset(("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"))

    def __init__(self) -> None:
        self.met = False

    def __enter__(self) -> SetGenerators:
        self._before = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._before if callable(self._before) else None)
        if not callable(self._before) and self._before is not None:
            self._before.enable()  # cProfile, which is not a function until Python 3.12

    def _profile(self, frame: Any, event: str, function: Any) -> None:
        if event != "c_call" or getattr(function, "__name__", "") not in self._SETTING:
            return
        if any(function.__self__ is each for each in every_generator()):
            while _root(frame) in ("torch", "contextlib"):
                frame = frame.f_back
            self.met |= _root(frame) != _root(sys._getframe())


def _root(frame: Any) -> str:
    """Return the name of the package whose code a frame runs."""
    return "" if frame is None else frame.f_globals.get("__name__", "").split(".")[0]


class UnchangedTensors:
    """The tensors of a module that training must not change.

    These are buffers and frozen parameters that are not stacked, and the module's own tensors in whose places the
    clients' are while they train.

    Args:
        module: has the tensors.
        stacked: names of those that may change, because every client has its own.
    """

    def __init__(self, module: nn.Module, stacked: Sequence[str]) -> None:
        self._module = module
        self._places: list[tuple[dict[str, Any], str, str]] = []
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        shared = {id(named[name]) for name in stacked if name in named}  # under other names too
        for prefix, part in module.named_modules():
            for table in (part._parameters, part._buffers):
                for name in table:
                    path = f"{prefix}.{name}" if prefix else name
                    if path not in stacked and id(table.get(name)) not in shared:
                        self._places.append((table, name, path))
        self._values: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: a buffer, and a copy of it
        self._replaced = [(name, named[name]) for name in stacked if name in named]
        self._versions: list[int] = []  # versions of these
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def check(self) -> None:
        """Raise if a tensor has changed since the first step; some kernels do not change its version.

        Raises:
            ValueError: a buffer was written, or a frozen parameter has been made one that trains.
            TypeError: a tensor was written in whose place the clients' own were.
        """
        thawed = [(name, tensor) for name, tensor in self._frozen if tensor.requires_grad]
        for _, parameter in thawed:
            parameter.requires_grad_(False)
        refuse_thawed(self._module, [name for name, _ in thawed])
        changed = self._differing()
        if changed:
            self._refuse(changed)
        held = [name for (name, tensor), version in zip(self._replaced, self._versions) if tensor._version != version]
        if held:
            raise TypeError(
                f"Expected a step that reaches the tensors of {type(self._module).__name__} by their names, but it "
                f"writes {', '.join(held)} through another reference, such as a list or an optimiser of its own, which "
                "clients do not have; use ft.lightning_fit"
            )

    def _differing(self) -> list[str]:
        """Return the names of buffers whose values have changed since the first step, and restore them."""
        changed = []
        for table, name, path in self._places:
            tensor = table.get(name)
            if tensor is not None and id(tensor) in self._values and not _same(tensor, self._values[id(tensor)][1]):
                with torch.no_grad():
                    tensor.copy_(self._values[id(tensor)][1])
                changed.append(path)
        return changed

    def __call__(self) -> AbstractContextManager[None]:
        """Raise ValueError at the end if a buffer was written; restore all buffers."""
        if not self._versions:
            self._versions = [tensor._version for _, tensor in self._replaced]
        return self._watched() if self._places else nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = [(table, name, path, table[name]) for table, name, path in self._places if name in table]
        versions = [None if tensor is None else tensor._version for *_, tensor in before]
        for *_, tensor in before:
            if tensor is not None and id(tensor) not in self._values:
                self._values[id(tensor)] = tensor, tensor.detach().clone()
        failed = True
        try:
            yield
            failed = False
        finally:
            changed = [
                path
                for (table, name, path, tensor), version in zip(before, versions)
                if self._put_back(table, name, tensor, version)
            ]
            if changed and not failed:
                self._refuse(sorted({*changed, *self._differing()}))

    def _put_back(self, table: dict[str, Any], name: str, tensor: Tensor | None, version: int | None) -> bool:
        """Restore one buffer; return whether its value had changed."""
        now, table[name] = table.get(name), tensor
        if now is tensor and (tensor is None or tensor._version == version):
            return False
        if tensor is None:
            return now is not None
        copy = self._values[id(tensor)][1]
        hidden = now is None or torch._C._functorch.is_functorch_wrapped_tensor(now)  # a value of many clients
        same = now is not None and not hidden and _same(now, copy)
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(copy)
        return not same

    def _refuse(self, changed: list[str]) -> None:
        frozen = [name for name in changed if name in dict(self._module.named_parameters())]
        if frozen:
            raise ValueError(
                f"Training changes {', '.join(frozen)} of {type(self._module).__name__} in place, which no client "
                "trains or keeps; make it a buffer, with buffers='local' or 'average'"
            )
        raise ValueError(
            f"Training changes the buffers {', '.join(changed)} of {type(self._module).__name__}, and averaging them "
            "silently would be wrong; choose buffers='local' (each client keeps its own) or buffers='average'"
        )


def refuse_thawed(module: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError for frozen parameters that the module unfreezes in training."""
    if names:
        raise ValueError(
            f"Training unfreezes the parameters {', '.join(names)} of {type(module).__name__}, which are not sent; set "
            "requires_grad=True before making the local solver, and freeze them in the steps of ft.lightning_fit"
        )


def equal_or_nan(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors of one shape are equal or both NaN.

    >>> equal_or_nan(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([1.0, torch.nan, 3.0])).tolist()
    [True, True, False]
    """
    return (one == other) | ((one != one) & (other != other))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(equal_or_nan(one, other).all())


def refuse_global_store(module: nn.Module) -> None:
    """Raise TypeError for parameters that Pyro keeps in one store of the process, which clients would share."""
    kind = loaded("pyro.nn", "PyroModule")
    held = [
        f"{name}.{each}".strip(".")
        for name, part in module.named_modules()
        if isinstance(part, kind)
        for each in vars(part).get("_pyro_params", {})
    ]
    if held and not sys.modules["pyro"].settings.get("module_local_params"):
        raise TypeError(
            f"Expected parameters that belong to the module, but Pyro keeps {', '.join(held)} of "
            f"{type(module).__name__} in its param store of the whole process, which clients would share; call "
            "pyro.settings.set(module_local_params=True) before the module is made"
        )
