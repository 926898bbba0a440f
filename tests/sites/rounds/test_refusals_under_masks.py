"""A server that chooses starts, and looks at which of them a site refuses: under masks none, whatever its rows are.

A patient is asked at one site beside all clients of two others. Without the protection the site refuses from the start
on at which the patient's number is beyond the grid, and bisection reads the age.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import sgd
from support.sites import Carried, carry_of, offers
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree
from fedtorch.sites import Policy, Remote, masked
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.rounds.policy import Watch
from fedtorch.sites.secure.grid import ExactSums, Grid, digits_of, largest_of

DEFAULT, PATIENT = (
    Policy(),
    1,
)  # of the clients 0 to 5; 0 and 1 are at one site, which tells them in an order of its own
RATE = 1e-3


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def people(age: float) -> ft.data.FederatedData:
    """Wards of twenty people below 40, and a patient alone."""
    draws = torch.Generator().manual_seed(5)
    ages = [20 + 20 * torch.rand(20, generator=draws, dtype=torch.float64) for _ in range(5)]
    ages.insert(PATIENT, torch.tensor([age], dtype=torch.float64))
    inputs = [torch.stack([torch.ones_like(each), each, torch.zeros_like(each)], 1) for each in ages]
    return ft.data.from_tensors([(x, torch.zeros(len(x), dtype=torch.float64)) for x in inputs])


def averaging() -> ft.Algorithm:
    """Clients count alike, so that a ward's message is its mean's, and a patient's the largest."""
    return ft.fedavg(sgd(RATE, steps=1), weight=lambda data: torch.ones_like(data.count))


class Exponential(nn.Module):
    """A mean response of e^(w · age)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).exp()


def counts() -> ft.Algorithm:
    solver = ft.gradient_descent(
        Exponential(), steps=1, loss=lambda mean, y: (mean[..., 0] - y).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    )  # fmt: skip
    return ft.fedavg(solver, weight=lambda data: torch.ones_like(data.count))


class Attack:
    """Rounds from chosen starts, and what each site says to them."""

    def __init__(self, make: Any, age: float, folder: Path | None = None, policy: Policy = DEFAULT, **carry: Any):
        if carry:
            make = Carried(make, masked(**carry))
        self.make, data = make, people(age)
        self.host = Loopback(offers(data, make, sites=3, policy=policy), folder, certified().identities)
        self.said: list[Any] = []
        self.host.after = self._after
        more = {"roster": certified().roster} if carry else {}
        remote = Remote(
            self.host, list(self.host.brought), "it", rows=data.rows, quorum=1.0, seconds=0.05,
            carry=carry_of(make), **more,
        )  # fmt: skip
        own = self.host.sites[next(iter(self.host.brought))].configuration.data
        cohort = [int(own.counts.argmin()), 2, 3, 4, 5]
        self.run = ft.Run(make(), remote, cohort=cohort if carry else None)
        self.before = tree.to(self.run.server, copy=True)

    def _after(self, name: str, reply: bytes) -> bytes:
        self.said.append((name, frames.read(reply, name)))
        return reply

    def ask(self, weight: float) -> str:
        """Why there is no sum from a start, none where there is one."""
        self.run.server = tree.map(torch.zeros_like, self.before)
        self.run.server["weight"][0, 1] = weight
        self.said.clear()
        try:
            self.run.step()
        except RuntimeError as error:
            return str(error)
        return ""

    @property
    def refused(self) -> bool:
        """Whether a site has."""
        return any(frame.kind == "refusal" for _, frame in self.said)


def bisected(attack: Attack, rounds: int = 24) -> float:
    """An age, from the largest start that a site does not refuse: 2 · RATE · W · age² is the grid's bound there."""
    low, high = 2.0**19 / (RATE * 100.0**2), 2.0**19 / (RATE * 41.0**2)
    for _ in range(rounds):
        middle = (low + high) / 2
        attack.ask(middle)
        low, high = (low, middle) if attack.refused else (middle, high)
    return float((2.0**19 / (RATE * low)) ** 0.5)


ALWAYS = Policy(refusals=10**6)
UNDER_MASKS = {"dropouts": 0}


