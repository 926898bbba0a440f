"""Robust exchanges against sorting by hand, and what wrong clients can do to them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.closed_forms import ROUNDING, distance, joined, linear_clients, sgd

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.exchange import Exchange, Mean, Sum, star
from fedtorch.trust.robust import median, trimmed_mean

GENERATOR = torch.Generator().manual_seed(0)
VALUES = torch.randn(9, 2, 3, generator=GENERATOR, dtype=torch.float64)
ONES = torch.ones(9)


def aggregate(exchange: Exchange, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return exchange.finish(exchange.gather(Mean({"w": value}, weight), slice(0, len(value)))).value["w"]


@pytest.mark.parametrize("count", [9, 8, 1])
def test_the_median_is_that_of_sorting(count: int) -> None:
    ordered = VALUES[:count].sort(0).values
    expected = 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])
    assert torch.equal(aggregate(median(), VALUES[:count], ONES[:count]), expected)


def test_weights_count_as_copies() -> None:
    weight = torch.tensor([1, 3, 2, 1, 1, 4, 1, 2, 2])
    copies = VALUES.repeat_interleave(weight, 0)
    for exchange in (median(), trimmed_mean(0.2), trimmed_mean(0.0)):
        one, two = aggregate(exchange, VALUES, weight), aggregate(exchange, copies, torch.ones(len(copies)))
        assert distance(one, two) < ROUNDING


def test_the_trimmed_mean_leaves_both_ends_out() -> None:
    expected = VALUES.sort(0).values[2:7].mean(0)
    assert distance(aggregate(trimmed_mean(2 / 9), VALUES, ONES), expected) < ROUNDING
    plain = star().finish(star().gather(Mean({"w": VALUES}, ONES), slice(0, 9))).value["w"]
    assert distance(aggregate(trimmed_mean(0.0), VALUES, ONES), plain) < ROUNDING


@pytest.mark.parametrize("exchange", [median(), trimmed_mean(0.25)])
def test_two_of_nine_wrong_clients_stay_within_the_others(exchange: Exchange) -> None:
    wrong = VALUES.clone()
    wrong[:2] = 1e9
    found = aggregate(exchange, wrong, ONES)
    assert bool((found <= VALUES[2:].amax(0)).all())
    assert bool((found >= VALUES[2:].amin(0)).all())


def test_fedavg_with_a_median_withstands_a_wrong_client() -> None:
    clients = list(linear_clients([30] * 7, seed=1))
    x, y = clients[0]
    clients = [(x, y)] * 6
    honest = ft.fedavg(sgd(0.1, steps=5))
    start = honest.start
    attacked = ft.data.from_tensors([*clients, (x, 1e6 * y)])
    robust = dataclasses.replace(honest, exchange=median())
    best = ft.run(honest, ft.InProcess(ft.data.from_tensors(clients)), start, rounds=50).last
    found = ft.run(robust, ft.InProcess(attacked), start, rounds=50).last
    assert distance(joined(found.server), joined(best.server)) < ROUNDING
    moved = ft.run(honest, ft.InProcess(attacked), start, rounds=50).last
    assert distance(joined(best.server), joined(moved.server)) > 1e4


def test_increments_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="Expected messages that are Mean for median, but got a Sum"):
        median().gather(Sum({"w": VALUES}), slice(0, 9))
    with pytest.raises(TypeError, match="for trimmed_mean"):
        ft.Run(
            dataclasses.replace(ft.scaffold(sgd(0.1)), exchange=trimmed_mean(0.1)), ft.InProcess(linear_clients([5, 6]))
        ).step()
    with pytest.raises(TypeError, match="bare tensor"):
        median().gather({"w": VALUES}, slice(0, 9))
    with pytest.raises(ValueError, match=r"at least 0 and below 0\.5, but got 0\.5"):
        trimmed_mean(0.5)
    with pytest.raises(ValueError, match="positive total weight"):
        aggregate(median(), VALUES, tree.zeros_like(ONES))


@pytest.mark.parametrize("exchange", [median(), trimmed_mean(0.1)])
def test_gtv_is_refused_when_its_run_begins(exchange: Exchange) -> None:
    algorithm = ft.gtv(sgd(0.1), ft.Network.from_edges([(0, 1), (1, 2)]), 0.3)
    with pytest.raises(TypeError, match=r"Expected messages that are Mean for .* use an algorithm .* ft\.fedavg"):
        ft.Run(dataclasses.replace(algorithm, exchange=exchange), ft.InProcess(linear_clients([4, 5, 6])))
    run = ft.Run(dataclasses.replace(algorithm, exchange=star()), ft.InProcess(linear_clients([4, 5, 6])))
    with pytest.raises(TypeError, match="Expected to hear neighbours, but got dict; leave GTV its exchange"):
        run.step()
