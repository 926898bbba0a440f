"""Labels of split networks that are private: what one label can change, the size of the noise, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.verticals import logistic_data

from fedtorch import random, vfl
from fedtorch.protocol.halves import together
from fedtorch.trust import privacy
from fedtorch.trust.privacy.mechanisms.split_labels import release
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.split_nn import mlp
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration

KEYS = random.fold_in(random.key(0), torch.arange(2))


def network(**arguments) -> vfl.SplitNetwork:
    bottoms = [mlp(width, [], 1).double() for width in (3, 2)]
    return vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), keys=KEYS, **arguments).double()


def trained(data: vfl.VerticalData, noise: float, steps: int = 4) -> vfl.SplitNetwork:
    model = network()
    server, parties = model.nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    iterations = [Iteration(step=step) for step in range(steps)]
    half = server_half(server, iterations)
    if noise:
        half = privacy.noised_gradients(server, half, clip=2.0, noise=noise, entropy=privacy.from_seed(0))
    together({0: half, **{p.index: party_half(p, iterations) for p in parties}})
    return model


def test_what_one_label_can_change() -> None:
    """Gradients of norm up to C, all elements of the batch together, so 2C; those within stay as they are."""
    gradient = torch.randn(2, 3, 2, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient[..., 0] *= 1e-3
    released = release(gradient, 1.0, 1e-9, privacy.from_seed(0))
    assert float(released.flatten(0, 2).norm(dim=0).max()) <= 1 + 1e-6
    assert torch.allclose(released[..., 0], gradient[..., 0], atol=1e-7)
    gradient[0, 0, 0, 1] = math.nan
    assert float(release(gradient, 1.0, 1e-9, privacy.from_seed(0))[..., 1].abs().max()) < 1e-6


def test_the_size_of_the_noise() -> None:
    """σ = 2Cz; an sd of m numbers is known to 1/√(2m)."""
    released = release(torch.zeros(1, 1, 1, 40_000, dtype=torch.float64), 0.5, 3.0, privacy.from_seed(1))
    assert float(released.std()) == pytest.approx(2 * 0.5 * 3.0, rel=4 / math.sqrt(80_000))
    again = release(torch.zeros(1, 1, 1, 40_000, dtype=torch.float64), 0.5, 3.0, privacy.from_seed(1))
    assert not torch.equal(released, again)  # another release has other noise, of the same seed, too


def test_training_goes_on_with_private_labels() -> None:
    """With hardly any noise the network is that of no noise; with some it still learns."""
    data = logistic_data([3, 2], 4000)
    plain, quiet, noisy = trained(data, 0.0, 30), trained(data, 1e-9, 30), trained(data, 1.0, 30)
    for ours, theirs in zip(quiet.parameters(), plain.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-6)
    scores = [float(model.log_score(data).mean()) for model in (plain, noisy, network())]
    assert scores[1] > 0.5 * (scores[0] + scores[2])


def test_all_parties_hear_the_same_numbers() -> None:
    """Otherwise two of them would know more than one."""
    data = logistic_data([3, 2], 50)
    model = network()
    start = copy.deepcopy(model)
    server, parties = model.nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    half = privacy.noised_gradients(
        server, server_half(server, [Iteration()]), clip=1.0, noise=5.0, entropy=privacy.from_seed(0)
    )
    together({0: half, **{p.index: party_half(p, [Iteration()]) for p in parties}})
    biases = [
        dict(after.named_parameters())[name] - dict(before.named_parameters())[name]
        for after, before in zip(model.parties, start.parties)
        for name in dict(after.named_parameters())
        if name.endswith("weights.1")
    ]
    assert len(biases) == 2
    assert torch.allclose(biases[0], biases[1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bayes": vfl.HierarchicalBayes(rho=1.0)}, "learns nothing"),
        ({"combine": vfl.concatenated, "top": mlp(2, [3], 1).double(), "widths": [1, 1]}, "learns nothing"),
    ],
)
def test_servers_that_learn_are_refused(arguments: dict, said: str) -> None:
    server, _ = network(**arguments).nodes(logistic_data([3, 2], 10))
    with pytest.raises(ValueError, match=said):
        privacy.noised_gradients(server, server_half(server, []), clip=1.0, noise=1.0)


def test_settings_out_of_range_and_shared_labels_are_refused() -> None:
    server, _ = network().nodes(logistic_data([3, 2], 10))
    for clip, noise, said in ((0.0, 1.0, "positive finite clip"), (1.0, 0.0, "positive finite noise")):
        with pytest.raises(ValueError, match=said):
            privacy.noised_gradients(server, server_half(server, []), clip=clip, noise=noise)
    server.response_shared = True
    with pytest.raises(ValueError, match="labels that stay at the server"):
        privacy.noised_gradients(server, server_half(server, []), clip=1.0, noise=1.0)