def test_sites_that_refuse_numbers_beyond_the_grid_tell_a_patient_s_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grid, "total", lambda grid, values, draws, largest, digits=53: grid.encode(values).sum(0))
    for age in (47.0, 81.5):
        assert bisected(Attack(averaging, age, policy=ALWAYS, **UNDER_MASKS)) == pytest.approx(age, abs=1e-3)


def test_no_site_refuses_numbers_beyond_the_grid_and_the_server_finds_that_a_sum_is() -> None:
    """The sum is right wherever it is within the grid, whatever is in it."""
    told = [Attack(averaging, age, policy=Policy(refusals=0), **UNDER_MASKS) for age in (47.0, 81.5)]
    ends = []
    for attack in told:
        for weight in (1.0, 1e3, 1e8, 1e12, 1e50, 1e99):
            ends.append("one beyond the largest of 6 clients" in attack.ask(weight))
            assert not attack.refused
    assert ends[:6] == ends[6:] == [False] * 2 + [True] * 4


def test_no_site_refuses_what_overflows_and_no_frame_says_whose_it_was() -> None:
    """An exponential that overflows of the oldest alone: at the patient's site as at another."""
    seen = []
    for oldest in (PATIENT, 4):
        attack = Attack(counts, 81.5 if oldest == PATIENT else 30.0, **UNDER_MASKS)
        reason = attack.ask(10.0 if oldest == PATIENT else 30.0)
        assert "a message of finite numbers of every client" in reason
        assert not attack.refused
        seen.append([(name, frame.about.get("ids"), frame.about.get("refused")) for name, frame in attack.said])
        assert attack.run.number == 0
    assert seen[0] == seen[1]


def test_a_site_stops_when_so_many_rounds_have_failed_by_its_rows(tmp_path: Path) -> None:
    """Over runs and restarts; the count is in its folder of states."""
    for begun in range(2):
        attack = Attack(counts, 81.5, tmp_path, policy=Policy(refusals=2))
        for weight in (10.0, 11.0) if not begun else ():
            assert attack.ask(weight)
            assert "answers nothing more" not in attack.said[-1][1].about.get("reason", "")
        attack.ask(0.1)
        said = [frame.about.get("reason", "") for name, frame in attack.said if name == "a"]
        assert "2 rounds or questions have failed at the site because of its rows" in said[-1]
        for name in "abc":
            (tmp_path / name / "sums.jsonl").unlink(missing_ok=True)


def whose(age: float) -> list[list[str]]:
    """Which sites refuse, round by round, where a patient of that age overflows and nobody else may."""
    attack, refusing = Attack(counts, age, policy=Policy(refusals=2), **UNDER_MASKS), []
    for number in range(4):
        attack.ask(10.0 + number)
        refusing.append([name for name, frame in attack.said if frame.kind == "refusal"])
    return refusing


