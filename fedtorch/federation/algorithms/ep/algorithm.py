"""The client's and the server's rounds of expectation propagation; the package describes the method."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.algorithms.ep import _damping as pacing
from fedtorch.federation.algorithms.ep._server import EPServer as EPServer
from fedtorch.federation.algorithms.ep._start import Completed, Factors, completed
from fedtorch.federation.algorithms.ep.estimates import estimates
from fedtorch.federation.algorithms.ep.hierarchical import Hierarchical, Shared
from fedtorch.federation.exchanges.exchange import Mean
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Natural
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.hyperpriors import Prior, renewed
from fedtorch.models.hierarchical.projections import Projection
from fedtorch.tree import Tree


@tells(
    Learns(
        "the likelihood of a client near the posterior: of one row, its features and response exactly",
        helps="sums under masks, Policy(minimum=…)",
    )
)
class _Told(NamedTuple):
    """All that a client has sent, or the sum over clients."""

    site: Natural
    summary: Tree
    waiting: Tensor  # 1 while its site is its share of the first estimate


class _State(NamedTuple):
    """State of a client; leaves `(K, ...)`."""

    told: _Told
    before: Natural  # site before the last step
    good: Natural  # site in the last round known to be good
    stepped: Tensor  # version of q that its last step started from, −1 before the first


class _Outbox(NamedTuple):
    """Broadcast of the server."""

    posterior: Natural
    share: Natural
    version: Tensor
    good: Tensor  # as in `Pace`, like the next two
    back: Tensor
    damping: Tensor


@tells(Learns("whether a step of the client was left out"))
class _Message(NamedTuple):
    """A client's diagnostics for the server."""

    improper: Mean  # 1 if its cavity is improper


def ep(model: Model | Factors, *, damping: float = 1.0) -> Algorithm:
    """Build expectation propagation.

    Args:
        model: a `hierarchical.Model`; or your own `Factors(project, prior)`, such as those of a Pyro model.
        damping: δ of the undisturbed rounds, in (0, 1].

    A run's history has every round's `Moved`, on which the stopping rule `settled` acts; `posterior`, `devices` and
    `corrected` return the results.

    Shapes: server state is `EPServer`; client state has its site, `(K, ...)`. A run's `parameters` are the prior's
    normal part, so that a posterior of one federation can be the prior of the next. `Algorithm.model` gives the
    clients' cavities, from which `hierarchical.Model.devices` makes their own posteriors.

    Raises:
        ValueError: `damping` is not in (0, 1].

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import posterior, settled
        >>> from fedtorch.federation.algorithms.ep.fitting import converged
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)])
        >>> model = hierarchical.linear(hierarchical.normal(1), noise=0.1)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
        >>> converged(run), round(float(posterior(run).mean[0]), 1)  # of μ ~ N(0, 1), and four devices around 2
        (True, 1.6)
    """
    if not 0 < damping <= 1:
        raise ValueError(f"Expected damping in (0, 1], but got {damping}")
    whole, named = completed(model), isinstance(model, Model) and model.hierarchy.coefficients
    return Algorithm(
        init=partial(_init, model=whole, damping=damping),
        outbox=_outbox,
        client=partial(_client, model=whole),
        server=partial(_server, model=whole, damping=damping),
        model=lambda inbox, state: tree.subtract(inbox.posterior, _site(inbox, state))._asdict(),
        prepare=model.prepare,
        told=Told(lambda state: state.told),
        report=lambda server: server.moved._asdict(),
        settings={"algorithm": "ep", "model": model, "damping": damping},
        posterior=(Hierarchical if named else Shared)(estimates, model),
        start=whole.prior.normal._asdict(),
    )


def _init(parameters: Tree, clients: int, *, model: Completed, damping: float) -> tuple[EPServer, _State]:
    """Start with the prior as q, and no site at any client."""
    prior = model.prior.replaced(Natural(parameters["shift"], parameters["precision"]))
    nothing, posterior = tree.zeros_like(prior.normal), _product(prior.normal, prior.sites, prior)
    pace, moved = pacing.begun(damping)
    server = EPServer(
        prior=prior.normal,
        prior_sites=prior.sites,
        share=nothing,
        posterior=posterior,
        trusted=posterior,
        version=torch.tensor(0),
        pace=pace,
        moved=moved,
        population=torch.tensor(clients),
    )
    contribution = _Told(nothing, model.start.summary(None, model.prior), torch.zeros((), dtype=torch.float64))
    return server, _State(contribution, nothing, nothing, torch.tensor(-1))


def _outbox(server: EPServer) -> _Outbox:
    """Return q, and the settings of the next round."""
    pace = server.pace
    return _Outbox(server.posterior, server.share, server.version, pace.good, pace.back, pace.damping)


