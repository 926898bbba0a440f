"""The round loop: cohorts, lost messages, increments that telescope, resumption to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, copy_of, distance, linear, linear_clients, same_bits, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data import ClientData
from fedtorch.federation.exchanges.graph import graph
from fedtorch.federation.exchanges.robust.exchange import star as robust_star
from fedtorch.federation.exchanges.star import star
from fedtorch.federation.runs.cohorts import RoundKeys, uniform_cohort
from fedtorch.tree import Tree
from fedtorch.trust import robust

SIZES = [5, 2, 9, 4, 4, 7, 6]
K = len(SIZES)


class Server(NamedTuple):
    total: Tensor | None = None


class State(NamedTuple):
    parameters: Tensor


def running_sum() -> ft.Algorithm:
    """Every client moves at random around its rows; the server keeps the sum of all clients' parameters."""

    def client(inbox: Tree, state: State, data: ClientData, turn: ft.Turn) -> ft.Reply:
        near = data.batch[0].sum(1) / data.count[:, None] + 0.1 * inbox
        new = 0.5 * (state.parameters + near) + random.normal(turn.key, near.shape[1:], near.dtype)
        return ft.Reply(None, State(new), {})

    return ft.Algorithm(
        init=lambda parameters, clients: (Server(), State(parameters)),
        outbox=lambda server: server.total / K,
        client=client,
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: state.parameters,
        told=ft.Told(lambda state: state.parameters),
    )


def sometimes(probability: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda keys, ids: random.bernoulli(keys, probability)


def states(round: ft.Round | ft.Run) -> Tree:
    return round.clients.table.read(slice(0, K))


START = torch.full((3,), 5.0, dtype=torch.float64)
FAULTS = {
    "none": None,
    "before": ft.Faults(before=sometimes(0.3)),
    "after": ft.Faults(after=sometimes(0.3)),
    "both": ft.Faults(sometimes(0.3), sometimes(0.3)),
}


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_the_total_is_that_of_all_clients(faults: ft.Faults | None, cohort: int | None) -> None:
    population = ft.InProcess(linear_clients(SIZES))
    for round in ft.Run(running_sum(), population, START, cohort=cohort, faults=faults).rounds(12):
        told = states(round).parameters
        assert distance(round.server.total, told.sum(0)) < ROUNDING
        asked = set(round.clients.table.touched().tolist())
        assert all(bool((row != START).any()) == (k in asked) for k, row in enumerate(told))


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_client_whose_message_was_lost_keeps_its_state(faults: ft.Faults | None) -> None:
    population = ft.InProcess(linear_clients(SIZES))
    run = ft.Run(running_sum(), population, START, faults=faults)
    old, silent = copy_of(states(run)), 0
    for round in run.rounds(8):
        new = copy_of(states(round))
        answered = torch.isin(torch.arange(K), round.ids)
        moved = (new.parameters != old.parameters).any(1)
        assert torch.equal(moved, answered)
        others = (~answered).nonzero()[:, 0]
        assert same_bits(tree.take(old, others), tree.take(new, others))
        silent += len(others)
        old = new
    assert (silent > 0) == (faults is not None)


def test_messages_that_never_left_cost_nothing() -> None:
    algorithm, population = running_sum(), ft.InProcess(linear_clients(SIZES))
    each = ft.Run(algorithm, population, START, cohort=1).step()
    heard = ft.Run(algorithm, population, START, faults=ft.Faults(before=lambda keys, ids: ids >= 3)).step()
    assert heard.ids.sort().values.tolist() == [0, 1, 2]
    assert (heard.bytes_up, heard.bytes_down) == (3 * each.bytes_up, 3 * each.bytes_down)
    sent = ft.Run(algorithm, population, START, faults=ft.Faults(after=lambda keys, ids: ids >= 3)).step()
    assert sent.ids.sort().values.tolist() == [0, 1, 2]
    assert (sent.bytes_up, sent.bytes_down) == (K * each.bytes_up, K * each.bytes_down)
    assert same_bits(sent.server, heard.server)


@pytest.mark.parametrize("when", ["before", "after"])
def test_if_nobody_answers_the_server_is_not_called(when: str) -> None:
    def server(total: Tree, aggregate: Tree, key: Tensor) -> Tree:
        raise AssertionError("called")

    algorithm = dataclasses.replace(running_sum(), server=server)
    faults = ft.Faults(**{when: lambda keys, ids: torch.ones(len(ids), dtype=torch.bool)})
    population = ft.InProcess(linear_clients(SIZES))
    run = ft.Run(algorithm, population, START, faults=faults)
    numbers, before = [], run.server
    for round in run.rounds(3):
        assert same_bits(round.server, before)
        assert len(round.clients.table.touched()) == 0
        assert round.ids.tolist() == []
        assert round.info == {}
        assert (round.bytes_up > 0, round.bytes_down > 0) == ((when == "after",) * 2)
        numbers.append(round.number)
    assert numbers == [1, 2, 3]


def test_cohorts_are_uniform_and_distinct() -> None:
    draws = 7000
    cohorts = uniform_cohort(3, K)(random.fold_in(random.key(0), torch.arange(draws)), 0)
    assert bool((cohorts[:, 1:] > cohorts[:, :-1]).all())
    _, counts = cohorts.unique(dim=0, return_counts=True)
    assert len(counts) == 35  # all subsets of 3 of 7
    expected = draws / 35
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 34) < 4 * (2 * 34) ** 0.5  # χ² with 34 degrees of freedom, four standard deviations
    assert uniform_cohort(K, K)(random.key(1), 0).tolist() == list(range(K))


