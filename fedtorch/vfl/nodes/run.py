"""A vertical fit among nodes in this process, with the methods of `ft.Run`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.checkpoint import below
from fedtorch.protocol.halves import Half
from fedtorch.protocol.overheard import disclosure
from fedtorch.vfl.fit.part import predicted
from fedtorch.vfl.fit.run import Iterated, VerticalRun
from fedtorch.vfl.nodes.clock import Clock, Delays
from fedtorch.vfl.nodes.iteration import exchange, party_half, server_half
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode
from fedtorch.vfl.rows.data import VerticalData

if TYPE_CHECKING:
    import pandas as pd


_TICK = 1.0  # seconds; within one process no tick waits


def _everybody(number: int) -> Iteration:
    """Return an iteration in which all parties take part and every node draws its own noise."""
    return Iteration(step=number)


class NodesRun(VerticalRun):
    """A fit among nodes in this process, which counts the messages that organisations would exchange.

    Args:
        server: the server.
        parties: all parties.
        iteration: from its number to the iteration as all nodes know it; by default every node draws its own noise.
        local_steps: steps that a party takes per exchange.
        delays: (party, from 0 on, number of its message) -> ticks of the server's clock by which the message is late.
            The server does not wait, but uses the last values, see `fedtorch.vfl.nodes.clock`. Every node draws its
            own noise; an iteration is a tick, and its active parties are those whose values arrived.

    Raises:
        ValueError: delays together with `iteration`, a power model, or parts that draw no noise of their own.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
        >>> bottoms = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
        >>> network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli())
        >>> fit = ft.vfl.NodesRun(*network.nodes(data))
        >>> [round.bytes_up == round.bytes_down for round in fit.rounds(3)]  # as many gradients as values
        [True, True, True]
        >>> fit.history["train_loss"].is_monotonic_decreasing
        True
        >>> late = ft.vfl.NodesRun(*network.nodes(data), delays=lambda party, number: 3 if party == 1 else 0)
        >>> [round.ids.tolist() for round in late.rounds(6)]  # no tick before the first value of every party
        [[], [], [], [0, 1], [0], [0]]
    """

    def __init__(
        self,
        server: ServerNode,
        parties: Sequence[PartyNode],
        *,
        iteration: Callable[[int], Iteration] = _everybody,
        local_steps: int = 1,
        delays: Delays | None = None,
    ) -> None:
        model, guide = server.model, server.guide
        settings = {
            "algorithm": "vertical nodes",
            "likelihood": model.likelihood,
            "power": model.power,
            "guide": guide,
            "optimizers": [type(node.optimizer).__name__ for node in (server, *parties)],
            "local_steps": local_steps,
            "iteration": iteration,
        }
        if delays is not None:
            settings["delays"] = delays
        super().__init__([party.part.name for party in parties], settings)
        self.server, self.parties, self.likelihood = server, list(parties), model.likelihood
        self.iteration, self.local_steps = iteration, local_steps
        if delays is not None and iteration is not _everybody:
            raise ValueError("Expected delays= or iteration=, but got both; by the clock nodes draw their own noise")
        self.clock = None if delays is None else Clock(server, parties, delays, local_steps)

    def _iterate(self, number: int) -> Iterated:
        if self.clock is not None:
            arrived, moved = self.clock.tick(number)
            return Iterated(self._report(), arrived, *moved)
        known = self.iteration(number)
        traffic = exchange(self.server, self.parties, known, local_steps=self.local_steps)
        everybody = torch.arange(len(self.parties))
        active = everybody if known.active is None else everybody[torch.as_tensor(known.active)]
        return Iterated(self._report(), active, *traffic)

    def disclosure(self, brief: bool = False) -> pd.DataFrame:
        """Return the fields that leave each node in an iteration, as `ft.Run.disclosure` does for a round.

        The next iteration is run for this and undone. Messages between a `FederatedParty` and its sites are not
        included.

        Args:
            brief: whether fields that are alike have one row, which names the first of them in `fields`.

        Example:
            >>> import torch, fedtorch as ft
            >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
            >>> bottoms = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
            >>> network = ft.vfl.SplitNetwork(bottoms, ft.vfl.likelihoods.bernoulli())
            >>> fit = ft.vfl.NodesRun(*network.nodes(data))
            >>> fit.disclosure()[["field", "shape", "of", "exactness", "reader"]]
                  field         shape          of exactness      reader
            0     value  (1, 1, 1, 3)     a party     exact  the server
            1  gradient  (1, 1, 1, 3)  the server     exact     a party
        """
        before, terms = self._state(), self.server.terms
        names = {0: "the server", **{party.index: "a party" for party in self.parties}}
        try:
            return disclosure(self._halves(), names, brief)
        finally:
            self._load(before)
            self.server.terms = terms

    def _halves(self) -> dict[int, Half]:
        """Return the halves of the next iteration; by the clock, those of a tick in which no party is late."""
        clocked = self.clock is not None
        mine = [Iteration(step=self.number) if clocked else self.iteration(self.number)]
        halves = {0: server_half(self.server, mine, tick=_TICK if clocked else None)}
        for party in self.parties:
            iterations = (Iteration(step=step) for step in itertools.count(self.number)) if clocked else mine
            halves[party.index] = party_half(
                party, iterations, self.local_steps, clocked=clocked, accept_disclosure=True
            )
        return halves

    def _report(self) -> dict[str, Tensor]:
        terms = self.server.terms
        return {} if terms is None else {"train_loss": -terms.mean()}

    def predict(
        self,
        features: Sequence[Tensor] | VerticalData,
        *,
        draws: int = 100,
        seed: int = 0,
        noise: bool = True,
    ) -> Tensor:
        """Return the predictive mean of new rows by all parties together, averaged over draws.

        Raises:
            ValueError: another number of parties, or parties with other numbers of rows.
        """
        features = features.features if isinstance(features, VerticalData) else features
        holders = [party.part for party in self.parties]
        key = random.key(seed).to(self.server.part.rho.device)
        total, shared = predicted(self.server.part, holders, features, draws, key, noise)
        return self.likelihood.mean(total, shared).mean(1)

    def _state(self) -> dict[str, Tensor]:
        nodes = enumerate((self.server, *self.parties))
        flat = {f"{j}.{name}": leaf for j, node in nodes for name, leaf in node.state_dict().items()}
        return flat | {f"clock.{name}": leaf for name, leaf in (self.clock.state_dict() if self.clock else {}).items()}

    def _load(self, flat: Mapping[str, Tensor]) -> None:
        for j, node in enumerate((self.server, *self.parties)):
            node.load_state_dict(below(f"{j}.", flat))
        if self.clock is not None:
            self.clock.load_state_dict(below("clock.", flat))
