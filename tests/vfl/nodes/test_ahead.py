"""Parties that run ahead: what is late and by how much, what it is worth over a slow line, and where it ends."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from support import splits
from support.oracles.closed_forms import ROUNDING
from support.verticals import (
    GUIDES,
    SD,
    gaussian_data,
    nodes,
    noises,
    predictors,
    regression,
    some_model,
    some_parameters,
)

from fedtorch import random, vfl
from fedtorch.models import encoders
from fedtorch.protocol.halves import Half, Send, together
from fedtorch.vfl.fit.guide import initial
from fedtorch.vfl.fit.sfvi import cosine
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.nodes.iteration import bounded_delay, party_half, server_half
from fedtorch.vfl.nodes.node import Iteration, PartyNode

STEPS = [Iteration(step=step) for step in range(8)]


def train(server: Any, parties: list[PartyNode], iterations: list[Iteration], delay: int) -> None:
    halves = {party.index: party_half(party, iterations, delay=delay) for party in parties}
    together({0: server_half(server, iterations), **halves})


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("name", ["dropout", "amortised"])
def test_delay_zero_is_synchronous(name: str) -> None:
    models = [splits.CASES[name]() for _ in range(2)]
    (server, parties), (there, others) = [model.nodes(splits.data(), splits.SGD) for model in models]
    together({0: server_half(server, STEPS)} | {party.index: party_half(party, STEPS) for party in parties})
    train(there, others, STEPS, 0)
    assert same(*models)


@pytest.mark.parametrize("delay", [0, 2])
def test_delay_with_shared_response_and_idle_parties(delay: int) -> None:
    model, data = some_model("augmented", "bernoulli")
    family = GUIDES["amortised"]()
    q = some_parameters(model, family, data)
    active = [None, *itertools.islice(bounded_delay(3, 2, 0.5, random.key(1)), 7)]
    iterations = [Iteration(noise, 0.05, None, here) for noise, here in zip(noises(model, family, 12, 8), active)]
    sides = [nodes(model, family, q, data, True) for _ in range(2)]
    together({0: server_half(sides[0][0], iterations)} | {p.index: party_half(p, iterations) for p in sides[0][1]})
    train(*sides[1], iterations, delay)
    each = [(one.part, two.part) for one, two in zip((sides[0][0], *sides[0][1]), (sides[1][0], *sides[1][1]))]
    assert all(same(*parts) for parts in each) == (delay == 0)


def linear() -> vfl.SplitNetwork:
    """A logistic regression of two parties without an intercept, from zero."""
    made = [torch.nn.Linear(15, 1, bias=False).double() for _ in range(2)]
    network = vfl.SplitNetwork(made, likelihoods.bernoulli()).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    return network


def cancer() -> vfl.VerticalData:
    """The bundled breast cancer data, 15 standardised features at each of two parties."""
    x, y = (torch.tensor(part, dtype=torch.float64) for part in load_breast_cancer(return_X_y=True))
    return vfl.VerticalData(tuple(((x - x.mean(0)) / x.std(0)).split(15, 1)), y)


def coefficients(network: vfl.SplitNetwork) -> list[torch.Tensor]:
    return [next(each for each in part.network.parameters()).detach().reshape(15) for part in network.parties]


@pytest.mark.parametrize("delay", [1, 3])
def test_gradients_are_late_by_the_delay(delay: int) -> None:
    """Against the recursion written out: w ← w − η Xᵀg of the iteration `delay` before."""
    data, rate, steps = cancer(), 0.1, 9
    network = linear()
    server, parties = network.nodes(data, lambda own: torch.optim.SGD(own, lr=rate))
    train(server, parties, [Iteration(step=step) for step in range(steps)], delay)
    x, y = torch.cat(data.features, 1), data.response
    w, late = torch.zeros(30, dtype=torch.float64), deque[torch.Tensor]()
    for step in range(steps + delay):
        if step < steps:
            late.append(x.T @ ((x @ w).sigmoid() - y) / len(y))
        if step >= delay:
            w = w - rate * late.popleft()
    assert (torch.cat(coefficients(network)) - w).abs().max() < ROUNDING


def test_no_party_is_ahead_by_more_than_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parties that are idle, too: what is sent in iteration t has had all gradients before t − s."""
    delay, taken, ahead = 2, defaultdict[int, list[int]](list), list[int]()
    sent = defaultdict[int, set[int]](set)
    propose = PartyNode.propose
    model, active = splits.CASES["plain"](), [None, *itertools.islice(bounded_delay(3, 3, 0.6, random.key(2)), 30)]
    iterations = [Iteration(step=step, active=here) for step, here in enumerate(active)]
    takes_part = lambda party, step: active[step] is None or active[step][party.index - 1]

    def proposes(self: PartyNode, iteration: Iteration) -> Any:
        if iteration.step in sent[self.index]:  # once more, with the gradient at hand
            taken[self.index].append(iteration.step)
            return propose(self, iteration)
        sent[self.index].add(iteration.step)
        before = [step for step in range(iteration.step) if takes_part(self, step)]
        behind = [step for step in before if step not in taken[self.index]]
        ahead.append(max((iteration.step - step for step in behind), default=0))
        return propose(self, iteration)

    monkeypatch.setattr(PartyNode, "propose", proposes)
    server, parties = model.nodes(splits.data(), splits.SGD)
    train(server, parties, iterations, delay)
    assert max(ahead) == delay
    assert all(taken[party.index] == [step for step in range(31) if takes_part(party, step)] for party in parties)


