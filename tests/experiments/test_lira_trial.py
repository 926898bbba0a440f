"""The trial of LiRA: the closed form by all halves, the best test's power, and the attack beside both."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from experiments.trials import lira


def test_the_closed_form_is_that_of_all_halves() -> None:
    x, y = lira.rows_of(0, 8, 6)
    products = (x @ x.mT) * (2.0 * y - 1) * (2.0 * y - 1)[:, None]
    values = {True: [[] for _ in y], False: [[] for _ in y]}
    for half in itertools.combinations(range(8), 4):
        for j in range(8):
            values[j in half][j].append(float(products[j, list(half)].sum()))
    inside, outside = (torch.tensor(values[member], dtype=torch.float64) for member in (True, False))
    torch.testing.assert_close(inside.std(1, correction=0), outside.std(1, correction=0))
    expected = (inside.mean(1) - outside.mean(1)) / outside.std(1, correction=0)
    torch.testing.assert_close(lira.gap(x, y, 0.0), expected)


def test_the_power_of_the_best_test() -> None:
    normal = NormalDist()
    for rate in lira.RATES:
        expected = normal.cdf(normal.inv_cdf(rate) + 2.0)
        assert lira.power(torch.full((3,), 2.0).double(), rate) == pytest.approx(expected, rel=1e-6)
    assert lira.area(torch.full((3,), 2.0).double()) == pytest.approx(normal.cdf(2 / math.sqrt(2)))
    mixed = torch.tensor([0.5, 3.0], dtype=torch.float64)
    assert lira.power(mixed, 0.01) > 0.5 * sum(lira.power(each[None], 0.01) for each in mixed)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_attack_comes_near_and_keeps_below_the_bound(noise: float) -> None:
    x, y = lira.rows_of(0, 256, 256)
    best, found = lira.best(x, y, noise), lira.attacked(x, y, noise, 128, seed=0)
    assert found["area"] == pytest.approx(best["area"], abs=0.02)
    for rate in lira.RATES:
        count = 128 * 128 * best[lira.name(rate)] / 256  # members that share a model or a row are not independent
        assert found[lira.name(rate)] <= best[lira.name(rate)] + 4 * best[lira.name(rate)] / math.sqrt(count)
        assert not noise or found[lira.name(rate)] <= lira.bound(noise, rate)


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    lira.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert all(0 <= row["ours"] <= 1 for row in rows)
    assert len(rows) == 14
