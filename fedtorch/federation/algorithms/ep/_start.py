"""The input of expectation propagation: the clients' factors f_k and the prior, in any form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributions import MultivariateNormal

from fedtorch import expected, tree
from fedtorch.federation.algorithm import identity
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.hyperpriors import Prior
from fedtorch.models.hierarchical.projections import LogFactor, Projection, Start, from_the_prior

AnyPrior = Prior | Natural | MultivariateNormal


class Factors(NamedTuple):
    """User-defined factors f_k(φ) for `ft.ep`."""

    project: Projection  # see `fedtorch.models.hierarchical.projections`
    prior: AnyPrior  # prior of φ
    start: Start | None = None  # for the summed round; default: mean of the clients' tilted moments under the prior
    prepare: Callable[[Any], Any] = identity  # data -> data, once per block
    log_factor: LogFactor | None = None  # log f_k, needed by `corrected`


class Completed(NamedTuple):
    """Factors with their defaults filled in."""

    project: Projection
    prior: Prior
    start: Start


def completed(model: Model | Factors) -> Completed:
    """Return the model's factors, its prior in float64 and a start."""
    expected.kind(model, (Model, Factors), "a hierarchical model", "such as hierarchical.linear(prior)")
    return Completed(model.project, as_prior(model.prior), model.start or from_the_prior(model.project))


def as_prior(prior: AnyPrior) -> Prior:
    """Return a prior of any of these forms, in float64.

    Raises:
        TypeError: a prior of another type.
        ValueError: a batch of priors.
    """
    if isinstance(prior, MultivariateNormal):
        if prior.batch_shape:
            raise ValueError(f"Expected one normal prior, but got a batch of {tuple(prior.batch_shape)}")
        prior = gaussian.natural(Moments(prior.mean.to(torch.float64), prior.covariance_matrix.to(torch.float64)))
    if isinstance(prior, Natural):
        prior = Prior(prior, ())
    if not isinstance(prior, Prior):
        raise TypeError(f"Expected a Prior, a Natural or a MultivariateNormal, but got {type(prior).__name__}")
    return Prior(tree.to(prior.normal, torch.float64), prior.factors)
