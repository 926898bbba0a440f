"""Rows that cut a side of the prior off: separated levels, and clients of which all rows have, or lack, the event."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import gammaln, log_expit
from scipy.stats import norm, qmc, t as student

import fedtorch as ft
from fedtorch.federation.algorithms.ep import corrected, settled
from fedtorch.federation.algorithms.maximum_likelihood import (
    devices as maximum_devices,
    estimates as maximum,
    maximised,
)
from fedtorch.federation.runs.run import Run
from fedtorch.models import hierarchical
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import factor, generalised, hyperpriors
from fedtorch.models.hierarchical.integrals.moments import mixture, outward, placed
from fedtorch.models.quadrature import gauss_hermite

LEVELS = {"device": ["old", "new"]}


def hospitals(
    kind: str, rows: int, *, events: int = 0, sites: int = 1, clients: int = 6, each: int = 40
) -> pd.DataFrame:
    """Return a frame with a device that some rows of some hospitals have, of which so many have the event."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(clients), each)
    frame = pd.DataFrame({"site": site, "age": rng.normal(60, 10, len(site)), "device": "old"})
    eta = 0.04 * (frame.age - 60) + 0.6 * rng.normal(size=clients)[site]
    logistic = kind == "logistic"
    frame["died"] = (rng.random(len(site)) < 1 / (1 + np.exp(-eta))) * 1 if logistic else rng.poisson(np.exp(eta))
    for k in range(sites):
        new = frame.index[frame.site == k][:rows]
        frame.loc[new, "device"], frame.loc[new, "died"] = "new", 0
        frame.loc[new[:events], "died"] = 1
    return frame


def fitted(frame: pd.DataFrame, formula: str, kind: str) -> Run:
    levels: dict[str, Any] = {"levels": LEVELS} if "device" in formula else {}
    data = ft.data.from_frame(frame, client="site", formula=formula, **levels)
    assert data.design is not None
    model = hierarchical.regression(data.design, kind)
    return ft.run(ft.ep(model), ft.InProcess(data), rounds=30, until=settled(), progress=False)


