"""Moves of τ with the levels of all sites' scales: their invariance, by direct draws of the model, and silent sites."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy import stats
from support.oracles import geweke
from support.oracles.closed_forms import distance, linear_clients
from torch import Tensor

import fedtorch as ft
from fedtorch import exact, random
from fedtorch.models.gibbs import _levels as levels, deviations, sparse

SIZES = [12, 5, 9, 30]
BOUND = 69.0


def drawn(replicates: int, sites: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(1/τ² `(R, 1)`, w, u and deviations `(R, M)`) from the prior."""
    keys = random.fold_in(random.key(4), torch.arange(replicates))
    t, _ = geweke.horseshoe_scales(random.fold_in(keys, 0), (1,))
    w, u = geweke.horseshoe_scales(random.fold_in(keys, 1), (sites,))
    return t, w, u, random.normal(random.fold_in(keys, 2), (sites,), torch.float64) / (t * w).sqrt()


def moved(t: Tensor, w: Tensor, u: Tensor, delta: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1/τ², w and u after a move, and the factors."""
    total = lambda leaf: leaf.sum(1, keepdim=True)
    of_w, of_u = factors.unbind(1)
    clients = torch.full((len(t),), float(w.shape[1])).double()
    told = total(w * delta.square() / 2) / of_w, total(u * w) / (of_w * of_u), total(u) / of_u
    keys = random.fold_in(random.key(5), torch.arange(len(t)))
    now, after = levels.move(levels.Levels(clients, *told), t, factors, BOUND, keys)
    ratio = after / factors
    return now, w * ratio[:, 0], u * ratio[:, 1], after


def statistics(t: Tensor, w: Tensor, u: Tensor, delta: Tensor) -> Tensor:
    """Numbers that have moments, `(R, S)`."""
    logs = torch.cat([t.log(), w.log(), u.log()], 1)
    pairs = (logs[:, :, None] * logs[:, None, :]).flatten(1)
    return torch.cat([logs, pairs, logs * (delta.abs() + 1).log().mean(1, keepdim=True), t.sqrt().atan()], 1)


@pytest.mark.parametrize("sites", [1, 2, 5])
@pytest.mark.parametrize("loosest", [2.0**50, 2.0])
def test_the_prior_is_left_as_it_is(sites: int, loosest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct draws and the same after a move, their differences against standard errors.

    Factors are drawn evenly from their range, as they are in the long run: of a narrow one many are at an end.
    """
    monkeypatch.setattr(levels, "LOOSEST", loosest)
    joint, keys = drawn(20_000, sites), random.fold_in(random.key(6), torch.arange(20_000))
    factors = loosest ** (2 * random.uniform(keys, (2, 1), torch.float64) - 1)
    *now, after = moved(*joint, factors)
    assert bool(((after <= loosest) & (after * loosest >= 1)).all())
    assert float((now[0] / joint[0]).log().std()) > 0.5
    gap = statistics(*now, joint[3]) - statistics(*joint)
    z = gap.mean(0) / (gap.std(0) / len(gap) ** 0.5)
    assert float(z.abs().max()) < stats.norm.ppf(1 - 1e-3 / (2 * z.numel()))


def test_a_wrong_density_is_found() -> None:
    """A sum that is half of what it is, for the size of the differences that the test above finds."""
    joint = drawn(20_000, 3)
    gap = statistics(*moved(*joint[:3], joint[3] / 2**0.5, torch.ones(20_000, 2, 1).double())[:3], joint[3])
    gap = gap - statistics(*joint)
    assert float((gap.mean(0) / (gap.std(0) / len(gap) ** 0.5)).abs().max()) > 10


def test_undetermined_levels_stay_within_bounds() -> None:
    """Equal coefficients at all sites, which the scale zero would explain best."""
    one = torch.ones(4, 2).double()
    heard = levels.Levels(3 * one[:, 0], 0 * one, one, one)
    precision, factors = one, torch.stack((one, one), 1)
    for t in range(300):
        keys = random.fold_in(random.fold_in(random.key(5), t), torch.arange(4))
        precision, factors = levels.move(heard, precision, factors, BOUND, keys)
    assert bool((precision.log().abs() <= BOUND + 1e-9).all())
    assert bool((factors.log2().abs() <= 50).all())


def test_sums_of_silent_sites_are_those_of_their_scales() -> None:
    """What a site told before a move stays true after it: its scales are those that it told times the factors."""
    data = linear_clients(SIZES)
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2)
    faults = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.4))
    round = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), faults=faults, rounds=30).last
    sites, shared = round.clients.table.read(slice(0, len(SIZES))).variables, round.server.variables
    told = exact.value(round.server.total["levels"]) * torch.stack((shared.factors.prod(1), shared.factors[:, 1]), 1)
    w, u = sparse.scaled(shared, sites.precision, sites.auxiliary)
    assert float(shared.factors.log().abs().min()) > 0
    assert distance(told, torch.stack(((u * w).sum(0), u.sum(0)), 1)) < 1e-12