def test_a_site_under_masks_that_has_failed_too_often_does_not_say_that_it_was_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says chance from then on, over what it would have added up as well."""
    assert whose(81.5) == [[]] * 4
    failed = Watch.failed
    monkeypatch.setattr(Watch, "failed", lambda watch, hidden=False: failed(watch))
    assert whose(81.5) == [[], [], ["a"], ["a"]]


def test_rounds_under_masks_are_chance_when_so_many_have_failed(tmp_path: Path) -> None:
    """Over runs and restarts, also such as would not fail."""
    chance = "a message of finite numbers of every client"
    for begun in range(2):
        attack = Attack(counts, 81.5, tmp_path, policy=Policy(refusals=2), **UNDER_MASKS)
        if not begun:
            assert attack.ask(0.1) == ""
        for weight in (10.0, 11.0) if not begun else ():
            assert chance in attack.ask(weight)
        assert chance in attack.ask(0.11)
        assert attack.run.number == (not begun)
        for name in "abc":
            (tmp_path / name / "sums.jsonl").unlink(missing_ok=True)


F64 = torch.float64

# -- words -------------------------------------------------------------------------------------------------------------


def chance(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(3)) * 2 + 1


def whole(words: Tensor) -> list[int]:
    return [int(word) % 2**64 for word in words]


def test_words_of_any_numbers_add_up_modulo_the_ring() -> None:
    grid = Grid(24)
    values = torch.tensor([[1.5, -(2.0**70), 2.0**45 + 1, 3e99], [0.25, 2.0**70, -(2.0**45), -1.0]], dtype=F64)
    values = torch.cat([values, torch.tensor([[-(2.0**-24), 0.0, 0.5, 7.0]], dtype=F64)])
    made = grid.total(values, torch.zeros(4, dtype=torch.int64), 0.0)
    assert whole(made) == [sum(round(v * 2**24) for v in column) % 2**64 for column in values.T.tolist()]
    inside = torch.tensor([[3.25, -7.5], [2.0**20, 1e-3]], dtype=F64)
    assert torch.equal(grid.total(inside, chance(2), 2.0**8), grid.encode(inside).sum(0))


def test_the_digits_that_a_number_does_not_have_are_chance() -> None:
    """Else zeros at the end of the sum's words would tell how large the smallest number is, start by start."""
    zeros = lambda word: (int(word) & -int(word)).bit_length() - 1
    starts = torch.tensor([2.0**40, 2.0**44, 2.0**48], dtype=F64)
    values = starts * torch.tensor([[1.1], [1.3], [1.7]], dtype=F64)
    grid = Grid(24)
    assert [zeros(word) for word in grid.total(values, torch.zeros(3, dtype=torch.int64), 0.0)] == [13, 17, 21]
    assert [zeros(word) for word in grid.total(values, chance(3), 0.0)] != [13, 17, 21]
    many = torch.stack([grid.total(values, draws, 0.0) for draws in chance(300).reshape(100, 3)])
    assert all(0.3 < float((column & 1).double().mean()) < 0.7 for column in (many >> 4).T)


def test_the_digits_that_a_number_in_single_precision_does_not_have_are_chance() -> None:
    """Of three numbers, each of which may be any: zeros at the end of the sum's word told the smallest."""
    zeros = lambda word: (int(word) & -int(word)).bit_length() - 1
    sizes = torch.tensor([2.0**4, 2.0**8, 2.0**12])
    values = sizes * torch.tensor([[1.1], [1.3], [1.7]])
    grid, wide = Grid(24), values.to(F64)
    assert all(zeros(word) >= n for word, n in zip(grid.total(wide, chance(3), 0.0), (4, 8, 12), strict=True))
    digits = digits_of({"weight": values})
    many = torch.stack([grid.total(wide, draws, 0.0, digits) for draws in chance(3000).reshape(1000, 3)])
    low, high = binom.interval(0.9999, 1000, 0.5)
    assert all(low <= int((column & 1).sum()) <= high for column in many.T)
    assert bool(((grid.decode(many) - wide.sum(0)).abs() <= sizes * 2.0**-22).all()), "no digit that they have is lost"


def test_noise_below_what_was_sent_covers_the_digits_of_numbers_made_of_it() -> None:
    """So that with rows that are whole numbers, of which sums end in zeros, nothing begins at a number's own size."""
    sent = 2.0**20
    values = sent * torch.tensor([[4.0], [9.0]]).double()
    words = torch.stack([Grid(24).total(values, draw[None], sent) for draw in chance(200)])[:, 0]
    exact = Grid(24).encode(values / 2**10).sum(0) << 10
    assert 0 < float((words - exact).abs().max()) < 2.0**12
    assert float((words & 1).double().mean()) == pytest.approx(0.5, abs=0.2)
    assert largest_of({"w": torch.tensor([-3.0, torch.nan]), "n": torch.tensor(7)}) == 3.0


def test_exact_sums_of_any_limbs_go_around_their_ring() -> None:
    grid, limbs = ExactSums(), torch.zeros(2, 10, dtype=torch.float64)
    limbs[:, -1] = torch.tensor([2.0**20, -(2.0**20)])
    limbs[0, 0] = 5.0
    with pytest.raises(ValueError, match=r"below 2\*\*140"):
        grid.encode(limbs)
    assert whole(grid.total(limbs, torch.zeros(5, dtype=torch.int64), 0.0)) == [5, 0, 0, 0, 0]
    assert not grid.has(torch.full((1, 10), torch.nan))
    assert not grid.within(grid.decode(grid.total(limbs[:1], torch.zeros(5, dtype=torch.int64), 0.0)), 1)
