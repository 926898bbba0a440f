r"""Edges that lose or delay messages, with a memory per edge that keeps sums consistent.

A sum of changes is right only if all of them arrive. An unreliable edge therefore carries the sender's whole value with
a sequence number, and remembers the last value that it has delivered:

- a lost message is repaired by the sender's next one;
- a message that was overtaken, or is repeated, has too small a sequence number and changes nothing.

Node i's sum is therefore always Σ_j A_ij (last value delivered from j), whichever messages were lost.

Source: Jung, "Federated learning: from theory to practice", Algorithm 8.1, whose k_{i,i'} is the age of node i's value
of i'.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.exchange import Mean, RowsOf, sum_over
from fedtorch.federation.exchanges.graph import graph
from fedtorch.federation.exchanges.messages import before_changes
from fedtorch.federation.exchanges.rows import private_rows
from fedtorch.federation.turn import Turn
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.networks.network import Network
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

_LOST, _DELAY, _SERVER = range(3)  # purposes of a round's key


class Edges(NamedTuple):
    """State of the server: the algorithm's own, and the memory of 2E directed edges over a window of T rounds."""

    algorithm: Tree
    last: Tree  # (2E, ...) last delivered value, at first the initial one, float64 or complex128
    sequence: Tensor  # (2E,) its number, 0 before the first
    values: Tree  # (T, n, ...) messages of the last rounds, float64 or complex128
    numbers: Tensor  # (T, n) sequence numbers, 0 for nodes without a message
    keys: Tensor  # (T,) the rounds' keys
    round: Tensor  # () rounds so far
    sent: Tensor  # (n,) messages that each node has sent


def unreliable_edges(network: Network, *, loss: float = 0.0, delay: int = 0) -> Wrapper:
    """Build the wrapper that loses or delays messages of an algorithm over `graph(network)` on single edges.

    Every message is lost on each directed edge with probability `loss`, independently, and otherwise arrives 0 to
    `delay` rounds later, all equally likely. Rounds without any answer do not count as time.

    Args:
        network: the algorithm's; all its messages must be persistent contributions (`told`), as for `ft.gtv`.
        loss: the probability of a loss, below 1.
        delay: the longest delay in rounds.

    Raises:
        ValueError: an impossible probability or delay. In wrapping: an algorithm without persistent contributions, or
            not over a graph.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1)), (torch.ones(1, 1), -torch.ones(1))])
        >>> network = ft.Network.from_edges([(0, 1)])
        >>> exact = ft.gtv(ft.least_squares(torch.nn.Linear(1, 1, bias=False)), network, alpha=0.5)
        >>> algorithm = exact | ft.unreliable_edges(network, loss=0.3, delay=2)
        >>> final = ft.run(algorithm, ft.InProcess(data), rounds=100)
        >>> final.tensors()["weight"].flatten().round(decimals=4)
        tensor([ 0.5000, -0.5000])
    """
    if not 0 <= loss < 1:
        raise ValueError(f"Expected a probability of loss of at least 0 and below 1, but got {loss}")
    if delay < 0:
        raise ValueError(f"Expected a delay of at least 0 rounds, but got {delay}")
    settings = {"loss": loss, "delay": delay, "drawn": "by names of nodes"}
    return Wrapper(Stage.EDGES, "unreliable_edges", partial(_unreliable, network, loss, delay), settings)


