"""What split networks and vertical models show: labels by gradients, features by values, and what holds them back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.verticals import draw, logistic_data
from torch import Tensor, nn
from torch.func import functional_call

from fedtorch import functional, random, vfl
from fedtorch.protocol.halves import Half, together
from fedtorch.trust import attacks, privacy
from fedtorch.trust.attacks.split import gram_matrix, label_scores, split_inversion, values_error
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.split_nn import mlp
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration, ServerNode

WIDTHS, N = [3, 2], 200
DATA = logistic_data(WIDTHS, N)


def network(bayes: vfl.HierarchicalBayes | None = None, hidden: tuple[int, ...] = (5,)) -> vfl.SplitNetwork:
    bottoms = [mlp(width, hidden, 1, activation=nn.Tanh).double() for width in WIDTHS]
    return vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), bayes=bayes).double()


def heard(
    model: vfl.SplitNetwork,
    data: vfl.VerticalData = DATA,
    steps: int = 10,
    lr: float = 0.1,
    defence: Callable[[ServerNode, Half], Half] = lambda server, half: half,
) -> tuple[Tensor, Tensor]:
    """What the first party sends and is sent in training, `(T, 1, M, C, n)` each."""
    server, parties = model.nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=lr))
    iterations = [Iteration(step=step) for step in range(steps)]
    said: dict[bool, list[Tensor]] = {True: [], False: []}
    overhear = lambda node, message, sent: said[sent].append(message[0])
    halves = {0: defence(server, server_half(server, iterations))}
    halves |= {party.index: party_half(party, iterations) for party in parties}
    halves[1] = attacks.tapped(halves[1], overhear)
    together(halves)
    return torch.stack(said[True]), torch.stack(said[False])


def right(gradients: Tensor, labels: Tensor = DATA.response) -> float:
    return float((attacks.guessed_labels(gradients) == labels).double().mean())


def test_gradients_of_one_step_are_the_labels() -> None:
    _, gradients = heard(network(), steps=1)
    assert right(gradients) == 1.0


def test_the_noise_of_the_model_does_not_hide_the_labels() -> None:
    """z is noisy, but y − p has the sign of y − ½ for any z that p was made of; seen in every step."""
    for rho in (0.1, 1.0, 5.0, 10.0):
        _, gradients = heard(network(vfl.HierarchicalBayes(rho=rho, auxiliary=vfl.amortised())), lr=0.01)
        assert min(right(each[None]) for each in gradients) == 1.0


def test_the_largest_entry_is_the_class() -> None:
    bottoms = [mlp(width, [4], 3).double() for width in WIDTHS]
    model = vfl.SplitNetwork(bottoms, likelihoods.categorical(3)).double()
    labels = (torch.arange(N) % 3).double()
    _, gradients = heard(model, DATA._replace(response=labels), steps=3)
    assert right(gradients, labels) == 1.0
    assert label_scores(gradients).shape == (1, 1, 3, N)


@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_noise_on_gradients_hides_labels_as_much_as_its_normal_law_says(noise: float) -> None:
    """A guess of one step is right where noise of 2z leaves the sign of y − ½ at the start, whose p is near ½."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, gradients = heard(
        model, steps=1,
        defence=privacy.noised_gradients(clip=1.0, noise=noise, delta=1e-6, entropy=privacy.from_seed(3)),
    )  # fmt: skip
    expected = 0.5 * (1 + math.erf(0.5 / (2 * noise) / math.sqrt(2)))
    assert right(gradients) == pytest.approx(expected, abs=4 * math.sqrt(0.25 / N))


def test_the_mean_of_many_values_has_little_of_the_noise() -> None:
    """Of a model that does not move: T = 100 values, whose mean is off by ρ/√T; a variance of n numbers is ±√(2/n)."""
    rho, steps = 2.0, 100
    model = network(vfl.HierarchicalBayes(rho=rho, auxiliary=vfl.amortised(), sd=1e-6))
    with torch.no_grad():
        for part in model.parties:
            for value in part.q["z"].values():
                value.zero_()
    values, _ = heard(model, steps=steps, lr=1e-12)
    within = values[:, 0, 0, 0]
    sd = within.std(0).square().mean().sqrt()  # of q(z | w), below ρ
    hidden = model.parties[0].propose(DATA.features[0], random.key(0), noise=False)[0, 0, 0]
    off = (within.mean(0) - hidden).square().mean().sqrt()
    assert float(off) == pytest.approx(values_error(float(sd), steps), rel=4 * math.sqrt(2 / N))
    assert float(sd) < rho
    with pytest.raises(ValueError, match="rho of at least 0"):
        values_error(-1.0, 1)


def test_a_linear_party_shows_its_features_up_to_a_rotation() -> None:
    rows = DATA.take(torch.arange(8))._replace(weight=None, weight_total=None, rows=None)
    model = network(hidden=())
    values, gradients = heard(model, rows, steps=40, lr=0.5)
    design = torch.cat([rows.features[0], torch.ones(8, 1, dtype=torch.float64)], 1)  # with the bias
    found = gram_matrix(values[:, 0, 0, 0], gradients[:-1, 0, 0, 0], 0.5)
    # gradients of all steps span the rows only up to the small part in which they changed
    assert torch.allclose(found, design @ design.T, atol=1e-4)
    with pytest.raises(ValueError, match="Expected values"):
        gram_matrix(values[:, 0, 0, 0], gradients[:, 0, 0, 0], 0.5)


@pytest.mark.parametrize(("outputs", "steps"), [(8, 0), pytest.param(1, 12, marks=pytest.mark.slow)])
def test_known_starting_weights_show_the_rows(outputs: int, steps: int) -> None:
    """By one value of many numbers, or by many values of one."""
    torch.manual_seed(0)
    bottom, rows = mlp(3, [8], outputs, activation=nn.Tanh).double(), draw(4, 4, 3)
    weights = {name: value.requires_grad_() for name, value in functional.parameters(bottom).items()}
    values, gradients = [], []
    for step in range(steps + 1):
        said = functional_call(bottom, weights, (rows,)).mT
        values.append(said.detach())
        if step < steps:
            gradients.append(draw(50 + step, outputs, 4))
            slopes = torch.autograd.grad((said * gradients[-1]).sum(), list(weights.values()))
            moved = [(w + 0.1 * slope).detach().requires_grad_() for w, slope in zip(weights.values(), slopes)]
            weights = dict(zip(weights, moved))
    told = torch.stack(gradients) if steps else torch.zeros(0, outputs, 4)
    found = split_inversion(bottom, torch.stack(values), told, shape=(4, 3), lr=0.1, restarts=12)
    assert found.distance < 1e-12
    assert torch.allclose(found.inputs, rows, atol=1e-4)


def test_recording_messages_changes_nothing() -> None:
    model, other = network(), network()
    heard(model)
    server, parties = other.nodes(DATA, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    iterations = [Iteration(step=step) for step in range(10)]
    together({0: server_half(server, iterations), **{p.index: party_half(p, iterations) for p in parties}})
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(ours, theirs)
