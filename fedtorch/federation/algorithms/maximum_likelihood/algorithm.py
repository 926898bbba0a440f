"""The client's and the server's rounds of maximum marginal likelihood; the package describes the method."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.algorithms.maximum_likelihood import _newton as newton
from fedtorch.federation.algorithms.maximum_likelihood._newton import Point
from fedtorch.federation.algorithms.maximum_likelihood._problem import MaximumServer, Problem
from fedtorch.federation.algorithms.maximum_likelihood.estimates import named
from fedtorch.federation.algorithms.maximum_likelihood.posterior import Maximised
from fedtorch.federation.exchanges.exchange import Sum
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Natural
from fedtorch.models.hierarchical import Model
from fedtorch.tree import Tree

_PART = 512  # nodes at a time
_NOWHERE = -1e30  # log likelihood where a client cannot compute it
_HARDER, _EASIER = 8.0, 0.125  # factors of the damping after steps that lost and that gained
_CLOSER = 0.25  # factor of the steps between nodes if the present ones are uninformative
_LEAST = 1e-3  # least damping; smaller values become zero


class _Outbox(NamedTuple):
    """Broadcast of the server."""

    at: Tensor
    steps: Tensor
    version: Tensor


@tells(
    Learns(
        "the likelihood of a client at points that the server chooses: of few rows, the rows", helps="sums under masks"
    )
)
class _Message(NamedTuple):
    """A client's message, of which the server gets the sum."""

    value: Sum  # () log f_k at the point, the first node
    relative: Sum  # (R,) differences to the nodes, so that sums in any order agree in these differences
    summary: Sum  # for the first estimate
    clients: Sum  # 1


def maximum_likelihood(model: Model, *, restricted: bool = False) -> Algorithm:
    """Build maximum marginal likelihood for a hierarchical model, the method of mixed-model software.

    All clients answer in every round; a round with missing answers is repeated. The first round makes a first estimate,
    the others take steps of Newton's method; about ten are enough. `maximised` stops a run, `run.summary()` and
    `estimates` return the estimates, `ft.inference.ranef` and `predict` those for each client. A variance estimated as
    zero, or a correlation as 1 or -1, is a singular fit: its logarithm, or Fisher's z, moves from round to round until
    nothing is gained, in some thirty rounds; a warning names it, and its standard error is NaN.

    Args:
        model: a `hierarchical.Model`; its prior is used for the first estimate only.
        restricted: whether the means are integrated out (REML) instead of maximised over.

    Shapes: server state is `MaximumServer`; clients have no state. A run's `parameters` are the normal part of the
    prior for the first estimate. A client sends 2 + 2p + 2p² numbers for p shared parameters, with `restricted` (1 + 2m
    + 2m²)(1 + 2s + 2s²) + 1 for m means and s others, of which the server needs the sums only.

    Raises:
        TypeError: no hierarchical model.
        ValueError: `restricted` without means; or, in the second round, of a model that is not linear.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.maximum_likelihood import estimates, maximised
        >>> from fedtorch.models import hierarchical
        >>> rows = torch.tensor([1.0, 2.0, 3.0])  # six clients of three rows each
        >>> data = ft.data.from_tensors([(torch.ones(3, 1), rows + 4 * k) for k in range(6)])
        >>> model = hierarchical.linear(hierarchical.normal(1, names=["level"]))
        >>> for restricted in (False, True):
        ...     algorithm = ft.maximum_likelihood(model, restricted=restricted)
        ...     found = estimates(ft.run(algorithm, ft.InProcess(data), rounds=30, until=maximised()))
        ...     print(f"{found.mean[0]:.3f} ± {found.errors[0]:.3f}, sd {found.sds[0]:.3f}, noise {found.noise:.3f}")
        12.000 ± 2.789, sd 6.807, noise 1.000
        12.000 ± 3.055, sd 7.461, noise 1.000
    """
    expected.kind(model, Model, "a hierarchical model", "such as hierarchical.linear(hierarchical.normal(2))")
    problem = Problem.of(model, restricted)
    if restricted and not problem.means:
        raise ValueError("Expected means to integrate over, but got a hierarchy without; leave restricted= away")
    return Algorithm(
        init=partial(_init, problem=problem),
        outbox=lambda server: _Outbox(server.at, server.steps, server.version),
        client=partial(_client, problem=problem),
        server=partial(_server, problem=problem),
        model=lambda inbox, state: {"phi": problem.phi(inbox.at)},
        prepare=model.prepare,
        report=_report,
        settings={"algorithm": "maximum_likelihood", "model": model, "restricted": restricted},
        start=model.prior.normal._asdict(),
        posterior=Maximised(named, model, restricted),
    )


