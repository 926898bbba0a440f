"""One question after a fit, at draws that a server has chosen, tells which of many known people have a row.

A hundred and more rows at one site, and eighty people whose age and body mass index a server knows, of whom forty are
there. A sum of changes of the mean response at a draw of large coefficients counts the rows in a thin slab of the
columns' space: with a slab through each person one question tells who is there. What sites tell is held by one rule
(`federation.runs.held`): with it the same attacks are right as often as a coin.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pandas
import pytest
import torch
from scipy.stats import binom, hypergeom
from support.loopback import Clock, Loopback
from support.oracles import closed_forms
from support.sites import offers
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs import held as holding
from fedtorch.federation.runs.holders import _described
from fedtorch.inference import checks
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.hierarchical import generalised, linear, normal
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import (
    _after_fit as after_fit,
    past_sums,
    session as meeting_session,
    site as meeting_site,
    sites as meeting,
)
from fedtorch.sites.rounds._behind import Behind

PEOPLE, ROWS = 80, 200
EVERY = Policy(after_fit=("effects", "densities", "margins", "checks"))
SINGLE = EVERY._replace(minimum=1)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, same_secret: None) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def chance(right: int, trials: int) -> bool:
    """Whether a coin is right as often, but for once in ten thousand times."""
    low, high = binom.interval(0.9999, trials, 0.5)
    return bool(low <= right <= high)


def chance_of_halves(right: int) -> bool:
    """Whether who picks forty of eighty people without looking has as many of all of them right."""
    low, high = hypergeom(PEOPLE, PEOPLE // 2, PEOPLE // 2).interval(0.9999)
    return bool(2 * low <= right <= 2 * high)


def hosted(data: ft.data.FederatedData, make: Callable[[], ft.Algorithm], policy: Policy, rounds: int = 1) -> ft.Run:
    """A run over one site."""
    host = Loopback(offers(data, make, sites=1, policy=policy), None)
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    for _ in range(rounds):
        run.step()
    return run


def asked(run: ft.Run, sent: dict[str, Tensor], question: str = "effects", **about: Any) -> Any:
    """What the site tells at what it is sent."""
    return run.clients.ask(run.outbox, question, {**sent, "key": ft.random.key(0)}, about)


class Site(NamedTuple):
    """A fit to a site's rows, and people whom the server knows."""

    run: ft.Run
    people: Tensor  # (80, 2) age and body mass index, in sds
    there: Tensor  # (80,) bool

    def at(self, phi: Tensor, question: str = "effects", **about: Any) -> dict[str, Tensor]:
        """What the site tells at these values of the coefficients `(S, 3)`."""
        answer: dict[str, Tensor] = asked(self.run, {"phi": phi}, question, **(about or {"kinds": {"1": "number"}}))
        return answer


