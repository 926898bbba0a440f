"""Where a run of expectation propagation starts: priors of any form, and the first estimate without a model's help."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import tree
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical.hyperpriors import Prior
from fedtorch.models.hierarchical.projections import Projection, Start
from fedtorch.tree import Tree

__all__ = ["as_prior", "changes", "from_the_prior", "jump", "product"]


def as_prior(prior: Prior | Natural | MultivariateNormal) -> Prior:
    """A prior of any of these forms, in float64.

    Raises:
        TypeError: of another form.
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


def from_the_prior(project: Projection) -> Start:
    """Each client's projection of the whole prior; the first estimate is their mean with the prior's precision."""

    def summary(data: Any, prior: Prior) -> Tree:
        own = prior.completed()
        if data is None:
            return torch.zeros_like(own.shift)
        count = len(tree.leaves(data)[0])
        cavity = tree.expand(gaussian.moments(own), count)
        tilted = project(Moments(*cavity), data, torch.zeros(count, dtype=torch.int64, device=own.shift.device)).tilted
        return torch.where(tilted.mean.isfinite().all(-1, keepdim=True), tilted.mean, cavity.mean)

    def estimate(total: Tree, count: Tensor, prior: Prior) -> Natural:
        own = prior.completed()
        mean = total / count
        return Natural((gaussian.unpack(own.precision) @ mean[:, None])[:, 0], own.precision)

    return Start(summary, estimate)


def product(base: Natural, factors: Natural, prior: Prior) -> Natural:
    """`base` times the sites of the prior's factors."""
    place = torch.tensor([factor.coordinate for factor in prior.factors], dtype=torch.int64, device=base.shift.device)
    diagonal = torch.zeros_like(base.shift).index_add(0, place, factors.precision)
    return Natural(base.shift.index_add(0, place, factors.shift), base.precision + gaussian.pack(torch.diag(diagonal)))


def jump(before: Natural, after: Natural) -> float:
    """The greatest change of a mean in the sd that it had; 0 where it had none."""
    old, new = gaussian.moments(before), gaussian.moments(after)
    return float(((new.mean - old.mean).abs() / old.covariance.diagonal().sqrt()).amax().nan_to_num(0.0))


def changes(before: Natural, after: Natural) -> Tensor:
    """Changes of the means, in sd, and of the sds; NaN where one is no density."""
    old, new = gaussian.moments(before), gaussian.moments(after)
    sd, old_sd = (m.covariance.diagonal(dim1=-2, dim2=-1).sqrt() for m in (new, old))
    return torch.stack([((new.mean - old.mean).abs() / sd).amax(), ((sd - old_sd).abs() / sd).amax()])