def summary(run: Run) -> tuple[pd.DataFrame, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        table = run.summary()
    return table, [str(warning.message) for warning in seen]


def of_the_device(frame: pd.DataFrame, table: pd.DataFrame, kind: str) -> tuple[float, float, float]:
    """Return mean and sd of the device's coefficient, the others as in a table, and its prior sd."""
    before = 2.5 / frame.device.eq("new").std(ddof=0)
    at = np.linspace(-6, 6, 6001) * before
    z, weights = np.polynomial.hermite_e.hermegauss(40)
    sd = table.estimate["sd(Intercept)"] if "sd(Intercept)" in table.index else 0.0
    total = -0.5 * (at / before) ** 2
    for _, own in frame.groupby("site"):
        if not own.device.eq("new").any():
            continue  # its rows say the same at any coefficient
        log = np.zeros((len(at), len(z)))
        rest = table.estimate["Intercept"] + table.estimate["age"] * own.age
        for eta, new, y in zip(rest, own.device.eq("new"), own.died):
            moved = eta + new * at[:, None] + sd * z
            log += y * moved - (np.logaddexp(0, moved) if kind == "logistic" else np.exp(np.minimum(moved, 50)))
        total += np.log(np.exp(log - log.max()) @ weights + 1e-300)
    density = np.exp(total - total.max())
    density /= density.sum()
    mean = density @ at
    return mean, float(np.sqrt(density @ (at - mean) ** 2)), before


@pytest.mark.parametrize(
    ("kind", "formula", "rows"),
    [
        ("logistic", "died ~ age + device + (1 | site)", 3),
        ("logistic", "died ~ age + device + (1 | site)", 40),  # a whole hospital
        ("logistic", "died ~ age + device", 1),
        ("poisson", "died ~ age + device + (1 | site)", 3),
        pytest.param("poisson", "died ~ age + device + (1 | site)", 40, marks=pytest.mark.slow),
        pytest.param("logistic", "died ~ age + device + (1 + age | site)", 3, marks=pytest.mark.slow),
    ],
)
def test_a_separated_level_has_its_posterior_and_a_word(kind: str, formula: str, rows: int) -> None:
    frame = hospitals(kind, rows)
    table, messages = summary(fitted(frame, formula, kind))
    mean, sd, before = of_the_device(frame, table, kind)
    found = table.loc["device[T.new]"]
    assert found.estimate == pytest.approx(mean, abs=0.05 * sd)
    assert found.sd == pytest.approx(sd, rel=0.04)
    assert found.sd < before
    (message,) = messages
    assert "'device[T.new]' may do so (all rows" in message
    assert "given=corrected(run)" in message


def test_a_rare_level_with_an_event_is_not_separated() -> None:
    frame = hospitals("logistic", 3, events=1)
    table, messages = summary(fitted(frame, "died ~ age + device + (1 | site)", "logistic"))
    mean, sd, _ = of_the_device(frame, table, "logistic")
    assert not messages
    assert abs(table.estimate["device[T.new]"] - mean) < 0.1 * sd
    assert table.sd["device[T.new]"] == pytest.approx(sd, rel=0.05)


def test_what_follows_a_separated_fit() -> None:
    frame = hospitals("logistic", 2, sites=3, clients=4, each=20)
    run = fitted(frame, "died ~ age + device + (1 | site)", "logistic")
    table, (message,) = summary(run)
    assert "(separated" in message
    given = corrected(run, points=2048)
    mean, sd, _ = of_the_device(frame, table, "logistic")
    with pytest.warns(RuntimeWarning, match="depend on the prior; merge levels"):
        found = run.summary(given=given).loc["device[T.new]"]
    assert found.estimate == pytest.approx(mean, abs=0.1 * sd)
    assert found.sd == pytest.approx(sd, rel=0.06)
    rows = pd.DataFrame({"site": [0], "age": [60.0], "device": ["new"]})
    assert ft.inference.predict(run, rows, given=given).estimate[0] < 0.05
    assert ft.inference.ranef(run).estimate.notna().all()


@pytest.mark.parametrize(("kind", "rows"), [("poisson", 40), ("logistic", 3)])
def test_maximum_likelihood_calls_a_separated_level_so(kind: str, rows: int) -> None:
    """Also a rare one, of whose column an sd is little, so that its coefficient by the sd is not large."""
    frame = hospitals(kind, rows, clients=6)
    data = ft.data.from_frame(frame, client="site", formula="died ~ age + device", levels=LEVELS)
    assert data.design is not None
    algorithm = ft.maximum_likelihood(hierarchical.regression(data.design, kind))
    run = ft.run(algorithm, ft.InProcess(data), rounds=60, until=maximised(), progress=False)
    messages = summary(run)[1]
    assert any("'device[T.new]' may do so (all rows" in message for message in messages)
    assert not any("linearly" in message for message in messages)


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
@pytest.mark.parametrize(
    ("size", "variance", "tolerance"), [(1, 1e4, 2e-3), (2, 100.0, 0.01), (3, 25.0, 0.08), (4, 25.0, 0.08)]
)
def test_clients_without_a_mixed_response(kind: str, size: int, variance: float, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(8), rng.normal(size=(8, size - 1))]
    make: Callable[..., Any] = getattr(generalised, kind)
    model = make(hierarchical.normal(size))
    data = ft.data.from_tensors([(torch.tensor(x), torch.zeros(8).double())])
    rows, phi = model.prepare(data.stack([0])), torch.tensor([[[-0.3] * size + [np.log(variance)] * size]])
    z = norm.ppf(qmc.Sobol(size, seed=1).random_base2(16))
    theta = -0.3 + np.sqrt(variance) * z
    eta = theta @ x.T
    log = (log_expit(-eta) if kind == "logistic" else -np.exp(np.minimum(eta, 100))).sum(1)
    weights = np.exp(log) / np.exp(log).sum()
    mean = weights @ theta
    sd = np.sqrt(weights @ (theta - mean) ** 2)
    found = model.given(phi, torch.ones(1, 1).double(), rows)
    np.testing.assert_allclose((found.means[0, 0].numpy() - mean) / sd, 0, atol=tolerance)
    np.testing.assert_allclose(found.covariances[0, 0].diagonal().sqrt().numpy() / sd, 1, atol=tolerance)
    evidence = float(model.log_factor(phi, rows)) - np.log(np.exp(log).mean())
    assert abs(evidence) < tolerance


def random_design(seed: int, size: int) -> tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A client of 1 to 60 rows: family, mean and variance of its coefficients, 0.05 to 400, columns and responses.

    Responses are mixed, all events, none, or one.
    """
    rng = np.random.default_rng((seed, size))
    rows, variance = int(np.exp(rng.uniform(0, np.log(60)))), np.exp(rng.uniform(np.log(0.05), np.log(400), size))
    mean = rng.normal(size=size) * np.minimum(variance, 4) ** 0.5
    x = np.c_[np.ones(rows), rng.normal(size=(rows, size - 1))]
    eta = np.clip(x @ (mean + np.minimum(variance**0.5, 1.5) * rng.normal(size=size)), -6, 4)
    kind, of = ("logistic", "poisson")[seed % 2], seed // 2 % 4
    y = rng.binomial(1, 1 / (1 + np.exp(-eta))) if kind == "logistic" else rng.poisson(np.exp(eta))
    y = [y, np.zeros(rows), np.maximum(y, 1), np.arange(rows) == 0][of] * 1.0
    return kind, mean, variance, x, y


def importance(
    kind: str, mean: np.ndarray, variance: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray, float]:
    """Log evidence, mean, sds and effective size: Sobol points, half of the prior, half of a t density at the mode."""
    columns, size = x * variance**0.5, len(mean)
    rate = (lambda eta: 1 / (1 + np.exp(-eta))) if kind == "logistic" else (lambda eta: np.exp(np.minimum(eta, 300)))

    def log(z: np.ndarray) -> np.ndarray:
        eta = x @ mean + z @ columns.T
        ratio = np.logaddexp(0, eta) if kind == "logistic" else rate(eta)
        return (y * eta - ratio).sum(-1) - 0.5 * (z**2).sum(-1)

    mode = np.zeros(size)
    for _ in range(200):
        p = rate(x @ mean + columns @ mode)
        bend = columns.T * (p * (1 - p) if kind == "logistic" else p) @ columns + np.eye(size)
        step, share = np.linalg.solve(bend, columns.T @ (y - p) - mode), 1.0
        while log(mode + share * step) < log(mode) and share > 1e-10:
            share /= 2
        mode = mode + share * step
    half = 1.2 * np.linalg.cholesky(np.linalg.inv(bend))
    u = np.clip(qmc.Sobol(size + 1, seed=1).random_base2(14), 1e-12, 1 - 1e-12)
    z = np.where(u[:, :1] < 0.5, norm.ppf(u[:, 1:]), mode + student.ppf(u[:, 1:], 4) @ half.T)
    away = np.linalg.solve(half, (z - mode).T).T
    both = [norm.logpdf(z).sum(1), student.logpdf(away, 4).sum(1) - np.log(half.diagonal()).sum()]
    ratio = log(z) - 0.5 * size * np.log(2 * np.pi) - np.logaddexp(*both) + np.log(2)
    weights = np.exp(ratio - ratio.max())
    evidence, share = ratio.max() + np.log(weights.mean()), weights / weights.sum()
    theta = mean + variance**0.5 * z
    centre = share @ theta
    return evidence, centre, np.sqrt(share @ (theta - centre) ** 2), 1 / (share**2).sum()


@pytest.mark.parametrize(
    ("size", "tolerance"),
    [
        (1, 0.03),
        pytest.param(2, 0.03, marks=pytest.mark.slow),
        pytest.param(3, 0.1, marks=pytest.mark.slow),
        pytest.param(4, 0.15, marks=pytest.mark.slow),
    ],
)
def test_clients_of_random_designs_have_their_moments(size: int, tolerance: float) -> None:
    """In sds of what is exact, by draws whose own error is 0.01; designs that no constant was chosen by."""
    worst = 0.0
    for seed in range(48):
        kind, mean, variance, x, y = design = random_design(seed, size)
        evidence, centre, sds, effective = importance(*design)
        assert effective > 500
        make: Callable[..., Any] = getattr(generalised, kind)
        model = make(hierarchical.normal(size))
        rows = model.prepare(ft.data.from_tensors([(torch.tensor(x), torch.tensor(y))]).stack([0]))
        phi = torch.tensor(np.r_[mean, np.log(variance)])[None, None]
        found = model.given(phi, torch.ones(1, 1).double(), rows)
        moved = (found.means[0, 0].numpy() - centre) / sds
        ratio = found.covariances[0, 0].diagonal().sqrt().numpy() / sds - 1
        log = float(model.log_factor(phi, rows)) - evidence
        log += gammaln(y + 1).sum() if kind == "poisson" else 0.0
        worst = max(worst, abs(moved).max(), abs(ratio).max(), abs(log))
    assert worst < tolerance


@pytest.mark.parametrize("inner", ["default", gauss_hermite(1, 25)])
def test_clients_that_all_have_or_have_not_the_event(inner: Any) -> None:
    """Exact by grids over μ, log τ and θ: a client with events 6.123 ± 4.224, log variance 3.299, sd 5.71."""
    hierarchy = hierarchical.normal(1, sd=2.5, variance=hyperpriors.log_normal(-1.0, 1.5))
    data = ft.data.from_tensors([(torch.ones(8, 1), torch.full((8,), float(k % 2))) for k in range(6)])
    model = generalised.logistic(hierarchy, inner=inner)
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30, until=settled(), progress=False)
    assert float(ft.federation.algorithms.ep.posterior(run).mean[1]) == pytest.approx(3.299, abs=0.02)
    own = ft.federation.algorithms.ep.devices(run).marginals()
    assert float(own.mean[1, 0]) == pytest.approx(6.123, abs=0.02)
    assert float(own.stddev[1, 0]) == pytest.approx(4.224, rel=0.025)


def test_an_edge_far_from_the_mode_is_seen() -> None:
    """A prior N(−30, 45²) whose mode says nothing of rows that cut it off above 0."""
    before, centre = 45.0, -30.0
    model = generalised.logistic(hierarchical.normal(2, random=[]))
    x = torch.tensor([[1.0, 0.0]] * 3).double()
    rows = model.prepare(ft.data.from_tensors([(x, torch.zeros(3).double())]).stack([0]))
    cavity = Moments(torch.tensor([[centre, 0.0]]).double(), torch.diag(torch.tensor([before**2, 1.0])).double()[None])
    found = model.project(cavity, rows, torch.zeros(1)).tilted
    at = centre + before * np.linspace(-8, 8, 40001)
    density = np.exp(3 * log_expit(-at) - 0.5 * ((at - centre) / before) ** 2)
    density /= density.sum()
    mean = density @ at
    assert float(found.mean[0, 0]) == pytest.approx(mean, rel=2e-3)
    assert float(found.covariance[0, 0, 0].sqrt()) == pytest.approx(np.sqrt(density @ (at - mean) ** 2), rel=2e-3)


def test_moments_that_rows_cannot_have_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a log-concave likelihood rows never make a variance greater: a client keeps its site, and it is said."""
    conditional = factor.Conditional

    def wider(log_evidence: Any, derivatives: Any, moments: Any) -> factor.Conditional:
        return conditional(log_evidence, lambda w: (derivatives(w)[0], -derivatives(w)[1]), moments)

    monkeypatch.setattr(generalised, "Conditional", wider)
    run = fitted(hospitals("logistic", 3, clients=3, each=10), "died ~ age", "logistic")
    with pytest.warns(RuntimeWarning, match="3 kept an old one .*no moments, or such as rows cannot have"):
        run.summary()


def ordered(*, without: int | None, formula: str = "rating ~ x") -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    rating = np.digitize(x + rng.logistic(size=200), [-1, 0, 1]) + 1
    frame = pd.DataFrame({"site": rng.choice(list("ab"), 200), "x": x, "rating": rating})
    return ft.data.from_frame(
        frame[frame.rating != without], client="site", formula=formula, levels={"rating": [1, 2, 3, 4]}
    )


def test_an_empty_level_between_others_is_refused_by_name() -> None:
    data = ordered(without=3, formula="rating ~ x + (1 | site)")
    model = hierarchical.regression(data.design, "cumulative")
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30, until=settled(), progress=False)
    rows = pd.DataFrame({"x": [0.0], "site": ["a"]})
    asked: list[Callable[[], Any]] = [
        run.summary,
        lambda: corrected(run, points=512),
        lambda: ft.inference.ranef(run),
        lambda: ft.inference.contrasts(run, "x"),
        lambda: ft.inference.predict(run, rows),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match="none of '3', so that thresholds are not in order; leave such levels out"):
            ask()


