"""Clients sharded over the ranks of a process group, as `torchrun` starts them.

Every rank has the server's state and a shard of the clients (client k is on rank k mod world size), and takes part in
every collective, even without a client of the cohort. Ranks use `all_reduce` if partial aggregates merge by addition,
and otherwise gather the rows of the partial aggregates. Nothing is pickled.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fedtorch import functional, tree
from fedtorch._devices import is_cuda
from fedtorch.checkpoint import describe
from fedtorch.data import ClientData, FederatedData, FederatedLoaders
from fedtorch.data.digests import Notes, noted
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry, plain
from fedtorch.federation.populations._ranks import Ranks
from fedtorch.federation.populations.clients import Gathered, LocalClients
from fedtorch.federation.populations.in_process import SMALL_BLOCK, placed
from fedtorch.federation.populations.population import Pending
from fedtorch.federation.populations.stored import StoredClients
from fedtorch.federation.turn import Turn
from fedtorch.learns import Field
from fedtorch.tree import Tree

TIMEOUT = timedelta(minutes=10)
_SAMPLE = 16 * 2**20  # most bytes of rows that ranks compare


class Distributed:
    """A population over ranks; give it the same data on every rank.

    Args:
        data: the rows of all clients, of which a rank stores only its own clients' blocks; or their loaders, of which a
            rank uses only its own clients'.
        chunk: most clients at once on a rank. Default: as many as fit 128 MiB, or a quarter of a CUDA device's free
            memory.
        device: device of this rank's blocks; default: the data's. "cuda" is the device with the rank's number on its
            machine, as set by `torchrun`. Collectives use nccl on a GPU, else gloo.
        timeout: the longest wait for another rank, its clients' work included; over nccl that of the process group.
        carry: as for `ft.InProcess`, the same on every rank.

    Under a Lightning `Trainer` use `strategy=ft.ClientSharding()`; outside one, the process group is started at the
    first round if necessary. Calls that need other ranks' clients (`evaluate`, `client_module`) must be made on every
    rank. There may be more ranks than clients.

    At the first collective of a run the ranks compare settings, seed, cohort, faults, start, clients, and up to 16 MiB
    of their rows, evenly spread. If one differs, every rank raises a ValueError that names it. A rank that has gone, or
    does not answer in time, is named by the others' RuntimeError.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))] * 3)
        >>> population = ft.Distributed(data)  # alone, where `torchrun` has not started others
        >>> population.rank, population.world_size
        (0, 1)
    """

    def __init__(
        self,
        data: FederatedData | FederatedLoaders,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        *,
        timeout: timedelta = TIMEOUT,
        carry: Carry = plain(),  # noqa: B008
    ) -> None:
        if not timeout > timedelta(0):
            raise ValueError(f"Expected a positive timeout, but got {timeout}")
        self.data, self.names, self.device = placed(data, chunk, own_device(device))
        self.rank, self.world_size = _place()
        self.chunk, self.leads, self.carry = chunk, self.rank == 0, carry
        self.ranks = Ranks(self.rank, self.world_size, self.device, timeout)

    @functools.cached_property
    def about(self) -> dict[str, str]:
        """Return digests of the data, which ranks compare."""
        if isinstance(self.data, FederatedLoaders):  # a rank does not read other ranks' loaders
            return {"sizes": describe(self.data.counts)}
        spread = slice(None, None, 1 + tree.nbytes(self.data.rows) // _SAMPLE)
        return {"sizes": describe(self.data.counts), "rows": describe(tree.take(self.data.rows, spread))}

    @functools.cached_property
    def _noted(self) -> Notes:
        return noted(self.data)

    def noted(self, clients: int | None = None) -> Mapping[str, Tensor]:
        """Return the digests of rows for checkpoints; see `Population.noted`."""
        return self._noted if clients in (None, len(self.data)) else noted(self.data, clients)

    def bind(self, algorithm: Algorithm, state: Tree) -> _DistributedClients:
        """Return this rank's clients for one run of `algorithm`."""
        shard = torch.arange(len(self.data))[self.rank :: self.world_size]
        if isinstance(self.data, FederatedLoaders):
            stored = StoredClients(algorithm, state, self.data, self.chunk, shard)
            return _DistributedClients(stored, shard, self)
        if len(shard):
            blocks = [(shard[ids], block) for ids, block in self.data.select(shard).buckets(small=SMALL_BLOCK)]
        else:
            first = self.data.stack(torch.tensor([0]))
            blocks = [(shard, tree.take(first, slice(0, 0)))]
        local = LocalClients(algorithm, state, self.data.names, blocks, len(self.data), self.chunk)
        return _DistributedClients(local, shard, self)

    def __repr__(self) -> str:
        return f"Distributed({self.data!r}, rank {self.rank} of {self.world_size})"


