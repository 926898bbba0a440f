"""The trial of Fed-TCGA-BRCA: FLamby's rows, loss and figures, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.trials import flamby_tcga, flamby_tcga_published
from experiments.trials.flamby_tcga_published import AVERAGE, EACH, REGIONS


@pytest.fixture(scope="module")
def rows() -> flamby_tcga.Rows:
    try:
        return flamby_tcga.rows()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_the_loss_is_that_of_cox() -> None:
    draws = torch.Generator().manual_seed(0)
    score = torch.randn(12, 1, generator=draws, dtype=torch.float64)
    event = (torch.rand(12, generator=draws) < 0.6).double()
    time = torch.rand(12, generator=draws, dtype=torch.float64)
    total = 0.0
    for i in range(12):
        at_risk = time >= time[i]
        total += float(event[i] * (score[at_risk, 0].exp().sum().log() - score[i, 0]))
    assert float(flamby_tcga.cox(score, torch.stack([event, time], 1))) == pytest.approx(total / 12, rel=1e-12)


def test_pairs_are_those_of_flamby(rows: flamby_tcga.Rows) -> None:
    """Its indices are fractions of the pairs that can be compared, with halves for equal risks."""

    def pairs(y: Tensor) -> int:
        event, time = y[:, 0] == 1, y[:, 1]
        later = (time[:, None] < time) | ((time[:, None] == time) & ~event)
        return int((event[:, None] & later).sum())

    counts = [pairs(y) for _, y in rows.test] + [pairs(rows.test.pool().rows[1])]
    assert all(
        known % count == 0 or 2 * count % known == 0 for known, count in zip(flamby_tcga_published.PAIRS, counts)
    )


def test_other_splits_are_of_the_same_patients(rows: flamby_tcga.Rows) -> None:
    other = flamby_tcga.resplit(rows, 3)
    assert other.test.counts.equal(rows.test.counts)
    for k in range(len(REGIONS)):
        sums = [torch.cat([of.train[k][0], of.test[k][0]]).sum(0) for of in (rows, other)]
        torch.testing.assert_close(*sums)
        assert other.train[k][1][:, 0].sum() == rows.train[k][1][:, 0].sum()
        assert not other.test[k][1].equal(rows.test[k][1])


def test_published_figures_are_those_of_flamby() -> None:
    assert flamby_tcga_published.published("pooled")["Northeast"][0] == 0.8016759776536313  # of its file of seed 42
    assert np.mean(flamby_tcga_published.published("FedAdam")["all rows"]) == pytest.approx(0.8418, abs=5e-4)
    assert len(flamby_tcga_published.published(EACH)[AVERAGE]) == 5
    assert flamby_tcga_published.published("EP") == {}


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    flamby_tcga.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    every = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len({row["setting"] for row in every}) > 18
    assert all(0.0 <= row["ours"] <= 1.0 for row in every)
    assert (tmp_path / "flamby_tcga.png").exists()
