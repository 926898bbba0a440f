"""Which algorithms run under which `carry=`, in one process and between sites: the table of what is accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear_clients, same_bits, sgd
from support.sites import Carried, offers
from test_conformance import ALGORITHMS

import fedtorch as ft
from fedtorch.sites import Policy, Remote, SiteConfiguration, masked, plain, sealed
from fedtorch.sites.rounds import sites as meeting
from fedtorch.trust import attacks, privacy, robust, secure

DATA = linear_clients([5, 2, 9, 4, 7, 6])
NETWORK = ft.Network.from_edges([(i, (i + step) % 6) for i in range(6) for step in (1, 2)])
GRID = secure.Grid(30, 2.0**20)
CARRY: dict[str, Any] = {
    "plain": plain(),
    "masked": masked(GRID, dropouts=0),
    "masked_graph": secure.masked_graph(NETWORK, GRID),
    "sealed": sealed(NETWORK),
}


def gtv(network: ft.Network = NETWORK) -> ft.Algorithm:
    return ft.gtv(sgd(0.05), network, 0.1)


def noised(quorum: int) -> ft.Algorithm:
    return ft.fedavg(sgd(0.1)) | privacy.local_level(clip=1.0, noise=2.0, delta=1e-3, quorum=quorum)


MAKE: dict[str, tuple[Callable[[], ft.Algorithm], set[str]]] = {  # and under what each runs in one process
    "fedavg": (lambda: ft.fedavg(sgd(0.1)), {"plain", "masked"}),
    "scaffold": (lambda: ft.scaffold(sgd(0.1)), {"plain", "masked"}),
    "own noise": (lambda: noised(1), {"plain", "masked"}),
    "noise of a quorum": (lambda: noised(3), {"masked"}),
    "an attack": (lambda: ft.fedavg(sgd(0.1)) | attacks.sign_flip([0]), {"plain", "masked"}),
    "gtv": (gtv, {"plain", "masked_graph", "sealed"}),
    "another network": (lambda: gtv(ft.Network.ring(6)), {"plain"}),
    "unreliable edges": (lambda: gtv() | ft.unreliable_edges(NETWORK, loss=0.1), {"plain"}),
    "without server": (lambda: ft.without_server(ft.fedavg(sgd(0.1)), NETWORK, 1e-9), {"plain"}),
    "robust": (lambda: ft.fedavg(sgd(0.1)) | robust.rule(robust.median()), {"plain"}),
    "robust totals": (lambda: ft.scaffold(sgd(0.1)) | robust.rule(robust.median()), {"plain"}),
    "noise of the server": (lambda: ft.fedavg(sgd(0.1)) | privacy.client_level(1.0, 2.0, delta=1e-3), {"plain"}),
    "private rows": (ALGORITHMS["matrix_normal"], {"plain"}),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


@pytest.mark.parametrize("name", MAKE)
def test_what_each_carry_accepts_in_one_process(name: str) -> None:
    make, accepted = MAKE[name]
    for way, carry in CARRY.items():
        if way in accepted:
            ft.Run(make(), ft.InProcess(DATA, carry=carry)).step()
        else:
            with pytest.raises(ValueError, match=r"^Expected (an algorithm|sums under masks)"):
                ft.Run(make(), ft.InProcess(DATA, carry=carry))


def test_every_population_in_this_process_takes_it() -> None:
    algorithm, seen = ft.fedavg(sgd(0.1)), lambda rounds: torch.full((6,), 100)
    carry = CARRY["masked"]
    inside = ft.InProcess(DATA, carry=carry)
    populations = [inside, ft.Distributed(DATA, carry=carry), ft.Growing(DATA, seen, carry=carry)]
    runs = [ft.run(algorithm, population, rounds=2) for population in populations]
    runs.append(ft.run(algorithm, inside, rounds=2, faults=ft.duplicated(1.0)))
    assert len({run.fingerprint()["messages"] for run in runs}) == 1
    assert all(same_bits(run.server, runs[0].server) for run in runs[:3])
    usual = ft.run(algorithm, ft.InProcess(DATA), rounds=2)
    assert "messages" not in usual.fingerprint()
    assert not same_bits(usual.server, runs[0].server)  # which are on the grid


def test_a_checkpoint_of_another_carry_is_refused(tmp_path: Any) -> None:
    algorithm = ft.fedavg(sgd(0.1))
    ft.run(algorithm, ft.InProcess(DATA, carry=CARRY["masked"]), rounds=1).save(tmp_path / "run")
    with pytest.raises(ValueError, match="messages"):
        ft.Run(algorithm, ft.InProcess(DATA)).load(tmp_path / "run")


HONEST = masked(GRID, dropouts=0, adversary="curious")
BETWEEN = {"plain": plain(), "masked": masked(GRID, dropouts=0), "curious": HONEST}


@pytest.mark.parametrize(("server", "site"), [*itertools.product(BETWEEN, BETWEEN)])
def test_sites_take_part_where_the_server_carries_as_their_terms_say(server: str, site: str) -> None:
    make = lambda: ft.fedavg(sgd(0.1))
    host = Loopback(offers(DATA, Carried(make, BETWEEN[site])), None, certified().identities)
    settings = {"seconds": 0.05, "roster": certified().roster, "carry": BETWEEN[server]}
    run = ft.Run(make(), Remote(host, ["a", "b", "c"], "it", **settings))
    if server == site:
        assert run.step().ids.tolist() == list(range(6))
    else:
        with pytest.raises(RuntimeError, match="under 'it' the site runs messages"):
            run.step()


def test_a_site_refuses_noise_of_a_quorum_that_its_terms_do_not_hide() -> None:
    """Whatever the server says: the algorithm is the site's own."""
    make = Carried(lambda: noised(3), plain())
    host = Loopback(offers(DATA, make), None)
    server = Remote(host, ["a", "b", "c"], "it", seconds=0.05)
    with pytest.raises(ValueError, match=r"but got Remote\(…, carry=plain\(\)\)"):
        ft.Run(make(), server)
    unaware = noised(3)
    unaware.budget.need = None
    with pytest.raises(RuntimeError, match=r"at least 3 clients.* but got the site's policy with carry=plain\(\)"):
        ft.Run(unaware, server).step()


def test_terms_name_every_algorithm_or_none() -> None:
    make = {"one": lambda: ft.fedavg(sgd(0.1)), "two": lambda: ft.scaffold(sgd(0.1))}
    with pytest.raises(ValueError, match=r"names all algorithms \['one', 'two'\] and no others, but got \['one'\]"):
        SiteConfiguration(DATA, make, Policy(carry={"one": CARRY["masked"]}))
    policy = Policy(carry={"one": CARRY["masked"], "two": plain()})
    assert SiteConfiguration(DATA, make, policy).policy.carry_of("two") == plain()
    assert policy.described()["carry"]["one"].startswith("sums under masks on Grid")
