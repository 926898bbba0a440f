"""Whoever reads what a site of one person says has the person's row; a site that holds to `minimum` says nothing then.

Each attack reads real frames, as a server would, and is one of those that a run's disclosure speaks of. How often a
guess is right where noise, masks or `minimum` protect a person is counted in `test_attacks_at_chance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear, sgd
from support.sites import Carried, carry_of, offers
from test_conformance import ALGORITHMS, STARTS, population
from torch import Tensor

import fedtorch as ft
from fedtorch import exact, tree
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.gibbs import graphical, imputation, sparse
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.secure import ExactSums, Grid
from fedtorch.sites.secure.masked import masked
from fedtorch.trust import attacks, privacy

ROOT = Path(__file__).parents[3]
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
    said: Said,
    make: Callable[[], ft.Algorithm],
    data: ft.data.FederatedData,
    policy: Policy,
    rounds: int,
    start: Any = None,
) -> ft.Run:
    """Add what three sites of one client each say to a list, also before a refusal ends the run."""
    carry, masks = carry_of(make), carry_of(make).masks is not None
    host = Loopback(offers(data, make, policy=policy), None, certified().identities if masks else None)

    def after(name: str, payload: bytes) -> bytes:
        frame = frames.read(payload, name)
        if frame.payload:
            said.append((name, {n: t for n, t in load(frame.payload).items() if not n.startswith("__")}))
        return payload

    host.after = after
    roster: dict[str, Any] = {"roster": certified().roster, "quorum": 1.0, "seconds": 0.2} if masks else {}
    run = ft.Run(make(), Remote(host, list(host.brought), "it", rows=data.rows, carry=carry, **roster), start)
    for _ in run.rounds(rounds):
        pass
    return run


Frame = Mapping[str, Tensor]
Attack = Callable[[Frame], Tensor | None]


def of_a_change(said: Frame) -> Tensor | None:
    """Return the row of which a linear model's step tells (1, 3) and its multiple."""
    if "partial.change.value.weight" not in said:
        return None
    return attacks.linear_inputs(said["partial.change.value.weight"], said["partial.change.value.bias"])[0]


def of_a_control(said: Frame) -> Tensor | None:
    """Return the row of which a control variate is the gradient, of the first round."""
    bias = said.get("partial.told.value.weighted.bias")
    if bias is None or said["partial.told.value.clients"] != 1:
        return None
    return attacks.linear_inputs(said["partial.told.value.weighted.weight"], bias)[0]


def of_a_site(said: Frame) -> Tensor | None:
    """Return the row whose products the precision of an approximate likelihood is made of."""
    if "partial.told.value.site.precision" not in said:
        return None
    precision = gaussian.unpack(said["partial.told.value.site.precision"])[0, :3]
    return precision / precision[0] if precision[0] != 0 else None


def of_exact_products(said: Frame) -> Tensor | None:
    """Return the row of which exact sums have products with each other, in limbs."""
    if "partial.told.value.information" not in said or said["partial.told.value.clients"][0].count_nonzero() == 0:
        return None
    products = gaussian.unpack(exact.value(said["partial.told.value.information"][0]))[0]
    return products / products[0]


def along(field: str) -> Attack:
    """Return the attack on numbers that are a multiple of the row, whose first number is one."""

    def attack(said: Frame) -> Tensor | None:
        found = said.get(field)
        return None if found is None or found.flatten()[0] == 0 else found.flatten() / found.flatten()[0]

    return attack


def of_moments(said: Frame) -> Tensor | None:
    """Return the row whose columns' means are told, but for the response."""
    mean = said.get("partial.value.mean")
    return None if mean is None or mean[0] != 1 else mean[:3]


def of_densities(said: Frame) -> Tensor | None:
    """Return the sizes of a row's numbers, from how likely each is by itself: 1 / (1 + |x|)²."""
    constant = said.get("partial.value.constant")
    return None if constant is None else (-constant[:, 0, 0] / 2).exp() - 1


def of_vectors(said: Frame) -> Tensor | None:
    """Return a node's own means of columns, which it tells its neighbours."""
    vectors = next((leaf for name, leaf in said.items() if name.endswith("vectors")), None)
    return None if vectors is None else vectors.reshape(-1, vectors.shape[-1]).sum(0)[:3]


def incomplete(data: ft.data.FederatedData) -> ft.data.FederatedData:
    return imputation.incomplete(list(data))


def started(algorithm: ft.Algorithm, start: Any) -> ft.Algorithm:
    return dataclasses.replace(algorithm, start=start)