@pytest.mark.parametrize("without", [1, 2, 3, 4, None])
def test_maximum_likelihood_refuses_an_empty_level_by_name(without: int | None) -> None:
    data = ordered(without=without)
    algorithm = ft.maximum_likelihood(hierarchical.regression(data.design, "cumulative"))
    run = ft.run(algorithm, ft.InProcess(data), rounds=25, until=maximised(), progress=False)
    if without is None:
        assert run.summary().estimate["x"] > 0
        return
    for ask in (run.summary, lambda: maximum(run), lambda: maximum_devices(run)):
        with pytest.raises(ValueError, match=f"none of '{without}', so that the likelihood has no maximum; leave"):
            ask()


@pytest.mark.parametrize("without", [1, 4])
def test_an_end_level_without_rows_is_right_and_warned_of(without: int) -> None:
    """A posterior that is cut off at one side: 1|2 or 3|4 by a grid, the others as found."""
    data = ordered(without=without, formula="rating ~ 1")
    run = ft.run(ft.ep(hierarchical.regression(data.design, "cumulative")), ft.InProcess(data), rounds=30,
                 until=settled(), progress=False)  # fmt: skip
    _, (message,) = summary(run)
    assert (
        f"few or none of '{without}', whose thresholds the rows do not inform; such a posterior is one-sided" in message
    )
    rows = pd.DataFrame({"site": ["a"]})
    p = ft.inference.predict(run, rows).set_index("level")["estimate"]
    assert p.between(0, 1).all()
    assert 0 < p[str(without)] < 0.02
    given = corrected(run, points=2048)
    with pytest.warns(
        RuntimeWarning, match=f"few or none of '{without}', whose thresholds the rows do not inform; leave"
    ):
        assert run.summary(given=given).sd.iloc[[0, 2]].lt(2.6 * 2**0.5).all()


