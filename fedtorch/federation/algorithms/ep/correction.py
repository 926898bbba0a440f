r"""The posterior beyond its normal approximation: common nodes, weighted in one more summed round.

Expectation propagation ends with a normal density q(φ). With few clients the posterior is skewed with longer tails, for
example of a log variance, or of a mean whose variance is uncertain, and q's sds are some per cent too small. Here every
client evaluates log f_k(φ_i) at the same nodes φ_i around q, and the server receives only the sum:

.. math:: w_i \propto p(\varphi_i) \prod_k f_k(\varphi_i) \big/ g(\varphi_i), \qquad
    g = \tfrac12 N(m, \Sigma) + \tfrac12 t_2(m, \Sigma),

with q = N(m, Σ). The component of Student's t with two degrees of freedom keeps the weights bounded if the posterior's
tails are longer, as for a mean over few clients, whose posterior is like t itself; a wider normal density would cut
such tails off unnoticed. Beyond five dimensions, where few of Student's nodes are near the posterior, the proposal is ¾
N(m, 1.2² Σ) + ¼ t₂(m, Σ), and half of the nodes are evaluated first: the others follow if those do not suffice.

Source: Vehtari et al. (2020), "Expectation propagation as a way of life", section 4; Owen and Zhou (2000), "Safe and
effective importance sampling"; Owen (2013), "Monte Carlo theory, methods and examples".
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
from fedtorch.federation.algorithms.consensus import at_node
from fedtorch.federation.algorithms.ep._checked import checked
from fedtorch.federation.algorithms.ep._start import as_prior
from fedtorch.federation.exchanges.exchange import Sum
from fedtorch.federation.exchanges.star import star
from fedtorch.federation.runs.run import Run
from fedtorch.federation.turn import Turn
from fedtorch.models import gaussian
from fedtorch.models.estimates import weighted_quantile
from fedtorch.models.hierarchical.hyperpriors import Prior
from fedtorch.models.hierarchical.projections import LogFactor
from fedtorch.models.quadrature import quasi_random
from fedtorch.progress import Progress
from fedtorch.tree import Tree

_FREEDOM = 2.0  # degrees of freedom of Student's nodes
_LOW = 5  # largest dimension in which quasi-random nodes gain much
_FEWEST = 100  # effective nodes
_PART = 512  # nodes at a time
_NOWHERE = -1e30  # log density of nodes without weight


class Corrected(NamedTuple):
    """Weighted nodes of the posterior of φ.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import posterior, settled
        >>> from fedtorch.federation.algorithms.ep import corrected
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)])
        >>> model = hierarchical.linear(hierarchical.normal(1), noise=0.1)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
        >>> found = corrected(run, points=512)
        >>> found.nodes.shape, found.weights.sum().round(decimals=6)
        (torch.Size([512, 2]), tensor(1., dtype=torch.float64))
        >>> bool((found.posterior.stddev > posterior(run).stddev).all())  # the posterior has longer tails than q
        True
        >>> bool((found.quantile(0.05) < found.quantile(0.95)).all())
        True
    """

    posterior: MultivariateNormal  # normal density with the nodes' mean and covariance
    nodes: Tensor  # (R, p)
    weights: Tensor  # (R,) of sum 1
    effective: float  # least number of equally weighted nodes with the same accuracy, over all means and variances

    def quantile(self, probability: float) -> Tensor:
        """Return quantiles of each coordinate, `(p,)`, as `Run.summary` has them."""
        return weighted_quantile(self.nodes, probability, self.weights)


def corrected(
    run: Run, *, points: int = 8192, enough: float = 750.0, tolerance: float = 0.01, node: int | None = None
) -> Corrected:
    """Compute the posterior's moments in one more summed round, which all clients of a run must answer.

    A `RuntimeWarning` is given if fewer than a hundred nodes' worth of weight is left: q is too far from the posterior
    for this correction.

    Args:
        run: of `ep` with a hierarchical model, or with `Factors` that have `log_factor`.
        points: most nodes, which is also the number of values sent by each client.
        enough: with more than five shared parameters, half of the nodes are used if these have that many nodes' worth
            of weight. Sds are then accurate to about 1 / √(2 · enough), for 750 to 2 or 3 per cent; `math.inf` uses
            all.
        tolerance: as for `posterior`, with the same warnings and errors.
        node: in a run `ft.without_server`, the node whose q and sums are used; default: the means of all. The sums are
            found by consensus there, too.
    """
    model, server, networked = checked(run, tolerance, node)
    if model.log_factor is None:
        raise ValueError("Expected factors with log_factor, but got some without; use Factors(..., log_factor=)")
    q, prior = gaussian.moments(server.posterior), as_prior(model.prior).replaced(server.prior)
    root = torch.linalg.cholesky(q.covariance).mT
    nodes, log = q.mean.new_zeros(0, len(q.mean)), q.mean.new_zeros(0)
    parts = 1 if len(q.mean) <= _LOW else 2
    for part in _proposed(len(q.mean), points).to(q.mean).split(-(-points // parts)):
        at = q.mean + part @ root
        total = _summed(model.log_factor, at, run, model.prepare, networked)
        total = total if networked is None else at_node(total, node)
        nodes = torch.cat([nodes, at])
        log = torch.cat([log, total + _log_prior(prior, at, q.mean) - _log_mixture(part)])
        weights = torch.softmax(log, 0)
        centre = weights @ nodes
        away = nodes - centre
        size = effective(weights, away)
        if size >= enough:
            break
    covariance = (weights[:, None] * away).mT @ away
    if bool(torch.linalg.cholesky_ex(covariance).info):
        raise RuntimeError(
            f"Expected nodes whose weights have a covariance, but got {size:.1f} effective ones of {len(nodes)}: use "
            "more points=, or the normal approximation"
        )
    if not size >= _FEWEST:
        warnings.warn(
            f"Expected at least {_FEWEST} effective nodes, but got {size:.1f} of {len(nodes)}; do not rely on the "
            "correction: use more points=, or the normal approximation",
            RuntimeWarning,
            stacklevel=2,
        )
    return Corrected(MultivariateNormal(centre, covariance), nodes, weights, size)


def _summed(
    log_factor: LogFactor, nodes: Tensor, run: Run, prepare: Callable[[Any], Any], networked: int | None
) -> Tensor:
    """Sum log f_k over clients at the nodes, `(R,)`, in an extra round; on a network one row per node.

    Student's nodes may lie a hundred standard deviations out, where covariances have no Cholesky factor in float64;
    a node at which a client cannot compute its factor has no weight.
    """

    def client(inbox: Tensor, state: Tree, data: Any, turn: Turn) -> Reply:
        parts = []
        for part in inbox.split(_PART, 1):
            parts.append(log_factor(part, data))
            shown.update(part.shape[0] * part.shape[1])
        values = torch.cat(parts, 1)
        return Reply(Sum(torch.where(values.isnan() | values.isneginf(), _NOWHERE, values)), state, {})

    # Without a server, neighbours compute the sums by consensus, and every node has the quadrature nodes.
    outbox: Tensor = nodes if networked is None else tree.expand(nodes, networked)
    algorithm = Algorithm(
        init=lambda parameters, clients: (outbox, ()),  # first the nodes, then the sums at them
        outbox=lambda server: server,
        client=client,
        server=lambda server, aggregate, key: aggregate.value,
        model=lambda inbox, state: {},
        prepare=prepare,
        exchange=star() if networked is None else run.algorithm.exchange,
    )
    clients = len(run.population.names)
    with Progress("Correction", clients * len(nodes), unit="node", shown=run.population.leads) as shown:
        done = Run(algorithm, run.population, {}).step()
    if len(done.ids) < clients:
        raise RuntimeError(f"Expected an answer of all {clients} clients, but got {len(done.ids)}; repeat")
    return done.server.to(nodes)


def _log_prior(prior: Prior, nodes: Tensor, centre: Tensor) -> Tensor:
    """Return log p at the nodes, up to a constant, expanded about a point among them because all may be far from 0."""
    normal = tree.to(prior.normal, nodes.device)
    precision, away = gaussian.unpack(normal.precision), nodes - centre
    quadratic = (away @ precision * away).sum(1)
    factors = [factor.log_density(nodes[:, factor.coordinate]) for factor in prior.factors]
    return away @ (normal.shift - precision @ centre) - 0.5 * quadratic + sum(factors, torch.zeros_like(quadratic))


def _proposed(size: int, points: int) -> Tensor:
    """Draw nodes of g at m = 0, Σ = I, `(R, size)`, normal and Student's, with the negatives of all.

    Up to five dimensions they take turns. Every fourth node would always lie in the same quadrant of the first two
    coordinates, whose correlation would be 0.06 off with any number of nodes; one more coordinate makes the choice
    instead.
    """
    normal, last, *other = quasi_random(size + 1 + (size > _LOW), points).nodes.split(
        [size, 1, *[1] * (size > _LOW)], 1
    )
    chi_square = -2 * torch.special.log_ndtr(last)  # with two degrees of freedom, the only one with a closed inverse
    every, wider = _mixed(size)
    if other:
        student = (2 * torch.special.ndtr(-other[0].abs())) > 1 - 1 / every  # the same for a node and its negative
    else:
        student = torch.arange(len(normal))[:, None] % every == 1
    nodes = torch.where(student, (_FREEDOM / chi_square).sqrt(), wider) * normal
    return torch.stack(nodes.chunk(2), 1).flatten(0, 1) if other else nodes


def _mixed(size: int) -> tuple[int, float]:
    """Return the reciprocal share of Student's nodes, and the sd of the others."""
    return (2, 1.0) if size <= _LOW else (4, 1.2)


def _log_mixture(white: Tensor) -> Tensor:
    """Return log g at m + Lz, up to a constant, for z `(R, p)`."""
    square, size = white.square().sum(1), white.shape[1]
    student = -0.5 * (_FREEDOM + size) * (square / _FREEDOM).log1p()
    student = student + math.lgamma(0.5 * (_FREEDOM + size)) - math.lgamma(0.5 * _FREEDOM)
    every, wider = _mixed(size)
    normal = math.log(every - 1) - 0.5 * square / wider**2 - size * math.log(wider)
    return torch.logaddexp(normal, student + 0.5 * size * math.log(2 / _FREEDOM))


def effective(weights: Tensor, away: Tensor) -> float:
    """Return the least effective sample size of the mass and of each coordinate's variance (Owen 2013, section 9.3).

    For a variance each node counts 3, since equal weights of normal draws have n / 3 effective nodes there.
    """
    shares = weights[:, None] * away.square()
    shares = shares / shares.sum(0).clamp(min=torch.finfo(shares.dtype).tiny)
    return min(float(1 / weights.square().sum()), float((3 / shares.square().sum(0)).min()))