def test_a_new_cohort_every_round() -> None:
    rounds = list(ft.Run(running_sum(), ft.InProcess(linear_clients(SIZES)), START, cohort=3).rounds(20))
    asked = [tuple(round.ids.sort().values.tolist()) for round in rounds]
    assert all(len(set(ids)) == 3 for ids in asked)
    assert len(set(asked)) > 5
    other = ft.Run(running_sum(), ft.InProcess(linear_clients(SIZES)), START, cohort=3, seed=1).rounds(20)
    assert asked != [tuple(round.ids.sort().values.tolist()) for round in other]


@pytest.mark.parametrize("size", [0, -1, K + 1])
def test_impossible_cohorts_are_refused(size: int) -> None:
    population = ft.InProcess(linear_clients(SIZES))
    with pytest.raises(ValueError, match=f"between 1 and the population's {K} clients, but got {size}"):
        ft.Run(running_sum(), population, START, cohort=size).step()


def test_cohorts_of_ones_own() -> None:
    population = ft.InProcess(linear_clients(SIZES))
    rounds = ft.Run(running_sum(), population, START, cohort=lambda key, round: torch.tensor([1, 4])).rounds(3)
    assert [round.ids.sort().values.tolist() for round in rounds] == [[1, 4]] * 3


def momentum() -> ft.Algorithm:
    local = ft.gradient_descent(
        linear(),
        epochs=1,
        batch_size=2,
        loss=lambda output, target: torch.nn.functional.mse_loss(output.squeeze(-1), target),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        reset="never",
    )
    return ft.personal_layers(local, "bias")


@pytest.mark.parametrize("through", ["memory", "a file"])
@pytest.mark.parametrize("algorithm", [running_sum(), momentum()], ids=["running sum", "momentum"])
def test_a_resumed_run_gives_the_same_bits(algorithm: ft.Algorithm, through: str, tmp_path: Path) -> None:
    parameters = START if algorithm.start is None else None
    population = ft.InProcess(linear_clients(SIZES))
    settings = {"cohort": 4, "seed": 3, "faults": FAULTS["both"]}
    whole = ft.run(algorithm, population, parameters, **settings, rounds=7).last
    half = ft.run(algorithm, population, parameters, **settings, rounds=4)
    if through == "a file":
        half.save(tmp_path / "half.safetensors")
        half = ft.Run(algorithm, population, parameters, **settings).load(tmp_path / "half.safetensors")
    rest = list(half.rounds(7))
    assert [round.number for round in rest] == [5, 6, 7]
    assert same_bits(rest[-1].server, whole.server)
    assert same_bits(rest[-1].clients.state_dict(), whole.clients.state_dict())
    assert same_bits(rest[-1].info, whole.info)


def test_the_seed_decides() -> None:
    algorithm, population = momentum(), ft.InProcess(linear_clients(SIZES))
    state = torch.random.get_rng_state()
    one, two, other = (ft.run(algorithm, population, seed=seed, rounds=3).last for seed in (5, 5, 6))
    assert same_bits(one.server, two.server)
    assert same_bits(one.clients.state_dict(), two.clients.state_dict())
    assert not same_bits(one.server, other.server)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_numbers_and_ends() -> None:
    algorithm, population = ft.fedavg(sgd(0.1)), ft.InProcess(linear_clients(SIZES))
    assert [round.number for round in ft.Run(algorithm, population).rounds(3)] == [1, 2, 3]
    assert list(ft.Run(algorithm, population).rounds(0)) == []
    run = ft.Run(algorithm, population)
    assert [round.number for _, round in zip(range(5), run.rounds(until=lambda history: False))] == [1, 2, 3, 4, 5]
    assert [round.number for round in run.rounds(7)] == [6, 7]
    assert list(run.rounds(7)) == []
    first = ft.Run(algorithm, population).step()
    assert first.ids.sort().values.tolist() == list(range(K))
    assert first.info["loss"].shape == (K,)


