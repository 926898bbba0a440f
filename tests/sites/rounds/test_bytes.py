"""What bytes are counted where: of clients' payloads in one process, of whole frames of sites, and what masks cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear, linear_clients, sgd
from support.sites import Carried, carry_of, offers

import fedtorch as ft
from fedtorch import wire
from fedtorch.sites import Remote
from fedtorch.sites.rounds import sites as meeting
from fedtorch.sites.secure import Grid
from fedtorch.sites.secure.masked import masked

SITES, NUMBER = 3, 8  # bytes of a float64, and of a word under masks
SMALL, LARGE = 11, 101  # numbers of a linear model of ten features, and of a hundred


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def moved(numbers: int, clients: int, where: str) -> dict[str, int]:
    """Bytes of a round of averaging a model of so many numbers."""
    data = linear_clients([5] * clients, numbers - 1)
    make: Any = lambda: ft.fedavg(sgd(1e-3, linear(numbers - 1)))
    if where == "masks":
        make = Carried(make, masked(Grid(30, 2.0**20), dropouts=0))
    if where == "process":
        run = ft.Run(make(), ft.InProcess(data))
    else:
        host = Loopback(offers(data, make, sites=SITES), None, certified().identities)
        more = {"roster": certified().roster, "carry": carry_of(make)} if where == "masks" else {}
        sites = Remote(host, sorted(host.sites), "it", rows=data.rows, seconds=0.2, quorum=1.0, **more)
        run = ft.Run(make(), sites)
    run.step()
    table = run.history.iloc[0]
    return {"up": int(table["round_bytes_up"]), "down": int(table["round_bytes_down"])}


def test_in_one_process_they_are_those_of_the_clients_payloads() -> None:
    for clients in (3, 6):
        for numbers in (SMALL, LARGE):
            sent = {"weight": torch.zeros(1, numbers - 1).double(), "bias": torch.zeros(1).double()}
            assert moved(numbers, clients, "process")["down"] == clients * wire.size(sent)


@pytest.mark.parametrize("way", ["up", "down"])
def test_sites_add_a_frame_that_does_not_grow_with_the_model(way: str) -> None:
    small, large = (moved(n, SITES, "sites")[way] - moved(n, SITES, "process")[way] for n in (SMALL, LARGE))
    assert abs(large - small) <= SITES * 16  # digits of shapes and places in the headers
    assert 0 < small < SITES * 1000


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_site_of_several_clients_sends_and_hears_one_message(way: str) -> None:
    grows = lambda where: moved(LARGE, 2 * SITES, where)[way] - moved(SMALL, 2 * SITES, where)[way]
    numbers = LARGE - SMALL
    assert grows("process") == pytest.approx(2 * SITES * numbers * NUMBER, abs=2 * SITES * 16)
    assert grows("sites") == pytest.approx(SITES * numbers * NUMBER, abs=SITES * 16)


@pytest.mark.parametrize(("way", "most"), [("up", 4_000), ("down", 7_000)])
def test_masks_add_keys_and_shares_that_do_not_grow_with_the_model(way: str, most: int) -> None:
    """Of three sites some 3 kB a site and round up, 6 kB down; words have eight bytes, whatever numbers had."""
    small, large = (moved(n, SITES, "masks")[way] - moved(n, SITES, "sites")[way] for n in (SMALL, LARGE))
    assert abs(large - small) <= SITES * 64
    assert SITES * 1000 < small < SITES * most
