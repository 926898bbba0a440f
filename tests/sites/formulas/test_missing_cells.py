"""Sites with missing cells agree on a design, draw a normal model, and fit what each of them completes itself."""

from __future__ import annotations

from typing import Any

import numpy
import pandas
import pytest
import torch
from support.formulas.agreeing import FRAMES
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import distance, same_bits
from support.sites import servers_keys

import fedtorch as ft
from fedtorch.data.frames.incomplete import incomplete_cells
from fedtorch.inference import completed
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import sites as meeting

FORMULA = "y ~ age + log(sbp) + (1 | clinic)"
NAMES = list("abc")
HOLES = {
    name: frame.assign(age=frame["age"].where(numpy.arange(len(frame)) % 4 > 0), y=frame["y"].mask(frame["sbp"] > 150))
    for name, frame in FRAMES.items()
}


def draws(design: ft.data.Design, draws: int) -> ft.Algorithm:
    return ft.normal_em(draws, columns=design)


def fit(design: ft.data.Design, **draw: Any) -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design)) | completed(design=design, **draw)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def test_sites_complete_their_rows_as_one_process_does() -> None:
    offers = {"draws": draws, "fit": fit}
    brought = {
        name: SiteConfiguration.of_frame(frame, "clinic", offers, policy=Policy(), missing="impute")
        for name, frame in HOLES.items()
    }
    host = Loopback(brought, None)
    design = agree(host, NAMES, FORMULA, client="clinic")
    together = pandas.concat(HOLES.values())
    data = ft.data.from_frame(together, client="clinic", formula=FORMULA, minimum=10, missing="impute")
    assert data.design == design
    for k, name in enumerate(NAMES):
        assert same_bits(host.sites[name].configuration.data.rows, data[k])
    like = incomplete_cells(torch.zeros(1, 3))
    remote = Remote(host, NAMES, "draws", {"draws": 2}, quorum=1.0, rows=like)
    with servers_keys():
        runs = [ft.run(draws(design, 2), population, rounds=5) for population in (remote, ft.InProcess(data))]
    assert distance(runs[0].server.normal, runs[1].server.normal) < 1e-9
    remote.finish(runs[0])
    one = {name: leaf[0].tolist() for name, leaf in runs[1].server.normal._asdict().items()}
    for name in NAMES:
        host.start(name)
    agree(host, NAMES, design)
    remote = Remote(host, NAMES, "fit", {**one, "key": 4}, quorum=1.0, rows=like)
    fits = [ft.run(fit(design, **one, key=4), population, rounds=3) for population in (remote, ft.InProcess(data))]
    assert distance(fits[0].server.posterior, fits[1].server.posterior) < 1e-8


def test_what_a_site_does_with_missing_cells_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="missing= as 'refuse' or 'impute', but got 'drop'"):
        SiteConfiguration.of_frame(HOLES["a"], "clinic", {"fit": fit}, missing="drop")  # type: ignore[arg-type]
