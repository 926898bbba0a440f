"""Messages with NaN or Inf: named, and the run stopped with nothing kept, or left out like a lost one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, copy_of, distance, linear_clients, same_bits, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Mean, Sum, not_finite
from fedtorch.federation.exchanges.robust.exchange import star as robust_star
from fedtorch.federation.turn import Turn
from fedtorch.trust import robust

SIZES = [5, 4, 7, 6]
BAD = 2


def spoiled(algorithm: ft.Algorithm, value: float, after: int = 0) -> ft.Algorithm:
    """Client `BAD` sends `value` in the first number of its message, once it has worked so many rounds."""
    worked = [0]

    def client(inbox: Any, state: Any, data: Any, turn: Turn) -> ft.Reply:
        reply = algorithm.client(inbox, state, data, turn)
        worked[0] += 1
        if worked[0] <= after:
            return reply
        ours = data.count == SIZES[BAD]

        def spoil(leaf: Tensor) -> Tensor:
            return torch.where(tree.along(ours, leaf), value, leaf)

        mean = reply.message.change
        return reply._replace(message=reply.message._replace(change=Mean(tree.map(spoil, mean.value), mean.weight)))

    return dataclasses.replace(algorithm, client=client)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("make", [ft.fedavg, ft.scaffold], ids=["fedavg", "scaffold"])
def test_a_bad_message_stops_the_run_and_nothing_is_kept(value: float, chunk: int | None, make: Any) -> None:
    algorithm = spoiled(make(sgd(0.05, steps=2)), value, after=1 if chunk is None else len(SIZES))
    run = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES), chunk))
    run.step()
    before = copy_of((run.server, run.clients.state_dict()))
    with pytest.raises(
        ValueError,
        match=r"client 'client 2' sent NaN, Inf or a negative weight in '(fresh\.)?change\.value\.weight' in round 2",
    ):
        run.step()
    with pytest.raises(ValueError, match="in round 2, and 0 others did so too"):
        run.step()
    assert run.number == 1
    assert same_bits((run.server, run.clients.state_dict()), before)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("make", [ft.fedavg, ft.scaffold], ids=["fedavg", "scaffold"])
def test_dropped_it_is_as_if_the_message_were_lost(chunk: int | None, make: Any) -> None:
    population = ft.InProcess(linear_clients(SIZES), chunk)
    algorithm = make(sgd(0.05, steps=2))
    dropped = ft.Run(spoiled(algorithm, math.nan), population, on_bad_message="drop")
    lost = ft.run(algorithm, population, faults=ft.Faults(after=lambda keys, ids: ids == BAD), rounds=3)
    for round in dropped.rounds(3):
        assert round.refused.tolist() == [BAD]
        assert round.ids.tolist() == [0, 1, 3]
    assert distance(dropped.server, lost.server) < ROUNDING
    assert same_bits(dropped.clients.state_dict()["ids"], lost.clients.state_dict()["ids"])
    assert dropped.history["refused"].tolist() == [1, 1, 1]


def weighing(weight: Tensor, **settings: Any) -> ft.Run:
    """A run whose clients' weights are these, by their numbers of rows."""
    known = dict(zip(SIZES, weight))
    algorithm = ft.fedavg(sgd(0.05), weight=lambda data: torch.stack([known[n] for n in data.count.tolist()]))
    algorithm = dataclasses.replace(algorithm, prepare=lambda data: data)  # weights that were positive before
    run = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES), settings.pop("chunk", None)), **settings)
    run.step()
    return run


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_none_is_refused_with_its_client(wrong: float, chunk: int | None) -> None:
    weight = torch.tensor([5.0, 4.0, wrong, 6.0])
    with pytest.raises(
        ValueError, match=r"client 'client 2' sent NaN, Inf or a negative weight in 'change\.weight' in round 1"
    ):
        weighing(weight, chunk=chunk)
    dropped = weighing(weight, chunk=chunk, on_bad_message="drop")
    assert dropped.last.refused.tolist() == [BAD]
    without = weighing(torch.tensor([5.0, 4.0, 0.0, 6.0]), chunk=chunk)
    assert distance(dropped.server, without.server) < ROUNDING


def test_sums_that_overflow_stop_the_run() -> None:
    with pytest.raises(ValueError, match=r"Expected messages of \d clients with a finite sum, but got NaN or Inf in"):
        weighing(torch.full((4,), 1.7e308, dtype=torch.float64))
    huge = weighing(torch.full((4,), 3e38))
    assert distance(huge.server, weighing(torch.ones(4)).server) < ROUNDING


def test_if_all_messages_are_bad_the_server_stays() -> None:
    data = linear_clients([SIZES[BAD]] * 3)
    run = ft.Run(spoiled(ft.fedavg(sgd(0.05)), math.nan), ft.InProcess(data), on_bad_message="drop")
    before = copy_of(run.server)
    round = run.step()
    assert (round.ids.tolist(), round.refused.tolist()) == ([], [0, 1, 2])
    assert same_bits(run.server, before)


def test_rows_and_fields_are_found_also_where_sums_overflow() -> None:
    large = torch.full((3, 2), 1e308, dtype=torch.float64)
    assert not_finite({"a": Sum(large), "empty": torch.zeros(3, 0), "whole": torch.ones(3, dtype=torch.int64)}) == {}
    bad = {"a": Sum(large), "b": Mean(torch.tensor([[1.0], [math.nan], [1.0]]), torch.tensor([1.0, 1.0, math.inf]))}
    assert not_finite(bad) == {1: "b.value", 2: "b.weight"}
    assert not_finite({"a": large[:0]}) == {}
    weights = {"a": Mean(torch.ones(3, 2), torch.tensor([1.0, -0.5, 0.0])), "b": Sum(-torch.ones(3))}
    assert not_finite(weights) == {1: "a.weight"}
    assert not_finite({"weight": Sum({"weight": -torch.ones(3)})}) == {}  # numbers of a layer's weight


def test_a_trimmed_mean_leaves_out_what_is_not_finite() -> None:
    exchange = robust_star(robust.trimmed_mean(0.3))
    values = torch.tensor([[1.0], [math.nan], [2.0], [3.0]], dtype=torch.float64)
    mean = exchange.finish(exchange.gather(Mean({"w": values}, torch.ones(4)), slice(0, 4)))
    assert bool(mean.value["w"].isfinite().all())


def test_what_to_do_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="Expected on_bad_message='raise' or 'drop', but got 'ignore'"):
        ft.Run(ft.fedavg(sgd(0.1)), ft.InProcess(linear_clients(SIZES)), on_bad_message="ignore")  # type: ignore[arg-type]
