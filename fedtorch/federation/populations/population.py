"""The contract of populations: clients and where they run.

A population describes clients, their data and their place. `bind` makes an algorithm's own `Clients`: prepared data and
a table of states. `Clients.step` runs a cohort and returns the aggregate for the server; the clients' new states are
set aside until `Pending.commit` stores those whose message has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.federation.turn import Turn
from fedtorch.learns import Field
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
_NOBODY = torch.zeros(0, dtype=torch.int64)


class Pending(NamedTuple):
    """A round as far as the clients have brought it."""

    aggregate: Tree  # None without answers
    ids: Tensor  # (M,) the clients that answered, ascending
    info: dict[str, Tensor]  # (M,) each, in the order of ids
    bytes_up: int  # of all messages sent, lost ones too: clients' encoded payloads; of sites, whole frames
    bytes_down: int
    commit: Callable[[], None]  # stores the new states of the clients that answered
    repeated: Tensor = _NOBODY  # clients whose message came more than once and was used once
    refused: Mapping[int, str] = MappingProxyType({})  # clients whose message was bad, and in which field
    away: Tensor = _NOBODY  # clients that could not be asked, or declined; besides simulated faults
    late: Tensor = _NOBODY  # clients that have not answered in time; besides simulated faults
    failed: Mapping[int, Exception] = MappingProxyType({})  # clients that could not take part, and why

    def check(self, names: Sequence[str], round: int, on_bad_message: str) -> None:
        """Raise for clients with a bad message or a failure; or log which clients the round lacks."""
        if self.refused and on_bad_message == "raise":
            self.raise_refused(names, round)
        if self.failed and on_bad_message == "raise":
            self.raise_failed(names, round)
        for client, error in self.failed.items():
            _LOG.warning("client %r was left out of round %d: %s", names[client], round, error)

    def raise_failed(self, names: Sequence[str], round: int) -> None:
        """Raise ValueError for clients that could not take part; name the first, and the round.

        Example:
            >>> import torch
            >>> failed = {1: ValueError("its loader raised at batch 3: OSError: no such file")}
            >>> pending = Pending(None, torch.tensor([0]), {}, 0, 0, lambda: None, failed=failed)
            >>> pending.raise_failed(names=["a", "b"], round=7)
            Traceback (most recent call last):
            ValueError: Expected every client to take part, but in round 7 client 'b' did not: its loader raised at ...
        """
        client, error = next(iter(self.failed.items()))
        others = f"; {len(self.failed) - 1} others failed too" * (len(self.failed) > 1)
        raise ValueError(
            f"Expected every client to take part, but in round {round} client {names[client]!r} did not: {error}"
            f"{others}. Nothing of the round was kept: mend the client's data and go "
            "on, or leave such clients out of their rounds by "
            "ft.Run(…, on_bad_message='drop') or ft.Federation(…, on_bad_message='drop')"
        ) from error

    def raise_refused(self, names: Sequence[str], round: int) -> None:
        """Raise ValueError for messages with NaN, Inf or a negative weight; name the first client, field and round.

        Example:
            >>> import torch
            >>> pending = Pending(None, torch.tensor([0]), {}, 0, 0, lambda: None, refused={1: "value.weight"})
            >>> pending.raise_refused(names=["a", "b"], round=7)
            Traceback (most recent call last):
            ValueError: Expected finite messages, but client 'b' sent NaN, Inf or a negative weight in 'value.weight'...
        """
        client, field = next(iter(self.refused.items()))
        advice = "Take smaller steps"
        if field.removeprefix("fresh.").startswith("buffers.value."):
            advice = "Keep that buffer in float32 or float64, or with its client by buffers='local'"
        raise ValueError(
            f"Expected finite messages, but client {names[client]!r} sent NaN, Inf or a negative weight in {field!r} "
            f"in round {round}, and {len(self.refused) - 1} others did so too; nothing of the round was kept. "
            f"{advice}, or leave such clients out of their rounds by "
            "ft.Run(…, on_bad_message='drop') or ft.Federation(…, on_bad_message='drop')"
        )


class Clients(Protocol):
    """The clients of a population, bound to one algorithm."""

    in_process: bool  # whether all of them run in this process

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Run the clients of `cohort` (ascending ids, None for all); messages of `lost` do not arrive.

        The turn's key is that of the round.
        """
        ...

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """Return `function(tensors each client predicts with, its data)`, `(K, ...)` in the order of `data`."""
        ...

    def total(self) -> Tree:
        """Return the aggregate of `Algorithm.told` over all clients; None if some cannot be asked now."""
        ...

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """Return the tensors that the clients `ids` (distinct) predict with, `(M, ...)`."""
        ...

    def disclosed(self, algorithm: Algorithm, carry: Carry, outbox: Tree, turn: Turn) -> list[Field]:
        """Return the disclosed fields of a run; see `fedtorch.federation.disclosure`.

        Args:
            algorithm: the run's, without changes for the transport.
            carry: transport of its messages.
            outbox, turn: those of a round.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return ids and states of all clients that have committed, flat."""
        ...

    def load_state_dict(self, flat: dict[str, Tensor], anyway: bool = False) -> None:
        """Load the states in `flat` that belong here; `anyway` accepts other rows elsewhere."""
        ...

    def meet(self) -> None:
        """Wait for the other processes, if there are any."""
        ...

    def introduce(self, about: Callable[[], Mapping[str, str]]) -> None:
        """Register the run's fingerprint; other processes compare it at the next collective."""
        ...


class Population(Protocol):
    """Clients and where they run."""

    names: tuple[str, ...]
    device: torch.device  # of the server's state
    leads: bool  # whether this process writes output common to all processes
    carry: Carry  # transport of messages; a run passes the adapted algorithm to `bind`

    @property
    def data(self) -> FederatedData:
        """Return the clients' data; raise an error that names their place if the population has none."""
        ...

    def noted(self, clients: int | None = None) -> Mapping[str, Tensor]:
        """Return checkpoint digests of the rows of the first clients, default all; see `fedtorch.data.digests`.

        Nothing if rows may change from round to round.
        """
        ...

    def bind(self, algorithm: Algorithm, state: Tree) -> Clients:
        """Return the clients for one run of `algorithm`, all in the initial `state` (of one client)."""
        ...


def row_counts(population: Population) -> Tensor:
    """Return the number of rows of each client, `(K,)`; for clients at sites the reported numbers."""
    counts = getattr(population, "counts", None)
    return population.data.counts if counts is None else counts


def feature_names(population: Population) -> tuple[str, ...]:
    """Return the names of the columns of x, or nothing if they are unknown here."""
    return () if hasattr(population, "counts") else tuple(getattr(population.data, "features", ()))


def check_population(population: Population) -> None:
    """Raise TypeError unless it is a population, with advice if it is data.

    Example:
        >>> import torch, fedtorch as ft
        >>> check_population(ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))]))
        Traceback (most recent call last):
        TypeError: Expected a population, but got FederatedData; say where clients run: ft.InProcess(data)
    """
    if not hasattr(population, "bind"):
        made = "data" if isinstance(population, FederatedData) else "ft.data.from_tensors([(x, y), …])"
        raise TypeError(
            f"Expected a population, but got {type(population).__name__}; say where clients run: ft.InProcess({made})"
        )
