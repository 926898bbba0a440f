"""The weights that sites send, against the rows that they have said they have."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.loopback import Loopback
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd
from support.sites import offers
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.algorithms.fedavg import Weight, rows_weight
from fedtorch.sites import Remote
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds._answer_looks import not_finite_in

DATA = linear_clients([5, 2, 9, 4, 17, 6])


def doubled(data: Any) -> Tensor:
    """A weight of one's own."""
    return 2.0 * data.count


def run(make: Any, change: Any = None) -> ft.Run:
    """One whose site b changes its partial aggregates."""
    host = Loopback(offers(DATA, make), None)
    begun = ft.Run(make(), Remote(host, ["a", "b", "c"], "it", seconds=60.0, quorum=0.5), seed=3)

    def answered(name: str, reply: bytes) -> bytes:
        about = {key: value for key, value in frames.read(reply, name).about.items() if key != frames.EVERYBODY}
        if name != "b" or about["kind"] != "answer" or change is None:
            return reply
        mean = {"value": {"weight": torch.zeros(1, 3).double(), "bias": torch.zeros(1).double()}}
        info = {key: torch.zeros(2).double() for key in about["info"]}
        partial = {"change": {**mean, "weight": torch.tensor(change).double()}}
        return frames.encode(tensors={"ids": torch.tensor([2, 3]), "info": info, "partial": partial}, **about)

    host.after = answered
    return begun


def test_a_layers_weight_is_no_weight_of_a_mean() -> None:
    """LayerNorm's is a vector called `weight`, and may change by more than there are rows."""

    def make() -> ft.Algorithm:
        norm, last = nn.LayerNorm(3, dtype=torch.float64), linear()
        with torch.no_grad():
            norm.weight.fill_(-9.0)  # far below the best
        return ft.fedavg(sgd(0.05, nn.Sequential(norm, last)))

    there, here = run(make), ft.run(make(), ft.InProcess(DATA), rounds=1, seed=3)
    assert there.step().ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert distance(there.server, here.server) < ROUNDING
    assert float(here.server["0.weight"].sum() + 27) > 1  # which was taken for too many rows


@pytest.mark.parametrize(
    ("weight", "sent", "expected"),
    [(rows_weight, 13.5, "a weight of at most 13"), (rows_weight, -1.0, "at least 0"), (doubled, -1.0, "at least 0")],
)
def test_a_site_that_counts_for_too_much_or_less_than_nothing_is_left_out(
    weight: Weight, sent: float, expected: str
) -> None:
    begun = run(lambda: ft.fedavg(sgd(0.1), weight=weight), sent)
    assert begun.step().ids.tolist() == [0, 1, 4, 5]
    assert expected in begun.population.troubles["b"]


@pytest.mark.parametrize("make", [ft.fedavg, ft.scaffold, lambda local: ft.feddyn(local, 0.1)])
def test_rows_are_held_against_weights_whatever_settings_say(make: Any) -> None:
    """Settings are words for people: replaced ones switch no check off."""
    algorithm = make(sgd(0.1))
    assert algorithm.weight is rows_weight
    if make is ft.fedavg:
        begun = run(lambda: dataclasses.replace(make(sgd(0.1)), settings={}), 13.5)
        assert begun.step().ids.tolist() == [0, 1, 4, 5]
        assert "a weight of at most 13" in begun.population.troubles["b"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_refused_by_their_field(bad: float) -> None:
    begun = run(lambda: ft.fedavg(sgd(0.1)), bad)
    assert begun.step().ids.tolist() == [0, 1, 4, 5]
    assert "expected finite numbers in 'change.weight', but got 'NaN or Inf'" in begun.clients.plan.sites.troubles["b"]


def test_values_whose_sum_is_too_large_are_finite() -> None:
    large = {"a": torch.full((3,), 1.7e308, dtype=torch.float64), "b": torch.ones(1)}
    assert not_finite_in(large) is None
    assert not_finite_in({**large, "c": torch.tensor([1, 2])}) is None
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert not_finite_in({**large, "c": torch.tensor([1.0, -torch.inf], dtype=dtype)}) == "c"