class Table(NamedTuple):
    """Sums over ranks of a round's counts and diagnostics."""

    counts: Tensor  # (8 + F,) as in `_Counts`, and how many ranks have each of F diagnostics
    # (1 + F, M) of the clients asked: whether it answered, and its diagnostics; zeros for other ranks' clients
    rows: Tensor


class _Counts(NamedTuple):
    """Sums over ranks."""

    up: int  # bytes
    down: int
    answered: int  # clients
    refused: int
    failed: int
    padded: int  # ranks that refuse padded steps
    stacked: int  # ranks that refuse all shared steps
    news: int  # ranks that have diagnostics of names that are not known yet


class _DistributedClients:
    """All ranks' clients, as seen from this rank.

    Args:
        local: the clients of this rank.
        ids: their ids.
        population: of all clients.
    """

    def __init__(self, local: LocalClients, ids: Tensor, population: Distributed) -> None:
        self.local, self.population = local, population
        self.mine = torch.zeros(local.clients, dtype=torch.bool)
        self.mine[ids] = True
        self.own, self._everybody = len(ids), torch.arange(local.clients)
        self.in_process = population.world_size == 1
        self._names: tuple[str, ...] = ()  # of the ranks' diagnostics so far
        self._about: Mapping[str, str] | None = None  # settings that the ranks still have to compare

    def introduce(self, about: Callable[[], Mapping[str, str]]) -> None:
        """Register settings that the ranks compare at their next collective; see `Clients.introduce`."""
        if self.population.world_size > 1:
            module = self.local.algorithm.module
            layers = {} if module is None else functional.layers(module)
            self._about = {**about(), **self.population.about, "model": describe(layers)}

    @property
    def ranks(self) -> Ranks:
        """Return the ranks after they have compared their settings."""
        about, self._about = self._about, None
        if about is not None:
            self.population.ranks.agree(about)
        return self.population.ranks

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Run this rank's part of the cohort and combine it with the others'; see `Clients.step`."""
        if self.population.world_size == 1:
            return self.local.step(outbox, cohort, turn, lost)
        ranks, exchange = self.ranks, self.local.algorithm.exchange
        gathered = self.local.gather(outbox, cohort, turn, lost)
        partial, message = gathered.partial, gathered.message
        if partial is None:
            block = self.local.empty_block()
            message = self.local.reply(block, outbox, turn).message
            partial = exchange.gather(message, block[0])
        table = self._table(cohort, gathered, turn)
        if exchange.additive:
            table, partial = ranks.add((table, partial))
        else:
            table, partial = ranks.add(table), ranks.gather(partial)
        counts, ids, info = self._joined(cohort, table, gathered, turn)
        ways = {"padded": counts.padded, "stacked": counts.stacked}
        unknown = {way for way, refusing in ways.items() if 0 < refusing < ranks.world_size}
        if unknown:  # unknown to some ranks, whose clients must not take such steps either
            turn.refused.update(unknown)
            return self.step(outbox, cohort, turn, lost)
        aggregate = self.local.finish(partial, message) if len(ids) else None
        refused = self._join_refused(gathered.refused) if counts.refused else {}
        failed: dict[int, Exception] = {}
        if counts.failed:  # other ranks report a failure by their messages
            why = self._join_refused({client: str(error) for client, error in gathered.failed.items()})
            failed = {client: gathered.failed.get(client, ValueError(text)) for client, text in why.items()}
        commit = lambda: self.local.commit(gathered.states)
        return Pending(aggregate, ids, info, counts.up, counts.down, commit, refused=refused, failed=failed)

    def total(self) -> Tree:
        """Return the total of all ranks' persistent contributions; see `Clients.total`."""
        exchange, partial = self.local.algorithm.exchange, self.local.told_here()
        return exchange.finish(self.ranks.add(partial) if exchange.additive else self.ranks.gather(partial)).value

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """Evaluate this rank's clients and gather all results; see `Clients.evaluate`."""
        if len(data) != self.local.clients:
            raise ValueError(
                f"Expected data of the population's {self.local.clients} clients, but got {len(data)}; split the data "
                "of the same clients"
            )
        ids, parts = self.local.evaluate_parts(outbox, data, function, self.mine)
        everybody, results = self.ranks.gather((ids.to(self.local.device), tree.concatenate(parts)))
        return tree.take(results, everybody.argsort())

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """Return the tensors that clients predict with, from the ranks that have them; see `Clients.tensors`."""
        mine = ids[self.mine[ids]]
        held, rows = self.ranks.gather((mine.to(self.local.device), self.local.tensors(outbox, mine)))
        return tree.take(rows, held.argsort()[ids.argsort().argsort().to(held.device)])

    def disclosed(self, algorithm: Algorithm, carry: Carry, outbox: Tree, turn: Turn) -> list[Field]:
        """Return the disclosed fields of this rank's or other ranks' clients; see `Clients.disclosed`."""
        return self.local.disclosed(algorithm, carry, outbox, turn)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of all ranks' clients that have committed."""
        states = self.local.state_dict()
        every = dict(zip(states, self.ranks.gather(tuple(states.values()))))
        order = every["ids"].argsort()
        return {name: leaf[order] for name, leaf in every.items()}

    def load_state_dict(self, flat: dict[str, Tensor], anyway: bool = False) -> None:
        """Load the states of this rank's clients; skip those of other ranks."""
        self.local.load_state_dict(flat)

    def meet(self) -> None:
        """Wait for the other ranks."""
        self.ranks.sum(torch.zeros(1))

    def _join_refused(self, refused: dict[int, str]) -> dict[int, str]:
        return {client: field for part in self.ranks.texts(list(refused.items())) for client, field in part}

    def _table(self, cohort: Tensor | None, here: Gathered, turn: Turn) -> Table:
        """Return counts, answers and known diagnostics of the clients here, in the form that ranks add up."""
        names, ids, info = self._names, here.ids, here.info
        asked = self.local.clients if cohort is None else len(cohort)
        rows = torch.zeros(1 + len(names), asked, dtype=torch.float64)
        mine: Tensor | slice = ids if cohort is None else torch.searchsorted(cohort, ids)
        if cohort is None and len(ids) == self.own:
            mine = slice(self.population.rank, None, self.population.world_size)
        for row, value in zip(rows, (1.0, *(info.get(name, torch.nan) for name in names))):
            row[mine] = value
        news = int(not info.keys() <= set(names))
        padded, stacked = (int(way in turn.refused) for way in ("padded", "stacked"))
        left_out = len(here.refused), len(here.failed)
        counts = _Counts(here.up, here.down, len(ids), *left_out, padded, stacked, news)
        return Table(torch.tensor([*counts, *(name in info for name in names)], dtype=torch.float64), rows)

    def _joined(
        self, cohort: Tensor | None, table: Table, here: Gathered, turn: Turn
    ) -> tuple[_Counts, Tensor, dict[str, Tensor]]:
        """Return counts, answers on all ranks, and all diagnostics; names new to a rank are exchanged first."""
        many = len(_Counts._fields)
        numbers = [int(number) for number in table.counts.tolist()]
        if numbers[many - 1]:
            reported = [name for names in self.ranks.texts(sorted(here.info)) for name in names]
            self._names = tuple(sorted({*self._names, *reported}))
            self.local.noted.update(dict.fromkeys(self._names))
            table = self.ranks.add(self._table(cohort, here, turn))
            numbers = [int(number) for number in table.counts.tolist()]
        counts, asked = _Counts(*numbers[:many]), self._everybody if cohort is None else cohort
        if counts.answered == len(asked):
            ids, rows = asked, table.rows[1:].clone()  # `rows` shares memory with messages
        else:
            answered = table.rows[0].nonzero()[:, 0]
            ids, rows = asked[answered], table.rows[1:, answered]
        return counts, ids, {name: row for name, row, ranks in zip(self._names, rows, numbers[many:]) if ranks}


def own_device(device: torch.device | str | None) -> torch.device | None:
    """Return a rank's device: for "cuda", the one with the rank's number on its machine."""
    if device is None:
        return None
    device = torch.device(device)
    unnumbered = is_cuda(device) and device.index is None
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0"))) if unnumbered else device


def _place() -> tuple[int, int]:
    """Return (rank, world size) of this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
