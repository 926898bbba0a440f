"""EM against the closed form without gaps, the likelihood's gradient with gaps, and in any blocks."""

from __future__ import annotations

import torch
from support.algorithm_cases import Case
from support.gaps import clients, fit
from support.oracles.closed_forms import distance

from fedtorch.federation.algorithms.normal_em import normal_em
from fedtorch.models.gibbs import imputation


def test_without_gaps_it_is_the_sample_covariance_at_once() -> None:
    data = imputation.incomplete(clients(0.0))
    found = fit(data, 1)
    values = data.rows.values
    assert distance(found.mean, values.mean(0)) < 1e-12
    assert distance(found.covariance, values.T.cov(correction=0)) < 1e-12


def test_with_gaps_the_gradient_of_the_observed_likelihood_vanishes() -> None:
    data = imputation.incomplete(clients(0.2))
    found = fit(data, 400)
    mean, factor = found.mean.clone().requires_grad_(), torch.linalg.cholesky(found.covariance).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for values, observed in zip(*data.rows):
        part = (factor @ factor.T)[observed][:, observed]
        normal = torch.distributions.MultivariateNormal(mean[observed], part)
        total = total + normal.log_prob(values[observed])
    gradients = torch.autograd.grad(total, (mean, factor))
    assert float(gradients[0].abs().max()) < 1e-6 * len(data.rows.values)
    assert float(gradients[1].tril().abs().max()) < 1e-6 * len(data.rows.values)


def test_chunks_and_permuted_clients() -> None:
    data = imputation.incomplete(clients(0.2))
    found = fit(data, 5)
    for other in (fit(data, 5, chunk=1), fit(data.select([2, 0, 1]), 5)):
        assert distance(found, other) < 1e-12


CASES: dict[str, Case] = {
    "normal_em": Case(
        normal_em,
        start=imputation.Normal(torch.zeros(4).double(), torch.eye(4).double()),
        rows=lambda data: imputation.incomplete(list(data)),
    )
}
