"""One question after a fit, at draws that a server has chosen, tells which of many known people have a row.

A hundred and more rows at one site, and eighty people whose age and body mass index a server knows, of whom forty are
there. A sum of changes of the mean response at a draw of large coefficients counts the rows in a thin slab of the
columns' space: with a slab through each person one question tells who is there.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import pytest
import torch
from scipy.stats import binom
from support.loopback import Clock, Loopback
from support.sites import offers
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.holders import _described
from fedtorch.inference import checks
from fedtorch.models.hierarchical import generalised, linear, normal
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import _after_fit as after_fit, sites as meeting

PEOPLE, ROWS = 80, 200
MARGINS = Policy(after_fit=("margins", "checks"))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


class Site(NamedTuple):
    """A fit to a site's rows, and people whom the server knows."""

    run: ft.Run
    people: Tensor  # (80, 2) age and body mass index, in sds
    there: Tensor  # (80,) bool

    def at(self, phi: Tensor, question: str = "effects", **about: Any) -> dict[str, Tensor]:
        """What the site tells at these values of the coefficients `(S, 3)`."""
        sent = {"phi": phi, "key": ft.random.key(0)}
        about = about or {"kinds": {"1": "number"}}
        answer: dict[str, Tensor] = self.run.clients.ask(self.run.outbox, question, sent, about)
        return answer


