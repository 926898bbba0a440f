"""Acyclic graphs: probabilities against all graphs of four variables, evidence against integration on a grid."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles import calibration, geweke
from support.oracles.closed_forms import same_bits
from torch import Tensor

import fedtorch as ft
from fedtorch.models.gibbs import acyclic, graphical


def laplace(key: int, shape: tuple[int, ...]) -> Tensor:
    keys = ft.random.split(ft.random.key(key), 2)
    return ft.random.exponential(keys[0], shape, torch.float64) - ft.random.exponential(keys[1], shape, torch.float64)


def posterior(parents: int, key: int = 0) -> acyclic.Graphs:
    """Scores of four variables that differ by some nats, and effects."""
    sets = acyclic.causes(4, parents)[0]
    scores = 2 * ft.random.normal(ft.random.key(key), sets.shape[:2], torch.float64)
    return acyclic.Graphs(scores, ft.random.normal(ft.random.key(key + 1), sets.shape, torch.float64))


def enumerated(given: acyclic.Graphs) -> dict[tuple[int, ...], float]:
    """The probability of every acyclic graph of four variables, by the set of causes that each variable has."""
    p, parents = 4, given.effect.shape[-1]
    sets, used = acyclic.causes(p, parents)
    weights: dict[tuple[int, ...], float] = {}
    for graph in product(range(sets.shape[1]), repeat=p):
        causes = [set(sets[j, s][used[j, s]].tolist()) for j, s in enumerate(graph)]
        orders = sum(
            all(causes[j] <= set(order[:place]) for place, j in enumerate(order)) for order in permutations(range(p))
        )
        if orders:
            weights[graph] = orders * math.exp(sum(float(given.score[j, s]) for j, s in enumerate(graph)))
    total = sum(weights.values())
    return {graph: weight / total for graph, weight in weights.items()}


@pytest.mark.parametrize(("parents", "graphs"), [(1, 125), pytest.param(3, 543, marks=pytest.mark.slow)])
def test_probabilities_and_effects_are_those_of_all_graphs(parents: int, graphs: int) -> None:
    given = posterior(parents)
    every, (sets, used) = enumerated(given), acyclic.causes(4, parents)
    assert len(every) == graphs
    inclusion, effects = torch.zeros(4, 4).double(), torch.zeros(4, 4).double()
    for graph, probability in every.items():
        for j, s in enumerate(graph):
            inclusion[j, sets[j, s][used[j, s]]] += probability
            effects[j, sets[j, s][used[j, s]]] += probability * given.effect[j, s][used[j, s]]
    assert torch.allclose(given.inclusion(), inclusion, rtol=0, atol=1e-12)
    assert torch.allclose(given.effects(), effects, rtol=0, atol=1e-12)


def test_draws_have_the_probabilities_of_graphs() -> None:
    given, count = posterior(1), 20_000
    sets, used = acyclic.causes(4, 1)
    drawn = given.draws(ft.random.key(5), count)
    assert bool(((drawn.double().matrix_power(4)) == 0).all())  # no cycle
    frequency: dict[bytes, int] = {}
    for graph in drawn.flatten(1).tolist():
        frequency[bytes(graph)] = frequency.get(bytes(graph), 0) + 1
    for graph, probability in enumerated(given).items():
        if probability > 0.01:
            matrix = torch.zeros(4, 4, dtype=torch.bool)
            for j, s in enumerate(graph):
                matrix[j, sets[j, s][used[j, s]]] = True
            share = frequency.get(bytes(matrix.flatten().tolist()), 0) / count
            assert abs(share - probability) < 5 * math.sqrt(probability / count)


def exact_evidence(sites: list[Tensor], spread: float, variance: float) -> float:
    """log of the integral over θ and each site's θ_k of the likelihoods of y₁ given its cause y₀, on grids."""
    theta = torch.linspace(-2, 2, 801, dtype=torch.float64)
    step = float(theta[1] - theta[0])
    normal = lambda gap, v: -gap.square() / (2 * v) - math.log(2 * math.pi * v) / 2
    total = normal(theta, variance)
    for y in sites:
        absolute = (y[:, 1] - theta[:, None] * y[:, 0]).abs().sum(1)
        inner = -(len(y) + 1) * absolute.log1p() + normal(theta[:, None] - theta, spread**2)
        total = total + inner.logsumexp(1) + math.log(step)
    return float(total.logsumexp(0)) + math.log(step)


