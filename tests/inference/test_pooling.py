"""Rubin's rules against numbers by hand, statsmodels' MICE, and fits that cannot be pooled."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.ep import posterior
from fedtorch.inference import pooled
from fedtorch.models import hierarchical

GAPS = [(torch.tensor([0.9, 2.0]), torch.diag(torch.tensor([0.04, 0.09])))] * 2
GAPS += [(torch.tensor([1.2, 2.0]), torch.diag(torch.tensor([0.10, 0.09])))]


def test_rules_by_hand() -> None:
    found = pooled([(mean.double(), covariance.double()) for mean, covariance in GAPS], names=["a", "b"])
    within, between = 0.06, 0.03  # of a: (0.04 + 0.04 + 0.10) / 3 and the variance of 0.9, 0.9, 1.2
    assert float(found.mean[0]) == pytest.approx(1.0)
    assert float(found.within[0, 0]) == pytest.approx(within)
    assert float(found.between[0, 0]) == pytest.approx(between)
    assert float(found.covariance[0, 0]) == pytest.approx(within + 4 / 3 * between)
    ratio = 4 / 3 * between / within
    assert float(found.freedom[0]) == pytest.approx(2 * (1 + 1 / ratio) ** 2)
    assert float(found.missing[0]) == pytest.approx((ratio + 2 / (float(found.freedom[0]) + 3)) / (1 + ratio))
    assert math.isinf(float(found.freedom[1]))
    assert float(found.missing[1]) == 0


def test_degrees_of_freedom_of_barnard_and_rubin() -> None:
    """With 20 degrees of freedom of the complete data, and a third or so of the variance between fits."""
    found = pooled(GAPS, freedom=20.0)
    share = 0.04 / 0.1
    of_draws, observed = 2 / share**2, 21 / 23 * 20 * (1 - share)
    assert float(found.freedom[0]) == pytest.approx(of_draws * observed / (of_draws + observed), rel=1e-6)
    assert float(found.freedom[1]) == pytest.approx(21 / 23 * 20)


def test_the_table_has_intervals_of_students_t() -> None:
    from scipy.stats import t

    table = pooled(GAPS, names=["age", "sex"]).summary(0.9)
    row = table.loc["age"]
    assert row["high"] - row["estimate"] == pytest.approx(t.ppf(0.95, row["df"]) * row["sd"])
    assert row["estimate"] - row["low"] == pytest.approx(row["high"] - row["estimate"])


def test_the_same_as_statsmodels() -> None:
    """Their MICE pools fits of linear regressions that it has made itself: both get the same fits."""
    import pandas
    from statsmodels.imputation import mice
    from statsmodels.regression.linear_model import OLS

    draw = numpy.random.default_rng(3)
    x = draw.standard_normal((80, 2)) @ numpy.array([[1.0, 0.5], [0.0, 1.0]])
    frame = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": x @ [1.0, -1.0] + draw.standard_normal(80)})
    frame.loc[frame.index[::4], "a"] = numpy.nan
    state = numpy.random.get_state()  # noqa: NPY002
    numpy.random.seed(0)  # noqa: NPY002
    try:
        data = mice.MICEData(frame)
        theirs = mice.MICE("y ~ a + b", OLS, data)
        combined = theirs.fit(2, 4)
        fits = theirs.results_list
    finally:
        numpy.random.set_state(state)  # noqa: NPY002
    ours = pooled([(torch.tensor(fit.params.to_numpy()), torch.tensor(fit.cov_params().to_numpy())) for fit in fits])
    assert torch.allclose(ours.mean, torch.tensor(numpy.asarray(combined.params)), atol=1e-12)
    assert torch.allclose(ours.covariance, torch.tensor(numpy.asarray(combined.cov_params())), atol=1e-12)
    share = (1 + 1 / 4) * ours.between.diagonal() / ours.covariance.diagonal()
    assert torch.allclose(share, torch.tensor(numpy.asarray(combined.frac_miss_info)), atol=1e-12)


@pytest.mark.parametrize(
    ("fits", "said"),
    [
        ([], "at least two fits to pool, but got 0"),
        (GAPS[:1], "at least two fits to pool, but got 1"),
        ([GAPS[0], (torch.zeros(1), torch.eye(1))], r"fits of the same q quantities.* shapes \[\(1,\), \(2,\)\]"),
        ([(torch.zeros(2), torch.ones(2))] * 2, r"\(q,\) and \(q, q\)"),
    ],
)
def test_fits_that_cannot_be_pooled(fits: list[tuple[Tensor, Tensor]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pooled(fits)


def test_names_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="a name for each of 2 quantities, but got 1"):
        pooled(GAPS, names=["a"])


def test_levels_are_between_zero_and_one() -> None:
    with pytest.raises(ValueError, match="level between 0 and 1, but got 95"):
        pooled(GAPS).summary(95)


def runs() -> list[ft.Run]:
    """Three fits of what three imputations might be."""
    found = []
    for level in (1.0, 1.3, 1.5):
        x = torch.ones(20, 1, dtype=torch.float64)
        data = ft.data.from_tensors([(x, x[:, 0] * own) for own in (1.0, 2.0, 3.0, level)])
        model = hierarchical.linear(hierarchical.normal(1, names=["level"]), noise=0.1)
        found.append(ft.run(ft.ep(model), ft.InProcess(data), rounds=30))
    return found


def test_runs_are_pooled_as_their_summaries_show_them() -> None:
    fits = runs()
    found, tables = pooled(fits), [fit.summary() for fit in fits]
    assert found.names == ("level", "sd(level)")
    summary = found.summary()
    assert summary.loc["level", "estimate"] == pytest.approx(
        sum(table.loc["level", "estimate"] for table in tables) / 3
    )
    variance = sum(table.loc["level", "sd"] ** 2 for table in tables) / 3
    assert float(found.within[0, 0]) == pytest.approx(variance, rel=1e-6)


def test_standard_deviations_are_pooled_as_logarithms() -> None:
    """As φ has them, log τ / 2, so that an interval has no negative end."""
    fits = runs()
    found = pooled(fits)
    logarithms = torch.stack([posterior(fit).mean[1] / 2 for fit in fits])
    assert torch.allclose(found.mean[1], logarithms.mean(), atol=1e-9)
    row = found.summary().loc["sd(level)"]
    assert row["estimate"] == pytest.approx(float(logarithms.mean().exp()))
    assert row["low"] * row["high"] == pytest.approx(row["estimate"] ** 2)
    assert row["sd"] == pytest.approx(row["estimate"] * float(found.covariance[1, 1].sqrt()))


def test_runs_without_a_posterior_are_refused() -> None:
    data = ft.data.from_tensors([(torch.eye(2), torch.ones(2))])
    run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data), rounds=1)
    with pytest.raises(TypeError, match=r"Expected a run of ft\.ep.* named quantities, but got one of fedavg"):
        pooled([run, run])


def test_fits_of_other_quantities_are_refused() -> None:
    one, other = runs()[:1], GAPS[:1]
    with pytest.raises(ValueError, match=r"Expected all fits to be of \['level', 'sd\(level\)'\], but got one of \[\]"):
        pooled([*one, *other])