def fitted(policy: Policy, seed: int = 0, smokers: bool = True, again: bool = False) -> Site:
    """A fit to rows of which, without smokers, another column is 0 in all, or, where it is there again, their age."""
    draws = torch.Generator().manual_seed(seed)
    normals = lambda *size: torch.randn(*size, generator=draws, dtype=torch.float64)
    people, there = normals(PEOPLE, 2), torch.randperm(PEOPLE, generator=draws) < PEOPLE // 2
    others = normals(ROWS - PEOPLE // 2, 2)
    own = torch.cat([people[there], others])
    x = torch.cat([torch.ones(ROWS, 1).double(), own], 1)
    names = ["Intercept", "age", "bmi"]
    if again:
        x, names = torch.cat([x, x[:, 1:2]], 1), [*names, "years"]
    if not smokers:
        x, names = torch.cat([x, torch.zeros_like(x[:, :1])], 1), [*names, "smoker"]
    y = (torch.rand(ROWS, generator=draws).double() < (own @ torch.tensor([0.8, -0.5]).double()).sigmoid()).double()
    data = ft.data.from_tensors([(x, y)])
    make = lambda: ft.ep(generalised.logistic(normal(len(names), random=[], names=names)))
    host = Loopback(offers(data, make, sites=1, policy=policy), None)
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    for _ in run.rounds(8):
        pass
    return Site(run, people, there)


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


def test_one_question_at_a_slab_for_each_person_tells_who_is_there() -> None:
    """Where the site's policy counts single rows, or where there was no rule."""
    site = fitted(MARGINS._replace(minimum=1))
    told = site.at(slabs(site.people, 0))["total"][:, 0]
    assert right(site, told.abs()) == PEOPLE


@pytest.mark.parametrize("question", ["effects", "calibration", "means"])
def test_chosen_draws_are_refused(question: str) -> None:
    site = fitted(MARGINS)
    with pytest.raises(
        RuntimeError, match=r"tells .* at draws of one posterior, and those of this question are further"
    ):
        site.at(slabs(site.people, 0), question, kinds={"1": "number"})


def test_thresholds_by_a_column_that_is_the_same_in_all_rows() -> None:
    """Draws that differ in its coefficient alone are alike at the rows; at rows in which it is changed they are not."""

    def told(policy: Policy, steepness: float = 1e5) -> tuple[Site, Tensor]:
        site = fitted(policy, smokers=False)
        slope = steepness * torch.tensor([3.0, 2.0]).double()
        level = -(site.people @ slope)
        thresholds = torch.stack([level - 20, level + 20], 1).flatten()  # a plane on either side of each person
        phi = torch.cat([torch.zeros(1).double(), slope, torch.zeros(1).double()]).repeat(len(thresholds), 1)
        phi[:, 3] = thresholds
        return site, site.at(phi, kinds={"3": "binary"})["total"][:, 0].unflatten(0, (-1, 2)).diff(dim=1)[:, 0]

    site, between = told(MARGINS._replace(minimum=1))
    assert right(site, between) == PEOPLE
    with pytest.raises(
        RuntimeError, match="where a variable is changed in the site's rows, draws of this question are"
    ):
        told(MARGINS, 1.0)


def test_too_many_draws_are_refused_whatever_they_are() -> None:
    site = fitted(MARGINS._replace(draws=200, minimum=1))
    with pytest.raises(RuntimeError, match=r"no more than 200 draws in one question, but was sent 201; ask with fewer"):
        site.at(torch.zeros(201, 3).double())
    assert site.at(torch.zeros(200, 3).double())["total"].shape == (200, 1)


def test_questions_of_ordinary_use_are_answered() -> None:
    site = fitted(MARGINS)
    table = ft.inference.marginal_effects(site.run, tolerance=torch.inf)
    assert list(table.index) == ["age", "bmi"]


def test_draws_that_are_alike_tell_of_no_person_in_a_slab() -> None:
    site = fitted(MARGINS._replace(minimum=1))
    for person in (0, 1, 2, 3):
        told = site.at(slabs(site.people, 0)[person].expand(10, 3))["total"]
        assert bool((told.abs() > 1).all()) == bool(site.there[person])
    with pytest.raises(RuntimeError, match="predictors have an sd of at most 5, and at one of this question they have"):
        fitted(MARGINS).at(slabs(site.people, 0)[0].expand(10, 3))


def test_a_draw_that_is_steep_where_a_variable_is_changed_is_refused() -> None:
    """At the rows a column and its copy have no sum; where one of the two is set to 0, the other is a plane."""
    phi = torch.tensor([0.0, 1e5, 0.0, -1e5]).double().expand(10, 4)
    asked = {"kinds": {"1": "binary"}}
    assert fitted(MARGINS._replace(minimum=1), again=True).at(phi, **asked)["total"].isfinite().all()
    with pytest.raises(RuntimeError, match="where a variable is changed in the site's rows, predictors at a draw have"):
        fitted(MARGINS, again=True).at(phi, **asked)


def oldest(policy: Policy, seed: int, base: float = 16.0) -> tuple[int, int]:
    """Numbers of patients at each of the highest ages that are digits of one sum of means: (right, tried)."""
    draws = torch.Generator().manual_seed(seed)
    age = (62 + 14 * torch.randn(ROWS, generator=draws).double()).round().clamp(20, 99)
    sex = (torch.rand(ROWS, generator=draws) < 0.5).double()
    x = torch.stack([torch.ones(ROWS).double(), (age - 62) / 14, sex], 1)
    y = (torch.rand(ROWS, generator=draws).double() < (0.8 * x[:, 1] - 0.3 * sex).sigmoid()).double()
    data = ft.data.from_tensors([(x, y)])
    make = lambda: ft.ep(generalised.logistic(normal(3, random=[], names=["Intercept", "age", "sex"])))
    host = Loopback(offers(data, make, sites=1, policy=policy), None)
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    run.step()
    slope = math.log(base)
    phi = torch.tensor([slope * (62 - 110), slope * 14, -5000.0], dtype=torch.float64).expand(10, 3).clone()
    sent = {"phi": phi, "key": ft.random.key(0)}
    left = -float(run.clients.ask(run.outbox, "effects", sent, {"kinds": {"2": "binary"}})["total"][0, 0])
    digits = {}
    for years in range(99, 99 - 22, -1):
        unit = base ** (years - 110) / (1 + base ** (years - 110))
        digits[years] = int(left / unit + 1e-9)
        left -= digits[years] * unit
    first = next(years for years, count in digits.items() if count)
    tried = range(first, first - 11, -1)
    return sum(digits[years] == int((age == years).sum()) for years in tried), len(tried)


def test_digits_of_one_sum_are_the_numbers_of_patients_at_the_highest_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change by a factor of 16 with each year, at draws that are all alike, and a coefficient that takes it away."""
    right, tried = (sum(each) for each in zip(*(oldest(MARGINS._replace(minimum=1), seed) for seed in range(3))))
    assert right == tried == 33
    with pytest.raises(RuntimeError, match="predictors have an sd of at most 5, and at one of this question they have"):
        oldest(MARGINS, 0)
    for module in (
        after_fit,
        importlib.import_module("fedtorch.inference.marginal_effects"),
    ):  # without a bound on that, digits of few numbers are left
        monkeypatch.setattr(module, "STEEP", 1e9)
    few = oldest(MARGINS, 0)[0]
    monkeypatch.setattr(after_fit, "_rounded", lambda told, digits: told)
    assert oldest(MARGINS, 0)[0] == 11 > few


def densities(site: Site, phi: Tensor, draws: int = 2) -> Tensor:
    """Sums of log densities at values of the coefficients `(P, 3)`, of up to 99 models in a question, `(P,)`."""
    told = []
    for part in phi.split(99):
        sent: dict[str, Tensor] = {}
        described = [_described(site.run)] * (len(part) - 1)
        for end, one in zip([*(f" {i}" for i in range(len(described))), ""], part, strict=True):
            sent |= {f"phi{end}": one.expand(draws, 3).clone(), f"key{end}": ft.random.key(0)}
        about = {"method": "waic", "beside": described}
        lppd = site.run.clients.ask(site.run.outbox, "densities", sent, about)["lppd"]
        told.append(lppd)  # those beside come first
    return torch.cat(told)


DENSITIES = Policy(after_fit=("densities",))


def by_second_differences(site: Site, steepness: float = 1e6, width: float = 1e-3) -> int:
    """How many people are guessed right by log densities at three planes through and beside each of them."""
    middle = slabs(site.people, 9, steepness)
    aside = torch.tensor([[-1.0], [0.0], [1.0]]).double() * steepness * width
    planes = middle[:, None].expand(-1, 3, -1).clone()
    planes[..., 0] += aside[:, 0]
    told = densities(site, planes.flatten(0, 1)).unflatten(0, (-1, 3))
    second = (told[:, 0] - 2 * told[:, 1] + told[:, 2]) / (steepness * width)  # one a person in the middle
    return int(((second.abs() > 0.9) == site.there).sum())


def test_log_densities_of_models_at_planes_beside_each_person_tell_who_is_there() -> None:
    """Each of a hundred models in one question has a plane of its own, at which its draws are all the same."""
    assert by_second_differences(fitted(DENSITIES._replace(minimum=1))) >= 0.95 * PEOPLE
    with pytest.raises(RuntimeError, match=r"of more than 3 models together where they predict its rows alike, and"):
        by_second_differences(fitted(DENSITIES))


def test_draws_for_log_densities_are_those_of_one_posterior_in_each_model() -> None:
    site = fitted(DENSITIES._replace(draws=100))
    near, far = (
        posterior_of(site.run.algorithm).draws(site.run, 80, None, torch.inf, 0).sent["phi"],
        slabs(site.people, 0),
    )
    for first, second in ((near, far), (far, near)):
        sent = {"phi": first, "phi 0": second, "key": ft.random.key(0), "key 0": ft.random.key(0)}
        with pytest.raises(
            RuntimeError, match="log densities at draws of one posterior, and those of this question are"
        ):
            site.run.clients.ask(
                site.run.outbox, "densities", sent, {"method": "loo", "beside": [_described(site.run)]}
            )
    with pytest.raises(RuntimeError, match=r"no more than 100 draws in one question, but was sent 101"):
        ft.inference.loo(site.run, draws=101, tolerance=torch.inf)


def test_three_models_that_are_far_apart_are_compared_and_four_are_not() -> None:
    """A covariate may explain nearly all of a response. Three planes tell of one person, as one draw does."""
    site = fitted(DENSITIES)
    own = posterior_of(site.run.algorithm).draws(site.run, 1, None, torch.inf, 0).sent["phi"]
    four = torch.cat([own, slabs(site.people, 0, 3.0)[:3]])
    assert densities(site, four[:3]).isfinite().all()
    with pytest.raises(RuntimeError, match="compare at most 3 of them at a time"):
        densities(site, four)
    assert densities(site, own.expand(9, 3)).unique().shape == (1,)


def test_accuracy_of_ordinary_use_is_told() -> None:
    run = fitted(DENSITIES).run
    alone = [accuracy(run, tolerance=torch.inf) for accuracy in (ft.inference.loo, ft.inference.waic)]
    table = ft.inference.compare({"one": run, "again": run}, tolerance=torch.inf)
    assert [each.left_out for each in alone] == [ROWS, ROWS]
    assert table["difference"].tolist() == [0.0, 0.0]


def by_regression(site: Site, phi: Tensor) -> int:
    """How many of the people the best linear guess has right, of all that a question tells together.

    It knows the distribution that other rows are drawn from, and takes what these add for noise.
    So it takes what rounding adds.
    """
    x = torch.cat([torch.ones(20_000, 1), torch.randn(20_000, 2, generator=torch.Generator().manual_seed(9))], 1)
    effects = lambda rows: (rows @ phi.mT).sigmoid() * (1 - (rows @ phi.mT).sigmoid()) * phi[:, 1]
    of_others, own = effects(x.double()), effects(torch.cat([torch.ones(PEOPLE, 1).double(), site.people], 1))
    unit, mean = of_others.abs().mean(0), of_others.mean(0)
    noise = (
        torch.cov((of_others / unit).mT) * (ROWS - PEOPLE // 2) + (ROWS * 2.0**-12) ** 2 * torch.eye(len(phi)).double()
    )
    more, told = (own - mean) / unit, (site.at(phi)["total"][:, 0] - ROWS * mean) / unit
    gain = more @ torch.linalg.pinv(more.mT @ more + 4 * noise, hermitian=True)
    return right(site, gain @ (told - more.sum(0) / 2))


@pytest.mark.slow
def test_all_numbers_of_a_question_together_tell_little_of_who_is_there() -> None:
    """At draws of the fit a guess is as good as a coin; at the most telling that were tried two of three are right.

    Slabs through each person are right each time. How far draws are apart is bounded, and how steep they are.
    """
    sites = [fitted(MARGINS, seed) for seed in range(6)]
    own = [posterior_of(site.run.algorithm).draws(site.run, 512, None, torch.inf, 0).sent["phi"] for site in sites]
    trials = PEOPLE * len(sites)
    low, high = binom.interval(0.9999, trials, 0.5)
    assert low <= sum(by_regression(site, phi) for site, phi in zip(sites, own, strict=True)) <= high
    chosen = torch.tensor([0.0, 2.0, 2.0]).double() + 0.5 * torch.randn(
        512, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    assert sum(by_regression(site, chosen) for site in sites) < 0.75 * trials


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
    """Of groups of ten observed rows in one histogram: how many end at the value of a row, and how many there are."""
    draws = torch.Generator().manual_seed(seed)
    y = (140 + 20 * torch.randn(ROWS, generator=draws, dtype=torch.float64)).round(decimals=2)
    data = ft.data.from_tensors([(torch.ones(ROWS, 1).double(), y)])
    make = lambda: ft.ep(linear(normal(1, random=[], sd=500.0), noise=20.0))
    host = Loopback(offers(data, make, sites=1, policy=Policy(after_fit=("checks",))), None)
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    run.step()
    sent = {"phi": torch.full((8, 1), 140.0).double(), "key": ft.random.key(0), "edges": edges}
    told = run.clients.ask(run.outbox, "histogram", sent, {})
    seen = torch.stack([told[:, 0], told[:, 1:].mean(1)], 1)
    starts = [0, *((seen[1:] != seen[:-1]).any(1).nonzero()[:, 0] + 1).tolist()]
    ends, values, right, tried = [*starts[1:], len(seen)], set(y.tolist()), 0, 0
    for start, end in list(zip(starts, ends, strict=True))[:-1]:
        if abs(float(seen[start:end, 0].sum()) - 10) < 1e-6 < float(seen[start:end, 1].sum()) - 10:
            right, tried = right + (round(float(edges[end - 1]) - 0.005, 2) in values), tried + 1
    return right, tried


def test_bins_of_a_histogram_end_at_no_rows_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine bins, of which a site joined neighbours until they had ten rows, and so told the value of the tenth."""
    edges = torch.arange(8_000, 20_000, dtype=torch.float64) / 100 + 0.005
    assert sum(ends_at_rows(edges, seed)[0] for seed in range(3)) <= 1  # a group may end at a row's value by chance
    monkeypatch.setattr(checks, "joined", greedy)
    right, tried = (sum(each) for each in zip(*(ends_at_rows(edges, seed) for seed in range(3)), strict=True))
    # A group with ten observed rows may also end where the last of its replicated columns, drawn anew, reaches ten.
    assert tried >= 8
    assert right >= 0.75 * tried


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
