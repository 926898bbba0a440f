"""Clients sharded over the ranks of a process group, as `torchrun` starts them.

Every rank holds the server's state and a shard of the clients (client k is on rank k mod world size), and takes part in
every collective, also when no client of the cohort is on it. Ranks meet by `all_reduce` where partial aggregates merge
by addition, and otherwise by gathering the rows of the partial aggregates. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, Turn
from fedtorch.federation.clients import LocalClients, Pending
from fedtorch.federation.population import SMALL_BLOCK, placed
from fedtorch.tree import Tree

_TIMEOUT = timedelta(minutes=10)


class Distributed:
    """A population over ranks; give it the same data on every rank.

    Args:
        data: the rows of all clients; a rank keeps blocks of its own only.
        chunk: at most so many clients at once on a rank. Default: as many as fit 512 MiB.
        device: where this rank's blocks live; default: where the data are. Collectives use nccl on a GPU, gloo else.

    Under a Lightning `Trainer` use `strategy=ft.ClientSharding()`; outside one, the process group is started at the
    first round if it is not there. Whatever needs other ranks' clients (`evaluate`, `client_module`) is called on every
    rank.
    """

    def __init__(self, data: FederatedData, chunk: int | None = None, device: torch.device | str | None = None) -> None:
        self.data, self.names, self.device = placed(data, chunk, device)
        self.rank, self.world_size = _place()
        self.chunk, self.leads = chunk, self.rank == 0

    def bind(self, algorithm: Algorithm, state: Tree) -> DistributedClients:
        """This rank's clients for one run of `algorithm`."""
        own = torch.arange(self.rank, len(self.data), self.world_size)
        if len(own):
            blocks = [(own[ids], block) for ids, block in self.data.select(own).buckets(small=SMALL_BLOCK)]
        else:
            first = self.data.stack(torch.tensor([0]))
            blocks = [(own, tree.take(first, slice(0, 0)))]
        local = LocalClients(algorithm, state, self.data.names, blocks, len(self.data), self.chunk)
        return DistributedClients(local, own, self.rank, self.world_size)

    def __repr__(self) -> str:
        return f"Distributed({self.data!r}, rank {self.rank} of {self.world_size})"


