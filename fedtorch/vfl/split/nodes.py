"""Split networks as messages: activations go up, gradients come down, and the numbers are those of one graph.

A `BottomNode` holds one party's networks and features, a `TopNode` the server's part and the response. Per iteration a
party sends z_j, `B · C_j · n` numbers, and hears as many: the gradient of the server's term per row. What a party needs
beside is known to all: the key, the step, and how many rows count (their weights).

With `local_steps` a party moves several times per exchange along the gradient that it was told, with the iteration's
draws, to first order: what the hierarchical Bayes variant permits. (Plain networks can do it, too, but nothing then
holds z_j near what was sent.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from fedtorch import wire
from fedtorch.vfl.messages import Gradient, Traffic, Value
from fedtorch.vfl.model import VerticalData, check_response
from fedtorch.vfl.split.network import SplitNetwork, adam
from fedtorch.vfl.split.party import PartyNetwork
from fedtorch.vfl.split.rows import batch_of, check_rows, minibatch, of_party, present, rows_of
from fedtorch.vfl.split.server import ServerNetwork

__all__ = ["BottomNode", "TopNode", "exchange", "nodes"]

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class BottomNode:
    """One party: its networks, its features, its optimiser.

    Args:
        network: its part of a split network; the node trains it in place.
        index: j, from 0 on.
        data: what the party may know: its own features as the only ones, the rows' weights and which it lacks, and the
            response where its encoder sees it (zeros otherwise).
        optimizer: from parameters to an optimiser.

    Raises:
        ValueError: features of another number of rows.
    """

    def __init__(self, network: PartyNetwork, index: int, data: VerticalData, optimizer: Optimizers = adam) -> None:
        check_rows(data, [network.bottom.row_dims], [network.name])
        self.network, self.index, self.data = network, index, data
        self.optimizer = optimizer(network.parameters())

    def propose(self, step: int, rows: Tensor | None = None) -> Value:
        """z_j of the iteration's rows."""
        self.step = step
        self.now = self.data if rows is None else minibatch(self.data, rows, [self.network.bottom.row_dims])
        self._forward()
        return Value(self.sent.detach())

    def _forward(self) -> None:
        batch = batch_of(self.now, self.network.rho.dtype)
        value, self.terms = self.network(self.now.features[0], self.step, of_party(batch, self.now, self.index))
        self.sent, self.rows = present(value, self.now, self.index), rows_of(self.now).to(value)

    def update(self, gradient: Gradient, local_steps: int = 1) -> None:
        """Moves down the loss, once or several times with this iteration's draws."""
        for step in range(local_steps):
            if step:
                self._forward()
            own = -self.terms.squeeze(1) / self.rows
            self.optimizer.zero_grad()
            ((self.sent * gradient.gradient).sum() + own.sum()).backward()
            self.optimizer.step()


class TopNode:
    """The server: the response, the cut layer and what is above it.

    Args:
        network: the server's part of a split network; the node trains it in place.
        data: response, offset and weights; its features are not looked at.
        optimizer: from parameters to an optimiser.

    Raises:
        ValueError: a response that the likelihood does not have.
    """

    def __init__(self, network: ServerNetwork, data: VerticalData, optimizer: Optimizers = adam) -> None:
        check_response(network.likelihood, data)
        self.network, self.data = network, data._replace(features=())
        self.optimizer = optimizer(network.parameters())

    def expected(self, rows: Tensor | None = None) -> list[Value]:
        """What the parties' values look like."""
        size, count = len(self.network.rho), self.data.response.shape[-1] if rows is None else len(rows)
        return [Value(self.network.rho.new_zeros(size, 1, width, count)) for width in self.network.widths]

    def evaluate(self, values: Sequence[Value], step: int, rows: Tensor | None = None) -> list[Gradient]:
        """Moves the server's parameters, and says every party the gradient of what it sent."""
        now = self.data if rows is None else minibatch(self.data, rows, [])
        batch = batch_of(now, self.network.rho.dtype)
        sent = [value.value.requires_grad_() for value in values]
        loss = -self.network(sent, step, batch).squeeze(1) / rows_of(now).to(batch.y)
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()
        return [Gradient(z.grad) for z in sent]  # type: ignore[arg-type]


def nodes(network: SplitNetwork, data: VerticalData, optimizer: Optimizers = adam) -> tuple[TopNode, list[BottomNode]]:
    """The nodes of a network in one process, each with what it may know; they train `network` in place."""
    network.train()
    network.check(data)
    bayes = network.parties[0].bayes
    sees = bayes is not None and bayes.auxiliary is not None and bayes.auxiliary.sees_response
    told = data.response if sees else torch.zeros_like(data.response)
    known = [VerticalData((x,), told, None, data.weight, data.present) for x in data.features]
    bottoms = [BottomNode(p, j, own, optimizer) for j, (p, own) in enumerate(zip(network.parties, known))]
    return TopNode(network.server, data, optimizer), bottoms


def exchange(
    server: TopNode,
    parties: Sequence[BottomNode],
    step: int,
    *,
    rows: Tensor | None = None,
    local_steps: int = 1,
) -> Traffic:
    """One iteration among nodes in one process, with the bytes that it would send.

    Args:
        server: the server.
        parties: all parties.
        step: of the iteration, from 0 on, the same at all nodes.
        rows: of a minibatch, `(m,)`; all rows by default.
        local_steps: steps that a party takes per exchange.
    """
    values = [party.propose(step, rows) for party in parties]
    gradients = server.evaluate(values, step, rows)
    for party, gradient in zip(parties, gradients):
        party.update(gradient, local_steps)
    return Traffic(sum(wire.size(value) for value in values), sum(wire.size(gradient) for gradient in gradients))
