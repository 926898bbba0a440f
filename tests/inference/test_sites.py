"""Effects of sites and predictions beside the dense posterior of a linear Gaussian model, and statsmodels."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.ep import devices, settled
from fedtorch.federation.algorithms.ep.correction import corrected
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import generalised, hyperpriors
from fedtorch.sites import Hub, SiteConfiguration, join
from fedtorch.sites.streams import memory

NAMES = ("Intercept", "age", "dose")
TAU, NOISE = 0.5, 0.3  # variances
EDGE = 1.6448536269514722


def rows_of_sites(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for k in range(count):
        n = 5 + 3 * k
        x = torch.cat([torch.ones(n, 1), torch.randn(n, 2, generator=generator)], 1).double()
        theta = torch.tensor([1.0, 0.5, -1.0]).double()
        theta[:2] += TAU**0.5 * torch.randn(2, generator=generator).double()
        made.append((x, x @ theta + NOISE**0.5 * torch.randn(n, generator=generator).double()))
    return made


ROWS = rows_of_sites(6)


def known_model() -> hierarchical.Model:
    variance = hyperpriors.log_normal(math.log(TAU), 1e-4)
    hierarchy = hierarchical.normal(3, random=[0, 1], sd=2.0, variance=variance, names=NAMES)
    return hierarchical.linear(hierarchy, noise=NOISE)


@pytest.fixture(scope="module")
def run() -> ft.Run:
    data = ft.data.from_tensors(ROWS, names=[f"ward {k}" for k in range(len(ROWS))])
    return ft.run(ft.ep(known_model()), ft.InProcess(data), rounds=20, until=settled(1e-6), progress=False)


class Dense(NamedTuple):
    """The posterior of (μ, b_1, …, b_K, b_new) from all rows at once, by the formula of a normal density."""

    mean: Tensor
    covariance: Tensor

    def of(self, weights: Tensor) -> tuple[float, float]:
        """The mean and sd of a linear combination."""
        return float(weights @ self.mean), float((weights @ self.covariance @ weights).sqrt())

    def weights(self, x: Tensor, site: int, shared: bool = True) -> Tensor:
        """Of x'θ at a site, the last of which is a new one; without what is shared those of its deviation."""
        weights = torch.zeros_like(self.mean)
        weights[:3] = x * shared
        weights[3 + 2 * site : 5 + 2 * site] = x[:2]
        return weights


@pytest.fixture(scope="module")
def dense() -> Dense:
    size = 3 + 2 * (len(ROWS) + 1)
    prior = torch.cat([torch.full((3,), 4.0), torch.full((size - 3,), TAU)]).double()
    precision, shift = torch.diag(1 / prior), torch.zeros(size).double()
    for k, (x, y) in enumerate(ROWS):
        design = torch.zeros(len(x), size).double()
        design[:, :3], design[:, 3 + 2 * k : 5 + 2 * k] = x, x[:, :2]
        precision, shift = precision + design.mT @ design / NOISE, shift + design.mT @ y / NOISE
    covariance = torch.linalg.inv(precision)
    return Dense(covariance @ shift, covariance)


@pytest.mark.parametrize("total", [False, True])
def test_effects_are_those_of_all_rows_in_one_place(run: ft.Run, dense: Dense, total: bool) -> None:
    table = ft.inference.ranef(run, level=0.9, total=total)
    assert list(table.index.names) == ["site", "coefficient"]
    assert len(table) == len(ROWS) * (3 if total else 2), "fixed effects do not deviate"
    for (site, name), row in table.iterrows():
        unit = torch.eye(3).double()[NAMES.index(name)]
        mean, sd = dense.of(dense.weights(unit, int(site.removeprefix("ward ")), shared=total))
        assert row["estimate"] == pytest.approx(mean, abs=2e-3 * sd)
        assert row["sd"] == pytest.approx(sd, rel=2e-3)
        assert row["high"] == pytest.approx(mean + EDGE * sd, abs=2e-2 * sd)


