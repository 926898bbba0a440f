"""Small split networks in float64, of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import random, vfl
from fedtorch.models import encoders
from fedtorch.vfl.fit.guide import full_covariance
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.split_nn import mlp

WIDTHS, N, B = [3, 2, 4], 14, 3
KEYS = random.key(range(B))
SGD = lambda parameters: torch.optim.SGD(parameters, lr=0.05)


def draw(key: int, *shape: int) -> Tensor:
    return random.normal(random.key(key), shape, torch.float64)


def data(classes: int = 3) -> vfl.VerticalData:
    features = tuple(draw(j, *((B,) if j == 1 else ()), N, width) for j, width in enumerate(WIDTHS))
    response = torch.arange(N).repeat(B, 1) % classes
    return vfl.VerticalData(features, response.double(), 0.1 * draw(8, N), 0.5 + draw(9, B, N).square())


def bottoms(outputs: int = 3, dropout: float = 0.0) -> list[nn.Module]:
    return [mlp(width, [5], outputs, dropout=dropout, activation=nn.Tanh).double() for width in WIDTHS]


def bayes(**arguments: Any) -> vfl.HierarchicalBayes:
    return vfl.HierarchicalBayes(rho=torch.tensor([0.7, 0.0, 2.0]), **arguments)


def network(bottom: list[nn.Module] | None = None, **arguments: Any) -> vfl.SplitNetwork:
    arguments = {"seed": range(B), "optimizer": SGD, **arguments}
    made = vfl.SplitNetwork(bottom or bottoms(), likelihoods.categorical(3), **arguments).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".z." in name:  # an encoder at its start answers zero, whatever it sees
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


WEIGHT_SD = torch.tensor([0.7, 0.2, 0.3])  # of the second, without noise, nothing depends on it
SMALL = encoders.perceptron(3)
CASES: dict[str, Callable[[], vfl.SplitNetwork]] = {
    "plain": network,
    "dropout": lambda: network(bottoms(dropout=0.3)),
    "concatenated": lambda: network(
        bottoms(2), combine=vfl.concatenated, top=mlp(6, [4], 3).double(), widths=[2, 2, 2]
    ),
    "sums": lambda: network(bayes=bayes()),
    "sums, skewed": lambda: network(bayes=bayes(auxiliary=vfl.sums(SMALL))),
    "amortised": lambda: network(bayes=bayes(auxiliary=vfl.amortised(SMALL), weight_sd=WEIGHT_SD)),
    "amortised, y seen": lambda: network(
        bayes=bayes(auxiliary=vfl.amortised(SMALL, sees_response=True), sticking=False)
    ),
    "full covariance, all weights": lambda: network(bayes=bayes(theta=full_covariance(), random="*")),
    "Bayes, concatenated": lambda: network(
        bottoms(2), combine=vfl.concatenated, top=mlp(6, [4], 3).double(), widths=[2, 2, 2], bayes=bayes()
    ),
}


def distance(first: nn.Module, second: nn.Module) -> float:
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    assert ours.keys() == theirs.keys()
    return max((float((ours[n] - theirs[n]).detach().abs().max()) for n in ours if ours[n].numel()), default=0.0)
