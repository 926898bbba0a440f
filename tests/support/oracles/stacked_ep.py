"""Expectation propagation of many federations side by side, in a plain loop: replicates are stacked as clients.

All have the same model and as many clients of as many rows. The loop has neither the damping nor the retreats of
`ft.ep`, whose fixed point is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.algorithms.ep import correction
from fedtorch.federation.algorithms.ep._start import completed
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.families import GAUSSIAN, LOGISTIC

DAMPING = 0.8


class Federations(NamedTuple):
    """Simulated data of R federations of K clients of n rows."""

    truth: Tensor  # (R, p) φ
    x: Tensor  # (R, K, n, d), of which the first column is one
    y: Tensor  # (R, K, n)

    def data(self, one: int) -> ft.data.FederatedData:
        return ft.data.from_tensors(list(zip(self.x[one], self.y[one])))


class Weighed(NamedTuple):
    """What `ep.corrected` finds, of R federations."""

    nodes: Tensor  # (R, N, p)
    weights: Tensor  # (R, N)

    def places(self, truth: Tensor) -> Tensor:
        """The posterior probabilities of less than the truth, `(R, p)`."""
        return (self.weights[..., None] * (self.nodes < truth[:, None])).sum(1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """(means, sds), `(R, p)` each."""
        mean = (self.weights[..., None] * self.nodes).sum(1)
        return mean, (self.weights[..., None] * (self.nodes - mean[:, None]).square()).sum(1).sqrt()

    def effective(self) -> Tensor:
        """How many nodes of equal weight tell as much, `(R,)`."""
        return 1 / self.weights.square().sum(1)


def simulated(model: Model, replicates: int, clients: int, rows: int, seed: int) -> Federations:
    """Draws from the prior, and data given them; φ ends with the log variance of the noise where that is not known."""
    hierarchy, prior = model.hierarchy, gaussian.moments(model.prior.completed())
    d, m = hierarchy.mean.shape
    keys = random.fold_in(random.key(seed), torch.arange(replicates))
    z = random.normal(random.fold_in(keys, 0), (len(prior.mean),), torch.float64)
    truth = prior.mean + z @ torch.linalg.cholesky(prior.covariance).mT
    each = random.fold_in(random.fold_in(keys, 1)[:, None], torch.arange(clients))
    spread = hierarchy.covariance(truth[:, m : len(hierarchy.names)]).diagonal(dim1=-2, dim2=-1).sqrt()
    theta = (truth[:, :m] @ hierarchy.mean.mT)[:, None]
    theta = theta + spread[:, None] * random.normal(random.fold_in(each, 0), (d,), torch.float64)
    x = random.normal(random.fold_in(each, 1), (rows, d), torch.float64)
    x[..., 0] = 1
    predictor = (x @ theta[..., None])[..., 0]
    if model.family is GAUSSIAN:
        error = random.normal(random.fold_in(each, 2), (rows,), torch.float64)
        y = predictor + (truth[:, -1] / 2).exp()[:, None, None] * error
    else:
        assert model.family is LOGISTIC
        y = (random.uniform(random.fold_in(each, 2), (rows,), torch.float64) < predictor.sigmoid()).double()
    return Federations(truth, x, y)


def propagated(model: Model, federations: Federations, rounds: int = 30) -> tuple[Natural, object]:
    """(q of each federation, the prepared data)."""
    replicates, clients, rows, _ = federations.x.shape
    stacked = (federations.x.flatten(0, 1), federations.y.flatten(0, 1))
    data = model.prepare(ft.data.ClientData(stacked, torch.full((replicates * clients,), rows)))
    whole = completed(model)
    prior, number = whole.prior.completed(), torch.tensor(float(clients), dtype=torch.float64)
    total = _summed(whole.start.summary(data, whole.prior), clients)
    totals = [tree.map(lambda leaf, at=r: leaf[at], total) for r in range(replicates)]
    starts = [whole.start.estimate(one, number, whole.prior) for one in totals]
    sites = _each(tree.map(lambda *leaves: torch.stack(leaves) / clients, *starts), clients)
    keys = random.fold_in(random.key(0), torch.arange(replicates * clients))
    for _ in range(rounds):
        cavity = tree.subtract(_each(_product(prior, sites, clients), clients), sites)
        proper = gaussian.is_proper(cavity)
        cavity = tree.where(proper, cavity, tree.expand(prior, len(proper)))
        found = whole.project(gaussian.moments(cavity), data, keys)
        wanted = tree.subtract(gaussian.natural(found.tilted), gaussian.natural(found.reference))
        done = proper & wanted.shift.isfinite().all(-1) & wanted.precision.isfinite().all(-1)
        sites = tree.where(done, tree.add_scaled(sites, tree.subtract(wanted, sites), torch.tensor(DAMPING)), sites)
    return _product(prior, sites, clients), data


def weighed(model: Model, q: Natural, data: object, clients: int, points: int = 512) -> Weighed:
    """Nodes of the posteriors as `ep.corrected` weighs them, `points` each."""
    assert model.log_factor is not None
    moments, prior = Moments(*gaussian.moments(q)), completed(model).prior
    white = correction._proposed(moments.mean.shape[1], points).to(torch.float64)
    nodes = moments.mean[:, None] + white @ torch.linalg.cholesky(moments.covariance).mT
    values = model.log_factor(nodes.repeat_interleave(clients, 0), data)
    values = torch.where(values.isnan() | values.isneginf(), correction._NOWHERE, values)
    before = [correction._log_prior(prior, own, mean) for own, mean in zip(nodes, moments.mean)]
    log = _summed(values, clients) + torch.stack(before) - correction._log_mixture(white)
    return Weighed(nodes, torch.softmax(log, 1))


def _product(prior: Natural, sites: Natural, clients: int) -> Natural:
    return tree.map(lambda own, total: own + total, prior, _summed(sites, clients))


def _summed(values: tree.Tree, clients: int) -> tree.Tree:
    return tree.map(lambda leaf: leaf.unflatten(0, (-1, clients)).sum(1) if hasattr(leaf, "shape") else leaf, values)


def _each(values: Natural, clients: int) -> Natural:
    return tree.map(lambda leaf: leaf.repeat_interleave(clients, 0), values)
