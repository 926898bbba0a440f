"""Read answers of sites into what was expected of them, or refuse them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.algorithms.fedavg import rows_weight
from fedtorch.federation.exchanges.exchange import Sum, has_negative_weights, is_finite, not_finite, weights
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.plan import Plan
from fedtorch.tree import Tree


class Answer(NamedTuple):
    """A site's part of a round."""

    ids: Tensor  # (M,) of its clients that answered
    info: dict[str, Tensor]  # (M,) each
    refused: dict[int, str]
    partial: Tree  # None if none of them answered; bytes by name where the server may not read it


class Reader:
    """Reads what sites answer in a run; all methods raise `PayloadError` for what is something else.

    Args:
        plan: of the population.
        algorithm: what clients compute.
        initial: one client's initial state.

    Attributes:
        message: `(0, ...)` what clients answer, before the first round None.
    """

    def __init__(self, plan: Plan, algorithm: Algorithm, initial: Tree) -> None:
        self._plan, self._algorithm, self._initial = plan, algorithm, initial
        self._hidden = plan.carry.masks is not None or plan.carry.network is not None
        self.message: Tree = None
        self._sums: Tree = None  # what becomes of it in a partial aggregate

    def round(self, site: str, frame: Frame) -> Answer:
        """An answer to a round."""
        index = self._plan.sites.names.index(site)
        count, names = frame.integer("clients", 0, self._plan.counts[index]), frame.texts("info")
        refused = {
            int(k): str(field)[:200] for k, field in frame.names("refused").items() if len(k) < 20 and k.isdecimal()
        }
        ids = torch.empty(count, dtype=torch.int64)
        like = {
            "ids": ids,
            "info": {name: torch.empty(count, dtype=torch.float64) for name in names},
            "partial": frame.room() if self._hidden else self._partial(count) if count else None,
        }
        came = frame.tree(like, finite=False)
        self._check_ids(frame, index, [*came["ids"].tolist(), *refused])
        if self._hidden:
            return Answer(came["ids"], came["info"], refused, frames.plain(came["partial"]) if count else None)
        if not torch.equal(getattr(came["partial"], "ids", came["ids"]), came["ids"]):
            raise frame.refused("a message of each client that answered", "messages of others")
        if count and not is_finite(came["partial"]):
            field = next(iter(not_finite(tree.map(lambda leaf: leaf[None], came["partial"])).values()))
            raise frame.refused(f"finite numbers in {field!r}", "NaN or Inf")
        self._check_weights(frame, site, came["ids"], came["partial"])
        return Answer(came["ids"], came["info"], refused, came["partial"])

    def _check_weights(self, frame: Frame, site: str, ids: Tensor, partial: Tree) -> None:
        """Refuse messages that count for less than nothing, or for more rows than the site says its clients have."""
        if has_negative_weights(partial):
            raise frame.refused("weights of at least 0", "negative ones")
        if self._algorithm.settings.get("weight") is not rows_weight:
            return
        first = self._plan.firsts[self._plan.sites.names.index(site)]
        rows = sum(self._plan.sites.bring[site].rows[client - first] for client in ids.tolist())
        for weight in weights(partial):
            if float(weight.sum()) > rows:
                raise frame.refused(f"the weight of {rows} rows, which the site says it has", float(weight.sum()))

    def _partial(self, count: int) -> Tree:
        """A partial aggregate of so many clients, as it looks; sums look alike of any number."""
        exchange = self._algorithm.exchange
        if exchange.additive and self._sums is not None:
            return self._sums
        rows = 0 if exchange.additive else count
        messages = tree.map(lambda leaf: leaf.new_zeros(rows, *leaf.shape[1:]), self.message)
        self._sums = exchange.gather(messages, torch.arange(rows))
        return self._sums

    def total(self, site: str, frame: Frame) -> Tree:
        """A partial aggregate of what clients tell for good; bytes where the server may not read it."""
        exchange, index = self._algorithm.exchange, self._plan.sites.names.index(site)
        if self._hidden:
            return frame.blob("said")
        return frame.tree({"told": self.told_by(0 if exchange.additive else self._plan.counts[index])})["told"]

    def told_by(self, clients: int) -> Tree:
        """The partial aggregate of what so many clients tell in their initial state."""
        return self._algorithm.exchange.gather(self.told_messages(clients), torch.arange(clients))

    def told_messages(self, clients: int) -> Sum:
        """Return what so many clients tell in their initial state."""
        assert self._algorithm.told is not None
        told = self._algorithm.told.of(tree.expand(self._initial, 1))
        return Sum(tree.map(lambda leaf: leaf.expand(clients, *leaf.shape[1:]), told))

    def sums(self, site: str, frame: Frame, like: Tree) -> Tree:
        """Return sums of metrics of each client, `like` those of none."""
        count = self._plan.counts[self._plan.sites.names.index(site)]
        sums = tree.map(lambda leaf: leaf.new_zeros(count, *leaf.shape[1:]), like)
        return frame.tree({"sums": sums}, finite=False)["sums"]

    def _check_ids(self, frame: Frame, index: int, ids: list[int]) -> None:
        first, count = self._plan.firsts[index], self._plan.counts[index]
        if any(not first <= client < first + count for client in ids) or len(set(ids)) != len(ids):
            raise frame.refused(f"different clients from {first} to {first + count - 1}", ids)