NORMAL = imputation.Normal(torch.zeros(4).double(), torch.eye(4).double())
LINEAR = hierarchical.linear(hierarchical.normal(3))
Data = Callable[[ft.data.FederatedData], ft.data.FederatedData]
PLAIN: Data = lambda data: data
ATTACKS: dict[str, tuple[Callable[[], ft.Algorithm], Attack, int, Data]] = {
    "averaging": (lambda: ft.fedavg(sgd(1e-4, steps=1)), of_a_change, 1, PLAIN),
    "control variates": (lambda: ft.scaffold(sgd(1e-4, steps=1)), of_a_control, 1, PLAIN),
    "expectation propagation": (lambda: ft.ep(LINEAR), of_a_site, 2, PLAIN),
    "maximum likelihood": (lambda: ft.maximum_likelihood(LINEAR), along("partial.summary.value.mean"), 1, PLAIN),
    "HM1": (
        lambda: ft.matrix_normal(ft.least_squares(ft.LinearHead(3, intercept=False, dtype=torch.float64)), noise=1.0),
        along("partial.message.parameters.value"),
        1,
        PLAIN,
    ),
    "Gibbs sampling": (
        lambda: started(ft.gibbs(sparse.regression(), sparse.hierarchy()), torch.zeros(3).double()),
        of_exact_products,
        1,
        PLAIN,
    ),
    "normal EM": (lambda: started(ft.normal_em(), NORMAL), of_moments, 1, incomplete),
    "acyclic graphs": (
        lambda: started(ft.acyclic_graphs(1, spreads=(0.2,)), graphical.start(3)),
        of_densities,
        1,
        lambda data: data.map(lambda rows: rows[0]),
    ),
    "neighbour search": (
        lambda: ft.neighbour_search(ft.Network.ring(3), k=1, width=4, relay=1),
        of_vectors,
        1,
        PLAIN,
    ),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_site_that_is_one_person_tells_the_row_where_its_policy_allows_it(name: str) -> None:
    make, attack, rounds, form = ATTACKS[name]
    data, said = people(1), list[tuple[str, Frame]]()
    listen(said, make, form(data), Policy(minimum=1), rounds)
    guesses = {site: guess for site, tensors in said if (guess := attack(tensors)) is not None}
    for site, (x, _) in zip("abc", data, strict=True):
        torch.testing.assert_close(guesses[site], x[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_site_of_fewer_rows_than_its_minimum_says_nothing_of_them(name: str) -> None:
    make, _, rounds, form = ATTACKS[name]
    said: Said = []
    with pytest.raises(RuntimeError, match="answers"):
        listen(said, make, form(people(1)), Policy(), rounds)
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
    data = host.sites["a"].configuration.data  # in the order of the pseudonyms, where there are some
    wards, alone = ((data.counts > 1).nonzero()[:, 0], (data.counts == 1).nonzero()[:, 0])
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows), cohort=wards.tolist())
    for _ in run.rounds(15):  # until what the wards tell changes no more
        pass
    guesses, answered, rest = [], [], tree.to(run.server, copy=True)
    for patient in alone:
        run.server = tree.to(rest, copy=True)
        run._draw = lambda key, number, patient=patient: torch.cat([wards, patient[None]]).sort().values
        answered.append(len(run.step().ids))
        row = of_a_site(said[-1])
        guesses.append(0.0 if row is None else float(row[1]))
    return torch.cat([data[int(k)][0][:, 1] for k in alone]), torch.tensor(guesses).double(), answered


def test_patients_who_come_one_by_one_to_a_total_at_rest_tell_their_ages() -> None:
    """A total leaves as its change, and where nothing else changes, that is what one patient tells."""
    ages, guesses, answered = guessed(Policy(minimum=1), 16)
    assert set(answered) == {4}
    torch.testing.assert_close(guesses, ages, rtol=0, atol=0.01)  # of ten years: a month


@pytest.mark.usefixtures("same_secret")
def test_patients_who_come_one_by_one_wait_for_others_and_their_ages_are_guessed_by_chance() -> None:
    ages, guesses, answered = guessed(Policy(), 16)
    assert set(answered) == {3}
    together = torch.corrcoef(torch.stack([ages, guesses]))[0, 1]
    assert not float(together.abs()) > 2 / 16**0.5  # two standard errors; NaN where all guesses are the same


ADDED_UP = ["averaging", "control variates", "expectation propagation", "Gibbs sampling", "normal EM"]


@pytest.mark.parametrize("name", ADDED_UP)
def test_under_masks_no_frame_has_what_the_attack_reads(name: str) -> None:
    """Frames have keys and signed words; that these are drawn anew, whatever the message, is a test of masks."""
    make, attack, rounds, form = ATTACKS[name]
    grid, data = ExactSums() if name == "Gibbs sampling" else Grid(12, 2.0**40), people(1)
    said: Said = []
    listen(said, Carried(make, masked(grid, dropouts=0)), form(data), Policy(minimum=1), rounds)
    assert {field for _, tensors in said for field in tensors} == {"keys", "said", "partial.said"}
    assert all(attack(tensors) is None for _, tensors in said)
    sent = b"".join(leaf.numpy().tobytes() for _, tensors in said for leaf in tensors.values())
    assert not any(age.numpy().tobytes() in sent for age in torch.cat([x[:, 1] for x, _ in data]))


def products_of_models(make: Callable[[], ft.Algorithm], data: ft.data.FederatedData) -> Tensor:
    """Return X'X / n of the first site's client under FedProx with μ = 1, by its exact solutions from d + 1 starts."""
    points = torch.cat([torch.zeros(1, 3), torch.eye(3)]).double()
    told = []
    for point in points:
        said: Said = []
        listen(said, make, data, Policy(), 1, {"weight": point[None]})
        frame = next(f for site, f in said if site == "a" and "partial.change.value.weight" in f)
        told.append(point + frame["partial.change.value.weight"][0] / frame["partial.change.weight"])
    slope = torch.stack(told[1:]) - told[0]  # row j is M e_j, M = (2 X'X / n + 1)^-1
    return (torch.linalg.inv(slope) - torch.eye(3).double()) / 2


def test_exact_solutions_from_several_starts_are_the_products_of_columns_unless_they_have_noise() -> None:
    """Of thirty rows for three features, which a site's minimum of ten allows."""
    data = people(30).map(lambda rows: (rows[0] / rows[0].new_tensor([1.0, 50.0, 1.0]), rows[1]))
    x = data[0][0]
    plain = lambda: ft.fedprox(ft.least_squares(linear(3, bias=False)), 1.0)
    noised = lambda: plain() | privacy.local_level(clip=1.0, noise=2.0, delta=1e-3)
    wanted = x.T @ x / len(x)
    error = lambda make: float((products_of_models(make, data) - wanted).norm() / wanted.norm())
    assert error(plain) < 1e-9
    assert error(noised) > 0.3  # as far as another site's are, at least


def test_a_loss_tells_whose_row_a_site_has_and_masks_hold_it_back() -> None:
    """Of a hundred and three people whose rows are known, each site's is the one whose loss it tells."""
    data, make = people(1), lambda: ft.fedavg(sgd(1e-4, steps=1))
    x, y = (torch.cat([rows[k] for rows in [*data, *people(50), *people(50)][: 3 + 2]]) for k in range(2))
    module, said = linear(), list[tuple[str, Frame]]()
    listen(said, make, data, Policy(minimum=1), 1)
    losses = {site: float(tensors["info.loss"]) for site, tensors in said if "info.loss" in tensors}
    known = (module(x)[:, 0].detach() - y).square()
    assert [int((known - losses[site]).abs().argmin()) for site in "abc"] == [0, 1, 2]
    hidden: Said = []
    listen(hidden, Carried(make, masked(Grid(12, 2.0**40), dropouts=0)), data, Policy(minimum=1), 1)
    assert hidden
    assert not any("loss" in field for _, tensors in hidden for field in tensors)


def test_a_weight_is_the_number_of_rows_and_masks_hold_it_back() -> None:
    make, said, hidden = (lambda: ft.fedavg(sgd(1e-4, steps=1))), list[tuple[str, Frame]](), list[tuple[str, Frame]]()
    listen(said, make, people(17), Policy(), 1)
    assert {float(f["partial.change.weight"]) for _, f in said if "partial.change.weight" in f} == {17.0}
    listen(hidden, Carried(make, masked(Grid(12, 2.0**40), dropouts=0)), people(17), Policy(), 1)
    assert hidden
    assert not any("weight" in field for _, tensors in hidden for field in tensors)


TRUST = "tests/trust/attacks/"
HERE = "tests/sites/rounds/test_attacks_on_rows.py::"
CHANCE = "tests/sites/rounds/test_attacks_at_chance.py::"
ONE_PERSON = f"{CHANCE}test_a_site_of_one_person_is_read_and_by_default_says_nothing"
TOLD = f"{HERE}test_a_site_that_is_one_person_tells_the_row_where_its_policy_allows_it"
EVIDENCE = {  # of what is told at worst, by its beginning
    "membership of rows; with one step": TOLD,
    "the likelihood of a client near the posterior": TOLD,
    "the likelihood of a client at points": TOLD,
    "the fit of a device": TOLD,
    "exact sums over a client's rows": TOLD,
    "means and products of a client's columns": TOLD,
    "sums of products of all columns of a site": TOLD,
    "the numbers by which nodes are compared": TOLD,
    "the outputs of a unit with no more rows than inducing values": ONE_PERSON,
    "the losses and what a module logs": f"{HERE}test_a_loss_tells_whose_row_a_site_has_and_masks_hold_it_back",
    "how many rows the client has": f"{HERE}test_a_weight_is_the_number_of_rows_and_masks_hold_it_back",
    "attributes of a node's rows": f"{TRUST}test_neighbour.py::test_a_neighbour_knows_the_local_problem",
    "membership of rows, of predictions": f"{TRUST}test_membership.py::test_an_overfitted_model_tells_its_rows",
}
NO_ATTACK = {  # what says of itself what it tells, or whose attack nobody has written
    "whether a step of the client was left out",
}


def test_every_row_of_the_table_names_an_attack_that_is_there() -> None:
    told = {
        worst
        for name in ALGORITHMS
        for worst in ft.Run(ALGORITHMS[name](), population(name), STARTS.get(name)).disclosure()["learns"]
    }
    begins = {worst: [each for each in EVIDENCE if worst.startswith(each)] for worst in told - NO_ATTACK}
    assert [worst for worst, found in begins.items() if len(found) != 1] == []
    assert told >= NO_ATTACK
    assert {found for each in begins.values() for found in each} == EVIDENCE.keys()
    for test in EVIDENCE.values():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text()
