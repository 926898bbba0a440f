"""Numbers have units: fits of a response times s, and of columns times u, are those of the plain rows, taken back.

Each case fits a small design at a scale, with priors, starts and penalties scaled along, and returns what it has found
in the units of the plain rows. So the plain fit is what all others are held against.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import mpmath
import numpy
import pandas
import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import inference, random, tree
from fedtorch.federation.algorithms.ep import corrected, devices, settled
from fedtorch.federation.algorithms.maximum_likelihood import devices as predicted, estimates, maximised
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gibbs import global_priors, imputation, sparse
from fedtorch.models.hierarchical import hyperpriors, shrinkage
from fedtorch.models.linear import LinearHead, SufficientStatistics
from fedtorch.networks.learning import regular
from fedtorch.networks.solvers.direct import direct
from fedtorch.networks.solvers.fedrelax import fedrelax
from fedtorch.networks.solvers.problem import LinearProblem

SIZES = (6, 9, 7, 5, 8, 10)
ROWS = sum(SIZES)
Found = dict[str, Tensor]


class Scale(NamedTuple):
    """What rows are multiplied by, and how many sds from zero they are."""

    y: float = 1.0
    x: float = 1.0
    z: float = 1.0
    x_mean: float = 0.0
    y_mean: float = 0.0

    @property
    def columns(self) -> Tensor:
        """Factors of an intercept and both columns."""
        return torch.tensor([1.0, self.x, self.z], dtype=torch.float64)

    @property
    def coefficients(self) -> Tensor:
        """What coefficients are multiplied by."""
        return self.y / self.columns


def rows(family: str, at: Scale) -> tuple[numpy.ndarray, ...]:
    """Sites, two columns, of which the slope of x differs by site, and a response."""
    rng = numpy.random.default_rng(3)
    site = numpy.repeat(numpy.arange(len(SIZES)), SIZES)
    x, z = rng.normal(size=(2, ROWS))
    own = 1.2 * rng.normal(size=(2, len(SIZES)))[:, site]
    eta = 0.3 + own[0] + (0.8 + own[1]) * x - 0.7 * z
    if family == "gaussian":
        y = (eta + rng.normal(size=ROWS) + at.y_mean) * at.y
    elif family == "logistic":
        y = (rng.random(ROWS) < 1 / (1 + numpy.exp(-eta))).astype(float)
    elif family == "poisson":
        y = rng.poisson(numpy.exp(eta / 2 + 1)).astype(float)
    else:
        y = numpy.digitize(eta + rng.logistic(size=ROWS), [-1, 1])
    return site, (x + at.x_mean) * at.x, z * at.z, y


def table(family: str, at: Scale) -> pandas.DataFrame:
    return pandas.DataFrame(dict(zip(("site", "x", "z", "y"), rows(family, at))))


def tensors(family: str, at: Scale) -> ft.data.FederatedData:
    _, x, z, y = (torch.from_numpy(part).double() for part in rows(family, at))
    design = torch.stack([torch.ones_like(x), x, z], 1)
    return ft.data.from_tensors(list(zip(design.split(SIZES), y.split(SIZES))))


def run_of(algorithm: Any, data: Any, until: Any = None, rounds: int = 80, start: Any = None) -> ft.Run:
    more = () if start is None else (start,)
    return ft.run(algorithm, ft.InProcess(data), *more, rounds=rounds, until=until, progress=False)


def numbers(frame: pandas.DataFrame, *names: str) -> Tensor:
    return torch.tensor(frame[list(names)].to_numpy(float))


def framed(family: str, formula: str, at: Scale, **settings: Any) -> Any:
    levels = {"levels": {"y": [0, 1, 2]}} if family == "cumulative" else {}
    return ft.data.from_frame(table(family, at), client="site", formula=formula, **levels, **settings)


def of_rows(family: str, at: Scale) -> float:
    """The logarithm of what densities of all rows are divided by."""
    return ROWS * math.log(at.y) if family == "gaussian" else 0.0


def summary(run: ft.Run, at: Scale, **options: Any) -> Found:
    """Estimates and sds by name; of rows that are moved, without what moves."""
    found = run.summary(**options)
    units = {"x": at.y / at.x, "z": at.y / at.z, "sd(x)": at.y / at.x, "cor(Intercept, x)": 1.0}
    units = torch.tensor([units.get(name, at.y) for name in found.index], dtype=torch.float64)
    fixed = [name for name in found.index if not (name == "Intercept" or "|" in name) or not (at.x_mean or at.y_mean)]
    place = [list(found.index).index(name) for name in fixed]
    both = numbers(found, "estimate", "sd")[place].nan_to_num(0.0) / units[place, None]
    return {"estimates": both[:, 0], "sds": both[:, 1]}


def regression(data: Any, family: str, at: Scale) -> hierarchical.Model:
    """Priors of columns that are not standardised are scaled along."""
    own = {} if data.design.encoding.standard else {"x": 3 * at.y / at.x, "z": 3 * at.y / at.z}
    return hierarchical.regression(data.design, family, sd=own)


def by_ep(family: str, formula: str, at: Scale, asked: bool = True, **settings: Any) -> Found:
    """Expectation propagation of a formula, and what can be asked of it."""
    data = framed(family, formula, at, **settings)
    run = run_of(ft.ep(regression(data, family, at)), data, settled(1e-4))
    found, unit = summary(run, at), at.y if family == "gaussian" else 1.0
    beyond = corrected(run, points=512)
    found |= {f"corrected {name}": value for name, value in summary(run, at, given=beyond).items()}
    if not asked:
        return found
    found["effective nodes"] = torch.tensor(beyond.effective)
    for name, one in (("loo", inference.loo), ("waic", inference.waic)):
        found[name] = torch.tensor(one(run, draws=100).elpd + of_rows(family, at), dtype=torch.float64)
    found["loo of sites"] = torch.tensor(inference.loo(run, out="site").elpd + of_rows(family, at), dtype=torch.float64)
    seen = inference.predict(run, table(family, at).head(4))
    found["predictions"] = numbers(seen, "estimate", "low", "high") / unit - at.y_mean
    found["their sds"] = numbers(seen, "sd") / unit
    both = inference.contrasts(run, {"both": {"x": at.x / at.y, "z": at.z / at.y}})
    found["contrasts"] = numbers(both, "estimate", "sd", "low", "high")
    of_sites = numbers(inference.ranef(run), "estimate", "sd", "low", "high") / at.y
    found["sites"] = of_sites.unflatten(0, (len(SIZES), -1)) * at.columns[: len(of_sites) // len(SIZES), None]
    if family != "cumulative":
        each = numbers(inference.marginal_effects(run, table(family, at)), "estimate", "sd")
        found["effects"] = each * at.columns[1:, None] / unit
    return found


def by_likelihood(family: str, formula: str, restricted: bool, at: Scale, **settings: Any) -> Found:
    """Maximum likelihood of a formula."""
    data = framed(family, formula, at, **settings)
    algorithm = ft.maximum_likelihood(regression(data, family, at), restricted=restricted)
    run = run_of(algorithm, data, maximised(1e-12))
    log = estimates(run).log_likelihood + of_rows(family, at)
    log -= float(at.coefficients.log().sum()) * restricted  # the flat density of the means
    return {**summary(run, at), "log likelihood": torch.tensor(log, dtype=torch.float64)}


def hierarchy(at: Scale, correlated: bool = False, random: tuple[int, ...] = (0, 1)) -> hierarchical.Hierarchy:
    """Priors of what tensors' coefficients are, scaled along."""
    unit = at.coefficients
    variances = [hyperpriors.log_normal(2 * math.log(unit[j]) - 1, 1.0) for j in random]
    return hierarchical.normal(3, random=random, correlated=correlated, sd=2 * unit, variance=variances)