def _unreliable(network: Network, loss: float, delay: int, algorithm: Algorithm) -> Algorithm:
    if algorithm.told is None:
        raise ValueError("Expected an algorithm with `told`, such as ft.gtv, but got one whose messages are all fresh")
    exchange, again = before_changes(algorithm.exchange)
    if exchange.additive:
        raise ValueError("Expected an algorithm over a graph, such as ft.gtv, but got one over a star; it has no edges")
    told = algorithm.told.of
    window, over, report = delay + 1, graph(network), algorithm.report

    def init(parameters: Tree, clients: int) -> tuple[Edges, Tree]:
        server, state = algorithm.init(parameters, clients)
        value = tree.wide(told(tree.expand(state, 1)))
        count, device = 2 * len(network.edges), tree.leaves(value)[0].device
        total = sum_over(over, tree.map(lambda leaf: leaf.expand(clients, *leaf.shape[1:]), value), slice(0, clients))

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        last = tree.map(lambda leaf: leaf.repeat(count, *[1] * (leaf.ndim - 1)), value)
        sent = tree.map(lambda leaf: leaf.new_zeros(window, clients, *leaf.shape[1:]), value)
        memory = (last, numbers(count), sent, numbers(window, clients))
        return Edges(server._replace(total=total), *memory, numbers(window), numbers(), numbers(clients)), state

    def client(inbox: Tree, state: Tree, data: Any, turn: Turn) -> Reply:
        reply = algorithm.client(inbox, state, data, turn)
        whole = told(reply.state)
        first = tree.leaves(whole)[0]
        number = torch.ones(len(first), dtype=torch.int64, device=first.device)  # in place of sequence numbers
        return reply._replace(message=Mean(whole, number))

    def server(state: Edges, aggregate: RowsOf, key: Tensor) -> Edges:
        number = int(state.round)
        state = _send(state, aggregate, key, number)
        arrived, state = _arrive(state, network, loss, delay, number)
        inner = state.algorithm._replace(total=tree.add(state.algorithm.total, arrived))
        return state._replace(algorithm=algorithm.server(inner, None, random.fold_in(key, _SERVER)))

    return dataclasses.replace(
        algorithm,
        init=init,
        outbox=lambda state: algorithm.outbox(state.algorithm),
        client=client,
        server=server,
        exchange=again(
            private_rows()._replace(
                scatter=exchange.scatter,
                traffic=exchange.traffic,
                heard_by=exchange.heard_by,
                network=exchange.network,
            )
        ),
        told=None,
        report=None if report is None else lambda state: report(state.algorithm),
    )


def _send(state: Edges, aggregate: RowsOf, key: Tensor, number: int) -> Edges:
    """Put the messages of round `number` into the window in place of the oldest."""
    ids = aggregate.ids.to(state.sent.device)
    slot = number % len(state.keys)
    sent = state.sent.index_add(0, ids, torch.ones_like(ids))

    def enter(window: Tensor, new: Tensor) -> Tensor:
        window = window.clone()
        window[slot] = 0
        window[slot, ids] = new.to(window.dtype)
        return window

    values = tree.map(enter, state.values, aggregate.message.value)
    keys = state.keys.clone()
    keys[slot] = key
    return state._replace(
        values=values, numbers=enter(state.numbers, sent[ids]), keys=keys, round=state.round + 1, sent=sent
    )


def _arrive(state: Edges, network: Network, loss: float, delay: int, round: int) -> tuple[Tree, Edges]:
    """Return the changes of all nodes' sums, and the edges' new memory, by the messages that arrive in a round."""
    device = state.sent.device
    low, high = network.edges.unbind(1)
    sender, receiver = torch.cat((low, high)), torch.cat((high, low))
    weight = network.weights.to(device).repeat(2)
    change = tree.map(lambda leaf: leaf.new_zeros(len(state.sent), *leaf.shape[1:]), state.last)
    last, sequence = state.last, state.sequence
    names, keys = numbers(network.names), state.keys.cpu()
    edge = torch.stack((names[sender], names[receiver]))
    sender, receiver = sender.to(device), receiver.to(device)
    for age in range(min(len(keys), round + 1) - 1, -1, -1):  # the oldest first
        slot = (round - age) % len(keys)
        key = keys[slot]
        number = state.numbers[slot, sender]
        comes = random.randint(_of_edges(key, _DELAY, edge), delay + 1) == age
        comes &= ~random.bernoulli(_of_edges(key, _LOST, edge), loss)
        taken = (comes.to(device) & (number > sequence)).nonzero()[:, 0]

        def hear(change: Tensor, last: Tensor, values: Tensor, slot: int = slot, taken: Tensor = taken) -> Tensor:
            new = values[slot, sender[taken]] - last[taken]
            return change.index_add(0, receiver[taken], tree.along(weight[taken], new) * new)

        change = tree.map(hear, change, last, state.values)
        last = tree.map(
            lambda old, values, slot=slot, taken=taken: old.index_copy(0, taken, values[slot, sender[taken]]),
            last,
            state.values,
        )
        sequence = sequence.index_copy(0, taken, number[taken])
    return change, state._replace(last=last, sequence=sequence)


def _of_edges(key: Tensor, purpose: int, edge: Tensor) -> Tensor:
    """Return a key for each directed edge, `(2E,)`, of the numbers of its sender's and its receiver's name."""
    sender, receiver = edge
    return random.fold_in(random.fold_in(random.fold_in(key, purpose), sender), receiver)