@pytest.mark.parametrize("slope", [1.0, 45.0, 300.0])
@pytest.mark.parametrize("rows", [1, 1000])
def test_nodes_go_where_a_density_bends(slope: float, rows: int) -> None:
    log = lambda t: rows * torch.nn.functional.logsigmoid(-slope * t) - 0.5 * t.square()
    fine = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    mode = fine[log(fine).argmax()]
    bend = 1 + rows * slope**2 * (-slope * mode).sigmoid() * (slope * mode).sigmoid()
    first = outward(mode, bend.rsqrt())
    nodes, weights = placed(first, log(first))
    moments = lambda at, density: [density.sum().log(), (density @ at) / density.sum()]
    exact, found = moments(fine, log(fine).exp() * (fine[1] - fine[0])), moments(nodes, (log(nodes) + weights).exp())
    np.testing.assert_allclose(found, exact, atol=2e-3)


def test_a_straight_tail_has_nodes() -> None:
    """One event of many rows under a wide prior: the log density of a log rate falls evenly, without a bend."""
    wide = 30.0  # prior sd

    def rows(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return wide * t - (wide * t).exp(), t[..., None], torch.zeros(*t.shape, 1, 1, dtype=t.dtype)

    zero = torch.zeros(1, 1, dtype=torch.float64)
    _, mean, spread = mixture(rows, zero, zero + 1 / wide)
    t = torch.linspace(-40.0, 5.0, 200_001, dtype=torch.float64) / wide
    share = (rows(t)[0] - 0.5 * t.square()).softmax(0)
    assert float(mean) == pytest.approx(float(share @ t), rel=2e-3)
    assert float(spread.sqrt()) == pytest.approx(float((share @ (t - share @ t).square()).sqrt()), rel=2e-3)