def test_runs_of_one_population_are_independent() -> None:
    population = ft.InProcess(linear_clients(SIZES))
    alone = ft.run(momentum(), population, rounds=3).last
    one, two = ft.Run(momentum(), population), ft.Run(momentum(), population)
    for _ in range(3):
        first, second = one.step(), two.step()
    assert same_bits(first.server, alone.server)
    assert same_bits(second.clients.state_dict(), alone.clients.state_dict())


def test_the_start_is_copied_and_carries_no_graph() -> None:
    module = linear()
    own = dict(module.named_parameters())
    population = ft.InProcess(linear_clients(SIZES))
    algorithm = ft.fedavg(ft.least_squares(module))
    run = ft.Run(algorithm, population, own)
    assert not any(leaf.requires_grad for leaf in tree.leaves(run.server))
    before = copy_of({name: p.detach() for name, p in own.items()})
    assert not any(leaf.requires_grad for leaf in tree.leaves(run.step().server))
    assert same_bits({name: p.detach() for name, p in own.items()}, before)


def test_an_algorithm_without_a_module_needs_a_start() -> None:
    with pytest.raises(ValueError, match=r"Expected parameters= to start from.*such as ft\.run\("):
        ft.Run(running_sum(), ft.InProcess(linear_clients(SIZES))).step()


def test_a_rounds_keys_depend_on_the_seed_and_its_number_only() -> None:
    purposes = torch.arange(4)
    for first in (0, 3, 64, 1000):
        made = RoundKeys(7)
        for number in range(first, first + 70):
            keys = made(number)
            expected = random.fold_in(random.fold_in(random.key(7), number), purposes)
            assert torch.equal(torch.stack(tuple(keys)), expected)


def adding(exchange: ft.Exchange, dtype: torch.dtype, nodes: int = 0) -> ft.Algorithm:
    """What a user writes first: the server adds what comes of the clients' first rows to its parameters."""

    def client(inbox: Tree, state: Tensor, data: ClientData, turn: ft.Turn) -> ft.Reply:
        message = Message(ft.Mean({"w": data.batch[0][:, 0]}, torch.ones(len(data.count))), None)
        return ft.Reply(message if nodes else message._replace(rows=ft.Sum(data.count)), state, {})

    def server(parameters: Tree, aggregate: Message, key: Tensor) -> Tree:
        assert aggregate.rows is None or aggregate.rows.value.dtype == torch.float64  # whole numbers
        return tree.add(parameters, aggregate.change.value)

    return ft.Algorithm(
        init=lambda parameters, clients: (parameters, torch.zeros(0)),
        outbox=lambda parameters: parameters,
        client=client,
        server=server,
        model=lambda inbox, state: inbox,
        exchange=exchange,
        start={"w": torch.zeros(nodes, 3, dtype=dtype) if nodes > 1 else torch.zeros(3, dtype=dtype)},
    )


class Message(NamedTuple):
    change: ft.Mean
    rows: ft.Sum | None


RING = ft.Network.from_edges([(k, (k + 1) % 6) for k in range(6)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("exchange", "nodes"),
    [(star(), 0), (robust_star(robust.median()), 1), (robust_star(robust.trimmed_mean(0.2)), 1), (graph(RING), 6)],
    ids=["star", "median", "trimmed mean", "graph"],
)
def test_an_aggregate_adds_to_parameters_of_any_dtype(exchange: ft.Exchange, nodes: int, dtype: torch.dtype) -> None:
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = ft.data.FederatedData((rows,), torch.full((6,), 2))
    for chunk in (None, 2):
        found = ft.Run(adding(exchange, dtype, nodes), ft.InProcess(data, chunk)).step().server["w"]
        assert found.dtype == dtype
        assert found.shape == ((6, 3) if nodes > 1 else (3,))


def test_means_of_many_blocks_are_rounded_once() -> None:
    rows = 100 + torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    data = ft.data.FederatedData((rows,), torch.full((2000,), 2))
    found = ft.Run(adding(star(), torch.float32), ft.InProcess(data, chunk=1)).step().server["w"]
    expected = rows[::2].double().mean(0)
    assert found.dtype == torch.float32
    assert bool(((found.double() - expected).abs() <= 2**-24 * expected).all())  # half a unit in the last place


@pytest.mark.parametrize("begin", [ft.Run, ft.Federation])
def test_a_function_that_makes_an_algorithm_is_none(begin: Callable[[object, ft.InProcess], object]) -> None:
    with pytest.raises(TypeError, match="Expected an algorithm, but got function; make one with"):
        begin(ft.fedavg, ft.InProcess(linear_clients(SIZES)))
