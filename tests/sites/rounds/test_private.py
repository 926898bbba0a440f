"""Noise that is added at sites, and what a site's own policy counts of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import distance, linear, linear_clients, sgd
from support.sites import Carried, carry_of, offers

import fedtorch as ft
from fedtorch.models.linear import LinearHead
from fedtorch.models.matrix_normal import inverse_wishart
from fedtorch.sites import Policy, Remote
from fedtorch.sites.rounds import sites as meeting
from fedtorch.sites.secure.masked import masked
from fedtorch.trust import privacy, secure

D, DELTA = 300, 1e-3
DATA = linear_clients([8, 3, 12, 5, 9, 7], features=3)
WIDE = linear_clients([8, 3, 12, 5, 9, 7], features=D)
NETWORK = ft.Network.ring(6)
GRID = secure.Grid(30, 2.0**20)
FEW = Policy(minimum=1)  # rows


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def on_sites(make: Callable[[], ft.Algorithm], data: Any = DATA, policy: Policy = FEW, **more: Any) -> ft.Run:
    host = Loopback(offers(data, make, policy=policy), None, certified().identities)
    settings = {"seconds": 0.05, "quorum": 1.0, "roster": certified().roster, "rows": data.rows, **more}
    return ft.Run(make(), Remote(host, ["a", "b", "c"], "it", carry=carry_of(make), **settings), seed=3)


class Ledgers:
    """A file for whoever builds an algorithm: the server first, then each site its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()

    def next(self) -> Path:
        return self.folder / f"{next(self.numbers)}.ledger"


def clients(ledgers: Ledgers, noise: float = 2.0, rate: float = 0.0, **more: Any) -> ft.Algorithm:
    settings = {"clip": 0.5, "delta": DELTA, "ledger": ledgers.next(), **more}
    return ft.fedavg(sgd(rate, linear(D))) | privacy.local_level(noise=noise, **settings)


def several(ledgers: Ledgers, noise: float = 2.0) -> ft.Algorithm:
    plain = ft.fedavg(sgd(0.0, linear(D)))
    return plain | privacy.local_level(0.5, noise, delta=DELTA, quorum=3, ledger=ledgers.next())


quorum = Carried(several, masked(GRID, dropouts=0))


def server(ledgers: Ledgers) -> ft.Algorithm:
    return ft.fedavg(sgd(0.1, linear(D))) | privacy.client_level(1.0, 2.0, delta=DELTA, ledger=ledgers.next())


@pytest.mark.parametrize(("make", "count"), [(clients, 1), (quorum, 3)])
def test_noise_is_added_at_sites_and_counted_there(make: Any, count: int, tmp_path: Path) -> None:
    """Six clients that send zeros: what the server hears is noise of √(6 / count) times what their ledgers count."""
    ledgers = Ledgers(tmp_path)
    run = on_sites(Carried(lambda: make(ledgers), carry_of(make)), WIDE, Policy(epsilon=4.0, honest=count, minimum=1))
    before = {name: leaf.clone() for name, leaf in run.server.items()}
    run.step()
    unit = 6 * torch.cat([(run.server[name] - before[name]).flatten() for name in before]) / math.sqrt(6 / count)
    assert float(unit.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * len(unit)))
    epsilon = privacy.epsilon(noise=2.0, rounds=1, delta=DELTA)
    sites = run.population.plan.sites.host.sites.values()
    assert [site._session.algorithm.budget.report()["epsilon"] for site in sites] == pytest.approx([epsilon] * 3)
    with pytest.raises(RuntimeError, match="spends no more than epsilon"):
        [run.step() for _ in range(20)]


def node_level(ledgers: Ledgers) -> ft.Algorithm:
    gtv = ft.gtv(sgd(0.05), NETWORK, 0.1)
    return gtv | privacy.node_level(clip=1e3, noise=1e-12, delta=DELTA, ledger=ledgers.next())


