"""Clients in one process, by name and in order: what is lost, what is evaluated, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, client_tensors, copy_of, distance, linear_clients, same_bits, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data import ClientData
from fedtorch.federation.populations.clients import LocalClients
from fedtorch.federation.populations.population import Pending
from fedtorch.tree import Tree

SIZES = [5, 2, 9, 4, 4, 17, 6]
ALGORITHMS: dict[str, Callable[[], ft.Algorithm]] = {
    "fedavg": lambda: ft.fedavg(sgd(0.1, epochs=2, batch_size=3)),
    "fedprox": lambda: ft.fedprox(ft.least_squares(sgd(0.1).module), 0.5),
    "personal layers": lambda: ft.personal_layers(sgd(0.1, steps=3, batch_size=2), "bias", mu=0.1),
    "separate": lambda: ft.separate(sgd(0.1, steps=2)),
}


@pytest.fixture(autouse=True, params=[0, 16_384], ids=["blocks by size", "one block"])
def small_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test sees its few rows in blocks of similar size, and in one padded block."""
    for place in ("populations.in_process", "populations.clients"):
        monkeypatch.setattr(f"fedtorch.federation.{place}.SMALL_BLOCK", request.param)


every_algorithm = pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)


def bound(make: Callable[[], ft.Algorithm], chunk: int | None = None) -> tuple[Tree, LocalClients, ft.Algorithm]:
    algorithm = make()
    progress = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES), chunk))
    return algorithm.outbox(progress.server), progress.clients, algorithm


def two_rounds(
    make: Callable[[], ft.Algorithm], chunk: int | None, cohort: Tensor | None, lost: Tensor | None = None
) -> tuple[list[Pending], Tree]:
    """What two rounds bring, and all states after them, in the order of the clients."""
    outbox, clients, _ = bound(make, chunk)
    rounds = []
    for number in range(2):
        pending = clients.step(outbox, cohort, ft.Turn(random.key(number), 0), lost if number else None)
        pending.commit()
        order = pending.ids.argsort()
        info = {name: value[order] for name, value in pending.info.items()}
        rounds.append(pending._replace(ids=pending.ids[order], info=info, commit=lambda: None))
    return rounds, clients.table.read(slice(0, len(SIZES)))


@every_algorithm
def test_everybody_by_name_is_everybody(make: Callable[[], ft.Algorithm]) -> None:
    whole, states = two_rounds(make, None, None)
    named, same = two_rounds(make, None, torch.arange(len(SIZES)))
    assert same_bits(same, states)
    assert all(same_bits(a.aggregate, b.aggregate) for a, b in zip(whole, named))


def test_nobody_asked() -> None:
    outbox, clients, _ = bound(ALGORITHMS["fedavg"])
    pending = clients.step(outbox, torch.zeros(0, dtype=torch.int64), ft.Turn(random.key(0), 0))
    assert pending.aggregate is None
    assert (pending.bytes_up, pending.bytes_down, len(pending.ids)) == (0, 0, 0)
    assert all(len(values) == 0 for values in pending.info.values())
    pending.commit()
    assert len(clients.table.touched()) == 0


@pytest.mark.parametrize("make", [ALGORITHMS["fedavg"], ALGORITHMS["personal layers"]])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_lost_message_counts_for_nothing(make: Callable[[], ft.Algorithm], chunk: int | None) -> None:
    lost = torch.tensor([0, 5])
    answered = torch.tensor([1, 2, 3, 4, 6])
    rounds, states = two_rounds(make, chunk, None, lost)
    outbox, clients, _ = bound(make, chunk)
    clients.step(outbox, None, ft.Turn(random.key(0), 0)).commit()
    old = copy_of(clients.table.read(slice(0, len(SIZES))))
    pending = clients.step(outbox, answered, ft.Turn(random.key(1), 0))
    pending.commit()
    assert rounds[1].ids.tolist() == answered.tolist()
    assert distance(rounds[1].aggregate, pending.aggregate) < ROUNDING
    assert distance(states, clients.table.read(slice(0, len(SIZES)))) < ROUNDING
    assert same_bits(tree.take(states, lost), tree.take(old, lost))
    assert rounds[1].bytes_up == rounds[0].bytes_up  # it was sent


def test_all_messages_lost() -> None:
    outbox, clients, _ = bound(ALGORITHMS["fedavg"])
    pending = clients.step(outbox, None, ft.Turn(random.key(0), 0), torch.arange(len(SIZES)))
    assert pending.aggregate is None
    assert pending.bytes_up > 0
    pending.commit()
    assert len(clients.table.touched()) == 0


def squared_errors(algorithm: ft.Algorithm) -> Callable[[Tree, ClientData], Tree]:
    def function(tensors: Tree, data: ClientData) -> Tree:
        x, y = data.batch
        error = (algorithm.predict(tensors, x).squeeze(-1) - y).square() * data.mask
        return {"error": error.sum(1), "rows": data.count}

    return function