def test_totals_are_those_of_devices(run: ft.Run) -> None:
    marginals = devices(run).marginals()
    table = ft.inference.ranef(run, total=True)
    np.testing.assert_allclose(table["estimate"], marginals.mean.flatten().numpy(), atol=1e-3)


def test_predictions_are_those_of_all_rows_in_one_place(run: ft.Run, dense: Dense) -> None:
    x = torch.tensor([[1.0, 2.0, 0.5], [1.0, -1.0, 0.0]]).double()
    for site, place, known in (("ward 2", 2, True), ("a new one", len(ROWS), False)):
        table = ft.inference.predict(run, x, interval=0.9, site=site)
        for row, (_, found) in zip(x, table.iterrows()):
            mean, sd = dense.of(dense.weights(row, place))
            whole = (sd**2 + NOISE) ** 0.5
            assert found["known"] == known
            assert found["estimate"] == pytest.approx(mean, abs=2e-3 * sd)
            assert found["sd"] == pytest.approx(sd, rel=2e-3)
            assert found["low"] == pytest.approx(mean - EDGE * sd, abs=1e-2 * sd)
            assert found["new_high"] == pytest.approx(mean + EDGE * whole, abs=1e-2 * sd)


def test_a_new_site_has_the_posterior_that_its_rows_would_have_given(run: ft.Run) -> None:
    x, y = rows_of_sites(1, seed=9)[0]
    ward = ft.inference.adapted(run, (x, y), site="ward 7")
    data = ft.data.from_tensors([*ROWS, (x, y)])
    whole = ft.run(ft.ep(known_model()), ft.InProcess(data), rounds=20, until=settled(1e-6), progress=False)
    expected = ft.inference.ranef(whole, total=True).loc["6"]
    table = ft.inference.ranef(ward, total=True).loc["ward 7"]
    np.testing.assert_allclose(table[["estimate", "sd"]], expected[["estimate", "sd"]], atol=2e-3)
    same = ft.inference.predict(ward, x)
    np.testing.assert_allclose(same["estimate"], (x.numpy() @ table["estimate"].to_numpy()), rtol=1e-9)
    with pytest.raises(ValueError, match="of which only totals are known"):
        ft.inference.ranef(ward)


def test_frames_come_back_with_their_index(run: ft.Run) -> None:
    frame = pd.DataFrame({"age": [1.0, 2.0], "Intercept": 1.0, "dose": 0.0, "place": ["ward 5", "x"]}, index=["p", "q"])
    table = ft.inference.predict(run, frame, site="place")
    assert list(table.index) == ["p", "q"]
    assert list(table["known"]) == [True, False]
    x = torch.from_numpy(frame[list(NAMES)].to_numpy(copy=True))
    assert table.loc["p", "estimate"] == ft.inference.predict(run, x[:1], site="ward 5")["estimate"].item()
    with pytest.raises(ValueError, match="but got none for 'dose'"):
        ft.inference.predict(run, frame.drop(columns="dose"))
    with pytest.raises(ValueError, match=r"Expected rows x with 3 columns .* but got shape \(2, 2\)"):
        ft.inference.predict(run, x[:, :2])


def test_every_row_of_federated_data_is_predicted_at_its_site(run: ft.Run) -> None:
    table = ft.inference.predict(run, run.population.data)
    assert list(table["site"]) == [f"ward {k}" for k, (x, _) in enumerate(ROWS) for _ in x]
    y = torch.cat([y for _, y in ROWS]).numpy()
    inside = ((table["new_low"] < y) & (y < table["new_high"])).mean()
    assert 0.8 < inside < 1.0