def round_trips(halves: Mapping[int, Half]) -> float:
    """How long halves take that compute in no time, in round trips: every message takes half of one."""
    clocks, arriving = dict.fromkeys(halves, 0.0), defaultdict[tuple[int, int], deque[tuple[float, Any]]](deque)
    waiting = {name: half.send(None) for name, half in halves.items()}
    while waiting:
        moved = False
        for name, step in list(waiting.items()):
            message = None
            if isinstance(step, Send):
                arriving[name, step.to].append((clocks[name] + 0.5, step.message))
            elif arriving[step.sender, name]:
                when, message = arriving[step.sender, name].popleft()
                clocks[name] = max(clocks[name], when)
            else:
                continue
            moved = True
            try:
                waiting[name] = halves[name].send(message)
            except StopIteration:
                del waiting[name]
        assert moved
    return max(clocks.values())


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_latency_is_shared_by_delayed_iterations(delay: int) -> None:
    server, parties = splits.CASES["plain"]().nodes(splits.data(), splits.SGD)
    halves = {party.index: party_half(party, STEPS, delay=delay) for party in parties}
    assert round_trips({0: server_half(server, STEPS), **halves}) == len(STEPS) / (delay + 1)


def test_delayed_training_reaches_the_same_optimum() -> None:
    """A logistic regression of the breast cancer data with weight decay, against scikit-learn's."""
    data, decay, steps = cancer(), 1.0, 120
    x, y = torch.cat(data.features, 1), data.response
    oracle = LogisticRegression(C=1 / (decay * len(y)), fit_intercept=False, tol=1e-10, max_iter=1000)
    wanted = torch.tensor(oracle.fit(x.numpy(), y.numpy()).coef_[0])
    network = linear()
    server, parties = network.nodes(data, lambda own: torch.optim.SGD(own, lr=0.08, weight_decay=decay))
    train(server, parties, [Iteration(step=step) for step in range(steps)], 4)
    left = (1 - 0.08 * decay) ** steps  # of the way, by gradient descent without delay along the flattest direction
    assert (torch.cat(coefficients(network)) - wanted).abs().max() < 10 * left * wanted.abs().max()


@pytest.mark.slow
def test_variational_inference_ends_at_the_posterior() -> None:
    """The means of a factorised family are those of the regression; their error is that of noisy gradients."""
    data = gaussian_data([2, 1], 30)
    model = vfl.augmented(likelihoods.gaussian(SD), predictors([2, 1]), 0.5)
    guide = vfl.Guide(vfl.sums(encoders.affine(), skewed=False))
    mean, covariance, _ = regression(data, SD**2 + 2 * 0.5**2)
    steps = 2000
    drawn, rate = noises(model, guide, 30, steps), cosine(0.02, steps)
    q = initial(model, guide, 30, 1, random.key(0), torch.float64)
    server, parties = nodes(model, guide, q, data, False)
    train(server, parties, [Iteration(noise, rate(step)) for step, noise in enumerate(drawn)], 4)
    found = torch.cat([node.part.q["theta"]["mean"].detach()[0] for node in (server, *parties)])
    assert ((found - mean) / covariance.diagonal().sqrt()).abs().max() < 0.1


def test_delay_refusals() -> None:
    model, data = some_model("power", "poisson")
    family = GUIDES["mean field"]()
    _, (party, *_) = nodes(model, family, some_parameters(model, family, data), data, True)
    with pytest.raises(ValueError, match="one message up and one down"):
        next(party_half(party, STEPS, delay=1))
    with pytest.raises(ValueError, match="delay of at least 0"):
        next(party_half(party, STEPS, delay=-1))