def model_of(family: str, at: Scale, **options: Any) -> hierarchical.Model:
    if family == "gaussian":
        noise = hyperpriors.log_normal(2 * math.log(at.y), 2.0)
        return hierarchical.linear(hierarchy(at, **options), noise=noise)
    return {"logistic": hierarchical.generalised.logistic, "poisson": hierarchical.generalised.poisson}[family](
        hierarchy(at, **options)
    )


def of_devices(found: Any, at: Scale) -> Found:
    marginals = found.marginals()
    return {"devices": marginals.mean / at.coefficients, "their sds": marginals.stddev / at.coefficients}


def tensors_by_ep(family: str, at: Scale, **options: Any) -> Found:
    """Columns as they are: nobody scales them."""
    run = run_of(ft.ep(model_of(family, at, **options)), tensors(family, at), settled(1e-4))
    both, unit = numbers(run.summary(), "estimate", "sd")[:3], at.coefficients[:, None]
    beyond = numbers(run.summary(given=corrected(run, points=512)), "estimate", "sd")[:3]
    return {"summary": both / unit, "corrected": beyond / unit, **of_devices(devices(run), at)}


def tensors_by_likelihood(family: str, restricted: bool, at: Scale, **options: Any) -> Found:
    algorithm = ft.maximum_likelihood(model_of(family, at, **options), restricted=restricted)
    run = run_of(algorithm, tensors(family, at), maximised(1e-12))
    found = estimates(run)
    log = found.log_likelihood + of_rows(family, at) - float(at.coefficients.log().sum()) * restricted
    means = torch.stack([found.mean[:3], found.errors[:3]]) / at.coefficients
    return {
        "means": means,
        "sds": found.sds / at.coefficients,
        "log likelihood": torch.tensor(log, dtype=torch.float64),
        **of_devices(predicted(run), at),
    }


