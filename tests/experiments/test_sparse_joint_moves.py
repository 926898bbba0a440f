"""Joint moves of a directed graph's effects: Geweke's test, powers of the likelihood, exchanges, the same bits."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from scipy import stats
from support.oracles import geweke
from support.oracles.closed_forms import same_bits
from torch import Tensor

from experiments.sparse.joint_moves import Chains, Posterior, draw_scale, stable
from fedtorch import random, tree
from fedtorch.models.gibbs import _scales

SITES, ROWS = 2, 4
VARIABLES = ("theta", "sites", "w", "u", "precision", "noise", "prior")
ONE = torch.ones(1, dtype=torch.float64)


def laplace(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    first, second = random.split(key, 2)
    return random.exponential(first, shape, torch.float64) - random.exponential(second, shape, torch.float64)


def rows(chains: Chains, key: Tensor) -> Tensor:
    """Rows of every chain's sites, `(B, K, N, p)`."""
    size, sites, p, _ = chains.sites.shape
    errors = laplace(random.fold_in(key, torch.arange(size)), (sites, ROWS, p)) / chains.noise[:, :, None]
    return torch.linalg.solve(torch.eye(p, dtype=torch.float64) - chains.sites, errors.mT).mT


def posterior(y: Tensor, ladders: int, powers: Tensor = ONE) -> Posterior:
    return Posterior(y, torch.full((y.shape[-3],), y.shape[-2]), powers, ladders, 4)


def draw(size: int, p: int, purpose: int) -> Chains:
    """Direct draws of all variables, again wherever a site is not stable."""
    of, left, attempt = posterior(torch.zeros(SITES, ROWS, p).double(), size), torch.arange(size), 0
    drawn = of.start(torch.zeros(p, p, dtype=torch.float64), 0.4)
    q = p * (p - 1)
    while len(left):
        keys = random.split(random.fold_in(geweke.keys(purpose, size)[left], attempt), 8)
        rho = random.uniform(keys[0], (), torch.float64)
        included = (random.uniform(keys[1], (q,), torch.float64) < rho[:, None]).double()
        eta = 0.5 / random.gamma(keys[2], 2.0, (q,), torch.float64)
        theta = random.normal(keys[3], (q,), torch.float64) * (eta * 0.01 ** (1 - included)).sqrt()
        precision = geweke.cauchy(keys[4], (q,)).pow(-2)
        w, u = geweke.horseshoe_scales(keys[5], (SITES, q))
        z = random.normal(keys[6], (SITES, q), torch.float64)
        sites = theta[:, None] + z / (w * precision[:, None]).sqrt()
        noise = random.gamma(keys[7], 1.0, (SITES, p), torch.float64)
        full = drawn._replace(
            theta=of.matrix(theta),
            sites=of.matrix(sites),
            w=of.matrix(w) + of.unit,
            u=of.matrix(u) + of.unit,
            precision=of.matrix(precision) + of.unit,
            noise=noise,
            prior=type(drawn.prior)(included, eta, rho),
        )
        put = lambda old, new, at=left: old.index_copy(0, at, new)
        drawn = drawn._replace(**{name: tree.map(put, getattr(drawn, name), getattr(full, name)) for name in VARIABLES})
        left, attempt = left[~stable(full.sites).all(1)], attempt + 1
    return drawn


def statistics(chains: Chains) -> dict[str, Tensor]:
    feedback = (chains.sites @ chains.sites).diagonal(0, 2, 3).sum(-1)
    off = posterior(torch.zeros(SITES, ROWS, chains.theta.shape[-1]).double(), 1).entries
    return {
        "theta": off(chains.theta).tanh(),
        "sites": off(chains.sites).tanh().flatten(1),
        "squares": (5 * off(chains.sites)).square().tanh().flatten(1),
        "feedback": feedback.tanh(),
        "noise": chains.noise.log().flatten(1),
        "tau": off(chains.precision).log().tanh(),
        "lambda": off(chains.w).log().tanh().flatten(1),
        "included": chains.prior.included.sum(1, keepdim=True),
    }