@functools.cache
def fitted(policy: Policy, seed: int = 0, smokers: bool = True) -> Site:
    """A fit to rows of which, without smokers, another column is 0 in all."""
    draws = torch.Generator().manual_seed(seed)
    normals = lambda *size: torch.randn(*size, generator=draws, dtype=torch.float64)
    people, there = normals(PEOPLE, 2), torch.randperm(PEOPLE, generator=draws) < PEOPLE // 2
    others = normals(ROWS - PEOPLE // 2, 2)
    own = torch.cat([people[there], others])
    x = torch.cat([torch.ones(ROWS, 1).double(), own], 1)
    names = ["Intercept", "age", "bmi"]
    if not smokers:
        x, names = torch.cat([x, torch.zeros_like(x[:, :1])], 1), [*names, "smoker"]
    y = (torch.rand(ROWS, generator=draws).double() < (own @ torch.tensor([0.8, -0.5]).double()).sigmoid()).double()
    data = ft.data.from_tensors([(x, y)])
    make = lambda: ft.ep(generalised.logistic(normal(len(names), random=[], names=names)))
    return Site(hosted(data, make, policy, rounds=8), people, there)


def slabs(people: Tensor, seed: int, steepness: float = 1e5) -> Tensor:
    """Coefficients `(80, 3)` at which the response changes in a thin slab through each person."""
    angle = 6.28 * torch.rand(len(people), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    slope = steepness * torch.stack([angle.cos(), angle.sin()], 1)
    return torch.cat([-(slope * people).sum(1, keepdim=True), slope], 1)


def right(site: Site, told: Tensor) -> int:
    """How many of the people are guessed right by who has the larger half of the numbers told."""
    guess = torch.zeros(PEOPLE, dtype=torch.bool)
    guess[told.argsort(descending=True)[: PEOPLE // 2]] = True
    return int((guess == site.there).sum())


def at_slabs(policy: Policy, seed: int) -> int:
    site = fitted(policy, seed)
    return right(site, site.at(slabs(site.people, seed))["total"][:, 0].abs())


def test_one_question_at_a_slab_for_each_person_tells_who_is_there() -> None:
    """Where the site's policy counts single rows, or where there was no rule."""
    for seed in range(3):
        assert at_slabs(SINGLE, seed) == PEOPLE
        assert chance_of_halves(at_slabs(EVERY, seed))


def beside(people: Tensor, seed: int) -> Tensor:
    """Two planes beside each person, so near that nobody else is between them, `(160, 3)`."""
    planes = slabs(people, seed, 1e7)[:, None].expand(-1, 2, -1).clone()
    planes[..., 0] += torch.tensor([-50.0, 50.0]).double()
    return planes.flatten(0, 1)


def between_planes(policy: Policy, seed: int) -> int:
    """By how many responses drawn anew are on either side of two planes beside each person."""
    site = fitted(policy, seed)
    told = site.at(beside(site.people, seed), "means", none=0)["replicated"][0].unflatten(0, (-1, 2))
    return right(site, told[:, 1] - told[:, 0])


def test_responses_drawn_anew_on_both_sides_of_a_plane_tell_who_is_there() -> None:
    for seed in range(3):
        assert between_planes(SINGLE, seed) == PEOPLE
        assert chance_of_halves(between_planes(EVERY, seed))


def by_thresholds(policy: Policy, seed: int) -> int:
    """By draws that are alike at the rows, but for a column that is 0 in all of them, until it is changed."""
    site = fitted(policy, seed, smokers=False)
    slope = 1e5 * torch.tensor([3.0, 2.0]).double()
    level = -(site.people @ slope)
    thresholds = torch.stack([level - 20, level + 20], 1).flatten()  # a plane on either side of each person
    phi = torch.cat([torch.zeros(1).double(), slope, torch.zeros(1).double()]).repeat(len(thresholds), 1)
    phi[:, 3] = thresholds
    return right(site, site.at(phi, kinds={"3": "binary"})["total"][:, 0].unflatten(0, (-1, 2)).diff(dim=1)[:, 0])


def test_thresholds_by_a_column_that_is_the_same_in_all_rows() -> None:
    for seed in range(3):
        assert by_thresholds(SINGLE, seed) == PEOPLE
        assert chance_of_halves(by_thresholds(EVERY, seed))


def test_questions_of_ordinary_use_are_answered() -> None:
    """What is told is about as near to what one process finds as its standard errors are large."""
    table, exact = (
        ft.inference.marginal_effects(fitted(policy).run, tolerance=torch.inf) for policy in (EVERY, SINGLE)
    )
    assert list(table.index) == ["age", "bmi"]
    assert bool(((table["estimate"] - exact["estimate"]).abs() < exact["sd"]).all())
    assert bool((table["sd"] / exact["sd"]).between(0.7, 1.6).all())


def oldest(policy: Policy, seed: int, base: float = 16.0) -> tuple[int, int]:
    """Numbers of patients at each of the highest ages that are digits of one sum of means: (right, tried)."""
    draws = torch.Generator().manual_seed(seed)
    age = (62 + 14 * torch.randn(ROWS, generator=draws).double()).round().clamp(20, 99)
    sex = (torch.rand(ROWS, generator=draws) < 0.5).double()
    x = torch.stack([torch.ones(ROWS).double(), (age - 62) / 14, sex], 1)
    y = (torch.rand(ROWS, generator=draws).double() < (0.8 * x[:, 1] - 0.3 * sex).sigmoid()).double()
    make = lambda: ft.ep(generalised.logistic(normal(3, random=[], names=["Intercept", "age", "sex"])))
    run, slope = hosted(ft.data.from_tensors([(x, y)]), make, policy), math.log(base)
    phi = torch.tensor([slope * (62 - 110), slope * 14, -5000.0], dtype=torch.float64).expand(10, 3).clone()
    left = -float(asked(run, {"phi": phi}, kinds={"2": "binary"})["total"][0, 0])
    digits = {}
    for years in range(99, 99 - 22, -1):
        unit = base ** (years - 110) / (1 + base ** (years - 110))
        digits[years] = int(left / unit + 1e-9)
        left -= digits[years] * unit
    first = next((years for years, count in digits.items() if count), 88)
    tried = range(first, first - 11, -1)
    return sum(digits.get(years) == int((age == years).sum()) for years in tried), len(tried)


def test_digits_of_one_sum_are_the_numbers_of_patients_at_the_highest_ages() -> None:
    """A change by a factor of 16 with each year, at draws that are all alike, and a coefficient that takes it away."""
    for policy, least, most in ((SINGLE, 33, 33), (EVERY, 0, binom.ppf(0.9999, 33, 49 / 88))):
        right, tried = (sum(each) for each in zip(*(oldest(policy, seed) for seed in range(3)), strict=True))
        assert tried == 33
        assert least <= right <= most  # 49 of 88 are right by the distribution of ages alone


def test_a_variable_is_told_once() -> None:
    """Not by other names of its number as well, of whose sums each would be moved anew."""
    with pytest.raises(RuntimeError, match="the site failed with ValueError"):
        fitted(EVERY).at(torch.zeros(2, 3).double(), kinds={"1": "number", "01": "number"})


# -- a level that few have, and many draws that are nearly alike -------------------------------------------------------

SLOPE, SITES = 1e-3, 30


class Rare(NamedTuple):
    """A fit to rows with a level that some have; of one more row it is a coin whether it has the level."""

    run: ft.Run
    coin: bool


@functools.cache
def rare(policy: Policy, seed: int, others: int) -> Rare:
    draws = torch.Generator().manual_seed(seed)
    coin = bool(torch.rand(1, generator=draws) < 0.5)
    level = torch.zeros(ROWS).double()
    level[: others + coin] = 1.0
    y = (torch.rand(ROWS, generator=draws) < 0.5).double()
    x = torch.stack([torch.ones(ROWS).double(), torch.randn(ROWS, generator=draws).double(), level], 1)
    make = lambda: ft.ep(generalised.logistic(normal(3, random=[], names=["Intercept", "age", "rare"])))
    return Rare(hosted(ft.data.from_tensors([(x, y)]), make, policy), coin)


def of_the_level(count: int, apart: float) -> Tensor:
    """Draws at an intercept of -90, at which no response changes with age but that of who has the level, by SLOPE / 4.

    They are nearly alike.
    """
    phi = torch.tensor([-90.0, SLOPE, 90.0]).double().expand(count, 3).clone()
    phi[:, 2] += apart * torch.linspace(-1, 1, count).double()
    return phi


def by_margins(policy: Policy, others: int, count: int, sites: int, least: float | None = None) -> int:
    """At how many sites it is guessed right whether one row more than those that are known has the level.

    It has where more rows than `least` seem to have it, by default half a row more than are known.
    """
    least = others + 0.5 if least is None else least
    found = 0
    for seed in range(sites):
        site = rare(policy, seed, others)
        told = asked(site.run, {"phi": of_the_level(count, 1e-9)}, kinds={"1": "number"})["total"].mean()
        found += (float(told) / (SLOPE / 4) > least) == site.coin
    return found


def test_a_level_that_one_row_has_is_not_all_there_is_in_a_sum() -> None:
    """Numbers were told to so many digits of their own, and all other rows change by next to nothing."""
    assert by_margins(SINGLE, 0, 10, SITES) == SITES
    assert chance(by_margins(EVERY, 0, 10, SITES), SITES)


def test_many_draws_that_are_nearly_alike_are_told_as_few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moved anew, they told by their mean whether one row more has a level."""
    assert chance(by_margins(EVERY, 20, 1000, SITES), SITES)
    monkeypatch.setattr(
        importlib.import_module("fedtorch.inference.marginal_effects"),
        "basis",
        lambda phi: torch.eye(len(phi)).double(),
    )
    monkeypatch.setattr(holding, "_ROWS", 0.0)
    assert by_margins(EVERY, 20, 1000, SITES) == SITES


def test_whether_as_many_rows_as_the_minimum_have_a_level_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine that are known and one more: were sizes cut at the tenth, all of them would be in the sum or none."""
    assert chance(by_margins(EVERY, 9, 10, SITES, least=2.0), SITES)
    monkeypatch.setattr(holding, "_ranks", lambda key, shape, minimum, spread: torch.full(shape, minimum))
    assert by_margins(EVERY, 9, 10, SITES, least=2.0) == SITES


def by_doubts(policy: Policy, others: int, sites: int) -> int:
    """By how many rows' log densities vary over draws that differ by what the level adds."""
    found = 0
    for seed in range(sites):
        site, phi = rare(policy, seed, others), torch.tensor([[0.0, 0.0, -50.0], [0.0, 0.0, 50.0]]).double()
        told = asked(site.run, {"phi": phi.repeat(5, 1)}, "densities", method="waic")
        found += (float(told["doubtful"]) > others + 0.5) == site.coin
    return found


def test_rows_are_not_counted_by_how_their_log_densities_vary() -> None:
    """Over draws that a server places so that one person's does, or those of a known group and of one more."""
    assert by_doubts(SINGLE, 0, SITES) == by_doubts(SINGLE, 20, SITES) == SITES
    assert chance(by_doubts(EVERY, 0, SITES), SITES)
    assert chance(by_doubts(EVERY, 20, SITES), SITES)


SQUARED, ABSOLUTE = (
    lambda prediction, target: (prediction[..., 0] - target).square(),
    lambda prediction, target: (prediction[..., 0] - target).abs(),
)


def scored(policy: Policy, others: int, seed: int, weight: float, metrics: dict[str, Any]) -> tuple[bool, list[float]]:
    """(the coin, sums of scores by a model that is far away for who has the level, and near for nobody else)."""
    draws = torch.Generator().manual_seed(seed)
    coin = bool(torch.rand(1, generator=draws) < 0.5)
    level, y = torch.zeros(ROWS, 1), torch.randn(ROWS, generator=draws)
    level[: others + coin] = 1.0
    data = ft.data.from_tensors([(level, y)])
    make = lambda: ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1, bias=False)))
    brought = {
        name: dataclasses.replace(one, validation=data, metrics=metrics)
        for name, one in offers(data, make, sites=1, policy=policy).items()
    }
    run = ft.Run(make(), Remote(Loopback(brought, None), ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    run.server = run.server | {"weight": torch.full((1, 1), weight)}
    told = run.evaluate(run.population.validation, metrics)
    return coin, [told[name].overall * ROWS for name in metrics]


def by_scores(policy: Policy, others: int, sites: int) -> int:
    found = 0
    for seed in range(sites):
        coin, (squares,) = scored(policy, others, seed, 1e4, {"mse": SQUARED})
        found += (squares / 1e8 > others + 0.5) == coin
    return found


def by_two_scores(policy: Policy, others: int, sites: int) -> int:
    """By the number of rows of which squared and absolute errors are, were both moved by the same secret number."""
    found, weight = 0, 1.3e4
    of_squares, of_sizes = (2 ** (math.ceil(2 * math.log2(size)) / 2) / size for size in (weight**2, weight))
    for seed in range(sites):
        coin, (squares, sizes) = scored(policy, others, seed, weight, {"mse": SQUARED, "mae": ABSOLUTE})
        count = (of_sizes * squares / weight**2 - of_squares * sizes / weight) / (of_sizes - of_squares)
        found += (count > others + 0.5) == coin
    return found


def test_scores_do_not_tell_whether_a_row_is_there() -> None:
    assert by_scores(SINGLE, 0, SITES) == by_scores(SINGLE, 20, SITES) == SITES
    assert chance(by_scores(EVERY, 0, SITES), SITES)
    assert chance(by_scores(EVERY, 20, SITES), SITES)


def test_scores_by_two_metrics_have_secret_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chance(by_two_scores(EVERY, 40, SITES), SITES)
    own = after_fit._held_sums
    shared = lambda rows, minimum, key, numbers: own(rows, minimum, ft.random.key(0), numbers)
    monkeypatch.setattr(after_fit, "_held_sums", shared)
    assert by_two_scores(EVERY, 40, SITES) == SITES


# -- log densities and posteriors of clients ---------------------------------------------------------------------------


def densities(site: Site, phi: Tensor) -> Tensor:
    """Sums of log densities at values of the coefficients `(P, 3)`, of up to 99 models in a question, `(P,)`."""
    told = []
    for part in phi.split(99):
        sent: dict[str, Tensor] = {}
        described = [_described(site.run)] * (len(part) - 1)
        for end, one in zip([*(f" {i}" for i in range(len(described))), ""], part, strict=True):
            sent |= {f"phi{end}": one.expand(2, 3).clone(), f"key{end}": ft.random.key(0)}
        told.append(asked(site.run, sent, "densities", method="waic", beside=described)["apart"][0, 1:])
    return torch.cat(told)  # those beside come first


def three_planes(people: Tensor, steepness: float, width: float) -> Tensor:
    """Planes through each person, and on either side, `(80, 3, 3)`."""
    planes = slabs(people, 9, steepness)[:, None].expand(-1, 3, -1).clone()
    planes[..., 0] += torch.tensor([-1.0, 0.0, 1.0]).double() * steepness * width
    return planes


def by_second_differences(policy: Policy, steepness: float = 1e6, width: float = 1e-3) -> int:
    """How many people are guessed right by log densities at three planes through and beside each of them."""
    site, some = fitted(policy), slice(30)
    planes = three_planes(site.people[some], steepness, width)
    told = densities(site, planes.flatten(0, 1)).unflatten(0, (-1, 3))
    second = (told[:, 0] - 2 * told[:, 1] + told[:, 2]) / (steepness * width)  # one a person in the middle
    return int(((second.abs() > 0.9) == site.there[some]).sum())


def test_log_densities_of_models_at_planes_beside_each_person_tell_who_is_there() -> None:
    """Each of a hundred models in one question has a plane of its own, at which its draws are all the same."""
    assert by_second_differences(SINGLE) >= 28
    assert chance(by_second_differences(EVERY), 30)


def test_accuracy_of_ordinary_use_is_told() -> None:
    run, exact = fitted(EVERY).run, fitted(SINGLE).run
    for accuracy in (ft.inference.loo, ft.inference.waic):
        one, other = (accuracy(each, tolerance=torch.inf) for each in (run, exact))
        assert one.left_out == ROWS
        assert abs(one.elpd - other.elpd) < 4 * one.se
        assert 0.7 < one.se / other.se < 1.8
    table = ft.inference.compare({"one": run, "again": run}, tolerance=torch.inf)
    assert table["difference"].tolist() == [0.0, 0.0]


def by_evidence(policy: Policy, some: int = 30) -> int:
    """How many people are guessed right by the evidence at cavities that are points on planes beside each of them."""
    site, steepness, width = fitted(policy), 1e8, 1e-5
    outbox, precision = site.run.outbox, torch.eye(3).double() * 1e22

    def evidence(phi: Tensor) -> float:
        posterior = outbox.posterior._replace(shift=precision @ phi, precision=gaussian.pack(precision))
        share = ft.tree.map(torch.zeros_like, outbox.share)
        return float(
            site.run.clients.ask(outbox._replace(posterior=posterior, share=share), "evidence", {}, {})["elpd"]
        )

    found = 0
    for planes, there in zip(three_planes(site.people[:some], steepness, width), site.there, strict=False):
        first, middle, last = map(evidence, planes)
        found += (abs(first - 2 * middle + last) / (steepness * width) > 0.5) == bool(there)
    return found


def test_evidence_tells_who_is_there_and_is_not_told_where_rows_are_counted() -> None:
    assert by_evidence(SINGLE) >= 28
    with pytest.raises(RuntimeError, match=r"held by no rows; its side would allow it by Policy\(minimum=1\)"):
        by_evidence(EVERY)


def test_posteriors_of_ordinary_use_are_told() -> None:
    """Moved by less than an sd of theirs where rows are twenty times the minimum, and as much wider."""
    there, exact = (
        posterior_of(run.algorithm).coefficients(run, tolerance=torch.inf).posterior
        for run in (fitted(EVERY).run, fitted(SINGLE).run)
    )
    sd, own = (each.covariances[0, 0].diagonal().sqrt() for each in (exact, there))
    assert bool(((there.means - exact.means)[0, 0].abs() < sd).all())
    assert bool(((own / sd > 0.9) & (own / sd < 1.3)).all())


def by_regression(site: Site, phi: Tensor) -> int:
    """How many of the people the best linear guess has right, of all that a question tells together.

    It knows the distribution that other rows are drawn from, and takes what these add for noise, and by how much
    numbers are moved.
    """
    x = torch.cat([torch.ones(20_000, 1), torch.randn(20_000, 2, generator=torch.Generator().manual_seed(9))], 1)
    functions = holding.basis(phi)
    effects = lambda rows: ((rows @ phi.mT).sigmoid() * (1 - (rows @ phi.mT).sigmoid()) * phi[:, 1]) @ functions
    of_others, own = effects(x.double()), effects(torch.cat([torch.ones(PEOPLE, 1).double(), site.people], 1))
    told, mean = functions.mT @ site.at(phi)["total"][:, 0], of_others.mean(0)
    largest = (of_others - mean).abs().quantile(0.95, dim=0)
    noise = torch.cov(of_others.mT) * (ROWS - PEOPLE // 2) + torch.diag((10 * largest).square() / 12)
    more = own - mean
    gain = more @ torch.linalg.pinv(more.mT @ more + 4 * noise, hermitian=True)
    return right(site, gain @ (told - ROWS * mean - more.sum(0) / 2))


def by_many_numbers(numbers: int, trials: int, uniform: bool) -> int:
    """How often it is guessed right, by all numbers of a question about the same rows, whether one row more is there.

    By the middle of what is possible where secret numbers are uniform, or else by the likelihood, which is the mean.
    """
    found = 0
    for trial in range(trials):
        values = torch.zeros(ROWS, numbers).double()
        values[: 40 + trial % 2] = 1.0
        told = holding.held(values, 10, ft.random.key(trial))
        half = told.variance.sqrt() * math.sqrt(3)
        ends = (told.total - half).amax(), (told.total + half).amin()
        guess = torch.stack(ends).mean() if uniform else told.total[told.variance > 0].mean()
        found += (float(guess) > 40.5) == bool(trial % 2)
    return found


def two_in_three(trials: int) -> float:
    """How many of the guesses are right at most where a row moves a normal number by √12 / 4 sds."""
    return float(binom.ppf(0.9999, trials, torch.special.ndtr(torch.tensor(math.sqrt(12) / 8).double()).item()))


@pytest.mark.parametrize("numbers", [6, 50, 300, 2500])
def test_many_numbers_tell_of_a_row_no_more_than_is_said(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the extremes and by the likelihood; with uniform numbers the extremes told it."""
    monkeypatch.setattr(holding, "_ranks", lambda key, shape, minimum, spread: torch.full(shape, 30))
    most = two_in_three(400)
    assert by_many_numbers(numbers, 400, uniform=False) <= most
    assert by_many_numbers(numbers, 400, uniform=True) <= most
    uniform = lambda *given: (ft.random.uniform(*given) - 0.5) * math.sqrt(12)
    monkeypatch.setattr(holding.random, "normal", uniform)
    assert numbers < 50 or by_many_numbers(numbers, 400, uniform=True) > most


def by_ranks(numbers: int, others: int, trials: int) -> int:
    """How often it is guessed right whether one row more is there, by how many of the numbers have any size at all."""
    spread, found = max(10, 4 * math.sqrt(numbers)) / math.sqrt(12), 0
    ranks = holding._ranks(ft.random.key(-1), torch.Size([100_000]), 10, spread)
    middle = ((ranks <= others).double().mean() + (ranks <= others + 1).double().mean()) / 2
    for trial in range(trials):
        values = torch.zeros(ROWS, numbers).double()
        values[: others + trial % 2] = 1.0
        share = (holding.held(values, 10, ft.random.key(trial)).variance > 0).double().mean()
        found += bool(share > middle) == bool(trial % 2)
    return found


@pytest.mark.parametrize(("numbers", "others"), [(50, 24), (50, 9), (300, 45), (2500, 49)])
def test_rows_are_not_counted_by_how_many_numbers_have_a_size(
    numbers: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_ranks(numbers, others, 400) <= two_in_three(400)
    between = lambda key, shape, minimum, spread: (10 + 10 * ft.random.uniform(key, shape, torch.float64)).long()
    monkeypatch.setattr(holding, "_ranks", between)
    assert by_ranks(2500, 14, 100) >= 99


@pytest.mark.slow
def test_all_numbers_of_a_question_together_tell_nothing_of_who_is_there() -> None:
    """At draws of the fit, and at the most telling that were tried."""
    sites = [fitted(EVERY, seed) for seed in range(6)]
    own = [posterior_of(site.run.algorithm).draws(site.run, 512, None, torch.inf, 0).sent["phi"] for site in sites]
    trials = PEOPLE * len(sites)
    assert chance(sum(by_regression(site, phi) for site, phi in zip(sites, own, strict=True)), trials)
    chosen = torch.tensor([0.0, 2.0, 2.0]).double() + 0.5 * torch.randn(
        512, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    assert chance(sum(by_regression(site, chosen) for site in sites), trials)


def greedy(rows: Tensor, minimum: int) -> Tensor:
    """Neighbours joined until they have enough rows: a group ends at the value of the row by which it has."""
    groups, total = [0], torch.zeros_like(rows[0])
    for cell in rows:
        total = total + cell
        done = bool((total >= minimum).all())
        groups.append(groups[-1] + done)
        total = torch.zeros_like(total) if done else total
    return torch.tensor(groups[:-1]).clamp(max=max(groups[-1] - 1, 0))


def ends_at_rows(edges: Tensor, seed: int) -> tuple[int, int]:
    """Of groups in one histogram: how many end at the value of a row, and how many there are."""
    draws = torch.Generator().manual_seed(seed)
    y = (140 + 20 * torch.randn(ROWS, generator=draws, dtype=torch.float64)).round(decimals=2)
    data = ft.data.from_tensors([(torch.ones(ROWS, 1).double(), y)])
    make = lambda: ft.ep(linear(normal(1, random=[], sd=500.0), noise=20.0))
    run = hosted(data, make, EVERY)
    told = asked(run, {"phi": torch.full((8, 1), 140.0).double(), "edges": edges}, "histogram")
    seen = torch.stack([told[:, 0], told[:, 1:].mean(1)], 1)
    starts = [0, *((seen[1:] != seen[:-1]).any(1).nonzero()[:, 0] + 1).tolist()]
    values = set(y.tolist())
    return sum(round(float(edges[end - 1]) - 0.005, 2) in values for end in starts[1:]), len(starts) - 1


def test_bins_of_a_histogram_end_at_no_rows_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine bins, of which a site joined neighbours until they had ten rows, and so told the value of the tenth."""
    edges = torch.arange(8_000, 20_000, dtype=torch.float64) / 100 + 0.005
    right, tried = (sum(each) for each in zip(*(ends_at_rows(edges, seed) for seed in range(6)), strict=True))
    assert binom.sf(right - 1, tried, 0.04) > 1e-4  # an end is at the value of a row by chance, in the middle
    monkeypatch.setattr(checks, "joined", greedy)
    right, tried = (sum(each) for each in zip(*(ends_at_rows(edges, seed) for seed in range(6)), strict=True))
    assert right > 0.2 * tried  # others end where the last of the replicated columns has ten


def test_all_rows_of_a_group_may_have_one_value() -> None:
    """Groups are then the same, so that nothing of few rows is known."""
    rows = torch.poisson(torch.full((128, 1), 3.0), generator=torch.Generator().manual_seed(0)).double()
    groups = checks.joined(rows, 10)
    totals = torch.zeros(int(groups.max()) + 1, 1).double().index_add(0, groups, rows)
    assert len(totals) > 8
    assert float(totals.min()) >= 10
    for group in range(len(totals)):  # all rows of a group in one of its cells
        alike = []
        for cell in (groups == group).nonzero()[:, 0].tolist():
            other = torch.where(groups[:, None] == group, 0.0, rows)
            other[cell] = totals[group]
            alike.append(checks.joined(other, 10).equal(groups))
        assert any(alike)


# -- what modules log --------------------------------------------------------------------------------------------------


def of_smokers() -> ft.Algorithm:
    """One that logs the mean response of rows whose first column is positive, NaN where there are none."""
    made = ft.fedavg(closed_forms.sgd(0.1))

    def client(inbox: Any, state: Any, data: Any, turn: Any) -> Any:
        reply, (x, y) = made.client(inbox, state, data, turn), data.batch
        there = (x[..., 0] > 0) & data.mask
        return reply._replace(info={"of smokers": torch.where(there, y, 0.0).sum(1) / there.sum(1)})

    return dataclasses.replace(made, client=client)


def by_two_cohorts(seed: int, folder: Path) -> bool:
    """Whether a patient's response is guessed right, by means with and without the patient and a ward of no smokers."""
    draws = torch.Generator().manual_seed(seed)
    normals = lambda *size: torch.randn(*size, generator=draws, dtype=torch.float64)
    rows = [(normals(n, closed_forms.linear().weight.shape[1]), normals(n)) for n in (30, 1, 9)]
    coin = bool(torch.rand(1, generator=draws) < 0.5)
    rows[1][0][0, 0], rows[1][1][0], rows[2][0][:, 0] = 1.0, 1.0 if coin else -1.0, -1.0
    data, told = ft.data.from_tensors(rows), []
    host = Loopback(offers(data, of_smokers, sites=1, policy=EVERY), folder)
    for cohort in ([0], [0, 1, 2]):
        remote = Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05)
        told.append(ft.Run(of_smokers(), remote, seed=3, cohort=cohort).step().info["of smokers"])
    return (float(2 * told[1][0] - told[0][0]) > 0) == coin  # NaN is a guess, too


def test_what_is_logged_is_a_mean_over_the_clients_whose_rows_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory keeps two cohorts apart by the rows of all clients, of which those without a value were in no mean."""
    monkeypatch.setattr(meeting_site.Site, "_in_order", lambda self, configuration: configuration)
    assert chance(sum(by_two_cohorts(seed, tmp_path / f"held {seed}") for seed in range(20)), 20)
    over_some = lambda self, values, ids, taken=None: values.nanmean().expand(len(values)).clone()
    monkeypatch.setattr(Behind, "joined", over_some)
    assert sum(by_two_cohorts(seed, tmp_path / f"plain {seed}") for seed in range(20)) == 20


# -- rows of which one is changed --------------------------------------------------------------------------------------


def smoking(frame: pandas.DataFrame, folder: Path) -> float:
    """A difference of sums of log densities of two models, of which the one beside has a column more."""
    regression = lambda design: ft.ep(hierarchical.regression(design, "logistic"))
    host = Loopback({"a": SiteConfiguration.of_frame(frame, "ward", {"it": regression}, policy=EVERY)}, folder)
    runs = []
    for formula in ("died ~ age + smoker + (1 | ward)", "died ~ age + (1 | ward)"):
        design = agree(host, ["a"], formula, client="ward")
        runs.append(ft.Run(regression(design), Remote(host, ["a"], "it", quorum=1.0, seconds=0.05)))
        runs[-1].step()
    longer, shorter = (torch.zeros(2, len(run.algorithm.start["shift"])).double() for run in runs)
    longer[:, 1], longer[:, 2], longer[:, 3:], shorter[:, 2:] = 0.3, 1.0, -20.0, -20.0
    sent = {"phi": shorter, "phi 0": longer, "key 0": ft.random.key(0)}
    return float(asked(runs[1], sent, "densities", method="waic", beside=[_described(runs[0])])["apart"][0, 1])


def by_a_changed_cell(seed: int, folder: Path) -> bool:
    """Whether it is guessed right if a patient smoked, of whom a site changes that between two questions."""
    draws = numpy.random.default_rng(seed)
    frame = pandas.DataFrame({"ward": numpy.repeat(["w 0", "w 1"], 60), "age": draws.normal(60, 10, 120)})
    frame["smoker"], frame["died"] = draws.integers(0, 2, 120), draws.integers(0, 2, 120)
    patient = int(draws.integers(120))
    before, changed = smoking(frame, folder), frame.copy()
    changed.loc[patient, "smoker"] = 1 - frame.loc[patient, "smoker"]
    more = smoking(changed, folder) > before
    return (more == bool(frame.loc[patient, "died"])) != bool(frame.loc[patient, "smoker"])


def test_the_secret_numbers_are_of_the_rows_of_models_beside_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were they the same again, two answers would differ by the row that is changed alone."""
    monkeypatch.setattr(past_sums, "begin", lambda path: None)
    right = sum(by_a_changed_cell(seed, tmp_path / f"held {seed}") for seed in range(20))
    assert chance(right, 20)
    monkeypatch.setattr(meeting_session, "noted", lambda data: {})
    assert sum(by_a_changed_cell(seed, tmp_path / f"plain {seed}") for seed in range(20)) >= 18