def test_effects_are_near_those_of_restricted_maximum_likelihood(run: ft.Run) -> None:
    frames = [pd.DataFrame(x.numpy(), columns=list(NAMES)).assign(y=y.numpy(), k=k) for k, (x, y) in enumerate(ROWS)]
    model = smf.mixedlm("y ~ age + dose", pd.concat(frames), groups="k", re_formula="~age")
    effects = pd.DataFrame(model.fit(method="lbfgs").random_effects).T.to_numpy()
    table = ft.inference.ranef(run)
    away = np.abs(table["estimate"].to_numpy() - effects.flatten()) / table["sd"].to_numpy()
    assert away.max() < 0.5, "the variances are known here and estimated there"


def test_the_corrected_posterior_is_an_option(run: ft.Run) -> None:
    given = corrected(run, points=256)
    table, plain = ft.inference.ranef(run, given=given), ft.inference.ranef(run)
    np.testing.assert_allclose(table["estimate"], plain["estimate"], atol=0.05)


@pytest.mark.parametrize(("family", "trials"), [("logistic", None), ("logistic", 7.0), ("poisson", None)])
def test_responses_of_generalised_models(family: str, trials: float | None) -> None:
    """The mixture at the nodes, integrated on a fine grid of the predictor."""
    made = getattr(generalised, family)(hierarchical.normal(3, random=[0], names=NAMES))
    binary = [(x, (y > 0).double()) for x, y in ROWS]
    data = ft.data.from_tensors(binary)
    fit = ft.run(ft.ep(made), ft.InProcess(data), rounds=30, until=settled(), progress=False)
    x = torch.tensor([[1.0, 0.3, -0.2]]).double()
    extra = {} if trials is None else {"trials": torch.full((1,), trials)}
    table = ft.inference.predict(fit, (x, extra), site="3").iloc[0]
    mixture = devices(fit).predictive(x[None].expand(len(ROWS), 1, 3), noise=0.0)
    eta = torch.linspace(-12, 12, 20_001).double()
    density = mixture.log_prob(eta[:, None, None].expand(-1, len(ROWS), 1))[:, 3, 0].softmax(0)
    g = made.family.mean(eta)
    mean = float(density @ g)
    assert table["estimate"] == pytest.approx(mean, rel=0.02)
    assert table["sd"] == pytest.approx(float((density @ (g - mean).square()).sqrt()), rel=0.05)
    low = float(g[(density.cumsum(0) < 0.05).sum()])
    assert table["low"] == pytest.approx(low, rel=0.06)
    most = torch.arange(1 + int(trials or 1 if family == "logistic" else 60)).double()
    scale = torch.full((1, 1), trials or 1.0).double()
    mass = made.family.log_density(most[:, None], eta, scale).exp() @ density
    below = mass.cumsum(0)
    assert float(below[int(table["new_high"])]) >= 0.93
    assert table["new_high"] == 0 or float(below[int(table["new_high"]) - 1]) <= 0.97
    new = ft.inference.adapted(fit, (x[:0], torch.zeros(0)), site="empty")
    averaged = ft.inference.predict(fit, x).iloc[0]
    assert ft.inference.predict(new, x).iloc[0]["estimate"] == pytest.approx(averaged["estimate"], rel=0.02)


def test_sites_keep_what_is_known_of_one_of_them() -> None:
    host, rows = Hub(), ft.data.from_tensors(ROWS, names=[f"ward {k}" for k in range(len(ROWS))])
    configuration = SiteConfiguration(rows, {"ep": lambda: ft.ep(known_model())})
    site = threading.Thread(target=join, args=(lambda: memory.link(host, "north"), configuration))
    site.start()
    remote = ft.Remote(host, ["north"], "ep")
    run = ft.run(ft.ep(known_model()), remote, rounds=6, progress=False)
    summary = run.summary()
    assert list(summary["n"])[:3] == [sum(len(x) for x, _ in ROWS)] * 3
    with pytest.raises(RuntimeError, match=r"does not let it tell the posterior .* Policy\(after_fit=\('effects',\)\)"):
        ft.inference.ranef(run)
    with pytest.raises(RuntimeError, match=r"does not let it tell the posterior .* Policy\(after_fit=\('effects',\)\)"):
        ft.inference.predict(run, ROWS[0][0], site=remote.names[0])
    new = ft.inference.predict(run, ROWS[0][0][:1]).iloc[0]
    assert new["low"] < new["estimate"] < new["high"]
    remote.finish(run)
    site.join()


