"""Keep two sites of one process from computing with the same solver.

A solver puts parameters into its module for the time of a forward pass. Where two threads do that with one solver, each
may compute with the other's parameters, and nothing tells. So a site takes its algorithm and the module of its solver,
with all that is in it, for itself when a run begins, and gives them back when it ends.

>>> import torch
>>> class Site:
...     "Holds what it computes with."
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
    """Remember which objects are in use, and by whom, as long as both are there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[int, tuple[ref[Any], ref[Any]]] = {}  # by identity: the object, and who uses it

    def take(self, user: object, objects: Sequence[object]) -> bool:
        """Note that somebody uses these objects, and return True; or False if another uses one of them."""
        with self._lock:
            self._users = {key: (kept, by) for key, (kept, by) in self._users.items() if kept() and by()}
            users = [self._users[id(each)][1]() for each in objects if id(each) in self._users]
            if any(other is not user for other in users):
                return False
            self._users |= {id(each): (ref(each), ref(user)) for each in objects}
            return True

    def release(self, user: object, but: Sequence[object] = ()) -> None:
        """Note that somebody uses nothing any more, but for some objects."""
        stay = {id(each) for each in but}
        with self._lock:
            self._users = {key: used for key, used in self._users.items() if used[1]() is not user or key in stay}


_IN_USE = InUse()


def take(user: object, name: str, algorithm: Algorithm) -> None:
    """Have an algorithm, and the module of its solver with all parts, for one site of this process.

    Raises:
        Refusal: another site has them.
    """
    if not _IN_USE.take(user, _objects(algorithm)):
        raise Refusal(
            f"the site's function {name!r} returns an algorithm, or a solver in one, with which another site of the "
            "same process computes; let it make new ones at every call"
        )


def release(user: object, but: Algorithm | None = None) -> None:
    """Give back what a site has taken, but for an algorithm with which it may go on."""
    _IN_USE.release(user, () if but is None else _objects(but))


def _objects(algorithm: Algorithm) -> list[object]:
    return [algorithm, *(() if algorithm.module is None else algorithm.module.modules())]


@contextmanager
def released(user: object) -> Iterator[None]:
    """Give back what a site has taken at the end of the block."""
    try:
        yield
    finally:
        release(user)
