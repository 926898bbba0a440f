r"""Rows that arrive between rounds: training continues with all rows so far, or with the latest.

A client's rows are in the order of their arrival, and `seen` is their number after a given number of rounds. The next
round trains with these, or with the latest of them alone. New rows can be predicted before they are used in training: a
rolling validation, for `fedtorch.trust.drift.DriftAlarm`.

Online gradient descent is a step on the latest row,

.. math:: w^{(t+1)} = w^{(t)} + 2 \eta_t x^{(t)} (y^{(t)} - (w^{(t)})^T x^{(t)}),

that is `window=1`, and a local solver that takes one step, with a schedule for η_t on the federation's clock.

Source: Jung, "Federated learning: from theory to practice", equation (4.23).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry, plain
from fedtorch.federation.populations.clients import SMALL_BLOCK, Gathered, LocalClients
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


class Growing(InProcess):
    """Clients in this process whose rows arrive between rounds.

    Args:
        data: all rows that will arrive, each client's in their order.
        seen: finished rounds -> number of rows of every client by then, `(K,)` whole numbers of at least one; larger
            numbers mean all rows.
        window: number of a client's latest rows to train with; default: all.
        chunk: as for `InProcess`.
        device: as for `InProcess`.
        carry: as for `InProcess`.

    Raises:
        ValueError: a window below one; or in a round with counts that are not as described.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
        >>> growing = ft.Growing(data, lambda rounds: torch.full((5,), 10 * (rounds + 1)))
        >>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), growing)
        >>> for _ in run.rounds(4):  # how well the rows are predicted that come next
        ...     score = run.evaluate(growing.newest(run.number), {"error": ft.metrics.mean_squared_error()})
        >>> growing.newest(4).counts.tolist(), growing.at(4).counts.tolist()
        ([10, 10, 10, 10, 10], [50, 50, 50, 50, 50])
    """

    def __init__(
        self,
        data: FederatedData,
        seen: Callable[[int], Tensor],
        *,
        window: int | None = None,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        carry: Carry = plain(),  # noqa: B008
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"Expected a window of at least one row, but got {window}; leave it out for all rows")
        super().__init__(data, chunk, device, carry=carry)
        self.seen, self.window = seen, window

    def at(self, rounds: int) -> FederatedData:
        """Return the rows that clients train with after a number of rounds."""
        last = self._counts(rounds)
        first = torch.zeros_like(last) if self.window is None else (last - self.window).clamp(min=0)
        return _between(self.data, first, last)

    def newest(self, rounds: int) -> FederatedData:
        """Return the rows that have arrived since the last round; a client may have none."""
        last = self._counts(rounds)
        return _between(self.data, torch.zeros_like(last) if rounds == 0 else self._counts(rounds - 1), last)

    def blocks(self) -> list[tuple[Tensor, ClientData]]:
        """Return the rows of the first round."""
        return self.at(0).buckets(small=SMALL_BLOCK)

    def noted(self, clients: int | None = None) -> Mapping[str, Tensor]:
        """Return nothing: rows arrive between rounds."""
        return {}

    def bind(self, algorithm: Algorithm, state: Tree) -> LocalClients:
        """Return the clients for one run of `algorithm`."""
        return _GrowingClients(self, algorithm, state)

    def _counts(self, rounds: int) -> Tensor:
        counts = torch.as_tensor(self.seen(rounds), device="cpu")
        whole = not counts.is_floating_point() and counts.shape == (len(self.data),)
        if not whole or bool((counts < 1).any()):
            raise ValueError(
                f"Expected whole numbers of at least one row for each of {len(self.data)} clients after {rounds} "
                f"rounds, but got {counts.tolist()}; leave clients out that have nothing yet"
            )
        return torch.minimum(counts.to(torch.int64), self.data.counts)


class _GrowingClients(LocalClients):
    """The clients of a `Growing` population, with the rows that have arrived by the current round."""

    def __init__(self, population: Growing, algorithm: Algorithm, state: Tree) -> None:
        self._population, self._rounds = population, 0
        data = population.data
        super().__init__(algorithm, state, data.names, population.blocks(), len(data), population.chunk)

    def gather(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None) -> Gathered:
        """Run a round with the rows of its time; see `LocalClients.gather`."""
        if turn.round != self._rounds:
            self.hold(self._population.at(turn.round).buckets(small=SMALL_BLOCK))
            self._rounds = turn.round
        return super().gather(outbox, cohort, turn, lost)


def _between(data: FederatedData, first: Tensor, last: Tensor) -> FederatedData:
    """Return rows `first` to `last` `(K,)` of every client."""
    counts, every = (last - first).clamp(min=0), data.rows
    begins = data.starts + first - (counts.cumsum(0) - counts)
    index = torch.arange(int(counts.sum())) + begins.repeat_interleave(counts)
    rows = tree.take(every, index)
    return dataclasses.replace(data, rows=rows, counts=counts, allow_empty=True, on_disk=False)
