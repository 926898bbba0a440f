"""Secure sums between sites: those of one process, to the bit; the server sees no message of a site, whoever drops out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certified import certified
from support.closed_forms import ROUNDING, distance, linear_clients, same_bits, sgd
from support.loopback import Clock, Loopback
from support.sites import offers
from test_conformance import ALGORITHMS, STARTS, population, start

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation import run as running
from fedtorch.federation.remote import Remote, Terms, frames, sites as meeting
from fedtorch.trust import secure
from fedtorch.trust.secure import Aborted, ExactSums, Grid
from fedtorch.trust.secure.messages import ADVERT, CONFIRM, MASKED, PHASES, REVEAL, SHARES

GRID = Grid(30, 2.0**20)
SIZES = [5, 2, 9, 4, 17, 6]
DATA = linear_clients(SIZES)
FINE = Grid(12, 2.0**40)  # for messages of which some are large


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def masked(make: Callable[[], ft.Algorithm], grid: Any = GRID, **more: Any) -> Callable[[], ft.Algorithm]:
    return lambda: dataclasses.replace(make(), exchange=secure.secure_star(grid, **more))


def fedavg() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


def scaffold() -> ft.Algorithm:
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=4))


class Federation:
    """Sites that keep frames, and a run on them."""

    def __init__(
        self, make: Callable[[], ft.Algorithm], data: Any = DATA, sites: int = 3, folder: Path | None = None, **more: Any
    ) -> None:
        first = more.pop("start", None)
        offer = {name: more.pop(name) for name in ("terms",) if name in more}
        self.make, self.frames = make, list[tuple[str, bytes]]()
        self.host = Loopback(offers(data, make, first, sites, **offer), folder, certified().identities)
        self.host.after = self.keep
        self.more = {"seconds": 0.2, "quorum": 1.0, "roster": certified().roster, "rows": data.rows, **more}

    def keep(self, name: str, reply: bytes) -> bytes:
        self.frames.append((name, reply))
        return reply

    def run(self, parameters: Any = None, **more: Any) -> ft.Run:
        return ft.Run(self.make(), Remote(self.host, list(self.host.brought), "it", **self.more), parameters, seed=3, **more)


# -- the same sums -----------------------------------------------------------------------------------------------------

EXACT = {"gibbs"}
SUMS = ["fedavg", "scaffold", "personal_layers", "feddyn", "fedadam", "ep", "fedmgp", "pooled_covariance", "gibbs"]


@pytest.mark.parametrize("name", SUMS)
def test_sites_add_up_what_one_process_does(name: str) -> None:
    """Clients one by one are the same operations, so that sums on the grid are the same to the bit."""
    here, make = population(name), masked(ALGORITHMS[name], ExactSums() if name in EXACT else FINE)
    made = Federation(make, here.data, sites=6, start=STARTS.get(name))
    first = start(name, make())
    run = made.run(first)
    wanted = ft.Run(make(), ft.InProcess(here.data, chunk=1), first, seed=3)
    for _ in range(2):
        run.step(), wanted.step()
    if name in EXACT:
        assert same_bits(run.server, wanted.server)
    assert distance(run.server, wanted.server) < ROUNDING
    assert run.last.ids.tolist() == list(range(6))
