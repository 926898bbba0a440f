"""The clients of one process whose rows stay on disk: a round reads and prepares its own clients' rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData, FederatedLoaders
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.clients import SMALL_BLOCK, Block, LocalClients, block_bytes
from fedtorch.tree import Rows, Tree

_LOADERS, _PADDED = 8, 64  # clients at once that have loaders, which may be open together; whose batches are padded


class StoredClients(LocalClients):
    """Clients in the blocks that they have in memory, too, so that their rounds are the same to the bit.

    Args:
        algorithm: the clients' algorithm.
        state: one client's initial state.
        data: rows on disk, or clients' loaders.
        chunk: most clients at once.
        mine: the clients of this process; default: all.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        state: Tree,
        data: FederatedData | FederatedLoaders,
        chunk: int | None,
        mine: Tensor | None = None,
    ) -> None:
        self._data = data
        groups = (data if mine is None else data.select(mine)).groups(small=SMALL_BLOCK)
        groups = groups if mine is None else [mine[ids] for ids in groups]
        some = groups[0][:1] if len(groups[0]) else torch.tensor([0])
        nobody = tree.take(data.stack(some), slice(0, 0))
        super().__init__(algorithm, state, data.names, [(ids, nobody) for ids in groups], len(data), chunk)

    def hold(self, blocks: list[tuple[Tensor, ClientData]]) -> None:
        """Set the clients' ids; see `LocalClients.hold`."""
        super().hold(blocks)
        counts = self._data.counts
        self._widths = [int(counts[ids].max()) if len(ids) else 1 for ids, _ in blocks]
        if self._chunk is None:
            self._sizes = [min(size, self._fit(width)) for size, width in zip(self._sizes, self._widths)]

    def _fit(self, width: int) -> int:
        """Return how many clients with this number of rows run at once."""
        data = self._data
        if isinstance(data, FederatedLoaders):
            return _LOADERS if data.pad is None else _PADDED
        row = tree.nbytes(data.rows) / max(1, int(data.counts.sum()))
        return max(1, int(block_bytes(self.device) / (row * max(1, width))))

    def empty_block(self) -> Block:
        """Return a block of no clients, `K = 0`."""
        ids, nobody = self._blocks[0]
        return ids[:0], nobody

    def _taken(self, number: int, rows: Rows) -> Tree:
        ids = self._blocks[number][0][rows]
        return self._prepare(ids, self._data.stack(ids, self._widths[number]))
