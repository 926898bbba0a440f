"""What the clients of a process have answered in a round, block by block and together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchanges.exchange import indices
from fedtorch.tree import Rows, Tree


class Answers(NamedTuple):
    """What the clients of a block have answered."""

    ids: Rows
    message: Tree  # (K, ...) all that they send
    state: Tree  # (K, ...)
    info: dict[str, Tensor]  # (K,) each

    def without(self, clients: Tensor, device: torch.device) -> Answers:
        """The answers of all but some clients; all that is answered is on `device`."""
        arrived = ~torch.isin(indices(self.ids), clients)
        if bool(arrived.all()):
            return self
        rows = arrived.nonzero()[:, 0]
        return Answers(indices(self.ids)[rows], *tree.take(self[1:], rows.to(device)))


class Gathered(NamedTuple):
    """A round of the clients of one process."""

    partial: Tree  # aggregate, None if nobody answered
    states: list[tuple[Rows, Tree]]  # to commit
    ids: Tensor  # (M,) those that answered, ascending
    info: dict[str, Tensor]  # (M,) each
    up: int  # bytes
    down: int
    refused: dict[int, str]  # clients whose message had NaN or Inf, and in which field
    message: Tree  # of the last block, None if there was none


def joined(infos: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, dict[str, Tensor]]:
    """(ids, info) of several blocks in ascending order of ids; NaN where a block does not tell a value."""
    if not infos:
        return torch.zeros(0, dtype=torch.int64), {}
    names = list(dict.fromkeys(name for _, info in infos for name in info))
    info = {
        name: torch.cat(
            [
                part[name].to("cpu", torch.float64) if name in part else torch.full((len(ids),), torch.nan)
                for ids, part in infos
            ]
        )
        for name in names
    }
    ids, order = torch.cat([ids for ids, _ in infos]).sort()
    return ids, tree.take(info, order)
