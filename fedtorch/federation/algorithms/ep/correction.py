r"""The posterior beyond its normal approximation: common nodes, weighted in one more summed round.

Expectation propagation ends with a normal density q(φ). With few clients the posterior is skewed and has longer tails,
as that of a log variance and of a mean whose variance is uncertain, and q's sds are some per cent too small. Here every
client takes the same nodes φ_i around q and tells log f_k(φ_i), of which the server hears the sum only:

.. math:: w_i \propto p(\varphi_i) \prod_k f_k(\varphi_i) \big/ g(\varphi_i), \qquad
    g = \tfrac12 N(m, \Sigma) + \tfrac12 N(m, 2 \Sigma),

with q = N(m, Σ). The wider half of g keeps the weights bounded where the posterior's tails are moderately longer.

Source: Vehtari et al. (2020), "Expectation propagation as a way of life", section 4; Owen and Zhou (2000), "Safe and
effective importance sampling".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.algorithms.ep.fitting import checked
from fedtorch.federation.algorithms.ep.start import as_prior
from fedtorch.federation.exchange import Sum
from fedtorch.federation.population import Population
from fedtorch.federation.run import Run
from fedtorch.models import gaussian
from fedtorch.models.hierarchical.hyperpriors import Prior
from fedtorch.models.hierarchical.projections import LogFactor
from fedtorch.models.quadrature import quasi_random

_WIDER = 2.0  # variance of the second half of the nodes
_FEWEST = 100  # effective nodes


class Corrected(NamedTuple):
    """Weighted nodes of the posterior of φ."""

    posterior: MultivariateNormal  # of the nodes' mean and covariance
    nodes: Tensor  # (R, p)
    weights: Tensor  # (R,) of sum 1
    effective: float  # how many nodes of equal weight would tell as much

    def quantile(self, probability: float) -> Tensor:
        """Quantiles of each coordinate, `(p,)`: the least node with at least this probability below or at it."""
        ordered, order = self.nodes.sort(0)
        below = self.weights[order].cumsum(0)
        place = (below < probability).sum(0).clamp(max=len(ordered) - 1)
        return ordered.gather(0, place[None])[0]


def corrected(run: Run, *, points: int = 8192, tolerance: float = 0.01) -> Corrected:
    """Moments of the posterior itself, from one more summed round of a run's clients, all of whom must answer.

    A `RuntimeWarning` says so where fewer than a hundred nodes' worth of weight is left: q is too far from the
    posterior for this correction.

    Args:
        run: of `ep` with a hierarchical model, or with `Factors` that have their `log_factor`.
        points: R, so many numbers are sent by each client.
        tolerance: see `posterior`, which warns and raises alike.
    """
    model = checked(run, tolerance)
    if model.log_factor is None:
        raise ValueError("Expected factors that tell their values, but got none; use Factors(..., log_factor=)")
    q, prior = gaussian.moments(run.server.posterior), as_prior(model.prior).replaced(run.server.prior)
    white = quasi_random(len(q.mean), points).nodes.to(q.mean)
    scale = torch.ones_like(white[:, :1])
    half = len(white) // 2  # then come the negatives of the first half
    scale[1:half:2] = scale[half + 1 :: 2] = _WIDER**0.5
    white = white * scale
    nodes = q.mean + white @ torch.linalg.cholesky(q.covariance).mT
    total = _summed(model.log_factor, nodes, run.population, model.prepare)
    weights = torch.softmax(total + _log_prior(prior, nodes) - _log_mixture(white), 0)
    effective = float(1 / weights.square().sum())
    if not effective >= _FEWEST:
        warnings.warn(
            f"Expected at least {_FEWEST} effective nodes, but got {effective:.1f} of {len(nodes)}; the correction is "
            "not to be trusted: use more points=, or the normal approximation",
            RuntimeWarning,
            stacklevel=2,
        )
    centre = weights @ nodes
    away = nodes - centre
    return Corrected(MultivariateNormal(centre, (weights[:, None] * away).mT @ away), nodes, weights, effective)


def _summed(log_factor: LogFactor, nodes: Tensor, population: Population, prepare: Callable[[Any], Any]) -> Tensor:
    """Σ_k log f_k at the nodes `(R,)`, by a round in which clients tell nothing else."""
    algorithm = Algorithm(
        init=lambda parameters, clients: (torch.zeros_like(nodes[:, 0]), ()),
        outbox=lambda server: nodes,
        client=lambda inbox, state, data, turn: Reply(Sum(log_factor(inbox, data)), state, {}),
        server=lambda server, aggregate, key: aggregate.value,
        model=lambda inbox, state: {},
        prepare=prepare,
    )
    done, clients = Run(algorithm, population, {}).step(), len(population.names)
    if len(done.ids) < clients:
        raise RuntimeError(f"Expected an answer of all {clients} clients, but got {len(done.ids)}; repeat")
    return done.server


def _log_prior(prior: Prior, nodes: Tensor) -> Tensor:
    """log p at the nodes, up to a constant."""
    normal = tree.to(prior.normal, nodes.device)
    quadratic = (nodes @ gaussian.unpack(normal.precision) * nodes).sum(1)
    factors = [factor.log_density(nodes[:, factor.coordinate]) for factor in prior.factors]
    return nodes @ normal.shift - 0.5 * quadratic + sum(factors, torch.zeros_like(quadratic))


def _log_mixture(white: Tensor) -> Tensor:
    """log g at m + Lz, up to a constant, for z `(R, p)`."""
    square, size = white.square().sum(1), white.shape[1]
    return torch.logaddexp(-0.5 * square, -0.5 * square / _WIDER - 0.5 * size * math.log(_WIDER))
