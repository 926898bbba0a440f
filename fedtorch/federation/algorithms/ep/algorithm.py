"""The rounds of expectation propagation: what a client and the server do. See the package for the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply, identity
from fedtorch.federation.algorithms.ep.start import (
    as_prior,
    changes,
    from_the_prior,
    jump,
    product,
    where_training_starts,
)
from fedtorch.federation.algorithms.ep.state import Message, Outbox, Server, State, Told
from fedtorch.federation.exchange import Mean
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Natural
from fedtorch.models.hierarchical.hyperpriors import Prior, renewed
from fedtorch.models.hierarchical.projections import Projection, Start
from fedtorch.tree import Tree

__all__ = ["ep"]


_FARTHEST = 5.0  # sds that a mean of q may move in a round
_RETREATS = 5  # for the sake of cavities; from then on clients without one keep their sites
_SETTLED = 4  # rounds after which changes should shrink
_RECOVERY = 2**0.5  # of the damping, in a good round
_LEAST_DAMPING = 1 / 64


def ep(
    project: Projection,
    prior: Prior | Natural | MultivariateNormal,
    *,
    start: Start | None = None,
    prepare: Callable[[Any], Any] = identity,
    damping: float = 1.0,
) -> Algorithm:
    """Expectation propagation.

    Args:
        project: (cavity, data, key) -> `Projected`, the moments of cavity_k f_k, for `K` clients at once; see
            `fedtorch.models.hierarchical.projections` and `fedtorch.models.hierarchical`.
        prior: of φ.
        start: of the summed round; default: the mean of the clients' tilted moments of the prior.
        prepare: data -> data, once per block.
        damping: δ of the undisturbed rounds, in (0, 1].

    Shapes: server state is `Server`, outbox `Outbox`; client state is `State`, `(K, ...)`. A run's `parameters` are the
    prior's normal part, so that a posterior of one federation can be the prior of the next. `Algorithm.model` gives the
    clients' cavities, from which `hierarchical.Model.devices` makes their own posteriors.

    Raises:
        ValueError: `damping` is not in (0, 1].

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import fit
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)])
        >>> model = hierarchical.linear(hierarchical.normal(1), noise=0.1)
        >>> algorithm = ft.ep(model.project, model.prior, start=model.start, prepare=model.prepare)
        >>> done = fit(algorithm, ft.InProcess(data))
        >>> done.converged, round(float(done.posterior.mean[0]), 1)  # of μ ~ N(0, 1), and four devices around 2
        (True, 1.6)
    """
    if not 0 < damping <= 1:
        raise ValueError(f"Expected damping in (0, 1], but got {damping}")
    prior = as_prior(prior)
    begin = from_the_prior(project) if start is None else start
    most = damping

    def init(parameters: Tree, clients: int) -> tuple[Server, State]:
        own = prior.replaced(Natural(parameters["shift"], parameters["precision"]))
        nothing = tree.zeros_like(own.normal)
        zero, minus = torch.zeros((), dtype=torch.float64), torch.tensor(-1)
        told = Told(nothing, summary_like(), zero)
        start = product(own.normal, own.sites, own)
        server = Server(
            own.normal, own.sites, nothing, start, start, torch.tensor(0), minus, torch.tensor(False),
            torch.tensor(most, dtype=torch.float64), torch.full((2,), torch.inf, dtype=torch.float64), zero + torch.inf,
            torch.tensor(0), zero, torch.tensor(clients),
        )  # fmt: skip
        return server, State(told, nothing, nothing, minus)

    def summary_like() -> Tree:
        """Zeros in the structure of one client's summary."""
        return begin.summary(None, prior)

    def client(inbox: Outbox, state: State, data: Any, key: Tensor) -> Reply:
        none = torch.zeros_like(state.told.waiting)
        if bool((inbox.version == 0).all()) and len(none):
            here = prior.replaced(tree.to(prior.normal, none.device))
            told = state.told._replace(summary=begin.summary(data, here), waiting=none + 1)
            return _reply(told, state, State(told, *state[1:]), none, none)
        site = _where(state.told.waiting > 0, inbox.share, state.told.site)
        good = _where(inbox.good >= state.stepped, state.before, state.good)
        good = _where(state.stepped < 0, site, good)
        if bool(inbox.back.any()):
            new = _where(state.stepped >= 0, tree.scale(tree.add(site, good), 0.5), state.told.site)
            told = state.told._replace(site=new)
            return _reply(told, state, State(told, state.before, state.good, state.stepped), none, none)
        cavity = tree.subtract(inbox.posterior, site)
        proper = gaussian.is_proper(cavity)
        target = _projected(project, _where(proper, cavity, inbox.posterior), data, key)
        done = proper & target.shift.isfinite().all(-1) & target.precision.isfinite().all(-1)
        step = tree.scale(tree.subtract(target, site), inbox.damping)
        told = Told(
            _where(done, tree.add(site, step), state.told.site),
            state.told.summary,
            torch.where(done, none, state.told.waiting),
        )
        stepped = torch.where(done, inbox.version, state.stepped)
        new = State(told, _where(done, site, state.before), _where(done, good, state.good), stepped)
        return _reply(told, state, new, (~proper).to(none.dtype), (proper & ~done).to(none.dtype))

    def server(state: Server, aggregate: Message, key: Tensor) -> Server:
        heard: Told = state.total
        improper = aggregate.improper.value
        own = prior.replaced(state.prior)
        first = int(state.version) == 0
        share = state.share
        if first:
            estimate = begin.estimate(heard.summary, heard.waiting, own)
            share = tree.scale(estimate, 1 / heard.waiting)
        sites = tree.add_scaled(heard.site, share, heard.waiting)
        base = tree.add(state.prior, sites)
        factors = renewed(base, state.factors, own.factors)
        posterior = product(base, factors, own)
        proper = bool(gaussian.is_proper(posterior)) and (first or jump(state.trusted, posterior) <= _FARTHEST)
        was_back = bool(state.back)
        good = state.version if not first and not was_back and float(improper) == 0 else state.good
        for_a_cavity = float(improper) > 0 and not was_back and int(state.retreats) < _RETREATS
        back = not proper or for_a_cavity
        change = changes(state.posterior, posterior)
        pace = change.amax() / state.damping
        everybody = float(aggregate.improper.weight) == float(state.population)  # cohorts' changes are not comparable
        worse = everybody and int(state.version) >= _SETTLED and not bool(pace < state.pace)
        if was_back:
            damping = state.damping
        else:
            damping = state.damping * (0.5 if back or worse else _RECOVERY)
        return Server(
            state.prior,
            factors,
            share,
            posterior,
            state.trusted if back else posterior,
            state.version + 1,
            good,
            torch.tensor(back, device=damping.device),
            damping.clamp(min=min(_LEAST_DAMPING, most), max=most),
            change,
            pace,
            state.retreats + int(for_a_cavity),
            improper,
            state.population,
            heard,
        )

    return Algorithm(
        init=init,
        outbox=lambda server: Outbox(
            server.posterior, server.share, server.version, server.good, server.back, server.damping
        ),
        client=client,
        server=server,
        model=lambda inbox, state: _cavity(inbox, state)._asdict(),
        prepare=prepare,
        local=where_training_starts(prior),
        told=lambda state: state.told,
    )


def _cavity(inbox: Outbox, state: State) -> Natural:
    return tree.subtract(inbox.posterior, _where(state.told.waiting > 0, inbox.share, state.told.site))


def _reply(told: Told, before: State, after: State, improper: Tensor, failed: Tensor) -> Reply:
    change = told.site.precision - before.told.site.precision
    info = {"improper": improper, "failed": failed, "moved": change.abs().amax(-1)}
    return Reply(Message(Mean(improper, torch.ones_like(improper))), after, info)


def _projected(project: Projection, cavity: Natural, data: Any, key: Tensor) -> Natural:
    """The site that makes q the projection of cavity times factor."""
    projected = project(gaussian.moments(cavity), data, key)
    return tree.subtract(gaussian.natural(projected.tilted), gaussian.natural(projected.reference))


def _where(condition: Tensor, first: Tree, second: Tree) -> Tree:
    return tree.map(lambda a, b: torch.where(_along(condition, a), a, b), first, second)


def _along(condition: Tensor, leaf: Tensor) -> Tensor:
    return condition.reshape(condition.shape + (1,) * (leaf.ndim - condition.ndim))