def counted(times: float, family: str) -> Found:
    """Counts a multiple of the plain ones, which weigh as much less: the same likelihood, but for a constant."""
    frame = table("poisson", Scale())
    frame["w"], frame["exposure"] = 1 / times, times
    frame["n"] = times * (frame.y + 3)
    frame["y"] = times * frame.y
    more = {"trials": "n"} if family == "binomial" else {}
    formula = "y ~ x + z + offset(log(exposure)) + (1 | site)" if family == "poisson" else FEW
    data = ft.data.from_frame(frame, client="site", formula=formula, weights="w", **more)
    algorithm = ft.maximum_likelihood(hierarchical.regression(data.design, family))
    return summary(run_of(algorithm, data, maximised(1e-12)), Scale())


def projected(family: str, at: Scale) -> Found:
    """What each site's rows make of the prior, and of single values of what is shared."""
    model, data = model_of(family, at, random=(0,)), tensors(family, at)
    rows, count = model.prepare(data.stack(range(len(SIZES)))), len(SIZES)
    cavity = tree.expand(gaussian.moments(model.prior.completed()), count)
    tilted = model.project(cavity, rows, torch.zeros(count, dtype=torch.int64)).tilted
    unit = at.coefficients
    phi = torch.cat([unit * torch.tensor([0.3, 0.8, -0.7], dtype=torch.float64), cavity.mean[0, 3:]])
    phi = phi.expand(count, 1, -1)
    given = model.given(phi, torch.ones(count, 1).double(), rows)
    return {
        "means": tilted.mean[:, :3] / unit,
        "covariance": tilted.covariance[:, :3, :3] / torch.outer(unit, unit),
        "log factor": model.log_factor(phi, rows),
        "given": given.means / unit,
        "spread given": given.covariances / torch.outer(unit, unit),
        "draws": given.distribution().sample().isfinite().double(),
    }


def matrix_normal(at: Scale) -> Found:
    """HM1 treats columns alike: all have one factor."""
    _, x, z, y = (torch.from_numpy(part).double() for part in rows("gaussian", at))
    design = torch.stack([torch.full_like(x, at.x), x, z], 1)
    data = ft.data.from_tensors(list(zip(design.split(SIZES), y.split(SIZES))))
    head = LinearHead(3, intercept=False, dtype=torch.float64)
    run = run_of(ft.matrix_normal(ft.least_squares(head)), data, rounds=12)
    unit = at.y / at.x
    both = numbers(inference.ranef(run, total=True), "estimate", "sd")
    omega = run.server.covariance
    return {
        "coefficients": run.server.parameters / unit,
        "estimates and sds": both / unit,
        "covariance": (omega.multiple + omega.vectors @ (omega.values[:, None] * omega.vectors.mT)) / unit**2,
    }


def least_squares(family: str, at: Scale) -> Found:
    """Every site's own minimiser, and the mean of all; of two sites, which no column tells apart."""
    x, y = (torch.cat(parts) for parts in zip(*tensors(family, at)))
    data = ft.data.from_tensors(list(zip(x.chunk(2), y.chunk(2))))
    head = LinearHead(3, intercept=False, dtype=torch.float64)
    local = ft.least_squares(head, family=family)
    own = run_of(ft.separate(local), data, rounds=1)
    each = torch.stack([own.client_module(k).coefficients.detach() for k in range(2)])
    mean = run_of(ft.fedavg(local), data, rounds=1).server["coefficients"]
    return {"own": each / at.coefficients, "mean": mean / at.coefficients}


