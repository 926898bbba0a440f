"""Audits find what broken mechanisms tell, and never more than right ones may."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from scipy.stats import binomtest
from support.oracles.closed_forms import linear_clients, sgd
from support.oracles.neighbour_tests import gaussian_detections, most_detections
from torch import Tensor

import fedtorch as ft
from fedtorch.trust import privacy
from fedtorch.trust.privacy.accounting.analytic import gaussian_delta
from fedtorch.trust.privacy.accounting.auditing import (
    clopper_pearson,
    learnt_attack,
    roc,
)
from fedtorch.trust.privacy.examples._per_example import PrivateLoss
from fedtorch.trust.privacy.mechanisms import _totals as totals, clients, nodes

DELTA = 1e-5
NOISE = privacy.gaussian_noise(1.0, DELTA)  # ε = 1


def solver(noise: float = NOISE, seed: int = 0, **settings) -> partial:
    """A mechanism with numbers that repeat: each block of runs has noise of a seed of its own."""
    seeds = iter(range(1000 * seed, 1000 * seed + 1000))
    settings = {"clip": 1.0, "sampling_rate": 1.0, "steps": 1, "delta": DELTA, **settings}
    return lambda *arguments, **given: privacy.example_level(
        *arguments, noise=noise, entropy=privacy.from_seed(next(seeds)), **settings, **given
    )


@pytest.mark.slow
def test_audit_of_a_correct_mechanism() -> None:
    found = privacy.audit(solver(seed=2))
    assert found.runs == 100_000
    assert 0.5 <= found.epsilon <= 1.0


@pytest.mark.slow
def test_half_of_the_noise_is_found_out() -> None:
    assert privacy.audit(solver(NOISE / 2, seed=2)).epsilon > 1.0


@pytest.mark.slow
def test_a_clip_that_is_left_out_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateLoss, "_share", lambda self, squares, taken: taken.double())
    assert privacy.audit(solver(seed=3)).epsilon > 1.0


@pytest.mark.slow
def test_audit_is_below_the_accounted_epsilon() -> None:
    noise = privacy.noise_for(epsilon=1.0, sampling_rate=0.3, rounds=8, delta=DELTA)
    right = privacy.audit(solver(noise, seed=4, sampling_rate=0.3, steps=4), rounds=2, runs=40_000)
    assert 0.1 < right.epsilon <= 1.0
    everybody = lambda self, batch, index, roster: torch.arange(batch.leaves[0].shape[1]) < batch.size[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateLoss, "_draw", everybody)  # all rows in every step, accounted as three tenths of them
        wrong = privacy.audit(solver(noise, seed=5, sampling_rate=0.3, steps=4), rounds=2, runs=40_000)
    assert wrong.epsilon > 1.0
    assert right.delta == DELTA


def test_a_learnt_attack_needs_no_knowledge_of_the_mechanism() -> None:
    """It finds the direction among five, in which the canary moves what is released."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    draw = lambda: torch.randn(60_000, 5, generator=generator, dtype=torch.float64) * (NOISE / 3)
    canary = torch.eye(5, dtype=torch.float64)[0]
    inside, outside = (draw() + canary) @ mixing, draw() @ mixing
    found = privacy.audit_outputs(inside, outside, delta=DELTA, choosing=20_000)
    assert found.epsilon > 1.0
    direction = learnt_attack(inside, outside)(mixing)  # how it scores each direction before the mixing
    assert float(direction[0] / direction.norm()) > 0.99


def test_an_attack_on_squares_finds_what_only_changes_the_spread() -> None:
    """Noise of 1 or 1.5, about zero with and without the canary: unbounded losses, which no linear score sees."""
    generator = torch.Generator().manual_seed(4)
    inside, outside = (sd * torch.randn(40_000, 2, generator=generator, dtype=torch.float64) for sd in (1.5, 1.0))
    squares = lambda rows: torch.cat([rows, rows.square()], 1)
    learnt = learnt_attack(inside[:10_000], outside[:10_000], features=squares)
    linear, better = (
        privacy.audit_outputs(inside, outside, delta=DELTA, choosing=10_000, score=score).epsilon
        for score in (None, learnt)
    )
    assert better > 2.0
    assert better > linear


