"""Cumulative logit models against their likelihood, fine grids, logistic regression, statsmodels; what is refused."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.federation.algorithms.maximum_likelihood import estimates, maximised
from fedtorch.inference.ranef import site_estimates
from fedtorch.models import hierarchical
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import cumulative as module
from fedtorch.models.hierarchical.cumulative import cumulative, difference_names
from fedtorch.models.hierarchical.families import CUMULATIVE
from fedtorch.models.quadrature import gauss_hermite

LEVELS = ("a", "b", "c", "d")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ratings(subjects: int = 12, rows: int = 8, seed: int = 0) -> pd.DataFrame:
    """Ratings 1 to 4 of subjects, whose thresholds are at -1, 0.5 and 2."""
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame({"subject": np.repeat([f"s{k}" for k in range(subjects)], rows)})
    frame["period"] = np.tile([3.0, 5.0], len(frame) // 2)
    eta = 0.5 * frame["period"] - 2 + np.repeat(generator.normal(size=subjects), rows)
    frame["rating"] = 1 + ((eta + generator.logistic(size=len(frame))).to_numpy()[:, None] > [-1, 0.5, 2]).sum(1)
    return frame


def read(frame: pd.DataFrame, formula: str = "rating ~ period + (1 | subject)", **settings: Any) -> Any:
    return ft.data.from_frame(
        frame, client="subject", formula=formula, **({"levels": {"rating": [1, 2, 3, 4]}} | settings)
    )


def log_density(eta: Tensor, thresholds: Tensor, y: Tensor) -> Tensor:
    ends = torch.cat([torch.tensor([-torch.inf]), thresholds, torch.tensor([torch.inf])])
    return ((ends[y.long() + 1] - eta).sigmoid() - (ends[y.long()] - eta).sigmoid()).log()


@pytest.mark.parametrize("random", [[], [0]])
def test_a_devices_factor_is_the_evidence_of_its_rows(random: list[int]) -> None:
    """Of rows with offsets and weights, against the likelihood and a fine grid over what is random."""
    x, y = torch.cat([torch.ones(9, 1), draw(9, 1, seed=1)], 1).double(), torch.tensor([0, 1, 2, 3, 1, 2, 2, 0, 3.0])
    more = {"offset": 0.5 * draw(9, seed=2), "weight": torch.tensor([1, 2, 1, 1, 3, 1, 1, 1, 0.5]).double()}
    names = ["Intercept", "x", *difference_names(LEVELS)]
    model = cumulative(
        hierarchical.normal(4, random=random, names=names), LEVELS, inner=gauss_hermite(len(random) or 4, 5)
    )
    block = ft.data.from_tensors([(x, y, more)]).stack([0])
    phi = torch.tensor([[[0.7, 0.4, 1.0, 2.5] + [-0.6] * len(random), [0.1, -0.4, 0.3, 2.0] + [0.6] * len(random)]])
    found = model.log_factor(phi.double(), model.prepare(block))[0]
    z = torch.linspace(-8, 8, 2001).double() if random else torch.zeros(1).double()
    weight = torch.softmax(-0.5 * z.square(), 0).log()
    for value, at in zip(found, phi[0].double()):
        eta = x @ at[:2] + more["offset"] + (z[:, None] * (at[-1] / 2).exp() if random else 0.0)
        thresholds = torch.cat([torch.zeros(1).double(), at[2:4]])
        expected = ((log_density(eta, thresholds, y) * more["weight"]).sum(-1) + weight).logsumexp(0)
        assert abs(float(value - expected)) < (1e-3 if random else 1e-6)


def test_slopes_are_derivatives_also_where_thresholds_cross() -> None:
    names = ["Intercept", *difference_names(LEVELS)]
    model = cumulative(hierarchical.normal(3, random=[], names=names), LEVELS)
    rows = model.prepare(ft.data.from_tensors([(torch.ones(4, 1), torch.arange(4.0))]).stack([0]))
    family = module._family(4)
    eta = torch.linspace(-3, 3, 90).double().reshape(9, 1, 10).transpose(0, 1).requires_grad_()  # gaps of both signs
    found = torch.ones_like(eta) * rows.times[:, None]  # type: ignore[index]
    times, value = found, -family.ratio(eta, rows)
    (first,) = torch.autograd.grad(value.sum(), eta, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), eta)
    slope, bend = family.slopes(eta.detach().clone())
    torch.testing.assert_close(slope * times, first)
    torch.testing.assert_close(bend * times, second)
    assert bool((bend >= 0).all())  # concave everywhere
    at, step = torch.linspace(0.1, 3, 90).double().reshape(9, 1, 10).transpose(0, 1), 1e-5
    bends = lambda shift: family.bends(at + shift)
    torch.testing.assert_close(bends(0.0)[0], family.slopes(at.clone())[1])
    for above, low, high in zip(bends(0.0)[1:], bends(-step), bends(step)):
        torch.testing.assert_close(above, (high - low) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("levels", "tolerance"), [([1], 0.005), ([0, 2, 3], 0.02)])
def test_what_few_rows_say_of_thresholds_has_no_bias(levels: list[int], tolerance: float) -> None:
    """Against fine grids; means by Laplace's method are 0.02 and 0.06 sds off, and of many clients that adds up."""
    names = ["Intercept", *difference_names(LEVELS)]
    model = cumulative(hierarchical.normal(3, random=[0], names=names), LEVELS)
    y = torch.tensor(levels).double()
    rows = model.prepare(ft.data.from_tensors([(torch.ones(len(y), 1), y)]).stack([0]))
    mean, sds = torch.tensor([1.0, 1.4, 2.6, 0.0]).double(), torch.tensor([0.4, 0.4, 0.4, 1e-3]).double()
    found = model.project(Moments(mean[None], sds.square().diag()[None]), rows, torch.zeros(1)).tilted
    phi = mean[:3] + 0.4 * torch.cartesian_prod(*[torch.linspace(-5, 5, 41).double()] * 3)
    cuts = torch.nn.functional.pad(torch.nn.functional.pad(phi[:, 1:], (1, 0)), (1, 1), value=1e9)
    cuts[:, 0] = -1e9
    z, weight = torch.linspace(-6, 6, 61).double(), 0.0
    for node in z:
        eta = phi[:, 0] + node
        each = [(cuts[:, k + 1] - eta).sigmoid() - (cuts[:, k] - eta).sigmoid() for k in levels]
        weight = weight + torch.stack(each).clamp(min=0.0).prod(0) * (-0.5 * node.square()).exp()
    weight = weight * (-0.5 * ((phi - mean[:3]) / 0.4).square().sum(1)).exp()
    weight = weight / weight.sum()
    exact = weight @ phi
    sd = (weight @ (phi - exact).square()).sqrt()
    assert ((found.mean[0, :3] - exact).abs() < tolerance * sd).all()
    assert ((found.covariance[0].diagonal().sqrt()[:3] / sd - 1).abs() < 0.01).all()