@pytest.mark.parametrize(
    ("rows", "spread", "apart", "nats"),
    [(30, 0.05, 0.1, 0.3), (200, 0.05, 0.05, 0.1), pytest.param(200, 0.8, 0.3, 0.1, marks=pytest.mark.slow)],
)
def test_evidence_is_the_integral_over_effects(rows: int, spread: float, apart: float, nats: float) -> None:
    sites = []
    for k in range(3):
        y = laplace(k, (rows, 2))
        y[:, 1] += (0.6 - apart * k) * y[:, 0]
        sites.append(y)
    said = [acyclic.evidence(y, 1, (spread,), 0.5) for y in sites]
    given = acyclic.joined(acyclic.Messages(*(sum(part) for part in zip(*said))), 0.5)
    with_cause = exact_evidence(sites, spread, 0.5)
    without = sum(-(rows + 1) * math.log1p(float(y[:, 1].abs().sum())) for y in sites)
    assert float(given.score[1, 0]) == pytest.approx(without, abs=1e-9)
    assert float(given.score[1, 1]) == pytest.approx(with_cause, abs=nats)  # of 12 and more


@pytest.mark.parametrize("left", [0.3, 0.03, 0.003])
def test_evidence_of_a_cause_that_explains_nearly_all(left: float) -> None:
    """Of one site, by a fine grid; all but a small part of the variable is its cause's."""
    y = laplace(3, (12, 2))
    y[:, 1] = 0.9 * y[:, 0] + left * y[:, 1]
    theta, wide = torch.linspace(-6, 6, 2_000_001, dtype=torch.float64), 0.5 + 0.05**2
    absolute = sum((own[1] - theta * own[0]).abs() for own in y)
    log = -13 * absolute.log1p() - theta.square() / (2 * wide) - math.log(2 * math.pi * wide) / 2
    exact = float(log.logsumexp(0)) + math.log(6e-6)
    given = acyclic.joined(acyclic.evidence(y, 1, (0.05,), 0.5), 0.5)
    assert float(given.score[1, 1]) == pytest.approx(exact, abs=0.3)
    assert float(given.effect[1, 1, 0]) == pytest.approx(float(log.softmax(0) @ theta), abs=0.05)


def simulated(replicates: int, rows: int, spreads: tuple[float, ...], variance: float) -> tuple[Tensor, Tensor]:
    """(graphs of three variables drawn from the prior `(R, 3, 3)`, rows of two sites `(R, 2, n, 3)`)."""
    pairs, graphs, weights = [(j, h) for j in range(3) for h in range(3) if j != h], [], []
    for arrows in product((False, True), repeat=6):
        graph = torch.zeros(3, 3, dtype=torch.bool)
        for (j, h), there in zip(pairs, arrows):
            graph[j, h] = there
        used = graph.nonzero().tolist()
        orders = sum(all(order.index(h) < order.index(j) for j, h in used) for order in permutations(range(3)))
        graphs.append(graph)
        weights.append(orders / math.prod(math.comb(2, int(count)) for count in graph.sum(1)))
    keys, below = geweke.keys(40, replicates), torch.tensor(weights, dtype=torch.float64).cumsum(0)
    fold = lambda purpose: ft.random.fold_in(keys, purpose)
    which = (ft.random.uniform(fold(0), (1,), torch.float64) > below / below[-1]).sum(1)
    graph = torch.stack(graphs)[which]
    theta = variance**0.5 * ft.random.normal(fold(1), (3, 3), torch.float64)
    chosen = (ft.random.uniform(fold(2), (3,), torch.float64) * len(spreads)).long()
    tau = torch.tensor(spreads, dtype=torch.float64)[chosen][:, None, :, None]
    each = ft.random.fold_in(fold(3)[:, None], torch.arange(2))
    draw = lambda purpose, *shape: ft.random.exponential(ft.random.fold_in(each, purpose), shape, torch.float64)
    own = theta[:, None] + tau * ft.random.normal(ft.random.fold_in(each, 0), (3, 3), torch.float64)
    errors = (draw(2, rows, 3) - draw(3, rows, 3)) / draw(1, 3)[:, :, None]
    system = torch.eye(3, dtype=torch.float64) - own * graph[:, None]
    return graph, torch.linalg.solve(system, errors.mT).mT