def released(noise: float, with_canary: bool, runs: int, seed: int) -> Tensor:
    """A coordinate of the server's parameters after one round, over and over from the same state."""
    data = linear_clients([4] * 5)
    rows = [(x, y * (1e6 if with_canary else 0.0) if k == 0 else 0 * y) for k, (x, y) in enumerate(data)]
    module = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    private = privacy.client_level(1.0, noise, delta=DELTA, entropy=privacy.from_seed(seed))
    algorithm = ft.fedavg(sgd(1e-3, module)) | private
    run = ft.Run(algorithm, ft.InProcess(ft.data.from_tensors(rows)))
    start, found = run.server, []
    for _ in range(runs):
        run.server = start
        found.append(run.step().server["weight"][0])
    return torch.stack(found)


@pytest.mark.parametrize("broken", ["", "noise", "clip"])
def test_whole_rounds_of_client_level_privacy_are_audited(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ε = 2, and wrong by so much that 70 rounds of either neighbour tell."""
    noise = privacy.gaussian_noise(2.0, DELTA)
    if broken == "clip":
        monkeypatch.setattr(clients, "clip_rows", lambda value, bound, mechanism: (value, torch.zeros(1)))
    used = noise / 8 if broken == "noise" else noise
    inside, outside = released(used, True, 100, 1), released(used, False, 100, 2)
    found = privacy.audit_outputs(inside, outside, delta=DELTA, choosing=30)
    assert (found.epsilon > 2.0) == (broken != "")


def told_by_nodes(noise: float, seed: int, pairs: int = 25_000) -> tuple[Tensor, Tensor]:
    """What nodes tell their only neighbour in the second round: a half with a canary, a half with nothing to tell."""
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    data = ft.data.from_tensors([(one, zero + 1e6), (one, zero)] * pairs)
    network = ft.Network(torch.arange(2 * pairs).reshape(-1, 2))
    module = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    private = privacy.node_level(1.0, noise, delta=DELTA, entropy=privacy.from_seed(seed))
    algorithm = ft.gtv(ft.least_squares(module), network, 1e-9) | private
    run = ft.Run(algorithm, ft.InProcess(data))
    both = []
    for _ in range(2):
        run.step()
        told = algorithm.told.of(run.clients.table.read(slice(0, 2 * pairs)))["weight"]
        both.append(told.reshape(pairs, 2).clone())
    inside, outside = torch.stack(both, 2).unbind(1)
    return inside, outside


@pytest.mark.parametrize("broken", ["", "noise", pytest.param("clip", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_audit_of_two_rounds_of_nodes(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ε = 1 of both rounds together."""
    noise = privacy.gaussian_noise(1.0, DELTA, rounds=2)
    if broken == "clip":
        monkeypatch.setattr(nodes, "clip_rows", lambda value, bound, mechanism: (value, torch.zeros(1)))
    inside, outside = told_by_nodes(noise / 2 if broken == "noise" else noise, seed=6)
    found = privacy.audit_outputs(inside, outside, delta=DELTA, choosing=5_000)
    assert (found.epsilon > 1.0) == (broken != "")
    assert found.epsilon > 0.3


def released_totals(noise: float, with_canary: bool, runs: int, seed: int) -> Tensor:
    """A message's and a total's first number of one round, over and over from the same state."""
    data = [(x, y * (1e6 if with_canary and k == 0 else 0.0)) for k, (x, y) in enumerate(linear_clients([4] * 5))]
    module = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    ones = lambda data: torch.ones_like(data.count, dtype=torch.float64)
    private = privacy.client_level(1.0, noise, clip_told=1.0, delta=DELTA, entropy=privacy.from_seed(seed))
    algorithm = ft.scaffold(sgd(1e-3, module), weight=ones) | private
    run = ft.Run(algorithm, ft.InProcess(ft.data.from_tensors(data)))
    start, found, nobody = run.server, [], run.clients.state_dict()
    for _ in range(runs):
        run.server = start
        run.clients.load_state_dict(nobody)
        inner = run.step().server.inner
        found.append(torch.cat([inner.parameters["weight"][0], inner.total.weighted["weight"][0]]))
    return torch.stack(found)


@pytest.mark.parametrize("broken", ["noise", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", "clip"))])
def test_totals_are_audited(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ε = 2 of a round's sum and total together."""
    noise = privacy.gaussian_noise(2.0, DELTA)
    if broken == "clip":
        monkeypatch.setattr(totals, "clip_rows", lambda value, bound, mechanism: (value, torch.zeros(1)))
    used = noise / 8 if broken == "noise" else noise
    inside, outside = released_totals(used, True, 100, 7), released_totals(used, False, 100, 8)
    found = privacy.audit_outputs(inside, outside, delta=DELTA, choosing=30)
    assert (found.epsilon > 2.0) == (broken != "")


def test_intervals_are_those_of_clopper_and_pearson() -> None:
    for count, trials in ((0, 10), (3, 10), (10, 10), (700, 10_000)):
        exact = binomtest(count, trials).proportion_ci(0.95, "exact")
        assert clopper_pearson(count, trials, 0.975) == pytest.approx((exact.low, exact.high))


def test_audit_bounds_have_nominal_confidence() -> None:
    """Two hundred audits of randomised response, whose ε is known; more than 18 misses happen once in a thousand."""
    epsilon = math.log(3)
    generator = torch.Generator().manual_seed(0)
    missed = 0
    for _ in range(200):
        truth = torch.rand(2, 2000, 1, generator=generator) < 0.75
        inside, outside = truth[0].double(), (~truth[1]).double()
        found = privacy.audit_outputs(inside, outside, delta=1e-9, choosing=500, score=lambda scores: scores[:, 0])
        missed += found.epsilon > epsilon
    assert missed <= 18


def test_the_neighbour_test_of_gaussian_noise_is_the_best_there_is() -> None:
    noise = 1.5
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(2, 200_000, generator=generator, dtype=torch.float64)
    alarms, detections = roc(draws[0] + 1 / noise, draws[1])
    assert bool((alarms.diff() >= 0).all() and (detections.diff() >= 0).all())
    assert (float(alarms[0]), float(alarms[-1]), float(detections[-1])) == (0.0, 1.0, 1.0)
    # Kolmogorov–Smirnov distances of two samples of 200 000.
    assert float((detections - gaussian_detections(alarms, noise)).abs().max()) < 4 * math.sqrt(2 / 200_000)
    for epsilon in (0.1, 1.0, 3.0):
        most = most_detections(alarms, epsilon, gaussian_delta(noise, epsilon))
        assert bool((gaussian_detections(alarms, noise) <= most + 1e-12).all())
    touching = most_detections(alarms, 1.0, gaussian_delta(noise, 1.0))
    assert float((touching - gaussian_detections(alarms, noise)).min()) == pytest.approx(0.0, abs=1e-6)


def test_audits_that_cannot_be_made_are_refused() -> None:
    few = torch.zeros(10, 1)
    for inside, outside, said in ((few, few[:9], "as many runs"), (few[:, 0], few[:, 0], "as many runs")):
        with pytest.raises(ValueError, match=said):
            privacy.audit_outputs(inside, outside, delta=DELTA, choosing=5)
    with pytest.raises(ValueError, match="more than 10"):
        privacy.audit_outputs(few, few, delta=DELTA, choosing=10)
    with pytest.raises(ValueError, match="confidence"):
        privacy.audit_outputs(few, few, delta=DELTA, choosing=5, confidence=1.0)
    with pytest.raises(ValueError, match="solver with a budget"):
        privacy.audit(partial(ft.gradient_descent, steps=1), runs=10, choosing=5, block=4)


def test_an_audit_whose_blocks_repeat_their_noise_is_refused() -> None:
    """Runs that are counted twice would make the bound tighter than it is."""
    seeded = partial(privacy.example_level, clip=1.0, noise=1.0, sampling_rate=1.0, steps=1, delta=DELTA,
                     entropy=privacy.from_seed(0))  # fmt: skip
    with pytest.raises(ValueError, match="other noise in every block"):
        privacy.audit(seeded, runs=8, choosing=4, block=8)
