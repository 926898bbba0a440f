"""Journal of a node's finished steps of a protocol, from which all nodes can resume at a common point.

A protocol that survives broken connections and kills is a function of a journal that makes the node's half:

    def half(journal):
        rows = yield from journal.once(Holder(identifiers, "clinic").following("leader"))
        party = PartyNode(network.parties[0], VerticalData((x[rows],), unknown))
        yield from journal.through(partial(party_half, party), party, iterations)

Every trained object is `Stateful`; a journal uses no other interface of it.

`once` and `through` pass points, at which the node's state is stored before any further message. A repeated call of the
whole function reads stored results up to its starting point instead of recomputing them. The same messages therefore
follow as in an undisturbed run, bit by bit. All messages must be within `once` and `through`, in the same order at
every node.

No node passes a point before all have passed the previous one, since every party sends something between them. So nodes
are at most one point apart, and each stores two. This is the rollback of a coordinated checkpoint, with the messages of
training as coordination.

Source: Elnozahy, Alvisi, Wang, Johnson, "A survey of rollback-recovery protocols in message-passing systems", ACM
Computing Surveys 34 (2002), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fedtorch import expected
from fedtorch.checkpoint import below
from fedtorch.protocol.halves import Half
from fedtorch.protocol.versions import FIRST, Versions

EVERY = 100  # steps between two points


class Stateful(Protocol):
    """An object whose state is flat tensors and can be restored bit by bit."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the changing state, copied."""
        ...

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Resume from the result of `state_dict`."""
        ...


class Journal:
    """A node's finished points, and its state at each.

    Args:
        folder: of states, with a subfolder for every run; None keeps them in memory, where they survive broken
            connections but not the end of the process.

    Attributes:
        run: the identity of the run, in hexadecimal.
        versions: of the node's state, by the number of finished steps.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.run, self.versions = folder, "", Versions(None)
        self.begin(FIRST)

    def enter(self, run: str) -> None:
        """Open the stored points of a run."""
        if run != self.run:
            self.run, self.versions = run, Versions(None if self.folder is None else self.folder / run)

    def begin(self, point: int) -> None:
        """Restart the protocol from its beginning, resuming at a stored point.

        Raises:
            ValueError: the node's state at that point is missing.
        """
        if point not in self.versions.numbers:
            raise ValueError(f"Expected one of the points {sorted(self.versions.numbers)}, but got {point}")
        self._flat = dict(self.versions.get(point) or {})
        self._from, self._before, self._at, self._part = point, point, FIRST, 0

    def once(self, half: Half) -> Half:
        """Run a half whose result is a tensor, such as that of an alignment; return a stored result at once."""
        name = self._next()
        if self._at < self._from:
            half.close()
            self._at += 1
            return self._flat[name]
        result = yield from half
        self._keep(1, name, {"": result})
        return result

    def through(
        self,
        half: Callable[[Sequence[Any]], Half],
        state: Stateful,
        steps: Sequence[Any],
        every: int = EVERY,
    ) -> Half:
        """Run a half of many steps, and store its state after every few of them.

        Args:
            half: of some steps, such as `partial(party_half, node)`.
            state: the state that it changes; at the start it may differ from the stored one, if it is in this process.
            steps: all of them, the same at every node; the attribute `active` of a step, if it has one, lists the nodes
                that take part in it.
            every: steps between two points, the same at every node.

        Raises:
            ValueError: a party is idle from one point to the next, so that it could be any number of points ahead.
        """
        _check_active(steps, every)
        prefix, done = f"{self._next()}.", max(0, min(self._from - self._at, len(steps)))
        self._at += done
        if saved := below(prefix, self._flat):
            state.load_state_dict(saved)
        else:
            self._keep(0, prefix, state.state_dict())
        for start in range(done, len(steps), every):
            block = steps[start : start + every]
            yield from half(block)
            self._keep(len(block), prefix, state.state_dict())

    def _next(self) -> str:
        """Return the name of the next part of the protocol."""
        self._part += 1
        return str(self._part)

    def _keep(self, work: int, prefix: str, new: Mapping[str, Tensor]) -> None:
        if work:
            self._before, self._at = self._at, self._at + work
        self._flat = {**self._flat, **{prefix + name: leaf for name, leaf in new.items()}}
        self.versions.put(self._at, self._flat)
        self.versions.retain({self._before, self._at})


def _check_active(steps: Sequence[Any], every: int) -> None:
    expected.positive(every=every)
    each = [getattr(step, "active", None) for step in steps]
    for start in range(0, len(each), every):
        block = each[start : start + every]
        if None not in block and not all(map(any, zip(*block))):
            raise ValueError(
                f"Expected every party to take part once in {every} iterations, but one does not; raise every"
            )