def test_two_levels_are_logistic_regression() -> None:
    frame = ratings(5, 6)
    frame["good"] = (frame["rating"] > 2).astype(float)
    data = read(frame, "good ~ period + (1 | subject)", levels={"good": [0, 1]})
    nodes = gauss_hermite(1, 25)
    one, other = (hierarchical.regression(data.design, family, inner=nodes) for family in ("cumulative", "logistic"))
    assert one.names == other.names
    block, phi = data.stack([0, 3]), draw(2, 6, 3, seed=3)
    torch.testing.assert_close(
        *(model.log_factor(phi, model.prepare(block)) for model in (one, other)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.slow
def test_a_posterior_of_two_levels_is_that_of_logistic_regression() -> None:
    frame = ratings()
    frame["good"] = (frame["rating"] > 2).astype(float)
    data = read(frame, "good ~ period + (1 | subject)", levels={"good": [0, 1]})
    one, other = (hierarchical.regression(data.design, family) for family in ("cumulative", "logistic"))
    runs = [ft.run(ft.ep(model), ft.InProcess(data), rounds=15, until=settled()) for model in (one, other)]
    sds = posterior(runs[1]).variance.sqrt()
    assert ((posterior(runs[0]).mean - posterior(runs[1]).mean).abs() < 0.05 * sds).all()
    table = runs[0].summary()["estimate"]
    assert table.index.tolist() == ["0|1", "period", "sd(Intercept)"]
    assert abs(table["0|1"] + runs[1].summary()["estimate"]["Intercept"]) < 0.02


@pytest.mark.slow
def test_ep_finds_the_moments_of_a_fine_grid() -> None:
    subjects = ratings(4, 10, seed=5).assign(rating=lambda each: each["rating"].clip(upper=3))
    data = read(subjects, "rating ~ 1 + (1 | subject)", levels={"rating": [1, 2, 3]})
    model = hierarchical.regression(data.design, "cumulative", sd=2.0)
    assert model.names == ("mean Intercept", "mean 2|3 - 1|2", "log variance Intercept")
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=40, until=settled())
    axes = [torch.linspace(*ends, 25).double() for ends in ((-4, 5), (0.05, 6), (-9, 5))]
    phi = torch.cartesian_prod(*axes)
    prior = model.prior.normal
    precision = ft.models.gaussian.unpack(prior.precision)
    log = phi @ prior.shift - 0.5 * ((phi @ precision) * phi).sum(1)
    each, block = model.prepare(data.stack(range(4))), len(data)
    log = log + model.log_factor(phi.expand(block, -1, -1), each).sum(0)
    weights = torch.softmax(log, 0)
    mean = weights @ phi
    sd = (weights @ (phi - mean).square()).sqrt()
    q = posterior(run)
    assert ((q.mean - mean).abs() < 0.1 * sd).all()
    assert ((q.variance.sqrt() / sd - 1).abs() < 0.1).all()
    table = run.summary()
    assert table.index.tolist() == ["1|2", "2|3", "sd(Intercept)"]
    expected = torch.stack([-mean[0], mean[1] - mean[0]])
    assert (torch.tensor(table["estimate"].to_numpy()[:2].copy()) - expected).abs().max() < 0.1


@pytest.mark.slow
def test_thresholds_and_slopes_are_those_of_statsmodels_without_random_effects() -> None:
    """The plain likelihood's maximum by statsmodels, in the units of the frame's columns."""
    ordinal = pytest.importorskip("statsmodels.miscmodels.ordinal_model")
    frame = ratings(6, 10, seed=1)
    data = read(frame, "rating ~ period")
    model = hierarchical.regression(data.design, "cumulative")
    run = ft.run(ft.maximum_likelihood(model), ft.InProcess(data), rounds=60, until=maximised(1e-12), progress=False)
    theirs = ordinal.OrderedModel(frame["rating"], frame[["period"]], distr="logit")
    fit = theirs.fit(method="newton", disp=False, maxiter=100)
    expected = np.r_[theirs.transform_threshold_params(fit.params)[1:-1], fit.params["period"]]
    table = run.summary()
    assert table.index.tolist() == ["1|2", "2|3", "3|4", "period"]
    np.testing.assert_allclose(table["estimate"], expected, atol=2e-6)
    np.testing.assert_allclose(table.loc["period", "sd"], fit.bse["period"], rtol=1e-4)
    assert abs(estimates(run).log_likelihood - fit.llf) < 1e-6


@pytest.mark.slow
def test_the_same_in_blocks_and_by_units_of_columns() -> None:
    frame = ratings(6, 6, seed=2)
    runs = []
    for data, chunk in ((read(frame), None), (read(frame), 1), (read(frame, standardise=False), None)):
        model = hierarchical.regression(data.design, "cumulative", inner=gauss_hermite(1, 7))
        algorithm = ft.maximum_likelihood(model)
        population = ft.InProcess(data, chunk=chunk)
        runs.append(ft.run(algorithm, population, rounds=40, until=maximised(1e-12), progress=False))
    first, second, third = (run.summary()["estimate"].to_numpy() for run in runs)
    np.testing.assert_allclose(first, second, rtol=1e-9)
    np.testing.assert_allclose(first, third, rtol=1e-5)


def test_the_density_and_draws_of_a_response() -> None:
    eta, scale = draw(5, 1, seed=7), torch.tensor([0.7, 1.9]).double().expand(5, 1, 2)
    y = torch.tensor([0.0, 1, 2, 3, 1]).double()[:, None]
    expected = log_density(eta[:, 0], torch.tensor([0.0, 0.7, 1.9]).double(), y[:, 0])
    torch.testing.assert_close(CUMULATIVE.log_density(y, eta, scale)[:, 0], expected)
    uniform = torch.linspace(0.0005, 0.9995, 1000).double().expand(5, -1)
    drawn = CUMULATIVE.draw(uniform, eta, scale)
    share = (drawn == y).double().mean(1)
    assert (share - expected.exp()).abs().max() < 2e-3
    with pytest.raises(TypeError, match=r"one of ordered levels; ft\.inference\.predict"):
        CUMULATIVE.mean(eta)


@pytest.fixture(scope="module")
def fitted() -> Any:
    data = read(ratings())
    model = hierarchical.regression(data.design, "cumulative")
    return ft.run(ft.ep(model), ft.InProcess(data), rounds=20, until=settled())


def test_probabilities_of_levels(fitted: Any) -> None:
    rows = ratings()[::8].assign(rating=1)
    table = ft.inference.predict(fitted, pd.concat([rows, rows[:1].assign(subject="new")]))
    assert table["level"].tolist() == ["1", "2", "3", "4"] * 13
    p = table["estimate"].to_numpy().reshape(13, 4)
    np.testing.assert_allclose(p.sum(1), 1.0)
    assert ((table["low"] < table["estimate"]) & (table["estimate"] < table["high"])).all()
    assert table["known"].tolist() == [True] * 48 + [False] * 4
    effects = ft.inference.ranef(fitted)["estimate"].to_numpy()
    assert np.corrcoef(effects, p[:12, 3])[0, 1] > 0.9
    own = ft.inference.ranef(fitted, total=True).loc["s0"]["estimate"]  # at the posterior means of what is random
    cuts = own[["1|2", "2|3", "3|4"]].to_numpy() - own["period"] * rows["period"].iloc[0]
    plain = np.diff(np.r_[0.0, 1 / (1 + np.exp(-cuts)), 1.0])
    assert np.abs(plain - p[0]).max() < 0.05


def test_what_a_run_of_ordered_levels_tells(fitted: Any) -> None:
    assert fitted.summary().index.tolist() == ["1|2", "2|3", "3|4", "period", "sd(Intercept)"]
    assert float(ft.inference.contrasts(fitted, "3|4 - 1|2")["estimate"].iloc[0]) > 0
    given = ft.inference.adapted(fitted, ratings(1, 8, seed=9))
    assert len(ft.inference.ranef(given, total=True)) == 4
    assert site_estimates(fitted, 0.9).scale == "log-odds"
    with pytest.raises(TypeError, match="Expected a response that has a mean, but got one of ordered levels"):
        ft.inference.marginal_effects(fitted, ratings())


def test_levels_that_are_not_in_order_or_not_there() -> None:
    frame = ratings()
    with pytest.raises(ValueError, match=r"but got '4' in column 'rating' of client 's\d+', row \d+"):
        read(frame, levels={"rating": [1, 2, 3]})
    numbers = read(frame, levels=None)
    with pytest.raises(ValueError, match=r"levels of 'rating' in order with the family 'cumulative', but got numbers"):
        hierarchical.regression(numbers.design, "cumulative")
    with pytest.raises(ValueError, match="with the family 'gaussian', but got 4 levels of 'rating'"):
        hierarchical.regression(read(frame).design)
    words = frame.assign(rating=frame["rating"].map(dict(enumerate(["", "no", "bit", "yes", "very"]))))
    for minimum in (None, 1):
        with pytest.raises(ValueError, match=r"two levels, but got 4 levels of 'rating'; .*, levels=\{'rating'"):
            read(words, levels=None, minimum=minimum, scales=minimum and {"period": (4, 1)})
    levels = {"rating": ["no", "bit", "yes", "very"]}
    declared = read(words, levels=levels, minimum=5, scales={"period": (4, 1)})
    assert declared.design.encoding.levels["rating"].names == ("no", "bit", "yes", "very")
    ordered = pd.Categorical(words["rating"], ["no", "bit", "yes", "very"], ordered=True)
    model = hierarchical.regression(read(words.assign(rating=ordered), levels=None).design, "cumulative")
    assert model.ordered is not None
    assert model.ordered.names == ("no|bit", "bit|yes", "yes|very", "period")


def test_models_of_ordered_levels_that_are_refused() -> None:
    frame = ratings()
    with pytest.raises(ValueError, match="a formula with an intercept with the family 'cumulative'"):
        hierarchical.regression(read(frame, "rating ~ 0 + period").design, "cumulative")
    with pytest.raises(ValueError, match="Expected complete rows with the family 'cumulative'"):
        hierarchical.regression(read(frame).design, "cumulative", covariates=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected trials with the binomial family and no other"):
        hierarchical.regression(read(frame.assign(n=1), trials="n").design, "cumulative")
    names = ["Intercept", *difference_names(LEVELS)]
    with pytest.raises(ValueError, match=re.escape(f"coefficients that end with {difference_names(LEVELS)}, but got")):
        cumulative(hierarchical.normal(3, names=["Intercept", "x", "y"]), LEVELS)
    with pytest.raises(ValueError, match="a coefficient 'Intercept' from which thresholds are counted"):
        cumulative(hierarchical.normal(3), LEVELS)
    with pytest.raises(ValueError, match="but got a rule for 2 dimensions"):
        cumulative(hierarchical.normal(3, random=[0], names=names), LEVELS, inner=gauss_hermite(2, 3))
    block = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([1.0, 4.0]))]).stack([0])
    with pytest.raises(ValueError, match=r"Expected numbers of the 4 levels .*, 0 to 3, but got 4 in y"):
        cumulative(hierarchical.normal(3, names=names), LEVELS).prepare(block)


