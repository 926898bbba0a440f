"""Expectation propagation and its correction over simulated federations: places of truths, sds, and what is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.oracles import calibration, stacked_ep

import fedtorch as ft
from fedtorch.federation.algorithms.ep import corrected, posterior, settled
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.hierarchical import Model, generalised, hyperpriors

CLIENTS = 5
SAID = "Expected clients that tell how far they differ"


def linear() -> Model:
    hierarchy = hierarchical.normal(2, random=[0], variance=hyperpriors.log_normal(-1.0, 1.0))
    return hierarchical.linear(hierarchy, noise=hyperpriors.log_normal(-0.5, 0.5))


def logistic() -> Model:
    return generalised.logistic(hierarchical.normal(2, random=[0], variance=hyperpriors.log_normal(-1.0, 1.0)))


@pytest.mark.parametrize(
    ("make", "replicates"),
    [
        pytest.param(linear, 300, id="linear, short"),
        pytest.param(linear, 3000, id="linear, long", marks=pytest.mark.slow),
        pytest.param(logistic, 150, id="logistic", marks=pytest.mark.slow),
    ],
)
def test_corrected_posteriors_are_calibrated(make: object, replicates: int) -> None:
    model = make()  # type: ignore[operator]
    simulated = stacked_ep.simulated(model, replicates, CLIENTS, 6, seed=5)
    q, data = stacked_ep.propagated(model, simulated, rounds=14)
    found = stacked_ep.weighed(model, q, data, CLIENTS)
    assert float(found.effective().min()) > 100
    places = found.places(simulated.truth)
    calibration.check({name: places[:, j] for j, name in enumerate(model.names)})
    sds = gaussian.moments(q).covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    ratio = (sds / found.moments()[1])[:, 1]  # of the slope that all clients share, whatever they are
    assert float(ratio.quantile(0.01)) > 0.9
    assert float(ratio.quantile(0.99)) < 1.1


def test_stacked_federations_end_where_a_run_does() -> None:
    model = linear()
    simulated = stacked_ep.simulated(model, 3, CLIENTS, 6, seed=5)
    q, data = stacked_ep.propagated(model, simulated)
    found, stacked = stacked_ep.weighed(model, q, data, CLIENTS), gaussian.moments(q)
    run = ft.run(ft.ep(model), ft.InProcess(simulated.data(1)), rounds=60, until=settled(1e-5))
    own, given = posterior(run), corrected(run, points=512)
    assert torch.allclose(own.mean, stacked.mean[1], atol=1e-3)
    assert torch.allclose(own.covariance_matrix, stacked.covariance[1], rtol=1e-2, atol=1e-4)
    mean, sd = found.moments()
    assert torch.allclose(given.posterior.mean, mean[1], atol=5e-3)
    assert torch.allclose(given.posterior.stddev, sd[1], rtol=1e-2)


@pytest.mark.parametrize("rows", [3, 30])
def test_sds_of_coefficients_are_right_or_a_summary_says_by_how_much_they_are_not(rows: int) -> None:
    """Within a tenth of those of the corrected posterior, or else the summary names the coefficient."""
    model = hierarchical.linear(
        hierarchical.normal(
            2, random=[0], sd=5.0, variance=hyperpriors.log_normal(-2.0, 2.0), names=["level", "slope"]
        ),
        noise=1.0,
    )
    said = []
    for clients in (3, 5, 12, 25):
        x = torch.randn(clients, rows, 2, generator=torch.Generator().manual_seed(clients), dtype=torch.float64)
        x[..., 0] = 1
        level, slope = torch.linspace(-1, 1, clients, dtype=torch.float64)[:, None], 0.5
        noise = torch.randn(clients, rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = ft.data.from_tensors(list(zip(x, level + slope * x[..., 1] + noise)))
        run = ft.run(ft.ep(model), ft.InProcess(data), rounds=60, until=settled(), progress=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = run.summary()
        messages = " ".join(str(warning.message) for warning in caught)
        given = corrected(run)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            better = run.summary(given=given)
        for name in ("level", "slope"):
            ratio = found.loc[name, "sd"] / better.loc[name, "sd"]
            assert 0.9 < ratio < 1.1 or f"'{name}' " in messages, (clients, name, ratio, messages)
        said.append(SAID in messages)
    assert said[0]
    assert not said[-1]
