"""Gradient inversion against the closed form of a linear layer, and model inversion against Bayes' rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import functional
from fedtorch.trust import attacks, privacy
from fedtorch.trust.attacks.inversion import representative

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.tensor([0, 2, 1])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def sent(rows: int, steps: int, noise: float = 0.0, lr: float = 0.3) -> dict[str, Tensor]:
    """What one client of federated averaging sends in its first round: by how much the server's model changes."""
    settings = {"steps": steps, "loss": nn.functional.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=lr)}
    if noise:
        local = privacy.example_level(
            network(), clip=1.0, noise=noise, sampling_rate=1.0, delta=1e-3, entropy=privacy.from_seed(0), **settings
        )
    else:
        local = ft.gradient_descent(network(), **settings)
    run = ft.Run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors([(X[:rows], Y[:rows])])))
    run.step()
    return {name: run.server[name] - start for name, start in functional.parameters(network()).items()}


@pytest.mark.parametrize("steps", [1, 4])
def test_first_layer_reveals_a_single_row(steps: int) -> None:
    """In closed form, up to the rounding of a difference of parameters."""
    change = sent(1, steps)
    found = attacks.linear_inputs(change["0.weight"], change["0.bias"])
    assert found.shape == (12, 6)
    assert torch.allclose(found, X[0].expand(12, 6), atol=1e-9)
    still = attacks.linear_inputs(torch.zeros(2, 3), torch.zeros(2))
    assert bool(still.isnan().all())
    with pytest.raises(ValueError, match="Expected weight"):
        attacks.linear_inputs(torch.zeros(2, 3), torch.zeros(3))


@pytest.mark.parametrize("steps", [1, 3])
def test_rows_together_are_found_by_a_search(steps: int) -> None:
    """And one alone is where the closed form says."""
    for rows in (1, 3):
        found = attacks.gradient_inversion(
            network(), sent(rows, steps), nn.functional.cross_entropy, shape=(rows, 6), targets=Y[:rows], lr=0.3,
            steps=steps,
        )  # fmt: skip
        assert found.distance < 1e-12
        assert float(torch.cdist(X[:rows], found.inputs).min(1).values.max()) < 1e-3


def test_unknown_labels_are_found_with_the_rows() -> None:
    found = attacks.gradient_inversion(
        network(), sent(2, 1), nn.functional.cross_entropy, shape=(2, 6), classes=3, lr=0.3, restarts=1, iterations=300
    )
    distance, which = torch.cdist(X[:2], found.inputs).min(1)
    assert float(distance.max()) < 1e-2
    assert torch.equal(found.targets.argmax(1)[which], Y[:2])
    for arguments in ({}, {"targets": Y, "classes": 3}):
        with pytest.raises(ValueError, match="neither or both"):
            attacks.gradient_inversion(network(), {}, nn.functional.cross_entropy, shape=(1, 6), **arguments)


def test_private_gradients_hide_the_row() -> None:
    """With ε = 1 what the first layer tells is noise: as far off as some other row would be."""
    noise = privacy.noise_for(epsilon=1.0, rounds=1, delta=1e-3)
    change = sent(1, 1, noise)
    found = attacks.linear_inputs(change["0.weight"], change["0.bias"]).median(0).values
    assert float((found - X[0]).norm()) > 0.5 * float((X[1] - X[0]).norm())


def test_model_inversion_is_bayes_rule() -> None:
    """A linear model with normal noise: the posterior of a private bit has a closed form."""
    weight = torch.tensor([0.5, 2.0], dtype=torch.float64)
    known = torch.randn(50, 2, generator=GENERATOR, dtype=torch.float64)
    outputs = torch.randn(50, generator=GENERATOR, dtype=torch.float64)
    candidates, prior = torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.tensor([0.7, 0.3])
    posterior = attacks.model_inversion(
        lambda rows: rows @ weight, known, outputs, candidates, [1],
        lambda said, told: -0.5 * ((told - said) / 0.8) ** 2, prior,
    )  # fmt: skip
    rest = outputs - 0.5 * known[:, 0]
    odds = torch.exp((rest.square() - (rest - 2.0).square()) / (2 * 0.8**2)) * 0.3 / 0.7
    assert torch.allclose(posterior[:, 1], odds / (1 + odds))
    with pytest.raises(ValueError, match="Expected rows"):
        attacks.model_inversion(lambda rows: rows, known, outputs, candidates, [0, 1], lambda a, b: a)


def test_what_is_typical_of_a_class_is_what_was_trained_on() -> None:
    """Of a linear classifier it lies from the start along the difference of the weights, where the slopes balance."""
    model = nn.Linear(4, 2).double()
    found = representative(model, 1, torch.zeros(4, dtype=torch.float64), ridge=0.1)
    difference = (model.weight[1] - model.weight[0]).detach()
    odds = model(found).detach()
    slope = (1 - odds.softmax(0)[1]) * difference
    assert torch.allclose(slope, 2 * 0.1 * found, atol=1e-6)
    assert float(found @ difference) > 0