def hm1(ledgers: Ledgers, noise: float = 2.0) -> ft.Algorithm:
    local = privacy.sufficient_statistics(
        LinearHead(3, dtype=torch.float64), clip_features=1.0, clip_targets=1.0, noise=noise, delta=DELTA,
        ledger=ledgers.next(),
    )  # fmt: skip
    return ft.matrix_normal(local, covariance=inverse_wishart(alpha=0.7))


def test_nodes_add_their_noise_at_sites(tmp_path: Path) -> None:
    """So little that numbers are those without."""
    ledgers = Ledgers(tmp_path)
    run = on_sites(lambda: node_level(ledgers))
    [run.step() for _ in range(3)]
    plain = ft.run(ft.gtv(sgd(0.05), NETWORK, 0.1), ft.InProcess(DATA), rounds=3, seed=3)
    assert distance(run.server.total, plain.server.total) < 1e-5  # clips are cut by 2⁻²⁰ of what they let through


def test_rows_of_their_own_are_noised_once_at_sites(tmp_path: Path) -> None:
    """HM1 on sums that are private: one release, whatever the rounds, and the limit of a site is above it."""
    ledgers = Ledgers(tmp_path)
    once = privacy.epsilon(noise=2.0, rounds=1, delta=DELTA)
    run = on_sites(lambda: hm1(ledgers), policy=Policy(epsilon=1.01 * once, minimum=1))
    [run.step() for _ in range(4)]
    sites = run.population.plan.sites.host.sites.values()
    assert [site._session.algorithm.budget.report()["epsilon"] for site in sites] == pytest.approx([once] * 3)
    with pytest.raises(RuntimeError, match="is spent"):
        on_sites(lambda: hm1(ledgers), policy=Policy(epsilon=0.99 * once, minimum=1)).step()


@pytest.mark.parametrize(
    ("make", "policy", "counts"),
    [
        (server, Policy(epsilon=1e3, honest=9, minimum=1), False),
        (lambda ledgers: clients(ledgers, ledger=None), Policy(epsilon=1e3, minimum=1), False),
        (lambda ledgers: clients(ledgers, entropy=privacy.from_seed(0)), Policy(epsilon=1e3, minimum=1), False),
        (lambda ledgers: ft.fedavg(sgd(0.1, linear(D))), Policy(epsilon=1e3, minimum=1), False),
        (quorum, Policy(epsilon=1e3, honest=2, minimum=1), False),
        (quorum, Policy(epsilon=1e3, honest=3, minimum=1), True),
        (clients, Policy(epsilon=1e3, minimum=1), True),
    ],
    ids=["the server's", "not written down", "of a seed", "none", "more than are honest", "a quorum's", "their own"],
)  # fmt: skip
def test_what_a_site_counts_as_noise(make: Any, policy: Policy, counts: bool, tmp_path: Path) -> None:
    ledgers = Ledgers(tmp_path)
    run = on_sites(Carried(lambda: make(ledgers), carry_of(make)), WIDE, policy)
    if counts:
        assert run.step().ids.tolist() == list(range(6))
    else:
        with pytest.raises(RuntimeError, match="noise of a server does not count, nor noise that more than"):
            run.step()


def test_a_server_that_asks_on_spends_nothing_more(tmp_path: Path) -> None:
    """Once the limit is reached a ledger does not grow, however often the server asks."""
    ledgers = Ledgers(tmp_path)
    run = on_sites(lambda: clients(ledgers), WIDE, Policy(epsilon=3.0, minimum=1))
    with pytest.raises(RuntimeError, match="spends no more than epsilon"):
        [run.step() for _ in range(50)]
    budget = next(iter(run.population.plan.sites.host.sites.values()))._session.algorithm.budget
    spent = budget.ledger.entries
    for _ in range(3):
        with pytest.raises(RuntimeError, match="is spent"):
            run.step()
    assert budget.ledger.entries == spent
