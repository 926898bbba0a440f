"""Whoever reads what a site of one person says has the person's row; a site that holds to `minimum` says nothing then.

Each attack reads real frames, as a server would, and is one of those that a run's disclosure speaks of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import sgd
from support.sites import offers
from torch import Tensor

import fedtorch as ft
from fedtorch import exact
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.gibbs import graphical, imputation, sparse
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