def _init(parameters: Tree, clients: int, *, problem: Problem) -> tuple[MaximumServer, tuple[()]]:
    prior = Natural(parameters["shift"], parameters["precision"])
    zero = prior.shift.new_zeros(())
    at = problem.coordinates(gaussian.moments(problem.model.prior.replaced(prior).completed()).mean)
    nothing = Point(at, torch.ones_like(at), zero - torch.inf, at.new_zeros(len(problem.nodes)))
    count = torch.tensor(clients)
    return MaximumServer(
        prior, at, nothing.steps, nothing, zero - torch.inf, zero + torch.inf, zero, count - count, count
    ), ()


def _client(inbox: _Outbox, state: Tree, data: Any, turn: Turn, *, problem: Problem) -> Reply:
    """Send a summary in the first round, and log f_k at the nodes in the others."""
    clients, model = len(inbox.at), problem.model
    offsets = problem.nodes.to(inbox.at)
    summary = tree.expand(model.start.summary(None, model.prior), clients)
    values = inbox.at.new_zeros(clients, len(offsets))
    if clients and bool((inbox.version == 0).all()):
        prior = model.prior.replaced(tree.to(model.prior.normal, inbox.at.device))
        summary = model.start.summary(data, prior)
    elif clients:
        nodes = problem.phi(inbox.at[:, None] + inbox.steps[:, None] * offsets)
        values = torch.cat([model.log_factor(part, data) for part in nodes.split(_PART, 1)], 1)
        values = torch.where(values.isfinite(), values, _NOWHERE)
    point = values[:, 0]
    message = _Message(Sum(point), Sum(values - point[:, None]), Sum(summary), Sum(torch.ones_like(point)))
    return Reply(message, state, {})


def _server(state: MaximumServer, aggregate: _Message, key: Tensor, *, problem: Problem) -> MaximumServer:
    """Make the first estimate or take a step; repeat the round if an answer is missing."""
    everybody = aggregate.clients.value.round() >= state.population
    complete, first = torch.stack([everybody, state.version == 0]).tolist()
    if not complete:
        return state
    if first:
        return _begun(state, aggregate, problem)
    value, relative = aggregate.value.value, aggregate.relative.value
    somewhere = (value > _NOWHERE) & (relative > _NOWHERE / 2)
    if problem.restricted:
        _check_linear(relative, problem)
    point = Point(state.at, state.steps, value, torch.where(somewhere, relative, torch.nan))
    new, old = problem.around(point), problem.around(state.best)
    better = newton.usable(new, old, problem.means)
    if not (problem.restricted or bool(better | state.best.value.isfinite())):  # first nodes are beyond an edge
        at = torch.where(value > _NOWHERE, state.at, state.best.at)  # else the prior's mean
        return state._replace(at=at, steps=_CLOSER * state.steps, version=state.version + 1)
    best = tree.where(better, new, old)
    eased = torch.where(state.damping > _LEAST, _EASIER * state.damping, 0.0)
    damping = torch.where(better, eased, (_HARDER * state.damping).clamp(min=1.0))
    steps = newton.apart(best, problem.means, state.steps)
    move, gain = newton.step(best, problem.means, steps / newton.APART, damping)
    return state._replace(
        at=best.at + move,
        steps=steps,
        best=tree.where(better, point, state.best),
        reached=best.value,
        gain=gain,
        damping=damping,
        version=state.version + 1,
    )


def _begun(state: MaximumServer, aggregate: _Message, problem: Problem) -> MaximumServer:
    """Place the first nodes."""
    model, count = problem.model, aggregate.clients.value
    first = model.start.estimate(aggregate.summary.value, count, model.prior.replaced(state.prior))
    precision = gaussian.unpack(first.precision).diagonal()
    at = problem.coordinates(first.shift / precision)
    return state._replace(at=at, steps=newton.spaced(precision.rsqrt()), version=state.version + 1)


def _check_linear(relative: Tensor, problem: Problem) -> None:
    """Raise ValueError unless the likelihood is quadratic in the means."""
    if not bool(newton.quadratic(relative, problem.means, len(problem.model.names) - problem.means)):
        raise ValueError(
            "Expected a linear model for restricted likelihood, whose means are integrated out exactly, but got one "
            "whose likelihood is not quadratic in its means; leave out restricted=, or use ft.ep"
        )


def _report(server: MaximumServer) -> dict[str, Tensor]:
    return {"log_likelihood": server.reached, "gain": server.gain, "damping": server.damping}
