"""Cohorts: what they draw and how often, and what is refused."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from support.oracles.closed_forms import linear_clients, same_bits, sgd
from support.small_federations import trainer
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.runs.cohorts import Cohort, fixed_cohort, uniform_cohort

K = 7
WEIGHTS = [1.0, 2.0, 3.0, 1.0, 5.0, 0.5, 2.5]
COHORTS: dict[str, Cohort] = {
    "uniform": uniform_cohort(3, K),
    "fixed": fixed_cohort([5, 0, 2]),
    "poisson": ft.poisson_cohort(0.4, K),
    "weighted": ft.weighted_cohort(WEIGHTS, 3),
}
every_cohort = pytest.mark.parametrize("name", COHORTS)


def draws(cohort: Cohort, count: int) -> list[Tensor]:
    return [cohort(key, 0) for key in random.fold_in(random.key(11), torch.arange(count))]


def inclusions(cohorts: list[Tensor], clients: int) -> Tensor:
    return torch.bincount(torch.cat(cohorts), minlength=clients) / len(cohorts)


@every_cohort
def test_distinct_ascending_ids_that_the_key_decides(name: str) -> None:
    cohort = COHORTS[name]
    for ids in draws(cohort, 50):
        assert ids.dtype == torch.int64
        assert bool((ids[1:] > ids[:-1]).all())
        assert all(0 <= k < K for k in ids.tolist())
    assert all(torch.equal(one, two) for one, two in zip(draws(cohort, 20), draws(cohort, 20)))
    assert (len({tuple(ids.tolist()) for ids in draws(cohort, 50)}) == 1) == (name == "fixed")


def test_poisson_cohorts_are_independent_coins() -> None:
    count, rate = 1500, 0.4
    cohorts = draws(ft.poisson_cohort(rate, K), count)
    error = (rate * (1 - rate) / count) ** 0.5
    assert float((inclusions(cohorts, K) - rate).abs().max()) < 4 * error
    sizes = torch.tensor([float(len(ids)) for ids in cohorts])
    variance = K * rate * (1 - rate)
    assert abs(float(sizes.mean()) - K * rate) < 4 * (variance / count) ** 0.5
    # A binomial's fourth central moment is about 3 σ⁴, so a variance's standard error is about √2 σ² / √n.
    assert abs(float(sizes.var()) - variance) < 4 * variance * (2 / count) ** 0.5
    members = torch.zeros(count, K)
    for row, ids in zip(members, cohorts):
        row[ids] = 1
    correlation = members.T.corrcoef() - torch.eye(K)
    assert float(correlation.abs().max()) < 4.5 / count**0.5
    assert len(draws(ft.poisson_cohort(1.0, K), 1)[0]) == K


def exact_inclusions(weights: list[float], size: int) -> Tensor:
    """By summing over all orders in which clients can be drawn one after another."""
    found = torch.zeros(len(weights), dtype=torch.float64)
    for order in permutations(range(len(weights)), size):
        left, probability = sum(weights), 1.0
        for k in order:
            probability *= weights[k] / left
            left -= weights[k]
        found[list(order)] += probability
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_weighted_cohorts_draw_one_after_another(size: int) -> None:
    count = 1500
    cohorts = draws(ft.weighted_cohort(WEIGHTS, size), count)
    assert all(len(ids) == size for ids in cohorts)
    expected = exact_inclusions(WEIGHTS, size)
    error = (expected * (1 - expected) / count).sqrt()
    assert float(((inclusions(cohorts, K) - expected) / error).abs().max()) < 4
    proportional = size * torch.tensor(WEIGHTS, dtype=torch.float64) / sum(WEIGHTS)
    assert torch.allclose(expected, proportional) == (size == 1)
    assert draws(ft.weighted_cohort(WEIGHTS, K), 1)[0].tolist() == list(range(K))


@every_cohort
def test_the_same_under_run_and_under_a_trainer(name: str) -> None:
    algorithm, population = ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6, 3, 8, 4, 5]))
    rounds = list(ft.Run(algorithm, population, cohort=COHORTS[name], seed=3).rounds(4))
    model = ft.Federation(algorithm, population, cohort=COHORTS[name], seed=3)
    trainer(max_epochs=4).fit(model)
    assert same_bits(model.server, rounds[-1].server)
    assert model.history["asked"].tolist() == [len(round.asked) for round in rounds]
    assert all(torch.equal(round.asked, round.ids) for round in rounds)


def test_empty_round_does_nothing() -> None:
    algorithm, population = ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6]))
    cohort = ft.poisson_cohort(0.15, 3)
    model = ft.Federation(algorithm, population, cohort=cohort, seed=1)
    trainer(max_epochs=12).fit(model)
    before = dict(algorithm.start)
    empty = 0
    for round in ft.Run(algorithm, population, cohort=cohort, seed=1).rounds(12):
        if len(round.asked) == 0:
            empty += 1
            assert same_bits(round.server, before)
            assert (round.ids.tolist(), round.bytes_up, round.bytes_down) == ([], 0, 0)
            assert [len(values) for values in round.info.values()] == [0]  # of the loss, which is NaN in the history
        before = round.server
    assert same_bits(model.server, before)
    assert 2 < empty < 12
    assert int((model.history["asked"] == 0).sum()) == empty
    assert int(model.history["train_loss"].isna().sum()) == empty


def test_refusals() -> None:
    for size in (0, K + 1):
        with pytest.raises(ValueError, match=f"but got {size}"):
            ft.weighted_cohort(WEIGHTS, size)
        with pytest.raises(ValueError, match=f"but got {size}"):
            uniform_cohort(size, K)
    for weights in ([1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [[1.0]]):
        with pytest.raises(ValueError, match="positive finite weights"):
            ft.weighted_cohort(weights, 1)
    for rate in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="rate above 0"):
            ft.poisson_cohort(rate, K)
    with pytest.raises(ValueError, match="at least one client"):
        ft.poisson_cohort(0.5, 0)
    for ids in ([-1, 2], [2, 2]):
        with pytest.raises(ValueError, match="distinct ascending ids"):
            fixed_cohort(ids)
    for ids in ([1.7, 2.0], [True, False]):
        with pytest.raises(TypeError, match="Expected ids of clients as whole numbers, but got torch"):
            fixed_cohort(ids)


@pytest.mark.parametrize(
    "cohort",
    [
        fixed_cohort([1, 3]),
        lambda key, round: torch.tensor([1, 0]),
    ],
    ids=["fixed", "not ascending"],
)
def test_cohorts_of_other_populations_are_refused_when_they_are_drawn(cohort: Cohort) -> None:
    run = ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6])), cohort=cohort)
    before = run.server
    with pytest.raises(ValueError, match="distinct ascending ids of the population's 3 clients"):
        run.step()
    assert (run.number, run.server) == (0, before)


def test_ids_of_other_populations_are_refused_at_once() -> None:
    algorithm, population = ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6]))
    for cohort in (ft.poisson_cohort(1.0, 5), ft.weighted_cohort([1.0] * 5, 5), uniform_cohort(2, 5)):
        with pytest.raises(ValueError, match="cohort of at most the population's 3 clients, but got one of 5"):
            ft.Run(algorithm, population, cohort=cohort)
    with pytest.raises(ValueError, match="distinct ascending ids of the population's 3 clients"):
        ft.Federation(algorithm, population, cohort=[1, 3])


def test_a_function_is_given_the_round_and_called_once_for_each() -> None:
    seen: list[int] = []

    def in_turn(key: Tensor, round: int) -> Tensor:
        seen.append(round)
        return torch.tensor([round % 3])

    run = ft.run(ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6])), rounds=4, cohort=in_turn)
    assert seen == [0, 1, 2, 3]
    assert [round.asked.tolist() for round in [run.last] if round is not None] == [[0]]


def test_a_function_of_the_key_alone_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="two arguments, the round's key and the number of rounds before it"):
        ft.Run(ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5])), cohort=lambda key: None)  # type: ignore[arg-type, misc]
