"""The generators that a device's operations draw from, and whether a device is a CUDA GPU.

Every branch that is taken on CUDA devices only asks `is_cuda`. Those who ask are the list of what nothing but a test on
such a device shows, which `docs/explanation/devices.md` has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def is_cuda(device: torch.device) -> bool:
    """Return whether a device is a CUDA GPU."""
    return device.type == "cuda"


def generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's own generators that operations on tensors of the CPU and of a device draw from.

    The CPU's is alone where a device does not show its own, as Apple's does not.
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
    """Put generators back at the end to where they were; let them begin at a seed, if one is given.

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
