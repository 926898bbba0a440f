"""Markov random fields: against separate regressions, a closed form and known networks; false discoveries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from support.oracles import calibration, geweke
from support.oracles.closed_forms import same_bits
from support.oracles.sampled import sampled
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.models.gibbs import deviations, global_priors, graphical, sparse
from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel

# Chains of a few rounds whose least squares estimates differ by the rounding of another factorisation.
ROUNDING = 1e-9


def precision(p: int, edges: dict[tuple[int, int], float]) -> Tensor:
    """A matrix with a unit diagonal."""
    matrix = torch.eye(p, dtype=torch.float64)
    for (i, j), value in edges.items():
        matrix[i, j] = matrix[j, i] = value
    return matrix


CHAIN = precision(5, {(0, 1): -0.45, (1, 2): 0.45, (3, 4): -0.5})


def normal_rows(omega: Tensor, counts: list[int], seed: int = 0) -> ft.data.FederatedData:
    """Rows of sites alike, normal with precision `omega`."""
    factor = torch.linalg.cholesky(torch.linalg.inv(omega))
    z = random.normal(random.key(seed), (sum(counts), len(omega)), torch.float64)
    return ft.data.FederatedData(z @ factor.mT, torch.tensor(counts))


def field(sweeps: int = 3, chains: int = 2, prior: Any = None, **arguments: Any) -> ft.Algorithm:
    shared = graphical.every_response(sparse.hierarchy(prior))
    return ft.gibbs(graphical.neighbourhoods(**arguments), shared, sweeps=sweeps, chains=chains)


def sample(data: ft.data.FederatedData, rounds: int = 60, seed: int = 0, sweeps: int = 4) -> Tensor:
    """Inclusion probabilities `(p, p)`."""
    start = graphical.start(data[0].shape[1])
    algorithm, population = field(sweeps, 4), ft.InProcess(data)
    sampler = sampled(algorithm, population, start, rounds=rounds, burn_in=rounds // 4, seed=seed, keep=False)
    return graphical.square(sampler.mean()["prior.included"])


def one_regression(j: int, intercept: bool) -> tuple[LocalKernel, GlobalKernel]:
    """The ordinary kernels, with the keys that the regression of variable j has."""
    local, shared = sparse.regression(intercept=intercept), sparse.hierarchy()

    def sweep(heard: Any, site: Any, data: Any, keys: Tensor, sweeps: int) -> Any:
        return local.sweep(heard, site, data, random.fold_in(keys, j), sweeps)

    def update(state: Any, sums: Any, keys: Tensor) -> Any:
        return shared.update(state, sums, random.fold_in(keys, j))

    kernel = LocalKernel(local.init, local.prepare, sweep, local.report)
    return kernel, GlobalKernel(shared.init, shared.send, update)


@pytest.mark.parametrize("intercept", [False, True])
def test_the_regressions_are_those_of_the_sparse_model(intercept: bool) -> None:
    data = normal_rows(CHAIN, [30, 3, 20, 40])
    together = ft.run(field(intercept=intercept), ft.InProcess(data), graphical.start(5), seed=5, rounds=4).last
    others = graphical.other_variables(5)
    for j in range(5):
        alone = data.map(lambda y, j=j: (y[:, others[j]], y[:, j]))
        algorithm = ft.gibbs(*one_regression(j, intercept), sweeps=3, chains=2)
        found = ft.run(algorithm, ft.InProcess(alone), torch.zeros(4), seed=5, rounds=4).last
        mine = together.server.variables
        assert torch.equal(mine.prior.included[:, j], found.server.variables.prior.included)
        assert torch.allclose(mine.theta[:, j], found.server.variables.theta, rtol=ROUNDING, atol=ROUNDING)
        site, lone = (r.clients.table.read(slice(0, 4)).variables for r in (together, found))
        assert torch.allclose(site.noise[:, :, j], lone.noise, rtol=ROUNDING)


def test_each_client_has_one_gram_matrix_and_no_copies_of_its_rows() -> None:
    data = normal_rows(CHAIN, [30, 50])
    block = data.stack(range(2))
    fields = graphical.neighbourhoods().prepare(block)
    for k, y in enumerate(data):
        assert torch.allclose(fields.gram[k], y.mT @ y, rtol=1e-13)
    numbers = sum(leaf[0].numel() for leaf in fields)
    assert numbers == 25 + 5 * 4 + 5 + 2  # Gram matrix, estimates, sums of squares and two counts, whatever the rows
    design = graphical.designs(fields)
    for j in range(5):
        others = graphical.other_variables(5)[j]
        direct = sparse.design(data.map(lambda y, j=j, o=others: (y[:, o], y[:, j])).stack(range(2)))
        for mine, theirs in zip(tree.leaves(design), tree.leaves(direct)):
            assert torch.allclose(mine[j::5], theirs, rtol=1e-11, atol=1e-13)


def test_the_gaussian_posterior() -> None:
    """All variances known, of the noise to a relative 3e-5; errors from the spread over independent chains."""
    data, sure, tau, chains = normal_rows(CHAIN[:3, :3], [12, 9, 20]), 1e9, 0.5, 60
    local = graphical.neighbourhoods(deviation=deviations.normal(), noise_shape=sure)
    shared = sparse.hierarchy(global_priors.gaussian(1.5), scale=tau, noise_scale=sure)
    algorithm = ft.gibbs(local, graphical.every_response(shared), sweeps=3, chains=chains)
    sampler = sampled(algorithm, ft.InProcess(data), graphical.start(3), rounds=45, burn_in=12, keep=False)
    found = sampler.moments["theta"].mean
    bound = float(stats.norm.ppf(1 - 1e-3 / 12))
    for j, others in enumerate(graphical.other_variables(3)):
        weight, shift = torch.eye(2, dtype=torch.float64) / 1.5**2, torch.zeros(2, dtype=torch.float64)
        for y in data:
            x = y[:, others]
            covariance = torch.eye(len(x), dtype=torch.float64) + tau**2 * x @ x.T
            weight = weight + x.T @ torch.linalg.solve(covariance, x)
            shift = shift + x.T @ torch.linalg.solve(covariance, y[:, j])
        error = found[:, j].std(0) / chains**0.5
        assert bool(((found[:, j].mean(0) - torch.linalg.solve(weight, shift)).abs() < bound * error).all())


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_same_bits_in_every_chunking(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtorch.federation.populations.in_process.SMALL_BLOCK", 0)
    data = normal_rows(CHAIN, [30, 4, 20, 40])
    rounds = [
        tuple(
            (round.server, round.clients.state_dict())
            for round in ft.Run(field(2), ft.InProcess(data, size), graphical.start(5), cohort=3).rounds(3)
        )
        for size in (None, chunk)
    ]
    assert same_bits(*rounds)


@pytest.mark.slow
def test_a_known_network_is_found() -> None:
    truth = (CHAIN != 0) & ~torch.eye(5, dtype=torch.bool)
    inclusion = sample(normal_rows(CHAIN, [120] * 5), rounds=240)
    assert float(inclusion[truth].min()) > 0.9
    assert float(torch.minimum(inclusion, inclusion.mT)[~truth].max()) < 0.5
    assert torch.equal(graphical.edges(inclusion, 0.05, torch.minimum), truth)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [torch.maximum, torch.minimum])
def test_false_discoveries_are_as_announced(rule: Any) -> None:
    """Over random networks the share of false edges is at most its nominal level, within three standard errors."""
    false, power, level = [], [], 0.1
    for seed in range(12):
        key = random.fold_in(random.key(77), seed)
        pairs = random.permutation(random.fold_in(key, 0), 28)[:7].tolist()
        every = torch.triu_indices(8, 8, 1).T.tolist()
        sizes = 0.3 * (1 - 2 * random.bernoulli(random.fold_in(key, 1), 0.5, (7,)).double())
        omega = precision(8, {tuple(every[e]): float(size) for e, size in zip(pairs, sizes)})  # type: ignore[misc]
        omega = omega + torch.eye(8) * max(0.0, 0.2 - float(torch.linalg.eigvalsh(omega)[0]))
        found = graphical.edges(sample(normal_rows(omega, [120] * 6, seed), 250), level, rule)
        truth = (omega != 0) & ~torch.eye(8, dtype=torch.bool)
        false.append(float((found & ~truth).sum() / found.sum().clamp(min=1)))
        power.append(float((found & truth).sum() / truth.sum()))
    rates = torch.tensor(false)
    assert float(rates.mean()) < level + 3 * float(rates.std()) / len(rates) ** 0.5
    least = {torch.maximum: 0.5, torch.minimum: 0.25}  # an edge that both include is half as easy to find
    assert sum(power) / len(power) > least[rule]


def test_permuted_variables() -> None:
    """The posterior is that of the permuted problem, within Monte Carlo errors of the chains."""
    data, order = normal_rows(CHAIN, [40, 60, 50]), [3, 1, 4, 0, 2]
    means = []
    for turned in (data, data.map(lambda y: y[:, order])):
        sampler = sampled(field(4, 8), ft.InProcess(turned), graphical.start(5), rounds=18, burn_in=7, keep=False)
        means.append(graphical.square(sampler.moments["theta"].mean))
    first, second = means[0][:, order][:, :, order], means[1]
    off = ~torch.eye(5, dtype=torch.bool)
    error = ((first.var(0) + second.var(0)) / 8).sqrt()
    z = ((first.mean(0) - second.mean(0)) / error)[off]
    assert float(z.abs().max()) < stats.t.ppf(1 - 1e-3 / 40, df=7)


def test_square_and_start() -> None:
    values = torch.arange(1.0, 7.0)
    expected = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 4.0], [5.0, 6.0, 0.0]])
    assert torch.equal(graphical.square(values), expected)
    assert torch.equal(graphical.square(values.reshape(3, 2).expand(4, 3, 2)), expected.expand(4, 3, 3))
    assert graphical.start(3).shape == (6,)
    with pytest.raises(ValueError, match="Expected at least 2 variables, but got 1"):
        graphical.start(1)
    with pytest.raises(ValueError, match="coefficients of p variables, but got 5"):
        graphical.variables(5)


def test_edges_count_once_and_the_diagonal_not_at_all() -> None:
    inclusion = torch.tensor([[0.0, 0.99, 0.9], [0.99, 0.0, 0.3], [0.9, 0.3, 0.0]], dtype=torch.float64)
    for rate, pairs in ((0.02, [(0, 1)]), (0.06, [(0, 1), (0, 2)]), (0.3, [(0, 1), (0, 2), (1, 2)])):
        found = graphical.edges(inclusion, rate, torch.maximum)
        assert torch.equal(found, found.mT)
        assert [tuple(pair) for pair in found.triu().nonzero().tolist()] == pairs
    every = torch.ones(9, 9, dtype=torch.float64) - torch.eye(9)  # the mean of 1 − q would be 0.11 with the diagonal
    for rule in (None, torch.maximum, torch.minimum):
        assert torch.equal(graphical.edges(every, 0.2, rule), every > 0)
    one_way = torch.tensor([[0.0, 0.1], [0.98, 0.0]])
    assert graphical.edges(one_way, 0.1).tolist() == [[False, False], [True, False]]
    assert graphical.edges(one_way, 0.1, torch.maximum).tolist() == [[False, True], [True, False]]
    assert not graphical.edges(one_way, 0.1, torch.minimum).any()
    with pytest.raises(ValueError, match="Expected a rate between 0 and 1"):
        graphical.edges(inclusion, 1.5)


def test_bad_input() -> None:
    prepare = graphical.neighbourhoods(names=("ER", "PR", "HER2")).prepare
    y, counts = random.normal(random.key(0), (2, 6, 3), torch.float64), torch.tensor([6, 6])
    with pytest.raises(ValueError, match="Expected at least 2 variables, but got 1"):
        prepare(ft.data.ClientData(y[..., :1], counts))
    with pytest.raises(ValueError, match=r"Expected rows y of shape \(p,\) and nothing else"):
        prepare(ft.data.ClientData((y, y[..., 0]), counts))
    constant = y.clone()
    constant[1, :, 1] = 3.0
    with pytest.raises(ft.BadClients, match="but got constant PR; leave them out") as caught:
        prepare(ft.data.ClientData(constant, counts))
    assert caught.value.rows == [1]
    with pytest.raises(ValueError, match="constant number 1"):
        graphical.neighbourhoods().prepare(ft.data.ClientData(constant, counts))
    gap = y.clone()
    gap[0, 2, 2] = torch.nan
    with pytest.raises(ft.BadClients, match=r"NaN or Inf; fill missing values by fedtorch\.models\.gibbs\.imputation"):
        prepare(ft.data.ClientData(gap, counts))
    single = ft.gibbs(graphical.neighbourhoods(), sparse.hierarchy())
    with pytest.raises(ValueError, match=r"but got a single one; use every_response\(hierarchy\)"):
        ft.Run(single, ft.InProcess(normal_rows(CHAIN, [9])), graphical.start(len(CHAIN))).step()
    with pytest.raises(ValueError, match="coefficients of p variables, but got 7"):
        ft.Run(field(), ft.InProcess(normal_rows(CHAIN, [9])), torch.zeros(7)).step()


def test_one_row_and_collinear_variables() -> None:
    data = normal_rows(CHAIN, [30, 1, 20])
    doubled = data.map(lambda y: torch.cat([y, 2 * y[:, :1]], 1))
    found = ft.run(field(), ft.InProcess(doubled), graphical.start(6), rounds=6).last
    assert bool(found.server.variables.theta.isfinite().all())


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(calibration.Length(150, 15, 16, 4), id="short"),
        pytest.param(calibration.Length(2000, 31, 60, 12), id="long", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("variable", [0, 2])
def test_the_regression_of_a_variable_on_the_others_is_calibrated(variable: int, length: calibration.Length) -> None:
    """Its values are drawn given the others', which are the same at all sites; theirs are not looked at."""

    def normal(keys: Tensor, p: int) -> tuple[Tensor, dict[str, Tensor]]:
        return random.normal(keys, (p,), torch.float64), {}

    def one(keys: Tensor) -> Tensor:
        return torch.ones(len(keys), dtype=torch.float64)

    others = random.normal(random.key(5), (6, 2), torch.float64)
    setting = geweke.Setting(others, 2, 2.0, geweke.horseshoe_scales, normal, one)
    truth = geweke.draw_joint(setting, length.replicates, 6)
    y = geweke.draw_responses(setting, truth.sites, geweke.keys(7, 2 * length.replicates))
    each = others.expand(len(y), -1, -1)
    rows = torch.cat([each[..., :variable], y[..., None], each[..., variable:]], -1)
    local = graphical.neighbourhoods(noise_shape=2.0)
    shared = graphical.every_response(sparse.hierarchy(global_priors.gaussian()))
    data = local.prepare(ft.data.ClientData(rows, torch.full((len(y),), len(others))))

    def statistics(joint: geweke.Joint) -> dict[str, Tensor]:
        if joint.shared.theta.ndim == 3:  # of all variables
            of_sites = tree.map(lambda leaf: leaf[:, :, variable], joint.sites)
            joint = geweke.Joint(tree.map(lambda leaf: leaf[:, variable], joint.shared), of_sites)
        return geweke.statistics(joint, setting.sites, lambda prior: {})

    start = graphical.start(3)
    calibration.check(
        calibration.of_gibbs(local, shared, setting, truth, data, statistics, length, start=start, sweeps=3)
    )