def cells(at: Scale, mean: float = 0.0) -> tuple[Any, Tensor]:
    """Rows of three columns with missing cells, and the columns' factors."""
    _, x, z, y = (torch.from_numpy(part).double() for part in rows("gaussian", at))
    x, z = x.clone(), z.clone()
    x[::7], z[3::11] = torch.nan, torch.nan
    both, y = torch.stack([x, z], 1) + mean, y + mean
    unit = torch.tensor([at.x, at.z, at.y], dtype=torch.float64)
    return imputation.incomplete(list(zip(both.split(SIZES), y.split(SIZES)))), unit


def normal_em(at: Scale) -> Found:
    data, unit = cells(at)
    start = imputation.Normal(torch.zeros(3).double(), torch.diag(unit.square()))
    found = run_of(ft.normal_em(), data, rounds=40, start=start).server
    return {"mean": found.mean / unit, "covariance": found.covariance / torch.outer(unit, unit)}


def normal_em_of(mean: float) -> Tensor:
    data, _ = cells(Scale(), mean)
    start = imputation.Normal(torch.full((3,), mean).double(), torch.eye(3).double())
    return run_of(ft.normal_em(), data, rounds=40, start=start).server.covariance


def normal_draws(at: Scale) -> Found:
    data, unit = cells(at)
    start = imputation.Normal(torch.zeros(3).double(), torch.diag(unit.square()))
    found = run_of(ft.normal_em(draws=3), data, rounds=8, start=start).server.normal
    return {
        "mean": found.mean / unit,
        "covariance": found.covariance / torch.outer(unit, unit),
        "between": found.between / unit.square(),
    }


def gibbs(deviation: str, at: Scale) -> Found:
    """Sparse regression whose scales are known; its columns have one factor."""
    _, x, z, y = (torch.from_numpy(part).double() for part in rows("gaussian", at))
    design, unit = torch.stack([x, z], 1), at.y / at.x
    data = ft.data.from_tensors(list(zip(design.split(SIZES), y.split(SIZES))))
    local = sparse.regression(deviation=getattr(sparse, deviation)() if deviation == "horseshoe" else None)
    shared = sparse.hierarchy(global_priors.gaussian(2 * unit), scale=unit, noise_scale=at.y**2)
    run = run_of(ft.gibbs(local, shared, sweeps=20, chains=2), data, rounds=6, start=torch.zeros(2).double())
    return {"theta": run.server.variables.theta / unit}


def penalised(at: Scale) -> Found:
    """A lasso whose penalty is scaled along."""
    _, x, z, y = (torch.from_numpy(part).double() for part in rows("gaussian", at))
    data = ft.data.from_tensors(list(zip(torch.stack([x, z], 1).split(SIZES), y.split(SIZES))))
    penalty = shrinkage.lasso(2)
    penalties = hyperpriors.log_normal(math.log(at.x), 1.0)  # in units of the noise
    model = shrinkage.penalised(penalty, penalties=penalties, noise=hyperpriors.log_normal(2 * math.log(at.y), 2.0))
    run = run_of(ft.ep(model), data, settled(1e-4))
    both = numbers(run.summary(), "estimate", "sd")
    both[0, 0] -= math.log(at.x)
    both[1, 0] -= 2 * math.log(at.y)
    return {"summary": both, "devices": devices(run).marginals().mean / (at.y / at.x)}