def test_other_deviations_have_no_levels() -> None:
    for deviation in (deviations.laplace(), deviations.normal()):
        local = sparse.regression(deviation=deviation)
        assert "levels" not in local.report(local.init(torch.zeros(1, 3).double()))
    data = linear_clients(SIZES)
    algorithm = ft.gibbs(sparse.regression(deviation=deviations.laplace()), sparse.hierarchy(), sweeps=2, chains=2)
    found = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=4).server.variables
    assert torch.equal(found.factors, torch.ones(2, 2, 3).double())
    assert "factors" not in found.quantities()


@pytest.mark.slow
def test_silent_sites_leave_the_posterior_as_it_is() -> None:
    """Means of log τ and θ when every site is silent in half of the rounds, and without the move of the levels."""
    data, chains = linear_clients(SIZES), 30
    alone = dataclasses.replace(deviations.horseshoe(), half_cauchy=False)
    found = []
    for deviation, faults in ((None, None), (None, ft.dropouts(0.5)), (alone, None)):
        algorithm = ft.gibbs(sparse.regression(deviation=deviation), sparse.hierarchy(), sweeps=3, chains=chains)
        watch = lambda round: {
            "theta": round.server.variables.theta,
            "log tau": round.server.variables.precision.log(),
        }
        sampler = ft.Sampler(burn_in=300, watch=watch)
        ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=2000, record=sampler, faults=faults)
        found.append(torch.cat([draws.mean(1) for draws in sampler.draws().values()], -1))
    for other in found[1:]:
        z = (found[0].mean(0) - other.mean(0)) / ((found[0].var(0) + other.var(0)) / chains).sqrt()
        assert float(z.abs().max()) < stats.norm.ppf(1 - 1e-3 / (4 * z.numel()))


@pytest.mark.slow
def test_scales_mix_faster() -> None:
    """Effective samples of log τ with and without, the median coefficient: half as many again at least."""
    x = random.normal(random.key(0), (4, 80, 4), torch.float64)
    y = x @ torch.tensor([0.5, 0.5, 0.0, 0.0]).double() + random.normal(random.key(1), (4, 80), torch.float64)
    data = ft.data.from_tensors([(x[k], y[k]) for k in range(4)])
    found = []
    for half_cauchy in (False, True):
        deviation = dataclasses.replace(deviations.horseshoe(), half_cauchy=half_cauchy)
        algorithm = ft.gibbs(sparse.regression(deviation=deviation), sparse.hierarchy(), sweeps=5, chains=6)
        watch = lambda round: {"log tau": round.server.variables.precision.log()}
        sampler = ft.Sampler(burn_in=100, watch=watch)
        ft.run(algorithm, ft.InProcess(data), torch.zeros(4), rounds=600, record=sampler)
        found.append(float(sampler.summary()["ess_bulk"].median()))
    assert found[1] > 1.5 * found[0], found
