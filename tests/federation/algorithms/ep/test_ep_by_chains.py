"""Whole fits of three coefficients that differ between clients, beside Hamiltonian chains of all that is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles import hamiltonian
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, softplus

import fedtorch as ft
from fedtorch.federation.algorithms.ep import settled
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.hierarchical import generalised, hyperpriors
from fedtorch.models.hierarchical.cumulative import cumulative, difference_names

CHAINS, VARYING, LEVELS = 50, 3, tuple("abcd")
FAR = 1e3  # an end beyond all thresholds
Rows = Callable[[Tensor, Tensor], Tensor]  # linear predictors (C, K, N) and fixed effects (C, f) -> log likelihood (C,)
Made = tuple[hierarchical.Model, list[Any], Rows]


def binomial(x: Tensor, eta: Tensor, generator: torch.Generator) -> Made:
    trials = torch.randint(1, 4, eta.shape, generator=generator).double()
    coins = torch.rand(3, *eta.shape, generator=generator, dtype=torch.float64) < eta.sigmoid()
    y = (coins * (torch.arange(3)[:, None, None] < trials)).sum(0).double()
    model = generalised.logistic(
        hierarchical.normal(VARYING, sd=2.0, variance=hyperpriors.log_normal(-1.0, 1.0)),
    )
    rows = [(own, told, {"trials": many}) for own, told, many in zip(x, y, trials)]
    return model, rows, lambda eta, fixed: (y * eta - trials * softplus(eta)).sum((1, 2))


def ordered(x: Tensor, eta: Tensor, generator: torch.Generator) -> Made:
    noise = torch.rand(eta.shape, generator=generator, dtype=torch.float64).logit()
    y = ((eta + noise)[..., None] > torch.tensor([0.0, 1.0, 2.2])).sum(-1)
    names = ["Intercept", "a", "b", *difference_names(LEVELS)]
    hierarchy = hierarchical.normal(
        VARYING + 2, random=range(VARYING), names=names, sd=2.0, variance=hyperpriors.log_normal(-1.0, 1.0)
    )

    def log(eta: Tensor, fixed: Tensor) -> Tensor:
        cuts = pad(pad(fixed, (2, 0))[:, 1:], (0, 1), value=FAR)
        ends = torch.cat([cuts.new_full((len(cuts), 1), -FAR), cuts], 1)
        low, high = (ends[:, y + i] - eta for i in (0, 1))
        each = logsigmoid(high) + logsigmoid(-low) + (-torch.expm1((low - high).clamp(max=-1e-12))).log()
        return each.sum((1, 2)).masked_fill((cuts.diff(dim=1) <= 0).any(1), -1e30)

    return cumulative(hierarchy, LEVELS), list(zip(x, y.double())), log


@pytest.mark.slow
@pytest.mark.parametrize("make", [binomial, ordered])
def test_three_coefficients_have_the_posterior_of_long_chains(make: Callable[..., Made]) -> None:
    """Means within 0.1 sds and sds within a tenth; chains know means to 0.02 sds, and sds to 2 %."""
    generator = torch.Generator().manual_seed(11)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    clients = 12
    x = draw(clients, 6, VARYING)
    x[..., 0] = 1
    own = 0.7 * draw(VARYING) + 0.7 * draw(clients, VARYING)
    model, rows, likelihood = make(x, (x @ own[..., None])[..., 0], generator)
    run = ft.run(ft.ep(model), ft.InProcess(ft.data.from_tensors(rows)), rounds=30, until=settled(), progress=False)
    q, prior = (gaussian.moments(each) for each in (run.server.posterior, model.prior.completed()))
    means, size = model.hierarchy.mean.shape[1], len(model.names)
    before = torch.distributions.Normal(prior.mean, prior.covariance.diagonal().sqrt())

    def log_density(at: Tensor) -> Tensor:
        phi, white = at[:, :size], at[:, size:].reshape(len(at), clients, VARYING)
        theta = phi[:, None, :VARYING] + (phi[:, None, means:] / 2).exp() * white
        eta = torch.einsum("ckj,knj->ckn", theta, x)
        return likelihood(eta, phi[:, VARYING:means]) + before.log_prob(phi).sum(1) - 0.5 * white.square().sum((1, 2))

    start = q.mean + 0.5 * q.covariance.diagonal().sqrt() * draw(CHAINS, size)
    start[:, VARYING:means] = q.mean[VARYING:means]  # thresholds in order
    start = torch.cat([start, draw(CHAINS, VARYING * clients)], 1)
    found = hamiltonian.draws(log_density, start, warm=200, kept=200)
    sds = found.flat.std(0)[:size]
    assert float((found.errors[:size] / sds).max()) < 0.03
    shift = (q.mean - found.flat.mean(0)[:size]) / sds
    ratio = q.covariance.diagonal().sqrt()[:means] / sds[:means]
    assert float(shift.abs().max()) < 0.1
    assert float(ratio.min()) > 0.9 - 0.02
    assert float(ratio.max()) < 1.1 + 0.02
