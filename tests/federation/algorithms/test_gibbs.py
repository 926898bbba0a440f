"""Gibbs sampling against the Gaussian posterior in closed form, a central sampler, and its own symmetries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from support.algorithm_cases import Case
from support.oracles.closed_forms import distance, linear_clients, same_bits
from support.oracles.sampled import sampled
from support.small_federations import trainer
from torch import Tensor

import fedtorch as ft
from fedtorch import exact, random, tree
from fedtorch.federation.runs import run as running
from fedtorch.models.gibbs import deviations, global_priors, sparse
from fedtorch.random.named import numbers

SIZES = [12, 5, 9, 30]
K = len(SIZES)
START = torch.zeros(3)


def sparse_algorithm(sweeps: int = 3, chains: int = 2, **arguments: Any) -> ft.Algorithm:
    return ft.gibbs(sparse.regression(**arguments), sparse.hierarchy(), sweeps=sweeps, chains=chains)


def conjugate(sweeps: int, chains: int, tau: float = 0.5, sigma: float = 0.8) -> ft.Algorithm:
    """All variances known: that of the noise to a relative 3e-5, by a prior as sure as 2e9 observations."""
    sure = 1e9
    local = sparse.regression(deviation=deviations.normal(), noise_shape=sure)
    prior = global_priors.gaussian(1.5)
    return ft.gibbs(
        local, sparse.hierarchy(prior, scale=tau, noise_scale=sure * sigma**2), sweeps=sweeps, chains=chains
    )


def closed_form(data: ft.data.FederatedData, tau: float = 0.5, sigma: float = 0.8) -> tuple[Tensor, Tensor]:
    """Mean and covariance of θ: given it, y_k is normal with mean X_k θ and covariance σ² I + τ² X_k X_k'."""
    precision, shift = torch.eye(3, dtype=torch.float64) / 1.5**2, torch.zeros(3, dtype=torch.float64)
    for x, y in data:
        covariance = sigma**2 * torch.eye(len(x), dtype=torch.float64) + tau**2 * x @ x.T
        precision = precision + x.T @ torch.linalg.solve(covariance, x)
        shift = shift + x.T @ torch.linalg.solve(covariance, y)
    return torch.linalg.solve(precision, shift), torch.linalg.inv(precision)


@pytest.mark.parametrize("sweeps", [1, pytest.param(100, marks=pytest.mark.slow), 5])
def test_the_gaussian_posterior(sweeps: int) -> None:
    """Whatever the number of sweeps; errors from the spread over independent chains."""
    data, chains = linear_clients(SIZES), 30
    sampler = sampled(conjugate(sweeps, chains), ft.InProcess(data), START, rounds=60, burn_in=12)
    mean, covariance = closed_form(data)
    found = sampler.moments["theta"]
    bound = float(stats.norm.ppf(1 - 1e-4))
    error = found.mean.std(0) / chains**0.5
    assert bool(((found.mean.mean(0) - mean).abs() < bound * error).all())
    draws = sampler.draws()["theta"] - mean
    squares = torch.einsum("cti,ctj->cij", draws, draws) / draws.shape[1]
    error = squares.std(0) / chains**0.5
    assert bool(((squares.mean(0) - covariance).abs() < bound * error).all())


@pytest.mark.slow
def test_one_sweep_and_a_hundred_have_one_stationary_distribution() -> None:
    """Of the sparse model; errors from the spread over independent chains."""
    data, chains = linear_clients(SIZES), 30
    found = []
    for sweeps, rounds in ((1, 2500), (100, 400)):
        population = ft.InProcess(data)
        sampler = sampled(
            sparse_algorithm(sweeps, chains), population, START, rounds=rounds, burn_in=200, keep=False, seed=sweeps
        )
        moments = sampler.moments
        found.append(torch.cat([moments[name].mean for name in ("theta", "prior.included")], -1))
    error = ((found[0].var(0) + found[1].var(0)) / chains).sqrt()
    z = (found[0].mean(0) - found[1].mean(0)) / error
    assert float(z.abs().max()) < stats.norm.ppf(1 - 1e-3 / 12)