MIXED = "y ~ x + z + (1 + x | site)"
FEW = "y ~ x + z + (1 | site)"
CASES: dict[str, Callable[[Scale], Found]] = {
    "EP of a formula": functools.partial(by_ep, "gaussian", MIXED),
    "EP of a formula, not standardised": functools.partial(by_ep, "gaussian", FEW, standardise=False, asked=False),
    "EP of a logistic formula": functools.partial(by_ep, "logistic", FEW),
    "EP of a Poisson formula": functools.partial(by_ep, "poisson", FEW, asked=False),
    "EP of a cumulative formula": functools.partial(by_ep, "cumulative", "y ~ x + z", asked=False),
    "ML of a formula": functools.partial(by_likelihood, "gaussian", MIXED, False),
    "REML of a formula": functools.partial(by_likelihood, "gaussian", MIXED, True),
    "REML of a formula, not standardised": functools.partial(by_likelihood, "gaussian", FEW, True, standardise=False),
    "ML of a logistic formula": functools.partial(by_likelihood, "logistic", FEW, False),
    "ML of a Poisson formula": functools.partial(by_likelihood, "poisson", FEW, False),
    "ML of a cumulative formula": functools.partial(by_likelihood, "cumulative", "y ~ x + z", False),
    "EP": functools.partial(tensors_by_ep, "gaussian"),
    "EP, correlated": functools.partial(tensors_by_ep, "gaussian", correlated=True),
    "EP, fixed effects": functools.partial(tensors_by_ep, "gaussian", random=(0,)),
    "EP, logistic": functools.partial(tensors_by_ep, "logistic", random=(0,)),
    "EP, Poisson": functools.partial(tensors_by_ep, "poisson", random=(0,)),
    "ML": functools.partial(tensors_by_likelihood, "gaussian", False),
    "ML, fixed effects": functools.partial(tensors_by_likelihood, "gaussian", False, random=(0,)),
    "REML": functools.partial(tensors_by_likelihood, "gaussian", True, random=(0,)),
    "ML, logistic": functools.partial(tensors_by_likelihood, "logistic", False, random=(0,)),
    "HM1": matrix_normal,
    "least squares": functools.partial(least_squares, "gaussian"),
    "least squares, logistic": functools.partial(least_squares, "logistic"),
    "least squares, Poisson": functools.partial(least_squares, "poisson"),
    "normal EM": normal_em,
    "normal draws": normal_draws,
    "Gibbs": functools.partial(gibbs, "horseshoe"),
    "Gibbs, normal deviations": functools.partial(gibbs, "normal"),
    "penalised": penalised,
}
TOGETHER = ("HM1", "Gibbs", "Gibbs, normal deviations", "penalised")  # columns are treated alike


QUICK = (
    "ML of a formula",
    "REML of a formula",
    "ML, fixed effects",
    "REML",
    "HM1",
    "least squares",
    "least squares, logistic",
    "least squares, Poisson",
    "normal EM",
    "normal draws",
    "Gibbs",
)
SCALED = [Scale(y=1e-8, x=1e4), Scale(y=1e8, z=1e-8), Scale(x=1e8), Scale(x=1e-8, z=1e-4)]
FAR = [Scale(y_mean=1e9), Scale(y_mean=-1e6), Scale(x_mean=1e9)]


def misfit(found: Found, plain: Found) -> dict[str, float]:
    """How far numbers are from the plain ones, relative to the largest of their kind."""
    far: dict[str, float] = {}
    for name, value in found.items():
        wanted = plain[name] if not value.ndim else plain[name][-len(value) :]  # of moved rows without an intercept
        far[name] = float((value - wanted).abs().max() / wanted.abs().max())
    return far


def suits(name: str, at: Scale) -> Scale:
    """The scale of a case: a response that has no units stays, and columns that are treated alike have one factor."""
    if any(family in name for family in ("logistic", "Poisson", "cumulative")):
        at = at._replace(y=1.0)
    return at._replace(z=at.x) if name in TOGETHER else at


@functools.cache
def plain(name: str) -> Found:
    return CASES[name](Scale())


