"""The clients of one process whose rows stay on disk: a round reads those of its clients, and prepares them."""

from __future__ import annotations

from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.clients import SMALL_BLOCK, LocalClients, block_bytes
from fedtorch.tree import Rows, Tree


class StoredClients(LocalClients):
    """Clients in the blocks that they have in memory, too, so that their rounds are the same to the bit.

    Args:
        algorithm: what they compute.
        state: one client's initial state.
        data: rows on disk.
        chunk: at most so many at once.
    """

    def __init__(self, algorithm: Algorithm, state: Tree, data: FederatedData, chunk: int | None) -> None:
        self._data = data
        groups = data.groups(small=SMALL_BLOCK)
        nobody = tree.take(data.stack(groups[0][:1]), slice(0, 0))
        super().__init__(algorithm, state, data.names, [(ids, nobody) for ids in groups], len(data), chunk)

    def hold(self, blocks: list[tuple[Tensor, ClientData]]) -> None:
        """Take the clients' ids; see `LocalClients.hold`."""
        super().hold(blocks)
        counts = self._data.counts
        self._widths = [int(counts[ids].max()) for ids, _ in blocks]
        if self._chunk is None:
            row = tree.nbytes(self._data.rows) / max(1, int(counts.sum()))
            fits = [max(1, int(block_bytes(self.device) / (row * max(1, width)))) for width in self._widths]
            self._sizes = [min(size, most) for size, most in zip(self._sizes, fits)]

    def _taken(self, number: int, rows: Rows) -> Tree:
        ids = self._blocks[number][0][rows]
        return self._prepare(ids, self._data.stack(ids, self._widths[number]))
