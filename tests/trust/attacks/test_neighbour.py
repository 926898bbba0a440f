"""A neighbour in a network finds out local problems exactly, and attributes as far as models tell them."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import linear_clients, sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.trust import attacks

ALPHA, LR, D = 0.3, 0.05, 3


def overheard(rounds: int) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """What two nodes of a network tell each other by Algorithm 5.1: models `(T + 1, d)` of both, and their rows."""
    data = linear_clients([30, 20])
    module = nn.Linear(D, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    algorithm = ft.gtv(sgd(LR, module), ft.Network.from_edges([(0, 1)]), alpha=ALPHA)
    run = ft.Run(algorithm, ft.InProcess(data))
    told = [run.tensors()["weight"][:, 0]]
    for _ in run.rounds(rounds):
        told.append(run.tensors()["weight"][:, 0])
    models = torch.stack(told)
    return models[:, 0], models[:, 1], list(data)


def test_a_neighbour_knows_the_local_problem() -> None:
    """After d + 1 steps; Q and q come from differences of models, whose rounding ill conditioning magnifies."""
    own, other, data = overheard(D + 3)
    found = attacks.local_problem(own, other[:-1], LR, ALPHA)
    x, y = data[0]
    assert torch.allclose(found.q, x.T @ x / len(x), atol=1e-5)
    assert torch.allclose(found.linear, x.T @ y / len(x), atol=1e-5)
    with pytest.raises(ValueError, match="Expected models"):
        attacks.local_problem(own, other, LR, ALPHA)


def test_the_nearest_known_problem_is_the_node_s() -> None:
    own, other, data = overheard(D + 3)
    generator = torch.Generator().manual_seed(2)
    rows = [*data] + [
        (torch.randn(25, D, generator=generator, dtype=torch.float64), torch.randn(25, generator=generator).double())
        for _ in range(5)
    ]
    known = attacks.Quadratics(
        torch.stack([x.T @ x / len(x) for x, _ in rows]), torch.stack([x.T @ y / len(x) for x, y in rows])
    )
    found = attacks.local_problem(own, other[:-1], LR, ALPHA)
    assert int(found.nearest(known)[0]) == 0


def test_attribute_inference_depends_on_the_model() -> None:
    """With linear dependence and noise of variance v the residual is v; a column that is constant says nothing."""
    generator = torch.Generator().manual_seed(3)
    models = torch.randn(4000, 4, generator=generator, dtype=torch.float64) * 100 + 7
    models[:, 3] = 2.0
    noise = torch.randn(4000, generator=generator, dtype=torch.float64)
    attribute = models @ torch.tensor([0.01, -0.02, 0.0, 5.0]).double() + 0.1 * noise
    guess = attacks.learnt_attribute(models[:2000], attribute[:2000], ridge=1e-9)
    residual = (guess(models[2000:]) - attribute[2000:]).square().mean()
    assert float(residual) == pytest.approx(0.01, rel=4 * (2 / 2000) ** 0.5)
    with pytest.raises(ValueError, match="positive ridge"):
        attacks.learnt_attribute(models, attribute, ridge=0.0)
