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

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchange import sum_over
from fedtorch.federation.faults import Faults, fates
from fedtorch.federation.population import Clients, Population
from fedtorch.federation.sampling import Cohort, check_ids, cohort_function
from fedtorch.tree import Tree

__all__ = ["Progress", "Round", "begin", "run"]

TOTAL_ANEW = 100  # rounds, after which totals are made anew from what the clients tell, without the rounding since
_KEYS_AHEAD = 64  # rounds whose keys are made in one call, which costs what the keys of one round do


class _Keys(NamedTuple):
    """A round's keys, one for each purpose."""

    cohort: Tensor
    client: Tensor
    server: Tensor
    faults: Tensor


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
    asked: Tensor  # ids of the clients that were asked: those that answered, and the three below
    lost_before: Tensor  # ids of those that did not hear the server
    late: Tensor  # ids of those that answered after the deadline
    lost_after: Tensor  # ids of those whose message was lost
    repeated: Tensor  # ids of those whose message came more than once, and was taken once


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
    if algorithm.told is not None:
        server = server._replace(total=_first_total(algorithm, state, len(population.data)))
    first = tree.leaves(population.data.rows)[0]
    return Progress(0, tree.to(server, first.device), clients)


def _first_total(algorithm: Algorithm, state: Tree, clients: int) -> Tree:
    """The total while all clients are in their initial state."""
    assert algorithm.told is not None
    initial = algorithm.told(tree.expand(state, 1))
    everybody = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape[1:]), initial)
    return sum_over(algorithm.exchange, everybody, slice(0, clients))


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
            round's key, such as `ft.poisson_cohort`; None asks everybody.
        seed: of all randomness.
        faults: what goes wrong; see `ft.dropouts`, `ft.stragglers`, `ft.lost_messages`.
        start: where to go on from; a new run if None.
    """
    everybody = torch.arange(len(population.data))
    draw = cohort_function(cohort, len(everybody))
    number, server, clients = start if start is not None else begin(algorithm, population, parameters)
    for keys in _keys(seed, number):
        if rounds is not None and number >= rounds:
            return
        asked = draw(keys.cohort)
        if asked is not None:
            check_ids(asked, len(everybody))
        hear, silent, before, late, after = fates(faults, keys.faults, asked, len(everybody))
        pending = clients.step(algorithm.outbox(server), hear, keys.client, silent)
        if pending.aggregate is not None:
            aggregate = pending.aggregate
            if algorithm.told is not None:
                server = server._replace(total=tree.add(server.total, aggregate.told.value))
                aggregate = aggregate.fresh
            server = algorithm.server(server, aggregate, keys.server)
            pending.commit()
        number += 1
        if algorithm.told is not None and number % TOTAL_ANEW == 0:
            server = server._replace(total=clients.total())
        yield Round(
            number,
            server,
            clients,
            pending.ids,
            pending.info,
            pending.bytes_up,
            pending.bytes_down,
            everybody if asked is None else asked,
            before,
            late,
            after,
            pending.ids[:0] if pending.repeated is None else pending.repeated,
        )


def _keys(seed: int, number: int) -> Iterator[_Keys]:
    """The keys of all rounds after the first `number`; a round's depend on the seed and its number only."""
    root, purposes = random.key(seed), torch.arange(len(_Keys._fields))
    for first in itertools.count(number, _KEYS_AHEAD):
        rounds = random.fold_in(root, torch.arange(first, first + _KEYS_AHEAD))
        for keys in random.fold_in(rounds[:, None], purposes).unbind():
            yield _Keys(*keys.unbind())
