"""Plots of sites show the posteriors' numbers, and own estimates that other software finds."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import fedtorch as ft
from fedtorch import random
from fedtorch.data.formulas.cells import Cells
from fedtorch.data.formulas.parsing import parse
from fedtorch.data.formulas.pooled import pooled_design
from fedtorch.federation.algorithms import ep
from fedtorch.inference.ranef import site_estimates
from fedtorch.models import hierarchical
from fedtorch.models.device_posterior import interval
from fedtorch.plots.forests import Line, forest, shortened
from fedtorch.plots.sites import site_funnel

NAMES = ("intercept", "age")


def sites(family: str = "linear", clients: int = 5, rows: int = 60) -> ft.data.FederatedData:
    parts = []
    for k in range(clients):
        for_x, for_y = random.split(random.fold_in(random.key(1), k), 2)
        x = torch.stack([torch.ones(rows), random.normal(for_x, (rows,), torch.float64)], 1)
        eta, uniform = x @ torch.tensor([0.5 * k - 1, 0.5]).double(), random.uniform(for_y, (rows,), torch.float64)
        y = eta + torch.special.ndtri(uniform) if family == "linear" else (uniform < eta.sigmoid()).double()
        parts.append((x, y))
    return ft.data.from_tensors(parts, names=[f"Clinic of cardiology and angiology number {k}" for k in range(clients)])


def fitted(family: str = "linear", **arguments: object) -> ft.Run:
    hierarchy = hierarchical.normal(2, names=NAMES, sd=3.0, **arguments)  # type: ignore[arg-type]
    made = hierarchical.linear if family == "linear" else hierarchical.generalised.logistic
    return ft.run(ft.ep(made(hierarchy)), ft.InProcess(sites(family)), rounds=60, until=ep.settled(1e-3))


@pytest.fixture(scope="module")
def run() -> ft.Run:
    return fitted()


def drawn(figure: Figure) -> Figure:
    figure.savefig(io.BytesIO(), format="png", dpi=30)
    return figure


def test_a_forest_has_the_sites_posteriors_and_the_mean_below(run: ft.Run) -> None:
    axes, _ = drawn(ft.plots.forest(run, level=0.8)).axes
    marginals, q = ep.devices(run).marginals(), ep.posterior(run)
    low, high = (edge[:, 0] for edge in interval(marginals, 0.8))
    order = marginals.mean[:, 0].argsort()
    segments = axes.collections[0].get_segments()  # type: ignore[attr-defined]
    np.testing.assert_allclose([s[0, 0] for s in segments], low[order], atol=1e-9)
    np.testing.assert_allclose([s[1, 0] for s in segments], high[order], atol=1e-9)
    middles = next(line for line in axes.get_lines() if str(line.get_label()).startswith("partial pooling, 80 %"))
    np.testing.assert_allclose(np.asarray(middles.get_xdata()), marginals.mean[order, 0], atol=1e-9)
    common = next(line for line in axes.get_lines() if line.get_label() == "mean of all sites")
    np.testing.assert_allclose(np.asarray(common.get_xdata()), [q.mean[0]], atol=1e-9)
    texts = [text.get_text() for text in axes.get_yticklabels()]
    assert texts[-1] == "all sites"
    assert len(set(texts)) == 6
    assert texts[0].endswith(f"number {int(order[0])}")


def test_own_estimates_are_least_squares(run: ft.Run) -> None:
    found = site_estimates(run, 0.9)
    noise = ep.posterior(run).mean[-1].exp()
    for k, (x, y) in enumerate(run.population.data):
        np.testing.assert_allclose(found.unpooled[k], torch.linalg.lstsq(x, y).solution, atol=2e-3)
        np.testing.assert_allclose(
            found.unpooled_sd[k], (noise * torch.linalg.inv(x.mT @ x)).diagonal().sqrt(), rtol=2e-3
        )
    assert bool(((found.mean - found.centre).abs() <= (found.unpooled - found.centre).abs() + 0.05).all())


def test_own_log_odds_are_those_of_the_rows_under_a_flat_prior() -> None:
    run = fitted("logistic")
    found = site_estimates(run, 0.9)
    x, y = run.population.data[2]
    axis = torch.linspace(-3, 4, 301).double()
    theta = torch.cartesian_prod(axis, axis)
    eta = theta @ x.mT
    weights = torch.softmax((y * eta - torch.nn.functional.softplus(eta)).sum(1), 0)
    mean = weights @ theta
    np.testing.assert_allclose(found.unpooled[2], mean, atol=0.01)
    np.testing.assert_allclose(found.unpooled_sd[2], (weights @ (theta - mean).square()).sqrt(), rtol=0.02)


def test_a_site_whose_rows_say_nothing_has_no_own_estimate() -> None:
    data = sites("logistic")
    parts = [(x, torch.zeros_like(y) if k == 0 else y) for k, (x, y) in enumerate(data)]
    parts[1] = (parts[1][0] * torch.tensor([1.0, 0.0]), parts[1][1])
    population = ft.InProcess(ft.data.from_tensors(parts))
    model = hierarchical.generalised.logistic(hierarchical.normal(2, names=NAMES))
    found = site_estimates(ft.run(ft.ep(model), population, rounds=60, until=ep.settled()), 0.9)
    assert bool(found.unpooled[0].isnan().all())
    assert found.unpooled[1].isnan().tolist() == [False, True]
    assert bool(found.unpooled[2:].isfinite().all())


def test_shrinkage_draws_both_estimates(run: ft.Run) -> None:
    axes, _ = drawn(ft.plots.shrinkage(run)).axes
    found = site_estimates(run, 0.9)
    own = next(line for line in axes.get_lines() if line.get_label() == "own estimate")
    np.testing.assert_allclose(np.asarray(own.get_xdata()), found.unpooled[found.mean[:, 0].argsort(), 0], atol=1e-9)


def test_a_funnel_names_who_is_outside(run: ft.Run) -> None:
    found = site_estimates(run, 0.9)
    far = found._replace(unpooled=found.unpooled.clone(), spread=torch.full_like(found.spread, 0.1))
    far.unpooled[:, 0] = far.centre[0] + torch.tensor([0.0, 0.01, 3.0, 0.02, -0.01])
    made = site_funnel(far, 0)
    assert made is not None
    assert [label.text[-1] for label in made.labels] == ["2"]
    inner, outer = made.series[:2]
    assert inner.low is not None
    precision = made.x[-1]
    width = 1.959964 * (1 / precision**2 + 0.1**2) ** 0.5
    assert (inner.y[-1], inner.low[-1]) == pytest.approx((float(far.centre[0]) + width, float(far.centre[0]) - width))
    assert bool((outer.y > inner.y).all())
    assert drawn(ft.plots.funnel(run, "age")).axes[0].get_ylabel() == "age"


def test_a_coefficient_is_chosen_by_name(run: ft.Run) -> None:
    assert [axes.get_title() for axes in drawn(ft.plots.forest(run, "age")).axes] == ["age"]
    with pytest.raises(ValueError, match="which differ by site, but got 'height'"):
        ft.plots.forest(run, "height")
    with pytest.raises(ValueError, match="Expected a model with coefficients that differ by site"):
        ft.plots.forest(fitted(random=[]))


def test_columns_name_coefficients_that_the_model_numbers() -> None:
    data = replace(sites(), features=("one", "height"))
    run = ft.run(ft.ep(hierarchical.linear(hierarchical.normal(2, sd=3.0))), ft.InProcess(data), rounds=20)
    assert site_estimates(run, 0.9).coefficients == ("one", "height")


def test_names_stay_apart_when_they_are_cut() -> None:
    names = [f"Clinic number {k} of a town whose name is rather long, department of cardiology" for k in range(139)]
    made = shortened(names)
    assert len(set(made)) == 139
    assert max(map(len, made)) <= 37
    middle = [f"The university hospital of a town, clinic {k}, department of internal medicine" for k in range(139)]
    assert len(set(shortened([*middle, "all sites"], 24))) == 140
    assert shortened(["short", "x"]) == ["short", "x"]


def test_a_forest_of_nothing_is_none() -> None:
    assert forest("", "", [Line("a", float("nan"), 1.0, 2.0)]) is None
    made = forest("", "", [Line("a", 5.0, 6.0, 7.0)], zero=0.0)
    assert made is not None
    assert made.zero is None  # far from the line
    assert made.x_range[0] > 4.9


def test_units_of_a_design_are_taken() -> None:
    """Coefficients of a column that was standardised are shown in the column's units."""
    run = fitted()
    frame = pd.DataFrame({"y": [0.0, 1.0, 2.0], "age": [40.0, 50.0, 60.0], "site": ["a", "a", "b"]})
    design = pooled_design(parse("y ~ age + (1 + age | site)"), Cells(frame, group="site"))
    before = site_estimates(run, 0.9)
    object.__setattr__(run.population.data, "design", design)  # whose ages have mean 50 and sd 10
    after = site_estimates(run, 0.9)
    torch.testing.assert_close(after.mean[:, 1], before.mean[:, 1] / 10)
    torch.testing.assert_close(after.unpooled[:, 0], before.unpooled[:, 0] - 5 * before.unpooled[:, 1])
    torch.testing.assert_close(after.spread[1], before.spread[1] / 10)
