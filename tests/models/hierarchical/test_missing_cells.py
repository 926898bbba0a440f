"""Rows with missing covariates against their likelihood by fine grids, and models without any against their own."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pandas
import pytest
import torch
from torch.distributions import Bernoulli, Normal, Poisson

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.ep import settled
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import imputation
from fedtorch.models.quadrature import gauss_hermite

MEAN = torch.tensor([0.3, -0.2, 0.1, 0.4]).double()
COVARIANCE = torch.eye(4).double() + 0.4
NORMAL = imputation.Normal(MEAN, COVARIANCE)
FAMILIES = {"gaussian": Normal, "logistic": Bernoulli, "poisson": Poisson}


def frame(family: str, rows: int = 8) -> pandas.DataFrame:
    """Return one site's rows y ~ x + z + w."""
    x, z, w, noise = random.normal(random.key(0), (4, rows), torch.float64).numpy()
    y = 0.5 * x - 0.5 * z + noise
    y = {"gaussian": y, "logistic": (y > 0).astype(float), "poisson": numpy.floor(numpy.exp(0.5 * y))}[family]
    return pandas.DataFrame({"site": "a", "x": x, "z": z, "w": w, "y": y})


def read(rows: pandas.DataFrame, right: str = "x + z + w", **arguments: Any) -> ft.data.FederatedData:
    formula = f"y ~ {right} + (1 | site)"
    return ft.data.from_frame(rows, client="site", formula=formula, standardise=False, **arguments)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_without_missing_cells_it_is_the_model_without(family: str) -> None:
    rows = frame(family)
    whole, gaps = read(rows), read(rows, missing="impute")
    phi = torch.cat([random.normal(random.key(1), (1, 3, 5), torch.float64), torch.full((1, 3, 1), 0.3)], 2)
    phi = phi if family == "gaussian" else phi[..., :-1]
    values = []
    for data, covariates in ((whole, None), (gaps, NORMAL)):
        model = hierarchical.regression(data.design, family, covariates=covariates, inner=gauss_hermite(4, 5))
        values.append(model.log_factor(phi, model.prepare(data.stack([0]))))
    assert torch.allclose(*values, atol=1e-6 if family == "gaussian" else 2e-3)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_factor_is_the_likelihood_of_what_is_observed(family: str) -> None:
    """By grids over the site's intercept and over the missing part of each row's predictor."""
    rows = frame(family)
    rows.loc[[1, 2, 5], "x"] = numpy.nan
    rows.loc[[2, 6], "z"] = numpy.nan
    rows.loc[7, "y"] = numpy.nan
    data = read(rows, missing="impute")
    model = hierarchical.regression(data.design, family, covariates=NORMAL, inner=gauss_hermite(4, 5))
    beta, log_variance, log_noise = torch.tensor([0.2, 0.7, -0.6, 0.3]).double(), math.log(0.5), math.log(0.6)
    phi = torch.cat([beta, torch.tensor([log_variance, log_noise][: 2 if family == "gaussian" else 1]).double()])
    found = model.log_factor(phi[None, None], model.prepare(data.stack([0])))
    standard = torch.linspace(-7, 7, 301).double()
    weight = torch.softmax(-0.5 * standard.square(), 0).log()
    total = weight
    for _, row in rows.iloc[:7].iterrows():
        cells = torch.tensor(row[["x", "z", "w"]].to_numpy(float))
        seen = ~cells.isnan()
        gain = COVARIANCE[:3, :3][~seen][:, seen] @ torch.linalg.inv(COVARIANCE[:3, :3][seen][:, seen])
        centre = MEAN[:3].clone().where(~seen, cells)
        centre[~seen] += gain @ (cells[seen] - MEAN[:3][seen])
        spread = COVARIANCE[:3, :3][~seen][:, ~seen] - gain @ COVARIANCE[:3, :3][seen][:, ~seen]
        sd = (beta[1:][~seen] @ spread @ beta[1:][~seen]).sqrt()
        eta = beta[0] + beta[1:] @ centre + standard * math.exp(log_variance / 2)
        eta = eta[:, None] + sd * standard
        law = {
            "gaussian": lambda eta: Normal(eta, math.exp(log_noise / 2)),
            "logistic": lambda eta: Bernoulli(logits=eta),
            "poisson": lambda eta: Poisson(eta.exp()),
        }[family](eta)
        total = total + (law.log_prob(torch.tensor(row["y"]).double()) + weight).logsumexp(1)
    assert abs(float(found) - float(total.logsumexp(0))) < 2e-3


def test_terms_that_bend_what_is_missing_are_refused_by_name() -> None:
    rows = frame("gaussian")
    rows.loc[1, "x"] = numpy.nan
    data = read(rows, "poly(x, 2) + z + w", missing="impute")
    model = hierarchical.regression(data.design, covariates=NORMAL)
    with pytest.raises(ValueError, match=r"linearly, but got some in \['poly\(x, 2\)\[1\]'.*ft.inference.imputed"):
        model.prepare(data.stack([0]))
    fewer = read(rows, "x + z", missing="impute")
    with pytest.raises(ValueError, match=r"covariates= of the columns \['x', 'z', 'y'\].*but got .* of 4"):
        hierarchical.regression(fewer.design, covariates=NORMAL)
    with pytest.raises(ValueError, match="leave covariates= out for complete rows"):
        hierarchical.regression(read(frame("gaussian")).design, covariates=NORMAL).prepare(
            read(frame("gaussian")).stack([0])
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gaussian", "logistic"])
def test_one_fit_equals_multiple_imputation(family: str) -> None:
    """A third of x is missing where z is large, at four sites: means to 0.3 sds of Rubin's, sds to a fifth."""
    many = pandas.concat([frame(family, 400).assign(site=numpy.arange(400) % 4)])
    many["x"] = many["x"].where((many["z"] < 0.4) & (many.index % 10 > 0))
    data = read(many, "x + z", missing="impute")
    found = ft.run(ft.normal_em(columns=data.design), ft.InProcess(data), rounds=100, progress=False).server

    def fit(rows: ft.data.FederatedData, covariates: Any = None) -> ft.Run:
        model = hierarchical.regression(rows.design, family, covariates=covariates)
        return ft.run(ft.ep(model), ft.InProcess(rows), rounds=30, until=settled(), progress=False)

    imputed = ft.inference.imputed(data, 30, rounds=600, between=False)
    theirs = ft.inference.pooled(fit(rows) for rows in imputed).summary()
    ours = fit(data, found).summary()
    for name in ("Intercept", "x", "z"):
        gap = (ours.loc[name, "estimate"] - theirs.loc[name, "estimate"]) / theirs.loc[name, "sd"]
        assert abs(gap) < 0.3, (name, gap)
        assert abs(ours.loc[name, "sd"] / theirs.loc[name, "sd"] - 1) < 0.2, name
