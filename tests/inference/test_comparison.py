"""Predictive accuracy: ArviZ's numbers of the same draws, refits without a site or a row, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.forked import over_ranks
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.correction import corrected
from fedtorch.federation.runs.holders import local_holder
from fedtorch.federation.runs.posterior_draws import Drawn, by_client
from fedtorch.federation.runs.sampler import load_arviz
from fedtorch.inference import checks, compare, loo, waic
from fedtorch.inference._pareto import left_out
from fedtorch.inference.ranef import site_estimates
from fedtorch.models import hierarchical
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical.families import GAUSSIAN, LOGISTIC, POISSON, Family
from fedtorch.models.rows import observations

RESPONSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # η, uniform numbers -> y
    "linear": lambda eta, uniform: eta + torch.special.ndtri(uniform),
    "logistic": lambda eta, uniform: (uniform < eta.sigmoid()).double(),
    "poisson": lambda eta, uniform: (uniform * 2 * eta.exp()).round(),
}


def sites(family: str = "linear", clients: int = 6) -> ft.data.FederatedData:
    """Rows of sites of different sizes, with an intercept and a slope."""
    respond, parts = RESPONSES[family], []
    for k in range(clients):
        for_x, for_y = random.split(random.fold_in(random.key(3), k), 2)
        x = torch.stack([torch.ones(6 + k), random.normal(for_x, (6 + k,), torch.float64)], 1)
        eta, uniform = x @ torch.tensor([0.4 * k - 1, 0.5]).double(), random.uniform(for_y, (6 + k,), torch.float64)
        parts.append((x, respond(eta, uniform)))
    return ft.data.from_tensors(parts)


def model_of(family: str, **arguments: object) -> hierarchical.Model:
    hierarchy = hierarchical.normal(2, sd=3.0, **arguments)  # type: ignore[arg-type]
    return (
        hierarchical.linear(hierarchy) if family == "linear" else getattr(hierarchical.generalised, family)(hierarchy)
    )


def fitted(family: str, data: ft.data.FederatedData | None = None, **arguments: object) -> ft.Run:
    population = ft.InProcess(sites(family) if data is None else data)
    return ft.run(ft.ep(model_of(family, **arguments)), population, rounds=60, until=ep.settled(1e-3))


@pytest.fixture(scope="module")
def runs() -> dict[str, ft.Run]:
    return {family: fitted(family) for family in RESPONSES}


def pointwise(run: ft.Run, draws: int) -> Tensor:
    """Log densities `(rows, S)` at the draws that `loo` takes."""
    kept = []

    def keep(drawn: list) -> Tensor:
        one = drawn[0]
        kept.extend(one.log_density(slice(0, one.mask.shape[1]))[one.mask])
        return one.rows.y

    data = run.population.data
    by_client(
        local_holder(run),
        [data],
        [run.algorithm.posterior.draws(run, draws, None, 0.01, 0).at],
        lambda drawn: keep(drawn)[:, :0],
    )
    return torch.stack(kept)


@pytest.mark.parametrize("family", RESPONSES)
def test_numbers_are_arviz_ones_of_the_same_draws(family: str, runs: dict[str, ft.Run]) -> None:
    az, run = load_arviz(), runs[family]
    values = pointwise(run, 400)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = az.from_dict(log_likelihood={"y": values.T[None].numpy()})
        theirs, other = az.loo(data, reff=1.0, pointwise=True), az.waic(data)
    ours, ours_waic = loo(run, draws=400), waic(run, draws=400)
    n = len(values)
    of_r = (n / (n - 1)) ** 0.5  # standard errors are R's, by n - 1; ArviZ has 1 / n
    assert ours.left_out == len(values) == int(run.population.data.counts.sum())
    assert (ours.elpd, ours.se, ours.parameters) == pytest.approx(
        (theirs.elpd_loo, of_r * theirs.se, theirs.p_loo), abs=1e-8
    )
    assert (ours.doubtful, ours.bad) == tuple(int((theirs.pareto_k > edge).sum()) for edge in (0.5, 0.7))
    ours_numbers = ours_waic.elpd, ours_waic.se, ours_waic.parameters
    assert ours_numbers == pytest.approx((other.elpd_waic, of_r * other.se, other.p_waic), abs=1e-8)


def without_site(data: ft.data.FederatedData, k: int) -> ft.data.FederatedData:
    return ft.data.from_tensors([rows for i, rows in enumerate(data) if i != k])


def test_a_site_left_out_is_predicted_as_by_a_fit_without_it(runs: dict[str, ft.Run]) -> None:
    run = runs["linear"]
    data, refits = run.population.data, []
    for k in range(len(data)):
        q, model = ep.posterior(fitted("linear", without_site(data, k))), model_of("linear")
        moments = Moments(*tree.expand(Moments(q.mean, q.covariance_matrix), 1))
        assert model.log_evidence is not None
        refits.append(float(model.log_evidence(moments, model.prepare(data.stack([k])))))
    found = loo(run, out="site")
    assert found.left_out == len(data)
    assert found.elpd == pytest.approx(sum(refits), abs=0.5)
    error = float(torch.tensor(refits).std()) * len(refits) ** 0.5
    assert found.se == pytest.approx(error, rel=0.05)


def test_a_row_left_out_is_predicted_as_by_a_fit_without_it(runs: dict[str, ft.Run]) -> None:
    data = runs["linear"].population.data
    every = left_out(pointwise(runs["linear"], 4000)).elpd[order_of(data)]
    for k, i in ((0, 2), (5, 1)):
        parts = list(data)
        x, y = parts[k]
        keep = torch.arange(len(y)) != i
        parts[k] = (x[keep], y[keep])
        less = ft.data.from_tensors(parts)
        run = fitted("linear", less)
        phi, model = run.algorithm.posterior.draws(run, 4000, None, 0.01, 1).sent["phi"], run.algorithm.posterior.model
        weights = torch.full((1, 4000), 1 / 4000).double()
        site = model.given(phi[None], weights, model.prepare(less.stack([k])))
        variance = torch.einsum("d,rde,e->r", x[i], site.covariances[0], x[i]) + site.log_noise[0].exp()
        exact = torch.distributions.Normal(site.means[0] @ x[i], variance.sqrt()).log_prob(y[i]).exp().mean().log()
        assert float(every[int(data.starts[k]) + i]) == pytest.approx(float(exact), abs=0.05)


def order_of(data: ft.data.FederatedData) -> Tensor:
    """Places of the rows in `pointwise`, whose clients are in the order of the blocks."""
    clients = torch.cat([ids for ids, _ in data.buckets(small=4096)]).tolist()
    starts = [torch.arange(int(data.starts[k]), int(data.starts[k] + data.counts[k])) for k in clients]
    return torch.cat(starts).argsort()


def test_models_are_compared_row_by_row(runs: dict[str, ft.Run]) -> None:
    other = fitted("linear", random=[])
    table = compare({"one level": other, "levels": runs["linear"]}, draws=400)
    assert table.index.tolist() == ["levels", "one level"]
    assert table["difference"].iloc[0] == 0
    pairs = {"one level": loo(other, draws=400), "levels": loo(runs["linear"], draws=400)}
    for name, one in pairs.items():
        assert table.loc[name, ["elpd", "se"]].tolist() == pytest.approx([one.elpd, one.se], abs=1e-8)
    az, rows = load_arviz(), pairs["levels"].left_out
    of_r = (rows / (rows - 1)) ** 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = {
            name: az.from_dict(
                log_likelihood={"y": pointwise(run, 400).T[None].numpy()}, posterior={"a": [[0.0] * 400]}
            )
            for name, run in (("one level", other), ("levels", runs["linear"]))
        }
        theirs = az.compare({name: az.loo(one, pointwise=True, reff=1.0) for name, one in every.items()})
    assert table["se of difference"].iloc[1] == pytest.approx(of_r * theirs.loc["one level", "dse"], abs=1e-8)
    by_site = compare({"one level": other, "levels": runs["linear"]}, out="site")
    assert by_site.index[0] == "levels"


def test_blocks_and_padding_do_not_matter(runs: dict[str, ft.Run]) -> None:
    data = runs["poisson"].population.data
    again = ft.run(ft.ep(model_of("poisson")), ft.InProcess(data, chunk=1), rounds=60, until=ep.settled(1e-3))
    assert loo(again, draws=100).elpd == pytest.approx(loo(runs["poisson"], draws=100).elpd, abs=1e-6)


@pytest.mark.slow
def test_two_ranks_equal_one_process(runs: dict[str, ft.Run], tmp_path: Path) -> None:
    def body(rank: int) -> list[float]:
        population = ft.Distributed(sites("logistic"))
        run = ft.run(ft.ep(model_of("logistic")), population, rounds=60, until=ep.settled(1e-3))
        estimates = site_estimates(run, 0.9)
        page = ft.report.write(run, tmp_path / "page")
        assert (rank == 0) == page.exists() or rank == 1
        numbers = loo(run, draws=100).elpd, loo(run, out="site").elpd, float(histogram_free(run))
        return [*numbers, *estimates.own[:, 0].nan_to_num(0.0).tolist()]

    def histogram_free(run: ft.Run) -> Tensor:
        return checks.calibration(run, bins=3, draws=100).observed.sum()

    run = runs["logistic"]
    expected = [loo(run, draws=100).elpd, loo(run, out="site").elpd, float(histogram_free(run))]
    expected += site_estimates(run, 0.9).own[:, 0].nan_to_num(0.0).tolist()
    for found in over_ranks(tmp_path / "ranks", 2, body):
        assert found == pytest.approx(expected, abs=1e-6)


def test_the_corrected_posterior_is_taken(runs: dict[str, ft.Run]) -> None:
    run = runs["linear"]
    better = corrected(run, points=2048)
    assert loo(run, given=better).elpd == pytest.approx(loo(run).elpd, abs=1.0)
    assert loo(run, given=better).elpd != loo(run).elpd


def test_other_runs_are_refused(runs: dict[str, ft.Run]) -> None:
    run = runs["linear"]
    fedavg = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False))), run.population)
    with pytest.raises(TypeError, match=r"Expected a run of ft\.ep with a hierarchical model of known family"):
        loo(fedavg)
    with pytest.raises(ValueError, match="Expected out= 'row' or 'site', but got 'patient'"):
        loo(run, out="patient")
    with pytest.raises(ValueError, match="Expected runs of the same clients with the same rows"):
        compare({"a": run, "b": fitted("linear", without_site(run.population.data, 0))})
    with pytest.raises(ValueError, match="rows whose responses differ"):
        compare({"a": run, "b": runs["poisson"]})


def test_rows_at_sites_are_refused_by_name(runs: dict[str, ft.Run]) -> None:
    run = runs["linear"]
    away = SimpleNamespace(**{name: getattr(run, name) for name in ("algorithm", "server", "number", "log", "last")})
    away.population = SimpleNamespace(names=run.population.names, counts=run.population.data.counts)
    with pytest.raises(ValueError, match="Expected rows in this process, but they are at the sites"):
        compare({"away": away}, out="site")  # type: ignore[dict-item]


def test_offsets_weights_and_trials_are_of_the_densities() -> None:
    """A weighted row counts as often; an offset moves the predictor; trials are Bernoulli rows together."""
    eta, y = torch.tensor([0.3, -0.2]).double(), torch.tensor([1.0, 3.0]).double()
    beside = {
        "offset": torch.tensor([0.1, 0.2]),
        "weight": torch.tensor([2.0, 1.0]),
        "trials": torch.tensor([2.0, 5.0]),
    }
    rows = observations(ft.data.from_tensors([(eta[:, None], y, beside)]).stack([0]))
    one, mask = torch.ones(1, 1, 1).double(), torch.ones(1, 2, dtype=torch.bool)
    drawn = Drawn(LOGISTIC, rows, mask, one, one[0], random.key(0)[None])
    expected = torch.distributions.Binomial(beside["trials"].double(), logits=eta + beside["offset"]).log_prob(y)
    whole = slice(0, 2)
    torch.testing.assert_close(drawn.log_density(whole)[0, :, 0], expected * beside["weight"])
    less = drawn._replace(family=GAUSSIAN, rows=rows._replace(trials=None), scale=3 * one[0])
    expected = torch.distributions.Normal(eta + beside["offset"], (3 / beside["weight"]).sqrt()).log_prob(y)
    torch.testing.assert_close(less.log_density(whole)[0, :, 0], expected)


@pytest.mark.parametrize(("family", "scale"), [(GAUSSIAN, 4.0), (LOGISTIC, 7.0), (POISSON, 1.0)])
def test_replicated_responses_have_the_family_s_moments(family: Family, scale: float) -> None:
    uniform = (torch.arange(20_000).double() + 0.5) / 20_000
    eta, scales = torch.full_like(uniform, 0.5), torch.full_like(uniform, scale)
    y = family.draw(uniform, eta, scales)
    p = torch.tensor(0.5).sigmoid()
    mean, variance = {
        "gaussian": (0.5, 4.0),
        "logistic": (float(7 * p), float(7 * p * (1 - p))),
        "poisson": (float(torch.tensor(0.5).exp()),) * 2,
    }[family.name]
    assert float(y.mean()) == pytest.approx(mean, abs=1e-3)
    assert float(y.var()) == pytest.approx(variance, rel=2e-3)