@pytest.mark.slow
def test_probabilities_of_arrows_are_calibrated() -> None:
    """Given the arrow its place is uniform above the probability of none, and without it below."""
    spreads, variance, replicates = (0.2, 0.8), 0.5, 1500
    graph, y = simulated(replicates, 12, spreads, variance)
    found = []
    for sites in y:
        said = [acyclic.evidence(own, 2, spreads, variance) for own in sites]
        messages = acyclic.Messages(*(sum(part) for part in zip(*said)))
        found.append(acyclic.joined(messages, variance).inclusion())
    there = torch.stack(found)
    share = ft.random.uniform(geweke.keys(41, replicates), (3, 3), torch.float64)
    places = torch.where(graph, 1 - there + share * there, share * (1 - there))
    calibration.check({"arrows": places[:, ~torch.eye(3, dtype=torch.bool)]})


def test_two_causes_and_several_spreads() -> None:
    """Of one site, whose evidence needs no normal function for the spread of the widest prior."""
    y = laplace(7, (50, 3))
    y[:, 2] += 0.5 * y[:, 0]
    axis = torch.linspace(-2, 2, 401, dtype=torch.float64)
    theta, step = torch.cartesian_prod(axis, axis), float(axis[1] - axis[0])
    absolute = (y[:, 2:] - y[:, :2] @ theta.mT).abs().sum(0)
    exact = []
    for spread in (0.1, 0.5):
        v = 0.5 + spread**2
        prior = -theta.square().sum(1) / (2 * v) - math.log(2 * math.pi * v)
        exact.append(float((prior - 51 * absolute.log1p()).logsumexp(0)) + 2 * math.log(step))
    given = acyclic.joined(acyclic.evidence(y, 2, (0.1, 0.5), 0.5), 0.5)
    assert float(given.score[2, 3]) == pytest.approx(math.log(sum(map(math.exp, exact)) / 2), abs=0.1)


def test_messages_do_not_depend_on_blocks() -> None:
    y = [laplace(k, (20 + k, 3)) for k in range(3)]
    algorithm, start = ft.acyclic_graphs(2), graphical.start(3)
    whole = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(y)), start, rounds=1).server
    parts = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(y), chunk=1), start, rounds=1).server
    assert torch.allclose(whole.score, parts.score, rtol=0, atol=1e-9)
    again = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(y)), start, rounds=2).server
    assert same_bits(whole, again)  # a second round says the same


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="positive spreads"):
        ft.acyclic_graphs(spreads=(0.1, 0.0))
    data = ft.InProcess(ft.data.from_tensors([laplace(0, (9, 3))]))
    with pytest.raises(ValueError, match="Expected 4 to 20 variables for parents=3, but got 3"):
        ft.run(ft.acyclic_graphs(), data, graphical.start(3), rounds=1)
    with pytest.raises(ValueError, match="Expected a start of 6 coefficients"):
        ft.run(ft.acyclic_graphs(1), data, graphical.start(4), rounds=1)


CASES: dict[str, Case] = {
    "acyclic_graphs": Case(
        lambda: ft.acyclic_graphs(1, spreads=(0.2,)), graphical.start(3), lambda data: data.map(lambda rows: rows[0])
    )
}
