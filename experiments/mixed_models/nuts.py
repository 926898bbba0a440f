"""Posteriors of expectation propagation beside NUTS: covariates with missing cells, ordered ratings of few rows each.

- `missing`: four sites, y ~ x + z with an intercept by site, a third of x missing, mostly where z is large.
  `hierarchical.regression(covariates=)` integrates the cells out under a normal distribution that it takes as known;
  NUTS draws each cell, under the same distribution and, of its own, with that unknown, too. Multiple imputation beside
  it.
- `ratings`: many clients with two ratings of four levels each. `corrected` is importance sampling about the same
  posterior.

Every density that NUTS samples is written here, not taken from the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pandas
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import fedtorch as ft
from experiments import common
from experiments.vfl.oracles import nuts
from fedtorch.federation.algorithms.ep import corrected, posterior, settled
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import hyperpriors

FEW: dict[str, int] = {"draws": 20, "warmup": 10, "chains": 1}
MANY: dict[str, int] = {"draws": 700, "warmup": 300, "chains": 1}
MEANS, SDS = (0.0, 0.0, 1.5, 3.0), (5.0, 2.5, 5.0, 5.0)  # of the prior of thresholds and slope
VARIANCE = -2.0, 2.0  # mean and sd of the prior of a log variance
Summary = tuple[Tensor, Tensor]  # means, sds


def fitted(model: Any, data: ft.data.FederatedData) -> ft.Run:
    """Expectation propagation until it has settled."""
    return ft.run(ft.ep(model), ft.InProcess(data), rounds=60, until=settled(), progress=False)


def of_run(run: ft.Run) -> Summary:
    """Means and sds of what is shared."""
    found = posterior(run)
    return found.mean, found.stddev


def of_draws(draws: Tensor) -> Summary:
    """The same of draws `(S, p)`."""
    return draws.mean(0), draws.std(0)


# -- missing covariates ------------------------------------------------------------------------------------------------


def incomplete(family: str, rows: int, seed: int = 0) -> pandas.DataFrame:
    """Rows of four sites, of which x is missing mostly where z is large."""
    draw = numpy.random.default_rng(seed)
    site, z = numpy.arange(rows) % 4, draw.normal(size=rows)
    x = 0.6 * z + 0.8 * draw.normal(size=rows)
    eta = 0.3 + 0.8 * x - 0.5 * z + 0.6 * draw.normal(size=4)[site]
    y = eta + draw.normal(size=rows) if family == "gaussian" else 1.0 * (draw.logistic(size=rows) < eta)
    lost = draw.uniform(size=rows) < numpy.where(z > 0.3, 0.65, 0.1)
    return pandas.DataFrame({"site": site, "x": numpy.where(lost, numpy.nan, x), "z": z, "y": y})


def cells_density(frame: pandas.DataFrame, family: str, given: tuple[float, float, float] | None) -> Callable:
    """The log density of β, log τ, log σ² (of Gaussian y), sites' effects, missing cells, and what x is like given z.

    Args:
        frame: with missing x.
        family: "gaussian" or "logistic".
        given: intercept, slope and log variance of x given z; None if they are drawn, under flat priors.
    """
    columns = {name: torch.tensor(frame[name].to_numpy(float)) for name in ("x", "z", "y")}
    site, lost = torch.tensor(frame["site"].to_numpy()), columns["x"].isnan()
    noisy = family == "gaussian"

    def log_density(at: Tensor) -> Tensor:
        beta, log_tau, rest = at[:3], at[3], at[4:]
        log_noise, rest = (rest[0], rest[1:]) if noisy else (at.new_zeros(()), rest)
        effects, cells, unknown = rest[:4], rest[4 : 4 + int(lost.sum())], rest[4 + int(lost.sum()) :]
        a, b, log_variance = given or unknown
        x = columns["x"].masked_scatter(lost, cells)
        eta = beta[0] + beta[1] * x + beta[2] * columns["z"] + (log_tau / 2).exp() * effects[site]
        total = Normal(0.0, 2.5).log_prob(beta).sum() + Normal(*VARIANCE).log_prob(log_tau) - effects @ effects / 2
        total = total + Normal(a + b * columns["z"], torch.as_tensor(log_variance / 2).exp()).log_prob(x).sum()
        if noisy:
            law = Normal(eta, (log_noise / 2).exp())
            return total + law.log_prob(columns["y"]).sum() + Normal(0.0, 3.0).log_prob(log_noise)
        return total - cross_entropy(eta, columns["y"], reduction="sum")

    return log_density


def missing(family: str, rows: int, sampling: dict[str, int]) -> dict[str, Summary]:
    """Means and sds of what sites share, by four ways; of coefficients only by multiple imputation."""
    frame = incomplete(family, rows)
    formula = "y ~ x + z + (1 | site)"
    data = ft.data.from_frame(frame, client="site", formula=formula, standardise=False, missing="impute")
    normal = ft.run(ft.normal_em(columns=data.design), ft.InProcess(data), rounds=200, progress=False).server

    def model(design: Any, covariates: Any = None) -> Any:
        noise = hyperpriors.log_normal(0.0, 3.0) if family == "gaussian" else None
        variance = hyperpriors.log_normal(*VARIANCE)
        return hierarchical.regression(
            design, family, mean=0.0, sd=2.5, variance=variance, noise=noise, covariates=covariates
        )

    found = {"ft.ep, cells integrated out": of_run(fitted(model(data.design, normal), data))}
    mean, covariance = normal.mean, normal.covariance
    slope = float(covariance[0, 1] / covariance[1, 1])
    variance = float(covariance[0, 0] - slope * covariance[0, 1])
    known = float(mean[0] - slope * mean[1]), slope, float(numpy.log(variance))
    shared, cells = 4 + (family == "gaussian"), int(frame["x"].isna().sum())
    for name, given in (("NUTS, the same distribution of cells", known), ("NUTS, that distribution unknown", None)):
        start = torch.zeros(shared + 4 + cells + (0 if given else 3)).double()
        draws = nuts(cells_density(frame, family, given), start, **sampling).flat[:, :shared]
        found[name] = of_draws(draws)
    imputed = ft.inference.imputed(data, 5 if sampling is FEW else 40, rounds=400)
    pooled = ft.inference.pooled(fitted(model(each.design), each) for each in imputed).summary()
    table = pooled.loc[["Intercept", "x", "z"], ["estimate", "sd"]].to_numpy(float)
    return found | {"ft.ep, multiple imputation": (torch.tensor(table[:, 0]), torch.tensor(table[:, 1]))}


# -- ordered ratings ---------------------------------------------------------------------------------------------------


def ratings(clients: int, seed: int = 0) -> pandas.DataFrame:
    """Two ratings of 1 to 4 of each client."""
    draw = numpy.random.default_rng(seed)
    frame = pandas.DataFrame({"client": numpy.arange(clients).repeat(2), "dose": draw.normal(size=2 * clients)})
    eta = 0.5 * frame["dose"] + 1.2 * draw.normal(size=clients).repeat(2) + draw.logistic(size=2 * clients)
    return frame.assign(rating=1 + (eta.to_numpy()[:, None] > [-0.5, 1.5, 3.0]).sum(1))


def rating_density(frame: pandas.DataFrame, prior: Normal) -> Callable[[Tensor], Tensor]:
    """The log density of φ, thresholds less the first as sums of exponentials, and clients' effects."""
    y, dose = torch.tensor(frame["rating"].to_numpy()) - 1, torch.tensor(frame["dose"].to_numpy())

    def log_density(at: Tensor) -> Tensor:
        phi, effects = ascending(at[:5]), at[5:].repeat_interleave(2)
        eta = phi[0] + phi[1] * dose + (phi[4] / 2).exp() * effects
        cuts = torch.cat([phi.new_tensor([-1e9, 0.0]), phi[2:4], phi.new_tensor([1e9])])
        chance = (cuts[y + 1] - eta).sigmoid() - (cuts[y] - eta).sigmoid()
        return prior.log_prob(phi).sum() + at[2:4].sum() + chance.log().sum() - at[5:] @ at[5:] / 2

    return log_density