@every_algorithm
def test_evaluation_in_the_order_of_the_clients(make: Callable[[], ft.Algorithm]) -> None:
    outbox, clients, algorithm = bound(make, 2)
    clients.step(outbox, torch.tensor([1, 5]), ft.Turn(random.key(0), 0)).commit()
    sizes = [3, 0, 8, 1, 0, 2, 40]
    rows = linear_clients([sum(sizes)], seed=9).rows
    validation = ft.data.FederatedData(rows, torch.tensor(sizes), allow_empty=True)
    for data in (validation, linear_clients(SIZES)):
        result = clients.evaluate(outbox, data, squared_errors(algorithm))
        assert result["rows"].tolist() == data.counts.tolist()
        for k, (x, y) in enumerate(data):
            model = client_tensors(clients, outbox, k)
            expected = (x @ model["weight"][0] + model["bias"] - y).square().sum()
            assert float(result["error"][k]) == pytest.approx(float(expected), rel=ROUNDING, abs=ROUNDING)


def test_evaluation_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, clients, algorithm = bound(ALGORITHMS["separate"])
    clients.step(outbox, None, ft.Turn(random.key(0), 0)).commit()
    data = linear_clients(SIZES, seed=1)
    whole = clients.evaluate(outbox, data, squared_errors(algorithm))
    monkeypatch.setattr("fedtorch.federation.populations.clients.BLOCK_ROWS", 1)
    assert distance(clients.evaluate(outbox, data, squared_errors(algorithm)), whole) < ROUNDING


@pytest.mark.parametrize("chunk", [1, 3])
def test_evaluation_runs_at_most_a_chunk_at_once(chunk: int) -> None:
    outbox, clients, _ = bound(ALGORITHMS["separate"], chunk)
    seen: list[int] = []
    clients.evaluate(outbox, linear_clients(SIZES), lambda tensors, data: seen.append(len(data.count)) or data.count)
    assert max(seen) == chunk
    assert sum(seen) == len(SIZES)


def test_a_pooled_client_is_evaluated_on_everybody() -> None:
    algorithm = ft.pooled(ft.least_squares(sgd(0.1).module))
    data = linear_clients(SIZES)
    progress = ft.Run(algorithm, ft.InProcess(data.pool()))
    progress.clients.step({}, None, ft.Turn(random.key(0), 0)).commit()
    result = progress.clients.evaluate({}, data, squared_errors(algorithm))
    together = progress.clients.evaluate({}, data.pool(), squared_errors(algorithm))
    assert result["rows"].tolist() == SIZES
    assert float(result["error"].sum()) == pytest.approx(float(together["error"]), rel=ROUNDING)


def test_evaluation_of_other_clients_is_refused() -> None:
    outbox, clients, algorithm = bound(ALGORITHMS["fedavg"])
    with pytest.raises(ValueError, match="Expected data of the population's 7 clients, but got 2"):
        clients.evaluate(outbox, linear_clients([3, 3]), squared_errors(algorithm))


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("local", [sgd(0.1), ft.least_squares(sgd(0.1).module)], ids=["descent", "least squares"])
@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_a_bad_client_is_named_when_bound(local: ft.LocalSolver, value: float, chunk: int | None) -> None:
    def weight(data: ClientData) -> Tensor:
        return torch.where(data.count == 9, value, 1.0)

    population = ft.InProcess(linear_clients(SIZES), chunk)
    for algorithm in (ft.fedavg(local, weight=weight), ft.personal_layers(local, "bias", weight=weight)):
        with pytest.raises(ValueError, match=f"Client 'client 2': expected a positive weight, but got {value}"):
            ft.Run(algorithm, population)


def test_states_move_between_chunkings() -> None:
    outbox, clients, _ = bound(ALGORITHMS["separate"], 1)
    clients.step(outbox, torch.tensor([0, 4, 6]), ft.Turn(random.key(0), 0)).commit()
    _, other, _ = bound(ALGORITHMS["separate"])
    other.step(outbox, None, ft.Turn(random.key(5), 0)).commit()
    other.load_state_dict(clients.state_dict())
    assert other.table.touched().tolist() == [0, 4, 6]
    assert same_bits(other.table.read(slice(0, 7)), clients.table.read(slice(0, 7)))


def test_many_blocks_are_merged_on_the_way() -> None:
    data = linear_clients([3] * 80)
    algorithm = ft.fedavg(sgd(0.1))
    results = []
    for chunk in (1, None):
        progress = ft.Run(algorithm, ft.InProcess(data, chunk))
        results.append(progress.clients.step(progress.server, None, ft.Turn(random.key(0), 0)).aggregate)
    assert distance(*results) < ROUNDING


def test_info_that_some_blocks_do_not_tell() -> None:
    base = ft.separate(sgd(0.1))

    def client(inbox: Tree, state: Tree, data: ClientData, turn: ft.Turn) -> ft.Reply:
        reply = base.client(inbox, state, data, turn)
        large = bool((data.count > 8).any())
        return reply._replace(info={"size": data.count, "large": data.count} if large else {"size": data.count})

    progress = ft.Run(dataclasses.replace(base, client=client), ft.InProcess(linear_clients(SIZES), 1))
    pending = progress.clients.step({}, None, ft.Turn(random.key(0), 0))
    sizes = torch.tensor(SIZES, dtype=torch.float64)[pending.ids]
    expected = torch.where(sizes > 8, sizes, torch.nan)
    torch.testing.assert_close(pending.info["large"], expected, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(pending.info["size"], sizes)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="Expected FederatedData, but got list"):
        ft.InProcess([torch.zeros(3)])
    with pytest.raises(ValueError, match="Expected chunk of at least 1, but got 0"):
        ft.InProcess(linear_clients([3]), chunk=0)
