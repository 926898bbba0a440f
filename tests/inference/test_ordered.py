"""Ordered responses: one result in every population, and predictive accuracy by ArviZ from draws of the test's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.forked import over_ranks
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import ROUNDING, distance

import fedtorch as ft
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.federation.runs.sampler import load_arviz
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import sites as meeting

FORMULA, LEVELS = "rating ~ dose + (1 | ward)", {"rating": [1, 2, 3]}
POLICY = Policy(after_fit=("effects", "densities"), minimum=1)


def ratings(wards: int = 6, rows: int = 8) -> pd.DataFrame:
    """Ratings 1 to 3 of wards."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"ward": np.repeat([f"ward {k}" for k in range(wards)], rows)})
    frame["dose"] = draw.normal(size=len(frame))
    eta = frame["dose"] + np.repeat(draw.normal(size=wards), rows) + draw.logistic(size=len(frame))
    return frame.assign(rating=1 + (eta.to_numpy()[:, None] > [-1, 1]).sum(1))


FRAME = ratings()


def fit(population: Any, design: ft.data.Design, method: str = "ep") -> ft.Run:
    return ft.run(offered(design, method), population, rounds=3, progress=False)


def offered(design: ft.data.Design, method: str = "ep") -> ft.Algorithm:
    model = hierarchical.regression(design, "cumulative")
    return ft.ep(model) if method == "ep" else ft.maximum_likelihood(model)


def read(**more: Any) -> ft.data.FederatedData:
    return ft.data.from_frame(FRAME, client="ward", formula=FORMULA, levels=LEVELS, **more)


@pytest.mark.parametrize("method", ["ep", pytest.param("maximum likelihood", marks=pytest.mark.slow)])
def test_sites_equal_one_process(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what sites tell of the fit: densities of rows left out."""
    monkeypatch.setattr(meeting, "time", Clock)
    parts = dict(zip(("north", "south"), (FRAME[:24], FRAME[24:])))
    brought = {name: SiteConfiguration.of_frame(each, "ward", {"it": offered}, policy=POLICY)
               for name, each in parts.items()}  # fmt: skip
    host: Any = Loopback(brought, None)
    design = agree(host, list(parts), FORMULA, client="ward", levels=LEVELS, minimum=1)
    there = fit(Remote(host, list(parts), "it", {"method": method}), design, method)
    here = fit(ft.InProcess(ft.data.from_frame(FRAME, client="ward", design=design)), design, method)
    assert distance(there.server, here.server) < (ROUNDING if method == "ep" else 1e-8)  # of differences over steps
    assert there.summary(tolerance=torch.inf).index.tolist() == ["1|2", "2|3", "dose", "sd(Intercept)"]
    if method == "ep":
        elpd = [ft.inference.loo(run, draws=50, tolerance=torch.inf).elpd for run in (there, here)]
        assert elpd[0] == pytest.approx(elpd[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ep", "maximum likelihood"])
def test_ranks_equal_one_process(method: str, tmp_path: Path) -> None:
    def numbers(population: Any) -> list[float]:
        run = fit(population, read().design, method)
        leaves = [leaf.double().flatten() for leaf in ft.tree.leaves(run.server)]
        found = torch.cat(leaves).tolist()
        return found + ([ft.inference.loo(run, draws=50, tolerance=torch.inf).elpd] if method == "ep" else [])

    for found in over_ranks(tmp_path / "ranks", 2, lambda rank: numbers(ft.Distributed(read()))):
        assert found == pytest.approx(numbers(ft.InProcess(read())), rel=1e-8, abs=1e-8)


@pytest.mark.slow
def test_accuracy_for_rows_left_out_is_arviz_one_of_other_draws() -> None:
    """Of draws from q of what wards share and, by a grid of the test's own, of a ward's effect given these."""
    data = read(standardise=False)
    run = ft.run(ft.ep(hierarchical.regression(data.design, "cumulative")), ft.InProcess(data), rounds=40,
                 until=settled())  # fmt: skip
    q, draws = posterior(run), 2000
    noise = torch.quasirandom.SobolEngine(5, scramble=True, seed=1).draw(draws, dtype=torch.float64)
    phi = (
        q.mean + torch.special.ndtri(noise[:, :4].clamp(1e-9, 1 - 1e-9)) @ torch.linalg.cholesky(q.covariance_matrix).T
    )
    y, x = (torch.tensor(FRAME[name].to_numpy()).reshape(6, 8) for name in ("rating", "dose"))
    cuts = torch.cat([phi[:, :1] * 0 - 1e9, phi[:, :1] * 0, phi[:, 2:3], phi[:, :1] * 0 + 1e9], 1)
    z, values = torch.linspace(-6, 6, 241).double(), []
    for k in range(6):
        eta = phi[:, None, :1] + phi[:, None, 1:2] * x[k] + (phi[:, 3:] / 2).exp()[:, None] * z[:, None]
        chance = (cuts[:, None, y[k]] - eta).sigmoid() - (cuts[:, None, y[k] - 1] - eta).sigmoid()
        rows = chance.clamp(min=1e-300).log()  # (draws, 241, 8)
        below = torch.softmax(rows.sum(-1) - z.square() / 2, 1).cumsum(1)
        place = (below < noise[:, 4:]).sum(1).clamp(max=240)
        values.append(rows[torch.arange(draws), place])
    az = load_arviz()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = az.from_dict(log_likelihood={"y": torch.cat(values, 1)[None].numpy()})
        left_out, waic = az.loo(theirs, reff=1.0), az.waic(theirs)
    for ours, elpd, se, parameters in (
        (ft.inference.loo(run, draws=2000), left_out.elpd_loo, left_out.se, left_out.p_loo),
        (ft.inference.waic(run, draws=2000), waic.elpd_waic, waic.se, waic.p_waic),
    ):
        assert ours.elpd == pytest.approx(elpd, abs=0.3)
        assert ours.se == pytest.approx(se, rel=0.02)
        assert ours.parameters == pytest.approx(parameters, abs=0.3)
