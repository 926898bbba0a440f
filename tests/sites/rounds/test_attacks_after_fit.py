"""What a server that composes questions reads of a site that answers them, and what the site's rules hold back still.

Answers after a fit are exact sums over `minimum` rows at parameters that the server chooses: where the policy names the
question, each attack here reads single rows of two hundred. Without a name in `after_fit=`, the default, nothing is
answered. Where bins end, and which clients a log is a mean of, is held back in either case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from support.loopback import Clock, Loopback
from support.oracles import closed_forms
from support.sites import offers
from torch import Tensor

import fedtorch as ft
from fedtorch.inference import checks
from fedtorch.inference.questions import QUESTIONS
from fedtorch.models.hierarchical import generalised, linear, normal
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import site as meeting_site, sites as meeting
from fedtorch.sites.rounds._behind import Behind

PEOPLE, ROWS = 80, 200
EVERY = Policy(after_fit=("effects", "densities", "margins", "checks"))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, same_secret: None) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def chance(right: int, trials: int) -> bool:
    """Whether a coin is right as often, but for once in ten thousand times."""
    low, high = binom.interval(0.9999, trials, 0.5)
    return bool(low <= right <= high)


def hosted(x: Tensor, y: Tensor, make: Callable[[], ft.Algorithm], policy: Policy) -> ft.Run:
    """A run over one site, after a round."""
    data = ft.data.from_tensors([(x, y)])
    host = Loopback(offers(data, make, sites=1, policy=policy), None)
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    run.step()
    return run


def asked(run: ft.Run, question: str, sent: dict[str, Tensor] | None = None, **about: Any) -> Any:
    """What the site tells of what it is sent."""
    more = {} if sent is None else {**sent, "key": ft.random.key(0)}
    return run.clients.ask(run.outbox, QUESTIONS[question], more, about)


def normals(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- questions that read rows ------------------------------------------------------------------------------------------


def by_slabs(policy: Policy, seed: int) -> int:
    """How many of eighty people, whose age and body mass index are known, are guessed right to be there or not.

    At a draw of large coefficients a sum of changes of the mean response counts the rows in a thin slab of the columns'
    space. With a slab through each person one question tells who is there.
    """
    people, angle = normals(seed, PEOPLE, 2), 6.28 * normals(seed + 100, PEOPLE)
    there = normals(seed + 200, PEOPLE) > 0
    own = torch.cat([people[there], normals(seed + 300, ROWS - int(there.sum()), 2)])
    x, y = torch.cat([torch.ones(ROWS, 1).double(), own], 1), (normals(seed + 400, ROWS) < own[:, 0]).double()
    run = hosted(x, y, lambda: ft.ep(generalised.logistic(normal(3, random=[]))), policy)
    slope = 1e5 * torch.stack([angle.cos(), angle.sin()], 1)
    phi = torch.cat([-(slope * people).sum(1, keepdim=True), slope], 1)
    told = asked(run, "effects", {"phi": phi}, kinds={"1": "number"})["total"][:, 0].abs()
    step = 1e-4  # of a derivative, in sds, which are nearly 1
    added = (slope[:, 0].abs() * step / 2).tanh() / (2 * step)  # by who is in the middle of a slab
    return int(((told > added / 2) == there).sum())


def by_a_level(policy: Policy, seed: int) -> float:
    """How far from the truth the response is that is read of the one row that has a level."""
    x, y = torch.ones(ROWS, 2).double(), normals(seed, ROWS)
    x[1:, 1] = 0.0
    run = hosted(x, y, lambda: ft.ep(linear(normal(2, random=[], sd=1e4), noise=1.0)), policy)
    return float((asked(run, "coefficients").means[0, 0].sum() - y[0]).abs())


def by_a_density(policy: Policy, seed: int) -> bool:
    """Whether it is guessed right if one row has a level, by parameters that are far off for who has it."""
    x, there = torch.ones(ROWS, 2).double(), bool(normals(seed, 1) > 0)
    x[int(there) :, 1] = 0.0
    run = hosted(x, normals(seed + 100, ROWS), lambda: ft.ep(linear(normal(2, random=[]), noise=1.0)), policy)
    phi = torch.tensor([0.0, 1e4]).double().expand(2, 2)
    return bool(asked(run, "densities", {"phi": phi.clone()}, method="waic")["elpd"][0] < -1e6) == there


def by_thresholds(policy: Policy, seed: int, place: int = 60) -> float:
    """How far from the truth a response is, of which is known that so many are smaller.

    A histogram of two bins counts the rows on both sides of an edge. The server halves where the edge is, and chooses
    draws of which half are on either side, so that the site does not join the bins.
    """
    y = normals(seed, ROWS)
    run = hosted(torch.ones(ROWS, 1).double(), y, lambda: ft.ep(linear(normal(1, random=[]), noise=1.0)), policy)
    low, high = -1.0, 1.0
    for _ in range(40):
        edge = (low + high) / 2
        phi, edges = torch.tensor([[edge - 99.0], [edge + 99.0]]), torch.tensor([edge], dtype=torch.float64)
        told = asked(run, "histogram", {"phi": phi.double(), "edges": edges})
        low, high = (edge, high) if float(told[0, 0]) <= place else (low, edge)
    return float((y.sort().values[place] - (low + high) / 2).abs())


ATTACKS: dict[str, Callable[[Policy, int], float]] = {
    "margins": by_slabs,
    "effects": by_a_level,
    "densities": by_a_density,
    "checks": by_thresholds,
}


@pytest.mark.parametrize("what", ATTACKS)
def test_a_question_that_the_default_policy_does_not_name_is_refused(what: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"allow it by Policy\(after_fit=\('{what}',\)\), only for a server that is"
    ):
        ATTACKS[what](Policy(), 0)


def test_one_question_at_a_slab_for_each_person_tells_who_is_there() -> None:
    assert sum(by_slabs(EVERY, seed) for seed in range(3)) >= 0.95 * 3 * PEOPLE  # some others stand in a slab, too


def test_a_row_that_determines_a_coefficient_is_read() -> None:
    assert max(by_a_level(EVERY, seed) for seed in range(3)) < 1e-6


def test_parameters_that_are_far_off_for_one_row_tell_whether_it_is_there() -> None:
    assert all(by_a_density(EVERY, seed) for seed in range(10))


def test_a_response_is_read_by_halving_an_edge() -> None:
    assert max(by_thresholds(EVERY, seed) for seed in range(3)) < 1e-9


def by_scores(seed: int, offered: bool = True) -> bool:
    """Whether it is guessed right if one of two hundred rows has a level, by a model that is far off for who has it."""
    level, y = torch.zeros(ROWS, 1), normals(seed, ROWS).float()
    level[0] = float(there := bool(normals(seed + 100, 1) > 0))
    data, metrics = ft.data.from_tensors([(level, y)]), {"mse": torch.nn.functional.mse_loss}
    make = lambda: ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1, bias=False)))
    site = offers(data, make, sites=1, policy=Policy())["a"]
    brought = {"a": dataclasses.replace(site, validation=data, metrics=metrics if offered else {})}
    run = ft.Run(make(), Remote(Loopback(brought, None), ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    run.server = {"weight": torch.full((1, 1), 1e4)}
    return (run.evaluate(run.population.validation, metrics)["mse"].overall > 1e5) == there


def test_scores_tell_whether_a_row_is_there_and_only_offered_ones_are_answered() -> None:
    assert all(by_scores(seed) for seed in range(10))
    with pytest.raises(RuntimeError, match=r"the site has validation rows for \[\], not for \['mse'\]"):
        by_scores(0, offered=False)


# -- where bins end ----------------------------------------------------------------------------------------------------


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
    make = lambda: ft.ep(linear(normal(1, random=[], sd=500.0), noise=20.0))
    run = hosted(torch.ones(ROWS, 1).double(), y, make, EVERY)
    told = asked(run, "histogram", {"phi": torch.full((8, 1), 140.0).double(), "edges": edges})
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
