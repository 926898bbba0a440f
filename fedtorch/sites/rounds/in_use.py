"""Prevent two sites of one process from computing with the same solver.

A solver loads parameters into its module during a forward pass. If two threads do that with one solver, each may
silently compute with the other's parameters. So a site reserves its algorithm and the solver's module, with all
submodules, when a run begins, and releases them when it ends.

>>> import torch
>>> class Site:
...     "Somebody who computes."
>>> first, second, module = Site(), Site(), torch.nn.Linear(2, 1)
>>> used = InUse()
>>> used.take(first, [module]), used.take(second, [module]), used.take(first, [module])
(True, False, True)
>>> used.release(first)
>>> used.take(second, [module])
True
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from fedtorch.federation.algorithm import Algorithm
from fedtorch.sites.rounds.policy import Refusal


class InUse:
    """A table of objects in use and their users, by weak references."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[int, tuple[ref[Any], ref[Any]]] = {}  # by id: the object and its user

    def take(self, user: object, objects: Sequence[object]) -> bool:
        """Reserve objects for a user and return True; return False if another user has one of them."""
        with self._lock:
            self._users = {key: (each, by) for key, (each, by) in self._users.items() if each() and by()}
            users = [self._users[id(each)][1]() for each in objects if id(each) in self._users]
            if any(other is not user for other in users):
                return False
            self._users |= {id(each): (ref(each), ref(user)) for each in objects}
            return True

    def release(self, user: object, but: Sequence[object] = ()) -> None:
        """Release all objects of a user except some."""
        stay = {id(each) for each in but}
        with self._lock:
            self._users = {key: used for key, used in self._users.items() if used[1]() is not user or key in stay}


_IN_USE = InUse()


def take(user: object, name: str, algorithm: Algorithm) -> None:
    """Reserve an algorithm, and its solver's module with all submodules, for one site of this process.

    Raises:
        Refusal: another site has reserved one of them.
    """
    if not _IN_USE.take(user, _objects(algorithm)):
        raise Refusal(
            f"the site's function {name!r} returns an algorithm, or a solver in it, that another site of the same "
            "process uses; let it make new ones at every call"
        )


def release(user: object, but: Algorithm | None = None) -> None:
    """Release a site's objects, except those of an algorithm with which it may go on."""
    _IN_USE.release(user, () if but is None else _objects(but))


def _objects(algorithm: Algorithm) -> list[object]:
    return [algorithm, *(() if algorithm.module is None else algorithm.module.modules())]


@contextmanager
def released(user: object) -> Iterator[None]:
    """Release a site's objects at the end of the block."""
    try:
        yield
    finally:
        release(user)
