"""Factors of logistic and Poisson devices against a fine grid, and responses that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Poisson

import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import generalised
from fedtorch.models.quadrature import gauss_hermite


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
@pytest.mark.parametrize("random", [[], [1]])
def test_a_generalised_device_factor_is_the_evidence_of_its_rows(kind: str, random: list[int]) -> None:
    """Against the likelihood itself where all effects are fixed, and a fine grid over the one that is not."""
    x, y = draw(6, 2, seed=4), torch.tensor([0.0, 1, 1, 0, 1, 1]).double()
    phi = draw(1, 5, 2 + len(random), seed=5)
    found = []
    for inner in ("default", gauss_hermite(2, 25)):
        model = getattr(generalised, kind)(hierarchical.normal(2, random=random), inner=inner)
        found.append(model.log_factor(phi, model.prepare(ft.data.from_tensors([(x, y)]).stack([0])))[0])
    standard = torch.linspace(-8, 8, 4001).double() if random else torch.zeros(1).double()
    weight = torch.softmax(-0.5 * standard.square(), 0)
    for default, fine, (a, b, *zeta) in zip(*found, phi[0]):
        slope = b + standard * (zeta[0] / 2).exp() if random else b + standard
        eta = x[:, :1] * a + x[:, 1:] * slope
        law = Bernoulli(logits=eta) if kind == "logistic" else Poisson(eta.exp())
        expected = (law.log_prob(y[:, None]).sum(0) + weight.log()).logsumexp(0)
        assert abs(float(fine - expected)) < 1e-6  # the fixed effect has a variance of one rounding error
        assert abs(float(default - expected)) < 1e-3  # seven nodes a coordinate


def test_responses_that_do_not_fit() -> None:
    x = torch.ones(3, 1).double()
    block = ft.data.from_tensors([(x, torch.tensor([0.0, 1.0, 2.0]).double())]).stack([0])
    with pytest.raises(ValueError, match=r"Expected responses 0 or 1, but got 0\.0 to 2\.0"):
        generalised.logistic(hierarchical.normal(1)).prepare(block)
    negative = ft.data.from_tensors([(x, torch.tensor([0.0, -1.0, 2.0]).double())]).stack([0])
    with pytest.raises(ValueError, match=r"Expected counts, but got -1\.0 to 2\.0"):
        generalised.poisson(hierarchical.normal(1)).prepare(negative)


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
@pytest.mark.parametrize("counts", [(3, 1100), (7,)])
def test_without_deviations_a_factor_is_the_likelihood(kind: str, counts: tuple[int, ...]) -> None:
    """Of few rows beside many, of far predictors, and of more nodes than are computed at a time."""
    x = [draw(count, 2, seed=count) * torch.tensor([1.0, 12.0 if kind == "logistic" else 1.0]) for count in counts]
    y = [(draw(count, seed=1) > 0).double() for count in counts]
    model = getattr(generalised, kind)(hierarchical.normal(2, random=[]))
    phi = draw(len(counts), 80, 2, seed=2)
    found = model.log_factor(phi, model.prepare(ft.data.from_tensors(list(zip(x, y))).stack(list(range(len(counts))))))
    for k in range(len(counts)):
        eta = phi[k] @ x[k].mT
        law = Bernoulli(logits=eta) if kind == "logistic" else Poisson(eta.exp())
        expected, score = law.log_prob(y[k]).sum(-1), (y[k] - law.mean) @ x[k]
        variance = torch.finfo(torch.float64).eps * score.square().sum(-1)  # of a fixed effect: one rounding error
        assert ((found[k] - expected).abs() < 1e-12 * expected.abs() + variance).all()