def by_numbers() -> tuple[pd.DataFrame, ft.Run]:
    frame = pd.DataFrame({"ward": np.repeat([1, 2, 3, 4], 8), "age": np.arange(32.0) % 7})
    frame["y"] = frame["ward"] + 0.1 * frame["age"] + 0.05 * np.sin(np.arange(32))
    data = ft.data.from_frame(frame, client="ward", formula="y ~ age + (1 | ward)")
    return frame, ft.run(ft.ep(hierarchical.regression(data.design)), ft.InProcess(data), rounds=20, progress=False)


def test_sites_with_numbers_are_known_whether_they_are_whole_or_floats() -> None:
    """Of a column with missing cells pandas makes floats, and wards 2 and 2.0 are one."""
    frame, run = by_numbers()
    expected = ft.inference.predict(run, frame)
    assert expected["known"].all()
    pd.testing.assert_frame_equal(ft.inference.predict(run, frame.assign(ward=frame["ward"].astype(float))), expected)
    alone = ft.inference.predict(run, frame[["age"]].head(8), site=1)
    np.testing.assert_array_equal(alone["estimate"], expected["estimate"].head(8))
    floats = ft.data.from_frame(
        frame.assign(ward=frame["ward"].astype(float)), client="ward", formula="y ~ age + (1 | ward)"
    )
    assert floats.names == tuple(run.population.names) == ("1", "2", "3", "4")


def test_new_sites_of_a_frame_are_adapted_each_by_its_rows() -> None:
    frame, run = by_numbers()
    new = frame[frame["ward"] < 3].assign(ward=lambda rows: rows["ward"] + 10)
    both = ft.inference.adapted(run, new)
    assert both.sites == ("11", "12")
    one = ft.inference.adapted(run, new[new["ward"] == 12])
    table = ft.inference.ranef(both, total=True)
    np.testing.assert_allclose(table.loc["12"], ft.inference.ranef(one, total=True).loc["12"], rtol=1e-9)
    assert ft.inference.predict(both, new)["known"].all()
    assert ft.inference.adapted(run, new, site="both").sites == ("both",)


def test_data_that_were_encoded_by_themselves_are_refused() -> None:
    """Their standardised columns look like the run's, and stand for other ages."""
    frame, run = by_numbers()
    other = {"client": "ward", "formula": "y ~ age + (1 | ward)"}
    young = frame.assign(age=frame["age"] / 2)
    for wrong in (ft.inference.predict, ft.inference.adapted):
        with pytest.raises(ValueError, match="of the run's design"):
            wrong(run, ft.data.from_frame(young, **other))
    encoded = ft.data.from_frame(young, client="ward", design=run.design)
    expected = ft.inference.predict(run, young)
    np.testing.assert_array_equal(ft.inference.predict(run, encoded)["estimate"], expected["estimate"])


def test_rows_without_their_numbers_of_trials_are_warned_of() -> None:
    rows = pd.DataFrame({"site": list("aabb"), "x": [0.0, 1.0, 0.0, 1.0], "n": [5, 6, 7, 8], "y": [1, 3, 2, 6]})
    data = ft.data.from_frame(rows, client="site", formula="y | trials(n) ~ x + (1 | site)")
    run = ft.run(ft.ep(hierarchical.regression(data.design, "binomial")), ft.InProcess(data), rounds=8)
    of_all = ft.inference.predict(run, rows)
    with pytest.warns(UserWarning, match="numbers of trials in column 'n', but the rows have no such"):
        of_one = ft.inference.predict(run, rows.drop(columns="n"))
    assert list(of_one["estimate"]) == list(of_all["estimate"])