class DistributedClients:
    """All ranks' clients, as this rank sees them.

    Args:
        local: the clients of this rank.
        own: their ids.
        rank: which of the ranks this is.
        world_size: how many ranks there are.
    """

    def __init__(self, local: LocalClients, own: Tensor, rank: int, world_size: int) -> None:
        self.local, self.rank, self.world_size = local, rank, world_size
        self.mine = torch.zeros(local.clients, dtype=torch.bool)
        self.mine[own] = True

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Runs this rank's part of the cohort and meets the others; see `Clients.step`."""
        exchange = self.local.algorithm.exchange
        found = self.local.gather(outbox, cohort, turn, lost)
        partial = found.partial
        if partial is None:
            block = self.local.empty_block()
            partial = exchange.gather(self.local.reply(block, outbox, turn).message, block[0])
        ids, info = self._join_infos(found.ids, found.info)
        counts = torch.tensor([found.up, found.down, len(found.refused)], dtype=torch.int64)
        up, down, refusals = self._reduce(counts).tolist()
        partial = self._add(partial) if exchange.additive else self._gather(partial)
        aggregate = exchange.finish(partial) if len(ids) else None
        refused = self._join_refused(found.refused) if refusals else {}
        return Pending(aggregate, ids, info, up, down, lambda: self.local.commit(found.states), refused=refused)

    def total(self) -> Tree:
        """What all ranks' clients tell for good; see `Clients.total`."""
        exchange, partial = self.local.algorithm.exchange, self.local.told_here()
        return exchange.finish(self._add(partial) if exchange.additive else self._gather(partial)).value

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """Evaluates this rank's clients and gathers everybody's results; see `Clients.evaluate`."""
        if len(data) != self.local.clients:
            raise ValueError(
                f"Expected data of the population's {self.local.clients} clients, but got {len(data)}; split the data "
                "of the same clients"
            )
        ids, parts = self.local.evaluate_parts(outbox, data, function, self.mine)
        everybody, results = self._gather((ids.to(self.local.device), tree.concatenate(parts)))
        return tree.take(results, everybody.argsort())

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """The tensors that clients predict with, from the ranks that have them; see `Clients.tensors`."""
        mine = ids[self.mine[ids]]
        held, rows = self._gather((mine.to(self.local.device), self.local.tensors(outbox, mine)))
        return tree.take(rows, held.argsort()[ids.argsort().argsort().to(held.device)])

    def state_dict(self) -> dict[str, Tensor]:
        """The states of all ranks' clients that have committed."""
        own = self.local.state_dict()
        every = dict(zip(own, self._gather(tuple(own.values()))))
        order = every["ids"].argsort()
        return {name: leaf[order] for name, leaf in every.items()}

    def load_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Replaces the states of this rank's clients; those of other ranks are skipped."""
        self.local.load_state_dict(flat)

    def meet(self) -> None:
        """Waits for the other ranks."""
        self._reduce(torch.zeros(1))

    def _reduce(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        _start(self.local.device)
        moved = tensor.to(self.local.device, copy=True)
        dist.all_reduce(moved)
        return moved.to(tensor.device)

    def _add(self, partial: Tree) -> Tree:
        """The sum of all ranks' partials, in one collective."""
        leaves = tree.leaves(partial)
        if self.world_size == 1 or not leaves:
            return partial
        total = self._reduce(torch.cat([leaf.flatten().to(torch.float64) for leaf in leaves]))
        parts = total.split([leaf.numel() for leaf in leaves])
        return tree.refill(partial, [p.reshape(leaf.shape).to(leaf.dtype) for p, leaf in zip(parts, leaves)])

    def _gather(self, rows: Tree) -> Tree:
        """All ranks' rows `(M, ...)`, in the order of the ranks, in one collective on their bytes."""
        leaves = tree.leaves(rows)
        if self.world_size == 1 or not leaves:
            return rows
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(leaves[0])
        counts = self._reduce(counts)
        found = [_as_bytes(leaf).to(self.local.device) for leaf in leaves]
        own = torch.cat(found, 1)
        padded = own.new_zeros(int(counts.max()), own.shape[1])
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded)
        every = torch.cat([part[:count] for part, count in zip(gathered, counts.tolist())])
        columns = every.split([part.shape[1] for part in found], 1)
        return tree.refill(rows, [_from_bytes(part, leaf) for part, leaf in zip(columns, leaves)])

    def _texts(self, mine: Any) -> list[Any]:
        """What all ranks have to say, as JSON."""
        line = torch.tensor(list(json.dumps(mine).encode() + b"\n"), dtype=torch.uint8)
        return [json.loads(text) for text in bytes(self._gather(line).tolist()).splitlines()]

    def _join_refused(self, refused: dict[int, str]) -> dict[int, str]:
        return {client: field for part in self._texts(list(refused.items())) for client, field in part}

    def _join_infos(self, ids: Tensor, info: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Everybody's diagnostics; ranks without clients do not know the names and learn them."""
        if self.world_size == 1:
            return ids, info
        union = sorted({name for names in self._texts(sorted(info)) for name in names})
        missing = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        rows = self._gather((ids, {name: info.get(name, missing) for name in union}))
        return tree.take(rows, rows[0].argsort())


def _as_bytes(leaf: Tensor) -> Tensor:
    """Rows `(M, ...)` as bytes `(M, bytes of a row)`."""
    flat = leaf.detach().reshape(len(leaf), math.prod(leaf.shape[1:])).contiguous()
    return flat.view(torch.uint8)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_as_bytes`: rows in the shape, dtype and place of those of `like`."""
    values = rows.clone(memory_format=torch.contiguous_format).flatten().view(like.dtype)
    return values.reshape(len(rows), *like.shape[1:]).to(like.device)


def _place() -> tuple[int, int]:
    """(rank, world size) of this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _start(device: torch.device) -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