def warned(frame: pd.DataFrame, formula: str, **settings: Any) -> str:
    data = read(frame, formula, **settings)
    model = hierarchical.regression(data.design, "cumulative")
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=20, until=settled())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.summary()
    return " ".join(str(each.message) for each in seen)


@pytest.mark.slow
def test_levels_without_rows_and_separation_are_warned_of() -> None:
    frame = ratings(6, 8)
    text = warned(frame, "rating ~ period", levels={"rating": [0, 1, 2, 2.5, 3, 4]})
    assert "Expected rows of every level, but got few or none of '0', '2.5'" in text
    apart = frame.assign(period=(frame["rating"] == 4).astype(float))
    assert "Expected responses that no column separates, but 'period'" in warned(apart, "rating ~ period")


@pytest.mark.slow
def test_few_rows_of_many_clients_and_more_than_two_coefficients() -> None:
    """Importance sampling of the posterior by the test's own likelihood: coefficients to 0.1 sds, sds to a tenth."""
    generator = np.random.default_rng(3)
    subjects = 120
    frame = pd.DataFrame({"subject": np.arange(subjects).repeat(2), "period": generator.normal(size=2 * subjects)})
    eta = 0.5 * frame["period"] + 1.2 * generator.normal(size=subjects).repeat(2)
    frame["rating"] = 1 + ((eta + generator.logistic(size=len(frame))).to_numpy()[:, None] > [-0.5, 1.5, 3]).sum(1)
    data = read(frame, standardise=False)
    model = hierarchical.regression(data.design, "cumulative")
    q = posterior(ft.run(ft.ep(model), ft.InProcess(data), rounds=40, until=settled()))
    law = torch.distributions.MultivariateNormal(q.mean, 1.5 * q.covariance_matrix)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        phi = law.sample((4000,))
    y, x = (torch.tensor(frame[name].to_numpy()).reshape(subjects, 2) for name in ("rating", "period"))
    z = torch.linspace(-5, 5, 41).double()
    far = torch.full_like(phi[:, :1], 1e9)
    cuts = torch.cat([-far, 0 * far, phi[:, 2:4], far], 1)
    log = torch.distributions.MultivariateNormal(*ft.models.gaussian.moments(model.prior.completed())).log_prob(phi)
    for k in range(subjects):
        at = phi[:, :1] + phi[:, 1:2] * x[k] + 0 * z[:, None, None]  # (41, 4000, 2)
        at = at + (phi[:, 4:] / 2).exp() * z[:, None, None]
        chance = (cuts[:, y[k]] - at).sigmoid() - (cuts[:, y[k] - 1] - at).sigmoid()
        each = chance.clamp(min=1e-300).log().sum(-1) - 0.5 * z[:, None].square()
        log = log + each.logsumexp(0)
    ordered = (phi[:, 2] > 0) & (phi[:, 3] > phi[:, 2])
    weights = torch.softmax((log - law.log_prob(phi)).where(ordered, -torch.inf), 0)
    assert 1 / weights.square().sum() > 1000
    mean = weights @ phi
    sd = (weights @ (phi - mean).square()).sqrt()
    assert ((q.mean - mean).abs()[:4] < 0.1 * sd[:4]).all()
    assert abs(float(q.mean[4] - mean[4])) < 0.25 * float(sd[4])  # a log variance is skewed, which q is not
    assert ((q.stddev / sd - 1).abs()[:4] < 0.1).all()


@pytest.mark.slow
def test_a_last_level_without_rows_is_warned_of_among_clients() -> None:
    text = warned(ratings(6, 8), "rating ~ period + (1 | subject)", levels={"rating": [1, 2, 3, 4, 5]})
    assert "Expected rows of every level, but got few or none of '5'" in text
    assert "every level" not in warned(ratings(6, 8), "rating ~ period + (1 | subject)")


@pytest.mark.slow
def test_draws_whose_thresholds_cross_are_none() -> None:
    """With few rows q reaches below 0, where the posterior has nothing: log densities of -700 would be all of loo."""
    data = read(ratings(4, 6, seed=4).assign(rating=lambda each: each["rating"].clip(upper=3)),
                levels={"rating": [1, 2, 3]})  # fmt: skip
    run = ft.run(ft.ep(hierarchical.regression(data.design, "cumulative")), ft.InProcess(data), rounds=40,
                 until=settled())  # fmt: skip
    q = posterior(run)
    gap = run.algorithm.settings["model"].names.index("mean 2|3 - 1|2")
    assert float(q.mean[gap] / q.stddev[gap]) < 4
    found = ft.inference.loo(run, draws=4000)
    assert -80 < found.elpd < -5
    assert found.bad < 5
