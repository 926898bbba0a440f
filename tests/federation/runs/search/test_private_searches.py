"""Searches over private settings: one ledger has what all of them cost, and a budget is that of the whole search."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import linear_clients
from torch import Tensor

import fedtorch as ft
from fedtorch.trust import privacy

DATA = linear_clients([12, 8, 9, 14, 17, 6])
TRAINING, VALIDATION = DATA.split(0.7, seed=0)
CLIPS = [0.5, 1.0, 2.0, 4.0]


def build(clip: float, **more: Any) -> ft.Algorithm:
    local = ft.least_squares(torch.nn.Linear(3, 1).double())
    mechanism = privacy.client_level(clip=clip, noise=4.0, delta=1e-3, **more)
    return ft.fedavg(local, weight=lambda data: torch.ones_like(data.count)) | mechanism


def squares(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction[..., 0] - target) ** 2


SCORED: dict[str, Any] = {"validation": VALIDATION, "metric": squares, "largest_is_best": False, "progress": False}
HALVED: dict[str, Any] = {"trials": 4, "rounds": 4, "first": 1, "factor": 2, **SCORED}


def cost(rounds: int) -> float:
    """What so many rounds cost by themselves."""
    algorithm = build(1.0)
    ft.run(algorithm, ft.InProcess(TRAINING), rounds=rounds, progress=False)
    assert algorithm.budget is not None
    return algorithm.budget.report()["epsilon"]


def test_a_grid_costs_what_all_its_rounds_cost() -> None:
    found = ft.grid(build, {"clip": CLIPS}, ft.InProcess(TRAINING), rounds=4, **SCORED)
    assert found.epsilon == cost(16) > 2 * cost(4)
    assert set(found.table["epsilon of the search"]) == {found.epsilon}


def test_search_beyond_budget_is_refused_before_any_release() -> None:
    spent: list[ft.Algorithm] = []

    def made(clip: float) -> ft.Algorithm:
        spent.append(build(clip, budget=cost(15)))
        return spent[-1]

    with pytest.raises(ValueError, match="settings cost epsilon"):
        ft.grid(made, {"clip": CLIPS}, ft.InProcess(TRAINING), rounds=4, **SCORED)
    assert [each.budget.report()["epsilon"] for each in spent if each.budget is not None] == [0.0] * 4


def test_settings_whose_epsilons_do_not_add_up_are_refused() -> None:
    def other(clip: float) -> ft.Algorithm:
        local = privacy.local_level(clip=clip, noise=4.0, delta=1e-3)
        return build(clip) if clip < 1 else ft.fedavg(ft.least_squares(torch.nn.Linear(3, 1).double())) | local

    with pytest.raises(ValueError, match="add up in one ledger"):
        ft.grid(other, {"clip": CLIPS}, ft.InProcess(TRAINING), rounds=1, **SCORED)


def test_a_study_costs_the_rounds_that_were_done() -> None:
    found = ft.tune(build, {"clip": CLIPS}, ft.InProcess(TRAINING), **HALVED)
    assert found.epsilon == cost(sum(found.rounds)) < cost(16)


def test_a_search_of_settings_without_privacy_has_no_epsilon() -> None:
    plain = lambda clip: ft.fedavg(ft.least_squares(torch.nn.Linear(3, 1).double()))
    found = ft.grid(plain, {"clip": CLIPS}, ft.InProcess(TRAINING), rounds=1, **SCORED)
    assert found.epsilon is None
    assert "epsilon of the search" not in found.table


@pytest.mark.parametrize(
    "search",
    [
        partial(ft.grid, rounds=1),
        partial(ft.tune, rounds=1, trials=16),
        partial(ft.tune, rounds=1, trials=16, search="random"),
    ],
)
def test_private_and_exact_settings_in_one_search_are_refused(search: Callable[..., Any]) -> None:
    """The search's epsilon would stand beside an exact setting, which may be the best."""
    exact = ft.fedavg(ft.least_squares(torch.nn.Linear(3, 1).double()))
    mixed = lambda clip: build(clip) if clip < 4 else exact
    with pytest.raises(ValueError, match="all private or all exact, but got some of each"):
        search(mixed, {"clip": CLIPS[2:]}, ft.InProcess(TRAINING), **SCORED)