def check(name: str, at: Scale, within: float) -> None:
    far = misfit(CASES[name](at), plain(name))
    assert {part: size for part, size in far.items() if not size < within} == {}, at


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", QUICK)
def test_fits_are_equivariant_to_scales(name: str) -> None:
    for at in dict.fromkeys(suits(name, at) for at in SCALED):
        check(name, at, 1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("restricted", [False, True])
def test_rows_far_from_zero_are_as_good(restricted: bool) -> None:
    fit = functools.partial(by_likelihood, "gaussian", FEW, restricted)
    here = fit(Scale())
    for at in FAR:
        assert max(misfit(fit(at), here).values()) < 1e-6, at


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_slopes_that_differ_are_as_good_far_from_zero() -> None:
    """Restricted likelihoods take determinants of second differences, which want nodes where they are said to be."""
    fit = functools.partial(by_likelihood, "gaussian", MIXED, True)
    assert max(misfit(fit(Scale(y_mean=1e9)), fit(Scale())).values()) < 1e-6


@pytest.mark.filterwarnings("ignore:Expected at least 100 effective nodes")
def test_ep_is_equivariant_to_scales() -> None:
    fit = functools.partial(by_ep, "gaussian", FEW, asked=False)
    here = fit(Scale())
    for at in (Scale(y=1e-8, x=1e8), Scale(y_mean=1e9)):
        assert max(misfit(fit(at), here).values()) < 1e-6, at


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson"])
@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_one_projection_of_columns_of_any_size(family: str, unit: float) -> None:
    """Fixed effects of large columns have tiny variances, and are no more known for that."""
    here, there = (projected(family, at) for at in (Scale(), Scale(x=unit, z=unit)))
    assert max(misfit(there, here).values()) < 1e-6


def deviations_of(mean: float) -> Tensor:
    """Return what sites deviate from what they share, of responses that are so far from zero."""
    levels, noise = (random.normal(random.key(k), (12, n), torch.float64) for k, n in ((1, 1), (2, 20)))
    data = ft.data.from_tensors([(torch.ones(20, 1).double(), y) for y in mean + levels + noise])
    model = hierarchical.linear(hierarchical.normal(1, mean=mean), noise=1.0)
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=40, until=settled(1e-6), progress=False)
    return numbers(inference.ranef(run), "estimate", "sd", "low", "high")


def test_deviations_of_sites_far_from_zero_are_as_good() -> None:
    """Each site weighs nodes by its own rows; 1e7 sds from zero squares of nodes have lost the digits that matter."""
    torch.testing.assert_close(deviations_of(1e7), deviations_of(0.0), rtol=0, atol=1e-6)


def test_means_of_incomplete_rows_far_from_zero_are_as_good() -> None:
    """EM of columns that are 1e9 sds from zero finds the same covariances."""
    found, far = (normal_em_of(mean) for mean in (0.0, 1e9))
    torch.testing.assert_close(far, found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["poisson", "binomial"])
def test_counts_of_many_are_those_of_few_that_weigh_more(family: str) -> None:
    few, many = counted(1.0, family), counted(1e8, family)
    assert max(misfit(many, few).values()) < 1e-6


def events(level: float, spread: float = 0.0) -> pandas.DataFrame:
    """Counts of two groups at five sites, about `level` each; the sites' rates differ by so much."""
    rng = numpy.random.default_rng(5)
    site = numpy.repeat(numpy.arange(5), 8)
    x = numpy.tile([0.0, 1.0], 20)
    rate = level * numpy.exp(0.4 * x + spread * rng.normal(size=5)[site])
    return pandas.DataFrame({"site": site, "x": x, "y": rng.poisson(rate).astype(float), "n": numpy.round(3 * rate)})


@pytest.mark.parametrize("level", [1e3, 1e9])
def test_huge_counts_without_random_effects_have_their_closed_form(level: float) -> None:
    frame = events(level)
    zero, one = (frame.y[frame.x == x] for x in (0, 1))
    below = 1 / zero.sum()
    wanted = [[math.log(zero.mean()), below], [math.log(one.mean() / zero.mean()), below + 1 / one.sum()]]
    means = numpy.where(frame.x == 1, one.mean(), zero.mean())
    with mpmath.workdps(50):
        each = [y * mpmath.log(m) - m - mpmath.loggamma(y + 1) for y, m in zip(map(mpmath.mpf, frame.y), means)]
        likelihood = float(mpmath.fsum(each))
    data = ft.data.from_frame(frame, client="site", formula="y ~ x", standardise=False)
    run = run_of(ft.maximum_likelihood(hierarchical.regression(data.design, "poisson")), data, maximised())
    found = run.summary().loc[["Intercept", "x"], ["estimate", "sd"]].to_numpy()
    errors = numpy.sqrt([row[1] for row in wanted])
    assert float(numpy.abs(found[:, 0] - [row[0] for row in wanted]).max() / errors.min()) < 1e-4
    numpy.testing.assert_allclose(found[:, 1], errors, rtol=1e-6)
    assert estimates(run).log_likelihood == pytest.approx(likelihood, rel=1e-6)
    flat = run_of(ft.ep(hierarchical.regression(data.design, "poisson", sd=1e6)), data, settled())
    found = flat.summary().loc[["Intercept", "x"], ["estimate", "sd"]].to_numpy()
    assert float(numpy.abs(found[:, 0] - [row[0] for row in wanted]).max() / errors.min()) < 0.01
    numpy.testing.assert_allclose(found[:, 1], errors, rtol=1e-6 + 10 / level)


