"""The round loop: sample, outbox, scatter, client, gather, server, commit, yield.

`run` is a generator, so research code can step through it:

>>> import torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0])), (torch.eye(2), torch.tensor([3.0, 4.0]))])
>>> local = ft.least_squares(torch.nn.Linear(2, 1, bias=False))
>>> for round in ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2):
...     print(round.number, round.server["weight"].round(decimals=3))
1 tensor([[2., 3.]])
2 tensor([[2., 3.]])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.population import Clients, Population
from fedtorch.tree import Tree

__all__ = ["Cohort", "Faults", "Progress", "Round", "begin", "check_cohort", "run", "uniform_cohort"]

Cohort = Callable[[Tensor], Tensor | None]  # round key -> ascending ids of the clients asked, None for all
_PURPOSES = 4  # of a round's keys
_COHORT, _CLIENT, _SERVER, _FAULTS = range(_PURPOSES)


class Faults(NamedTuple):
    """Which messages are lost. Both take (key, ids `(M,)`) and return `(M,)` bool."""

    before: Callable[[Tensor, Tensor], Tensor] | None = None  # the server's, before the client's work
    after: Callable[[Tensor, Tensor], Tensor] | None = None  # the client's, after its work: its state is rolled back


class Progress(NamedTuple):
    """Where a run stands between rounds."""

    number: int  # rounds done
    server: Tree
    clients: Clients


class Round(NamedTuple):
    """One communication round, done."""

    number: int  # from 1
    server: Tree  # the server's state after it
    clients: Clients
    ids: Tensor  # (M,) the clients that answered
    info: dict[str, Tensor]  # (M,) each
    bytes_up: int
    bytes_down: int


def begin(algorithm: Algorithm, population: Population, parameters: Tree = None) -> Progress:
    """The state before the first round.

    Args:
        algorithm: what is computed.
        population: who computes.
        parameters: where training starts; default: the parameters of the algorithm's local solver.
    """
    if parameters is None:
        if algorithm.local is None:
            raise ValueError("Expected parameters= to start from, because this algorithm has no local solver's module")
        parameters = algorithm.local.parameters
    server, state = algorithm.init(tree.map(lambda leaf: leaf.detach().clone(), parameters), len(population.data))
    clients = population.bind(algorithm, state)
    first = tree.leaves(population.data.rows)[0]
    return Progress(0, tree.to(server, first.device), clients)


def run(
    algorithm: Algorithm,
    population: Population,
    parameters: Tree = None,
    *,
    rounds: int | None = None,
    cohort: int | Cohort | None = None,
    seed: int = 0,
    faults: Faults | None = None,
    start: Progress | None = None,
) -> Iterator[Round]:
    """Runs communication rounds and yields after each.

    Args:
        algorithm: what clients and server compute.
        population: who computes, and where.
        parameters: where training starts; default: the parameters of the algorithm's local solver.
        rounds: stop after so many rounds in all; None goes on for ever.
        cohort: how many clients are asked each round, drawn uniformly without replacement; or a function of the
            round's key; None asks everybody.
        seed: of all randomness.
        faults: messages that are lost.
        start: where to go on from; a new run if None.
    """
    draw = _cohort(cohort, len(population.data))
    number, server, clients = start if start is not None else begin(algorithm, population, parameters)
    root = random.key(seed)
    while rounds is None or number < rounds:
        keys = random.fold_in(random.fold_in(root, number), torch.arange(_PURPOSES))
        asked, lost = _lose(faults, keys[_FAULTS], draw(keys[_COHORT]), len(population.data))
        pending = clients.step(algorithm.outbox(server), asked, keys[_CLIENT], lost)
        if pending.aggregate is not None:
            server = algorithm.server(server, pending.aggregate, keys[_SERVER])
            pending.commit()
        number += 1
        yield Round(number, server, clients, pending.ids, pending.info, pending.bytes_up, pending.bytes_down)


def uniform_cohort(size: int, clients: int) -> Cohort:
    """`size` of `clients` clients, uniformly without replacement, the same on every rank.

    Raises:
        ValueError: fewer than one, or more than there are.
    """
    if not 1 <= size <= clients:
        raise ValueError(f"Expected a cohort between 1 and the population's {clients} clients, but got {size}")
    return lambda key: random.choice(key, clients, size)


def check_cohort(cohort: int | Cohort | None, clients: int) -> None:
    """Raises ValueError if `cohort` asks for more clients than there are."""
    _cohort(cohort, clients)


def _cohort(cohort: int | Cohort | None, clients: int) -> Cohort:
    if cohort is None:
        return lambda key: None
    if isinstance(cohort, int):
        return uniform_cohort(cohort, clients)
    return cohort


def _lose(
    faults: Faults | None, key: Tensor, asked: Tensor | None, clients: int
) -> tuple[Tensor | None, Tensor | None]:
    """(the clients that hear the server, those among them whose message is lost)."""
    if faults is None:
        return asked, None
    ids = torch.arange(clients) if asked is None else asked
    if faults.before is not None:
        ids = ids[~faults.before(random.fold_in(key, 0), ids)]
    return ids, ids[faults.after(random.fold_in(key, 1), ids)] if faults.after is not None else None