def central(data: ft.data.FederatedData, rounds: int, sweeps: int, chains: int, seed: int) -> sparse.Global:
    """The same sampler without a federation: one loop, all sites at hand, sums of all sites at once."""
    local, shared = sparse.regression(), sparse.hierarchy()
    block = local.prepare(data.stack(range(len(data))))
    start = START.double().expand(chains, 3).contiguous()
    variables, sites = shared.init(start), tree.expand(local.init(start), len(data))
    for number in range(rounds):
        key = random.fold_in(random.fold_in(random.key(seed), number), torch.arange(4))
        keys = random.fold_in(random.fold_in(key[1], numbers(tuple(data.names)))[:, None], torch.arange(chains))
        sites = local.sweep(tree.expand(shared.send(variables), len(data)), sites, block, keys, sweeps)
        sums = {name: sum(exact.limbs(t) for t in terms).sum(0) for name, terms in local.report(sites).items()}
        variables = shared.update(variables, sums, random.fold_in(key[2], torch.arange(chains)))
    return variables


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("small", [0, 16_384], ids=["blocks by size", "one block"])
def test_federated_equals_central_to_the_bit(chunk: int | None, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtorch.federation.populations.in_process.SMALL_BLOCK", small)
    data = linear_clients(SIZES)
    found = ft.run(sparse_algorithm(), ft.InProcess(data, chunk), START, seed=3, rounds=6).last
    assert same_bits(found.server.variables, central(data, 6, 3, 2, seed=3))


@pytest.mark.parametrize("p", [3, 40])
def test_the_same_bits_in_every_chunking(p: int) -> None:
    data = linear_clients([12, 50, 9, 30], p)
    runs = []
    for chunk in (None, 1, 3):
        rounds = ft.Run(sparse_algorithm(2), ft.InProcess(data, chunk), torch.zeros(p), cohort=3, seed=1).rounds(4)
        runs.append([(round.server, round.clients.state_dict()) for round in rounds])
    for other in runs[1:]:
        assert all(same_bits(one, two) for one, two in zip(runs[0], other))


def test_a_chain_does_not_depend_on_the_others() -> None:
    data = linear_clients(SIZES)
    three = ft.run(sparse_algorithm(chains=3), ft.InProcess(data), START, rounds=4).last
    one = ft.run(sparse_algorithm(chains=1), ft.InProcess(data), START, rounds=4).last
    assert same_bits(tree.map(lambda leaf: leaf[:1], three.server), one.server)


def means(algorithm: ft.Algorithm, data: ft.data.FederatedData, seed: int = 0, **arguments: Any) -> dict[str, Tensor]:
    sampler = sampled(algorithm, ft.InProcess(data), START, rounds=36, burn_in=12, keep=False, seed=seed, **arguments)
    return {name: moments.mean for name, moments in sampler.moments.items()}


def close(one: Tensor, two: Tensor) -> bool:
    """Whether means over chains `(C, ...)` agree within their Monte Carlo error at a level of 1e-3 in all."""
    z = (one.mean(0) - two.mean(0)) / ((one.var(0) + two.var(0)) / len(one)).sqrt()
    return float(z.abs().max()) < stats.norm.ppf(1 - 1e-3 / (2 * z.numel()))


def test_permuted_clients_and_covariates() -> None:
    """The posterior is that of the permuted problem; the sums alone do not even see the order."""
    data, order, columns = linear_clients(SIZES), [2, 3, 0, 1], [2, 0, 1]
    algorithm = sparse_algorithm(2, 10)
    base = means(algorithm, data)
    assert close(base["theta"], means(algorithm, data.select(order), seed=1)["theta"])
    turned = means(algorithm, data.map(lambda rows: (rows[0][:, columns], rows[1])), seed=2)
    assert close(base["theta"][:, columns], turned["theta"])
    assert close(base["prior.included"][:, columns], turned["prior.included"])


def test_a_client_that_never_answers_is_not_in_the_model() -> None:
    """Nor in the number of sites: with the others' keys it is the sampler of the others, to the bit."""
    data, silent = linear_clients(SIZES), ft.Faults(after=lambda keys, ids: ids == K - 1)
    found = ft.run(sparse_algorithm(), ft.InProcess(data), START, faults=silent, rounds=5).last
    others = ft.run(sparse_algorithm(), ft.InProcess(data.select(range(K - 1))), START, rounds=5).last
    assert same_bits(found.server, others.server)
    assert bool((exact.value(found.server.total["clients"]) == K - 1).all())


def test_clients_that_answer_now_and_then_do_not_bias_the_posterior() -> None:
    """A block that is not visited in a round stays where it is; the sums know it about any centre."""
    data = linear_clients(SIZES)
    faults = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.4))
    base = means(conjugate(1, 16), data)["theta"]
    assert close(base, means(conjugate(1, 16), data, seed=1, faults=faults)["theta"])


