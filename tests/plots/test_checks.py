"""Calibration and replicated responses: the numbers of the rows themselves, and models that are wrong are seen."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms import ep
from fedtorch.inference import checks
from fedtorch.models import hierarchical


def drawn(figure: Figure) -> Figure:
    figure.savefig(io.BytesIO(), format="png", dpi=30)
    return figure


def fitted(family: str, heavy: bool = False) -> ft.Run:
    """A run on rows of 8 sites; `heavy` ones have more spread than the family."""
    parts = []
    for k in range(8):
        for_x, for_y, more = random.split(random.fold_in(random.key(2), k), 3)
        x = torch.stack([torch.ones(50), random.normal(for_x, (50,), torch.float64)], 1)
        eta, uniform = x @ torch.tensor([0.2 * k - 0.7, 0.6]).double(), random.uniform(for_y, (50,), torch.float64)
        if family == "poisson":
            rate = eta.exp() * (random.exponential(more, (50,), torch.float64) if heavy else 1.0)
            y = torch.from_numpy(stats.poisson.ppf(uniform.numpy(), rate.numpy()))
        elif family == "logistic":
            y = (uniform < eta.sigmoid()).double()
        else:
            y = eta + torch.special.ndtri(uniform) * (4 * uniform if heavy else 1.0)
        parts.append((x, y))
    made = hierarchical.linear if family == "linear" else getattr(hierarchical.generalised, family)
    data = ft.data.from_tensors(parts, names=[f"site {k}" for k in range(8)])
    return ft.run(ft.ep(made(hierarchical.normal(2))), ft.InProcess(data), rounds=60, until=ep.settled())


@pytest.fixture(scope="module")
def logistic() -> ft.Run:
    return fitted("logistic")


def test_calibration_counts_every_row_once(logistic: ft.Run) -> None:
    found, (_, y) = checks.calibration(logistic, bins=5), logistic.population.data.rows
    assert int(found.rows.sum()) == len(y)
    assert float((found.rows * found.observed).sum()) == pytest.approx(float(y.sum()))
    assert bool((found.rows >= 60).all())  # about equally many
    assert bool((found.curve[1:, 1] >= found.curve[:-1, 1] - 1e-12).all())
    assert bool((found.predicted[1:] > found.predicted[:-1]).all())
    low, high = stats.binomtest(int(found.observed[0] * found.rows[0]), int(found.rows[0])).proportion_ci(0.9, "wilson")
    assert (float(found.low[0]), float(found.high[0])) == pytest.approx((low, high))


def test_a_good_model_is_calibrated(logistic: ft.Run) -> None:
    found = checks.calibration(logistic, bins=5, level=0.99)
    assert bool(((found.low <= found.predicted) & (found.predicted <= found.high)).all())
    axes = drawn(ft.plots.calibration(logistic)).axes[0]
    assert {str(line.get_label()) for line in axes.get_lines()} == {"perfect", "isotonic", "bins of rows"}


@pytest.mark.parametrize("family", ["linear", "poisson"])
def test_histograms_count_rows_and_see_a_family_that_is_wrong(family: str) -> None:
    outside = {}
    for heavy in (False, True):
        run = fitted(family, heavy)
        found = checks.histograms(run, bins=12)
        assert float(found.observed.sum()) == 400
        assert bool((found.replicated.sum(1) == 400).all())
        low, high = found.replicated.quantile(torch.tensor([0.01, 0.99]).double(), 0)
        outside[heavy] = int(((found.observed < low) | (found.observed > high)).sum())
    assert outside[False] <= 1
    assert outside[True] >= 3
    _, y = run.population.data.rows
    if family == "poisson":
        expected = np.bincount(y.long().clamp(max=int(found.places[-1])).numpy(), minlength=len(found.places))
        assert found.observed.tolist() == expected.tolist()
    axes = drawn(ft.plots.predictive_check(run)).axes[0]
    assert axes.get_ylabel() == ("√ rows" if family == "poisson" else "density")


def test_sites_are_checked_by_their_means(logistic: ft.Run) -> None:
    found, data = checks.site_means(logistic), logistic.population.data
    np.testing.assert_allclose(found.observed, [float(y.mean()) for _, y in data], atol=1e-12)
    low, high = found.replicated.quantile(torch.tensor([0.005, 0.995]).double(), 1)
    assert bool(((low <= found.observed) & (found.observed <= high)).all())
    figure = drawn(ft.plots.predictive_check(logistic))
    assert sorted(text.get_text() for text in figure.axes[0].get_yticklabels()) == sorted(data.names)


def test_what_does_not_fit_is_refused(logistic: ft.Run) -> None:
    with pytest.raises(TypeError, match="Expected responses that are not yes or no"):
        ft.plots.predictive_check(logistic, of="rows")
    with pytest.raises(TypeError, match="Expected yes/no responses, but got a gaussian model"):
        ft.plots.calibration(fitted("linear"))
    with pytest.raises(ValueError, match="Expected of= 'rows' or 'sites', but got 'patients'"):
        ft.plots.predictive_check(logistic, of="patients")
