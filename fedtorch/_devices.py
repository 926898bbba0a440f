"""A device's random generators, and whether a device is a CUDA GPU.

Every branch for CUDA devices is guarded by `is_cuda`. Its callers are therefore the list of code that only a test on a
GPU exercises; `docs/explanation/devices.md` has that list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def is_cuda(device: torch.device) -> bool:
    """Return whether a device is a CUDA GPU."""
    return device.type == "cuda"


def generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators that operations on CPU tensors and on a device's tensors draw from.

    Only the CPU's generator is returned for devices whose generators torch does not expose, such as Apple's.
    """
    of_device = () if device.type == "cpu" else _shown(device.type)
    return [torch.default_generator, *of_device[device.index or 0 :][:1]]


def every_generator() -> list[torch.Generator]:
    """Return torch's own generators of the CPU and of all devices that have been used."""
    kinds = ("cuda", "xpu", torch._C._get_privateuse1_backend_name())
    return [torch.default_generator, *(generator for kind in kinds for generator in _shown(kind))]


def _shown(kind: str) -> tuple[torch.Generator, ...]:
    """Return the generators of a kind of device; none before torch has used one."""
    return tuple(getattr(getattr(torch, kind, None), "default_generators", ()))


@contextmanager
def restored(generators: Iterable[torch.Generator], seed: int | None = None) -> Iterator[None]:
    """Restore the generators' states at the end; with `seed`, seed them at the start.

    >>> before = torch.get_rng_state()
    >>> with restored(every_generator(), seed=0):
    ...     torch.rand(())
    tensor(0.4963)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        if seed is not None:
            for generator, _ in states:
                generator.manual_seed(seed)
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