def _client(inbox: _Outbox, state: _State, data: Any, turn: Turn, *, model: Completed) -> Reply:
    """Send a summary, retreat, or take a step, depending on the round."""
    none = torch.zeros_like(state.told.waiting)
    first, back = torch.stack([(inbox.version == 0).all(), inbox.back.any()]).tolist()
    if first and len(none):
        prior = model.prior.replaced(tree.to(model.prior.normal, none.device))
        contribution = state.told._replace(summary=model.start.summary(data, prior), waiting=none + 1)
        return _reply(state, state._replace(told=contribution), none, none)
    site = _site(inbox, state)
    good = pacing.last_good(site, state.before, state.good, state.stepped, inbox.good)
    if back:
        before = tree.where(state.stepped >= 0, pacing.halfway(site, good), state.told.site)
        return _reply(state, state._replace(told=state.told._replace(site=before)), none, none)
    return _stepped(inbox, state, site, good, _target(inbox, site, model.project, data, turn.key))


def _server(state: EPServer, aggregate: _Message, key: Tensor, *, model: Completed, damping: float) -> EPServer:
    """Update q from the prior and the sum of the sites, and plan the next round; the first round makes the shares."""
    version, total = int(state.version), state.total
    prior, share = model.prior.replaced(state.prior), state.share
    if version == 0:
        share = tree.scale(model.start.estimate(total.summary, total.waiting, prior), 1 / total.waiting)
    base = tree.add(state.prior, tree.add_scaled(total.site, share, total.waiting))
    prior_sites = renewed(base, state.prior_sites, prior.factors)
    posterior = _product(base, prior_sites, prior)
    near = (state.population == 1) | (state.version == 0) | pacing.is_near(state.trusted, posterior)
    pace, moved = pacing.update(
        state.pace,
        pacing.changes(state.posterior, posterior),
        version=version,
        proper=gaussian.is_proper(posterior) & near,
        improper=aggregate.improper.value,
        everybody=aggregate.improper.weight == state.population,
        most=damping,
    )
    return state._replace(
        prior_sites=prior_sites,
        share=share,
        posterior=posterior,
        trusted=tree.where(pace.back, state.trusted, posterior),
        version=state.version + 1,
        pace=pace,
        moved=moved,
    )


def _site(inbox: _Outbox, state: _State) -> Natural:
    """Return the clients' sites in the server's sum: shares of the first estimate until their first step."""
    return tree.where(state.told.waiting > 0, inbox.share, state.told.site)


def _target(inbox: _Outbox, site: Natural, project: Projection, data: Any, key: Tensor) -> tuple[Tensor, Natural]:
    """Return (whether cavities are densities, the sites that make q the projections of cavities times factors)."""
    cavity = tree.subtract(inbox.posterior, site)
    proper = gaussian.is_proper(cavity)
    projected = project(gaussian.moments(tree.where(proper, cavity, inbox.posterior)), data, key)
    return proper, tree.subtract(gaussian.natural(projected.tilted), gaussian.natural(projected.reference))


def _stepped(inbox: _Outbox, state: _State, site: Natural, good: Natural, target: tuple[Tensor, Natural]) -> Reply:
    """Return a step towards the target; clients without a cavity or without moments keep their site."""
    proper, wanted = target
    done = proper & wanted.shift.isfinite().all(-1) & wanted.precision.isfinite().all(-1)
    step = tree.scale(tree.subtract(wanted, site), inbox.damping)
    contribution = state.told._replace(
        site=tree.where(done, tree.add(site, step), state.told.site), waiting=state.told.waiting.where(~done, 0.0)
    )
    new = _State(
        told=contribution,
        before=tree.where(done, site, state.before),
        good=tree.where(done, good, state.good),
        stepped=torch.where(done, inbox.version, state.stepped),
    )
    return _reply(state, new, (~proper).to(contribution.waiting.dtype), (proper & ~done).to(contribution.waiting.dtype))


def _product(base: Natural, sites: Natural, prior: Prior) -> Natural:
    """Return `base` times the sites of the prior's factors."""
    place = torch.tensor([factor.coordinate for factor in prior.factors], dtype=torch.int64, device=base.shift.device)
    diagonal = torch.zeros_like(base.shift).index_add(0, place, sites.precision)
    return Natural(base.shift.index_add(0, place, sites.shift), base.precision + gaussian.pack(torch.diag(diagonal)))


def _reply(before: _State, after: _State, improper: Tensor, failed: Tensor) -> Reply:
    change = after.told.site.precision - before.told.site.precision
    info = {"improper": improper, "failed": failed, "moved": change.abs().amax(-1)}
    return Reply(_Message(Mean(improper, torch.ones_like(improper))), after, info)