def test_the_server_keeps_the_sum_of_what_was_sent_exactly() -> None:
    data = linear_clients(SIZES)
    faults = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.4))
    for round in ft.Run(sparse_algorithm(), ft.InProcess(data), torch.full((3,), 2.0), faults=faults).rounds(30):
        sent = round.clients.table.read(slice(0, K)).told
        assert same_bits(round.server.total, tree.map(lambda leaf: leaf.sum(0), sent))


def check_drift(rounds: int) -> None:
    """A site without information on its coefficient: λ and the deviation wander over many orders of magnitude."""
    x, y = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    data = ft.data.from_tensors([(x, y)] * 2)
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1, chains=1)
    worst = 0.0
    for round in ft.Run(algorithm, ft.InProcess(data), torch.zeros(1)).rounds(rounds):
        if round.number % 50 and round.number < rounds - 100:
            continue
        site = round.clients.table.read(slice(0, 2)).variables
        centre, heard = round.server.variables.centre, round.server.total
        sums = exact.about(*exact.read(*(heard[n] for n in ("precision", "first", "second")), exact.limbs(centre)))
        fresh = [(site.precision * (site.place - centre) ** power).sum(0) for power in range(3)]
        scale = [(site.precision * (site.place - centre).abs() ** power).sum(0) for power in range(3)]
        worst = max(worst, *(float(((s - f) / c).abs().max()) for s, f, c in zip(sums, fresh, scale)))
    assert worst < 1e-8


@pytest.mark.slow
def test_running_sums_do_not_drift() -> None:
    check_drift(60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_running_sums_do_not_drift_over_a_hundred_thousand_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TOTAL_ANEW", 10**9)
    check_drift(100_000)


def test_a_run_starts_where_it_is_told() -> None:
    data, start = linear_clients(SIZES), torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    begun = ft.Run(sparse_algorithm(), ft.InProcess(data), start)
    assert torch.equal(begun.server.variables.theta, start.double())
    assert distance(begun.server.total, tree.zeros_like(begun.server.total)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sweeps": 0}, "Expected sweeps of at least 1, but got 0"),
        ({"chains": 0}, "Expected chains of at least 1, but got 0"),
    ],
)
def test_bad_settings(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.gibbs(sparse.regression(), sparse.hierarchy(), **arguments)


def test_bad_starts() -> None:
    data = ft.InProcess(linear_clients(SIZES))
    with pytest.raises(ValueError, match=r"Expected the start of the global parameter.*but got dict"):
        ft.Run(sparse_algorithm(), data, {}).step()
    with pytest.raises(ValueError, match="Expected a start for each of 2 chains, but got 3"):
        ft.Run(sparse_algorithm(), data, torch.zeros(3, 3)).step()


def test_a_lightning_trainer_runs_it_too() -> None:
    data, algorithm = linear_clients(SIZES), sparse_algorithm()
    federation = ft.Federation(algorithm, ft.InProcess(data), START, seed=3)
    trainer(max_epochs=4).fit(federation)
    assert same_bits(federation.server, ft.run(algorithm, ft.InProcess(data), START, seed=3, rounds=4).last.server)
    resumed = ft.Federation(algorithm, ft.InProcess(data), START, seed=3)
    resumed.load_state_dict(federation.state_dict())
    trainer(max_epochs=2).fit(resumed)
    assert same_bits(resumed.server, ft.run(algorithm, ft.InProcess(data), START, seed=3, rounds=6).last.server)


CASES: dict[str, Case] = {
    "gibbs": Case(
        lambda: ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2),
        start=torch.full((3,), 0.5).double(),
    )
}
