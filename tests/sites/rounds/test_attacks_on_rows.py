"""Whoever reads what a site of one person says has the person's row; a site that holds to `minimum` says nothing then.

Each attack reads real frames, as a server would, and is one of those that a run's disclosure speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from safetensors.torch import load
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import sgd
from support.sites import offers
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.models import gaussian, hierarchical
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.trust import attacks

Said = list[tuple[str, Mapping[str, Tensor]]]  # site, the tensors of a frame


def people(rows: int) -> ft.data.FederatedData:
    """Three sites' clients, one each: a constant, an age and a sex."""
    draws, parts = torch.Generator().manual_seed(3), []
    for _ in range(3):
        age = 20 + 60 * torch.rand(rows, 1, generator=draws, dtype=torch.float64)
        sex = (torch.rand(rows, 1, generator=draws, dtype=torch.float64) < 0.5).double()
        y = torch.randn(rows, generator=draws, dtype=torch.float64)
        parts.append((torch.cat([torch.ones_like(age), age, sex], 1), y))
    return ft.data.from_tensors(parts)


def listen(
    said: Said, make: Callable[[], ft.Algorithm], data: ft.data.FederatedData, policy: Policy, rounds: int
) -> None:
    """Add what three sites of one client each say to a list, also before a refusal ends the run."""
    host = Loopback(offers(data, make, policy=policy), None)

    def after(name: str, payload: bytes) -> bytes:
        frame = frames.read(payload, name)
        if frame.payload:
            said.append((name, {n: t for n, t in load(frame.payload).items() if not n.startswith("__")}))
        return payload

    host.after = after
    run = ft.Run(make(), Remote(host, list(host.brought), "it", rows=data.rows))
    for _ in run.rounds(rounds):
        pass


def of_a_change(said: Mapping[str, Tensor]) -> Tensor | None:
    """Return the row of which a linear model's step tells (1, 3) and its multiple."""
    if "partial.change.value.weight" not in said:
        return None
    return attacks.linear_inputs(said["partial.change.value.weight"], said["partial.change.value.bias"])[0]


def of_a_site(said: Mapping[str, Tensor]) -> Tensor | None:
    """Return the row whose products the precision of an approximate likelihood is made of."""
    if "partial.told.value.site.precision" not in said:
        return None
    precision = gaussian.unpack(said["partial.told.value.site.precision"])[0, :3]
    return precision / precision[0] if precision[0] != 0 else None


ATTACKS = {
    "averaging": (lambda: ft.fedavg(sgd(1e-4, steps=1)), of_a_change, 1),
    "expectation propagation": (lambda: ft.ep(hierarchical.linear(hierarchical.normal(3))), of_a_site, 2),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_site_that_is_one_person_tells_the_row_where_its_policy_allows_it(name: str) -> None:
    make, attack, rounds = ATTACKS[name]
    data, said = people(1), list[tuple[str, Mapping[str, Tensor]]]()
    listen(said, make, data, Policy(minimum=1), rounds)
    guesses = {site: guess for site, tensors in said if (guess := attack(tensors)) is not None}
    for site, (x, _) in zip("abc", data, strict=True):
        torch.testing.assert_close(guesses[site], x[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_site_of_fewer_rows_than_its_minimum_says_nothing_of_them(name: str) -> None:
    make, _, rounds = ATTACKS[name]
    said: Said = []
    with pytest.raises(RuntimeError, match="answers"):
        listen(said, make, people(1), Policy(), rounds)
    assert not any(tensors for _, tensors in said)


# -- near a fixed point ------------------------------------------------------------------------------------------------


def wards_and_patients(patients: int) -> ft.data.FederatedData:
    """A site's clients: three wards of twenty rows, and patients of one: a constant, an age and a sex."""
    draws, parts = torch.Generator().manual_seed(5), []
    for rows in [20] * 3 + [1] * patients:
        age = 20 + 60 * torch.rand(rows, 1, generator=draws, dtype=torch.float64)
        sex = (torch.rand(rows, 1, generator=draws, dtype=torch.float64) < 0.5).double()
        y = age[:, 0] / 10 + torch.randn(rows, generator=draws, dtype=torch.float64)
        parts.append((torch.cat([torch.ones_like(age), (age - 50) / 10, sex], 1), y))
    return ft.data.from_tensors(parts)


def guessed(policy: Policy, patients: int) -> tuple[Tensor, Tensor, list[int]]:
    """(each patient's age, what a server guesses that asks them one by one near the fixed point, who answered then)."""
    data, said = wards_and_patients(patients), list[Mapping[str, Tensor]]()
    make = lambda: ft.ep(hierarchical.linear(hierarchical.normal(3), noise=1.0))
    host = Loopback(offers(data, make, sites=1, policy=policy), None)
    host.after = lambda name, reply: said.append(load(reply)) or reply
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows), cohort=[0, 1, 2])
    for _ in run.rounds(15):  # until what the wards tell changes no more
        pass
    guesses, answered, rest = [], [], tree.to(run.server, copy=True)
    for patient in range(3, len(data)):
        run.server = tree.to(rest, copy=True)
        run._draw = lambda key, number, patient=patient: torch.tensor([0, 1, 2, patient])
        answered.append(len(run.step().ids))
        row = of_a_site(said[-1])
        guesses.append(0.0 if row is None else float(row[1]))
    return torch.cat([data[k][0][:, 1] for k in range(3, len(data))]), torch.tensor(guesses).double(), answered


def test_patients_who_come_one_by_one_to_a_total_at_rest_tell_their_ages() -> None:
    """A total leaves as its change, and where nothing else changes, that is what one patient tells."""
    ages, guesses, answered = guessed(Policy(minimum=1), 16)
    assert set(answered) == {4}
    torch.testing.assert_close(guesses, ages, rtol=0, atol=0.01)  # of ten years: a month


def test_patients_who_come_one_by_one_wait_for_others_and_their_ages_are_guessed_by_chance() -> None:
    ages, guesses, answered = guessed(Policy(), 16)
    assert set(answered) == {3}
    together = torch.corrcoef(torch.stack([ages, guesses]))[0, 1]
    assert not float(together.abs()) > 2 / 16**0.5  # two standard errors; NaN where all guesses are the same
