"""A loader whose own generators are seeded, and whose workers end with the context."""

from __future__ import annotations

import copy
import random as python_random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from fedtorch.data.items import seeded


@contextmanager
def seeded_loader(loader: Any, seed: int) -> Iterator[Any]:
    """Yield a loader whose generators, and those of its samplers, are seeded; restore them at the end.

    Generators of the process are the caller's: samplers and workers without their own generator draw from torch's.
    Persistent workers end with the context, because their draws would affect later rounds.

    Args:
        loader: of one client.
        seed: of all of its generators, each in a separate stream.
    """
    with ExitStack() as after:
        for place, generator in enumerate(_generators(loader)):
            after.callback(_restore(generator))
            _seed(generator, (seed + place) % 2**63)
        alone = copy.copy(loader) if isinstance(loader, DataLoader) and loader.persistent_workers else loader
        if alone is not loader:
            alone._iterator = None
        yield alone


class Draws:
    """One client's random draws from the process's generators, which it uses alone inside of `with`.

    Args:
        seed: of torch's, NumPy's and Python's generators on the CPU.
    """

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._states = _states()
        self._others = self._states

    def __enter__(self) -> None:
        self._others = _states()
        _set_states(self._states)

    def __exit__(self, *error: object) -> None:
        self._states = _states()
        _set_states(self._others)


def _states() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), np.random.get_state(), python_random.getstate()  # noqa: NPY002


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    python_random.setstate(states[2])


def _generators(loader: Any) -> list[Any]:
    """Return the generators that a loader and its samplers hold, each once."""
    seen: dict[int, Any] = {}
    held: list[Any] = []

    def look(node: Any, inside: bool) -> None:
        if id(node) in seen:
            return
        seen[id(node)] = node
        if isinstance(node, (torch.Generator, np.random.Generator, np.random.RandomState, python_random.Random)):
            held.append(node)
        elif isinstance(node, (list, tuple)):
            for child in node:
                look(child, False)
        elif isinstance(node, dict):
            look(list(node.values()), False)
        elif inside or isinstance(node, (DataLoader, Sampler)):
            for name, child in getattr(node, "__dict__", {}).items():
                if name not in ("dataset", "_iterator"):
                    look(child, name in ("sampler", "batch_sampler"))  # which need not be of torch's classes

    look(loader, True)
    return held


def _restore(generator: Any) -> Callable[[], Any]:
    """Return a function that restores a generator's present state."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    return partial(generator.setstate, generator.getstate())


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