@pytest.mark.slow
def test_geweke() -> None:
    size, rounds = 100, 60
    direct, chains = statistics(draw(4_000, 3, 1)), draw(size, 3, 2)
    drawn: dict[str, list[Tensor]] = {name: [] for name in direct}
    for t in range(rounds):
        of = posterior(rows(chains, random.fold_in(random.key(3), t)), size)
        chains = of.step(chains, random.key(4), t)
        for name, value in statistics(chains).items():
            drawn[name].append(value)
    assert bool((chains.accepted > 0.1).all() and (chains.accepted < 0.99).all())
    name, score, bound = geweke.worst(geweke.z_scores(direct, drawn))
    assert abs(score) < bound, (name, score, bound)


def test_half_of_twice_the_rows_is_the_rows() -> None:
    chains = draw(5, 3, 5)
    y, key = rows(chains, random.key(6)), random.key(7)
    once = posterior(y, 5).step(chains, key, 0)
    twice = posterior(torch.cat([y, y], 2), 5, ONE / 2).step(chains, key, 0)
    for a, b in zip(tree.leaves(once), tree.leaves(twice)):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-8)


def test_exchanges_reach_every_order_as_often_as_they_should() -> None:
    """Of three chains that stand still, orders of temperatures have probabilities in proportion to Π p(y)^β."""
    ladders, powers = 3_000, torch.tensor([1.0, 0.6, 0.1], dtype=torch.float64)
    three = draw(3, 2, 8)
    y = rows(three, random.key(9))[0]
    of = posterior(y, ladders, powers)
    each = of.likelihood(three.sites, three.noise).sum(1)
    scale = 2 / float(each.max() - each.min())  # likelihoods that differ by two
    many = of.start(torch.zeros(2, 2, dtype=torch.float64))
    of.likelihood = lambda sites, noise: scale * each.repeat(ladders)[:, None]  # type: ignore[method-assign]
    for t in range(30):
        many = of.swaps(many, random.fold_in(random.fold_in(random.key(10), t), torch.arange(3 * ladders)), t)
    orders = list(permutations(range(3)))
    weight = torch.stack([(powers[list(order)] * scale * each).sum() for order in orders]).softmax(0)
    count = [int((many.temperature.view(-1, 3) == torch.tensor(order)).all(1).sum()) for order in orders]
    assert sum(count) == ladders
    assert stats.chisquare(count, (ladders * weight).numpy()).pvalue > 1e-3
    assert bool((of.cold(many) % 3 == (many.temperature.view(-1, 3) == 0).nonzero()[:, 1]).all())


def test_a_run_that_is_taken_up_again_is_the_same_run() -> None:
    chains = draw(6, 3, 11)
    of = posterior(rows(chains, random.key(12))[0], 2, torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64))
    chains = of.start(torch.zeros(3, 3, dtype=torch.float64))
    whole = chains
    for t in range(4):
        whole = of.step(whole, random.key(13), t, adapt=True)
        if t == 1:
            kept = tree.map(torch.clone, whole)
    for t in (2, 3):
        kept = of.step(kept, random.key(13), t, adapt=True)
    assert same_bits(kept, whole)


def test_scales_are_drawn_as_in_the_federated_sampler() -> None:
    first, second, third, fourth = random.gamma(random.key(14), 1.0, (4, 5, 6), torch.float64)
    each = lambda *numbers: torch.tensor(numbers, dtype=torch.float64)[:, None, None]
    components = _scales.Components(each(0.3, 0.7), each(2.0, 9.0))
    known = _scales.ScaleStatistics(torch.full((5, 1), 7.0).double(), first, second, third)
    keys = random.fold_in(random.key(15), torch.arange(5))
    theirs = _scales.draw(known, fourth, components, keys)
    ours = draw_scale(7, third, fourth, lambda v: _scales.evidence(components, second, v / first), keys)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0.0)  # the sampler's may be by a program