def ascending(at: Tensor) -> Tensor:
    """φ from coordinates of which the third and fourth are logarithms of what thresholds are apart."""
    return torch.cat([at[..., :2], at[..., 2:4].exp().cumsum(-1), at[..., 4:]], -1)


def few_rows(clients: int, sampling: dict[str, int]) -> dict[str, Summary]:
    """Means and sds of what clients share, by three ways."""
    frame = ratings(clients)
    data = ft.data.from_frame(
        frame, client="client", formula="rating ~ dose + (1 | client)", levels={"rating": [1, 2, 3, 4]},
        standardise=False,
    )  # fmt: skip
    assert data.design is not None
    variance = hyperpriors.log_normal(*VARIANCE)
    model = hierarchical.regression(data.design, "cumulative", mean=MEANS, sd=SDS, variance=variance)
    prior = Normal(torch.tensor([*MEANS, VARIANCE[0]]).double(), torch.tensor([*SDS, VARIANCE[1]]).double())
    run = fitted(model, data)
    better = corrected(run, points=1024 if sampling is FEW else 8192).posterior
    draws = nuts(rating_density(frame, prior), torch.zeros(5 + clients).double(), **sampling).flat[:, :5]
    return {
        "ft.ep": of_run(run),
        "ft.ep, corrected": (better.mean, better.stddev),
        "NUTS": of_draws(ascending(draws)),
    }


def rows_of(setting: str, names: Sequence[str], found: dict[str, Summary]) -> list[common.Row]:
    """A line a way: the mean of each shared parameter, and its sd."""
    rows = []
    for way, (means, sds) in found.items():
        for name, mean, sd in zip(names, means.tolist(), sds.tolist()):
            rows += [common.Row(f"{setting}: {way}", name, mean), common.Row(f"{setting}: {way}", f"{name}, sd", sd)]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Fit all and print posteriors side by side."""
    options = common.arguments(__doc__).parse_args(argv)
    sampling, rows = (FEW if options.smoke else MANY), []
    shared = ("Intercept", "x", "z", "log variance", "log noise")
    for family in ("gaussian", "logistic"):
        rows += rows_of(f"{family} y", shared, missing(family, 60 if options.smoke else 240, sampling))
    thresholds = ("Intercept", "dose", "2|3 - 1|2", "3|4 - 1|2", "log variance")
    rows += rows_of("ratings", thresholds, few_rows(30 if options.smoke else 100, sampling))
    common.show_rows("Expectation propagation beside NUTS", rows)
    common.finish("mixed_models.nuts", rows, options)


if __name__ == "__main__":
    main()