def test_huge_counts_of_sites_that_differ_are_as_good_as_their_logarithms() -> None:
    """A site's logarithm is then known to 2e-5, so that sites are a normal sample; the mean is not that of a site."""
    frame = events(1e9, 0.3)
    frame = frame[frame.x == 0]
    logs = numpy.log(frame.groupby("site").y.mean())
    data = ft.data.from_frame(frame, client="site", formula="y ~ 1 + (1 | site)")
    run = run_of(ft.maximum_likelihood(hierarchical.regression(data.design, "poisson")), data, maximised())
    found = run.summary()["estimate"]
    assert found["Intercept"] == pytest.approx(logs.mean(), rel=1e-6)
    assert found["sd(Intercept)"] == pytest.approx(logs.std(ddof=0), rel=1e-5)


@pytest.mark.parametrize("level", [1e9])
def test_huge_numbers_of_trials_have_their_closed_form(level: float) -> None:
    frame = events(level)
    sums = frame.groupby("x")[["y", "n"]].sum()
    odds = numpy.log(sums.y / (sums.n - sums.y))
    parts = 1 / sums.y + 1 / (sums.n - sums.y)
    data = ft.data.from_frame(frame, client="site", formula="y ~ x", trials="n", standardise=False)
    run = run_of(ft.maximum_likelihood(hierarchical.regression(data.design, "binomial")), data, maximised())
    found = run.summary().loc[["Intercept", "x"], ["estimate", "sd"]].to_numpy()
    errors = numpy.sqrt([parts[0], parts.sum()])
    assert float(numpy.abs(found[:, 0] - [odds[0], odds[1] - odds[0]]).max() / errors.min()) < 1e-4
    numpy.testing.assert_allclose(found[:, 1], errors, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Expected at least 100 effective nodes")
@pytest.mark.parametrize("far", [0.0, 1e9])
def test_an_offset_moves_nothing_but_the_response(far: float) -> None:
    """The default prior of the intercept is about what an offset leaves."""
    frame = table("gaussian", Scale())
    moved = frame.assign(o=far + numpy.random.default_rng(1).normal(size=ROWS))
    moved["y"] += moved.o
    fits = []
    for rows, formula in ((frame, FEW), (moved, FEW + " + offset(o)")):
        data = ft.data.from_frame(rows, client="site", formula=formula)
        run = run_of(ft.ep(hierarchical.regression(data.design)), data, settled(1e-4))
        fits.append(numbers(run.summary(), "estimate", "sd"))
    torch.testing.assert_close(fits[1], fits[0], rtol=1e-6, atol=1e-6)
    data = ft.data.from_frame(moved, client="site", formula=FEW, offset="o")
    assert data.design.encoding.response is not None
    assert data.design.encoding.response.mean == pytest.approx(float(frame.y.mean()), rel=1e-6, abs=1e-6)


def test_what_a_fit_leaves_of_responses_far_from_zero() -> None:
    """The loss of least squares, and the noise that HM1 hears of."""
    found = []
    for at in (Scale(), Scale(y_mean=1e9)):
        data, head = tensors("gaussian", at), LinearHead(3, intercept=False, dtype=torch.float64)
        loss = run_of(ft.separate(ft.least_squares(head)), data, rounds=1).history["train_loss"].iloc[-1]
        noise = run_of(ft.matrix_normal(ft.least_squares(head)), data, rounds=2).server.summary.residual
        found.append(torch.cat([noise, torch.tensor([loss], dtype=torch.float64)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


def test_penalised_rows_far_from_zero_are_as_likely() -> None:
    """Under a prior that is wide beside their distance."""
    likely = []
    for far in (0.0, 1e7):
        y = far + random.normal(random.key(2), (20,), torch.float64)
        model = shrinkage.penalised(shrinkage.ridge(1))
        rows = model.prepare(ft.data.from_tensors([(torch.ones(20, 1).double(), y)]).stack([0]))
        phi = torch.tensor([[[math.log(1e-22), 0.0]]], dtype=torch.float64)
        likely.append(model.log_factor(phi, rows))
    torch.testing.assert_close(likely[1], likely[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("draws", [None, 2])
def test_columns_far_from_the_start_are_found(draws: int | None) -> None:
    """Sums about a start of zero have lost the digits of variances; they are taken again about the means."""
    covariances = []
    for mean in (0.0, 1e9):
        data, _ = cells(Scale(), mean)
        start = imputation.Normal(torch.zeros(3).double(), torch.eye(3).double())
        server = run_of(ft.normal_em(draws=draws), data, rounds=40 if draws is None else 3, start=start).server
        covariances.append(server.covariance if draws is None else server.variance)
    torch.testing.assert_close(covariances[1], covariances[0], rtol=1e-5, atol=1e-6)


def process(at: Scale, exact: bool) -> Found:
    """A multi-output Gaussian process of four units; inputs and outputs have their units."""
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(4, 9, 1, generator=rng).double()
    y = (6 * x[..., 0] + torch.arange(4.0)[:, None]).sin() + 0.1 * torch.randn(4, 9, generator=rng).double()
    inducing = torch.linspace(0, 1, 5).double()[:, None] * at.x
    data = ft.data.from_tensors(list(zip(x * at.x, (y + at.y_mean) * at.y)))
    model = ConvolvedGP(inducing, mean=bool(at.y_mean))
    run = run_of(ft.fedmgp(model, steps=2, exact_units=exact), data, rounds=3)
    unit = run.client_module(1)
    mean, variance = unit.marginals(x[1] * at.x)
    return {
        "loss": torch.tensor(run.history["train_loss"].iloc[-1] - math.log(at.y), dtype=torch.float64),
        "means": mean.detach() / at.y - at.y_mean,
        "variances": variance.detach() / at.y**2,
        "noise": unit.likelihood.noise.detach() / at.y**2,
    }


@pytest.mark.parametrize("exact", [False, True])
def test_gaussian_processes_are_equivariant_to_scales(exact: bool) -> None:
    here = process(Scale(), exact)
    for at in (Scale(y=1e-8, x=1e8), Scale(y=1e8, x=1e-8)):
        assert max(misfit(process(at, exact), here).values()) < 1e-6, at


def variation(at: Scale) -> Found:
    """Linear models of nodes, whose coupling is scaled along."""
    _, x, z, y = (torch.from_numpy(part).double() for part in rows("gaussian", at))
    data = ft.data.from_tensors(list(zip(torch.stack([x, z], 1).split(SIZES), y.split(SIZES))))
    problem = LinearProblem(ft.Network.ring(len(SIZES)), 0.3 * at.x**2, SufficientStatistics.of(data).per_row())
    found = {"direct": direct(problem).parameters, "relaxed": fedrelax(problem, rounds=2000).parameters}
    return {name: value / (at.y / at.x) for name, value in found.items()}


def test_total_variation_is_equivariant_to_scales() -> None:
    here = variation(Scale())
    for at in (Scale(y=1e-8, x=1e8, z=1e8), Scale(y=1e8, x=1e-8, z=1e-8)):
        assert max(misfit(variation(at), here).values()) < 1e-6, at


@pytest.mark.parametrize("projected", [False, True])
def test_learnt_networks_know_no_units_of_discrepancies(projected: bool) -> None:
    apart = random.uniform(random.key(0), (8, 8), torch.float64)
    apart = (apart + apart.T).fill_diagonal_(0.0)
    here = regular(apart, 2.0, projected=projected)
    for unit in (1e-12, 1e12):
        there = regular(unit * apart, 2.0, projected=projected)
        assert torch.equal(there.edges, here.edges)
        torch.testing.assert_close(there.weights, here.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("power", [-12, -8, -4, 4, 8, 12])
@pytest.mark.parametrize("name", CASES)
def test_the_whole_grid(name: str, power: int) -> None:
    one = 10.0**power
    every = [Scale(y=one), Scale(x=one), Scale(z=one), Scale(y=one, x=one), Scale(y=one, x=1 / one)]
    for at in dict.fromkeys(suits(name, at) for at in every):
        if max(abs(math.log10(unit)) for unit in at.coefficients.tolist()) < 13 or power == 4:
            check(name, at, 1e-6 if abs(power) <= 8 else 1e-4)
