r"""Expectation propagation: the posterior of what all clients share, by sums of normal sites.

The posterior of the shared parameters φ is p(φ) ∏_k f_k(φ), where f_k(φ) = ∫ p(y_k | θ_k) p(θ_k | φ) dθ_k needs client
k's data. Client k stands for f_k by a site q_k, a normal density's natural parameters (r_k, Q_k); the server keeps
q(φ) = p(φ) ∏ q_k(φ), whose parameters are sums. In a round, with damping δ,

.. math::
    \text{cavity}_k = q / q_k, \qquad
    q_k \leftarrow q_k^{1-\delta} \bigl(\mathrm{proj}[\text{cavity}_k f_k] / \text{cavity}_k\bigr)^\delta ,

where proj is the normal density of equal mean and covariance, found by `project`. A site may be indefinite, and most
sites of a converged hierarchical model are; q and the cavities must be densities.

The first round is a summed one: clients tell a summary, from which the server makes a first estimate; each client
starts with an equal share of it, so that the first cavities are neither the bare prior nor narrow. Printed from zero
sites (Algorithm 3), the method breaks in its first step. Whoever joins later starts from a zero site.

Backtracking. The sites at which q and all cavities are densities form a convex set, which the start lies in. When q or
a client's cavity is none, every client goes half the way back to its site of the last round that was good, until the
server's q and all cavities are densities again; then δ is half of what it was. It is halved, too, where changes of q
do not shrink, and recovers in good rounds. Where a cavity is still none after some retreats, as with few clients of
very different sizes, that client keeps its site, and the report says so.

Hyperpriors that are not normal are factors of one coordinate each; the server keeps a site for each and renews it as a
client would (`Factor`).

Source: Yue, Kontar, Estrada Gómez (2022), "Federated data analytics: a study on linear models", Algorithms 2 and 3;
Vehtari et al. (2020), "Expectation propagation as a way of life".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply, identity
from fedtorch.federation.coordinator import Round, run
from fedtorch.federation.exchange import Increment, Mean
from fedtorch.federation.population import Population
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import Model
from fedtorch.models.hyperpriors import Prior, renewed
from fedtorch.models.projections import Projection, Start
from fedtorch.tree import Tree

__all__ = ["Fit", "Outbox", "RoundReport", "Server", "State", "Told", "devices", "ep", "fit", "posterior"]


_FARTHEST = 5.0  # sds that a mean of q may move in a round
_RETREATS = 5  # for the sake of cavities; from then on clients without one keep their sites
_SETTLED = 4  # rounds after which changes should shrink
_RECOVERY = 2**0.5  # of the damping, in a good round
_LEAST_DAMPING = 1 / 64
_LARGEST = 10  # change of a last round, in tolerances


class Told(NamedTuple):
    """All that a client has told, or the sum over clients."""

    site: Natural
    summary: Tree
    waiting: Tensor  # 1 while its site is its share of the first estimate


class State(NamedTuple):
    """A client's own; leaves `(K, ...)`."""

    sent: Told
    before: Natural  # its site before its last step
    good: Natural  # its site in the last round known to be good
    stepped: Tensor  # version of q that its last step started from


class Server(NamedTuple):
    """What the server keeps."""

    prior: Natural  # the normal part of p(φ)
    factors: Natural  # sites of the other part, (F,) each
    heard: Told  # the sum of all `sent`, float64
    share: Natural  # of the first estimate, of each client that waits
    posterior: Natural  # q(φ)
    trusted: Natural  # the last q that clients need not go back from
    version: Tensor  # rounds that have been aggregated
    good: Tensor  # the last version of q of which all cavities were densities
    back: Tensor  # whether clients must go back
    damping: Tensor
    change: Tensor  # (2,) of the last round: max |Δmean| / sd, max |Δsd| / sd
    pace: Tensor  # the greater of them, divided by the damping
    retreats: Tensor  # rounds gone back for the sake of a cavity
    improper: Tensor  # the share of clients whose cavity was no density
    population: Tensor  # number of clients


class Outbox(NamedTuple):
    """What the server sends out."""

    posterior: Natural
    share: Natural
    version: Tensor
    good: Tensor
    back: Tensor
    damping: Tensor


class Message(NamedTuple):
    """What a client tells the server."""

    told: Increment
    improper: Mean  # 1 if its cavity is no density


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
            `fedtorch.models.projections` and `fedtorch.models.hierarchical`.
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
    prior = _prior(prior)
    begin = _from_the_prior(project) if start is None else start
    most = damping

    def init(parameters: Tree, clients: int) -> tuple[Server, State]:
        own = prior.replaced(Natural(parameters["shift"], parameters["precision"]))
        nothing = tree.zeros_like(own.normal)
        zero, minus = torch.zeros((), dtype=torch.float64), torch.tensor(-1)
        told = Told(nothing, summary_like(), zero)
        start = _product(own.normal, own.sites, own)
        server = Server(
            own.normal, own.sites, told, nothing, start, start, torch.tensor(0), minus, torch.tensor(False),
            torch.tensor(most, dtype=torch.float64), torch.full((2,), torch.inf, dtype=torch.float64), zero + torch.inf,
            torch.tensor(0), zero, torch.tensor(clients),
        )  # fmt: skip
        return server, State(told, nothing, nothing, minus)

    def summary_like() -> Tree:
        """Zeros in the structure of one client's summary."""
        return begin.summary(None, prior)

    def client(inbox: Outbox, state: State, data: Any, key: Tensor) -> Reply:
        none = torch.zeros_like(state.sent.waiting)
        if bool((inbox.version == 0).all()) and len(none):
            told = state.sent._replace(summary=begin.summary(data, prior), waiting=none + 1)
            return _reply(told, state, State(told, *state[1:]), none, none)
        site = _where(state.sent.waiting > 0, inbox.share, state.sent.site)
        good = _where(inbox.good >= state.stepped, state.before, state.good)
        good = _where(state.stepped < 0, site, good)
        if bool(inbox.back.any()):
            new = _where(state.stepped >= 0, tree.scale(tree.add(site, good), 0.5), state.sent.site)
            told = state.sent._replace(site=new)
            return _reply(told, state, State(told, state.before, state.good, state.stepped), none, none)
        cavity = tree.subtract(inbox.posterior, site)
        proper = gaussian.is_proper(cavity)
        target = _projected(project, _where(proper, cavity, inbox.posterior), data, key)
        done = proper & target.shift.isfinite().all(-1) & target.precision.isfinite().all(-1)
        step = tree.scale(tree.subtract(target, site), inbox.damping)
        told = Told(
            _where(done, tree.add(site, step), state.sent.site),
            state.sent.summary,
            torch.where(done, none, state.sent.waiting),
        )
        stepped = torch.where(done, inbox.version, state.stepped)
        new = State(told, _where(done, site, state.before), _where(done, good, state.good), stepped)
        return _reply(told, state, new, (~proper).to(none.dtype), (proper & ~done).to(none.dtype))

    def server(state: Server, aggregate: Message, key: Tensor) -> Server:
        heard = tree.add(state.heard, aggregate.told.value)
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
        posterior = _product(base, factors, own)
        proper = bool(gaussian.is_proper(posterior)) and (first or _jump(state.trusted, posterior) <= _FARTHEST)
        was_back = bool(state.back)
        good = state.version if not first and not was_back and float(improper) == 0 else state.good
        for_a_cavity = float(improper) > 0 and not was_back and int(state.retreats) < _RETREATS
        back = not proper or for_a_cavity
        change = _change(state.posterior, posterior)
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
            heard,
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
        local=_where_training_starts(prior),
        sent=lambda state: Increment(state.sent),
        recount=lambda server, told: server._replace(heard=told.value),
    )


@dataclass(frozen=True)
class RoundReport:
    """What a round has moved."""

    round: int
    mean_change: float  # the greatest change of a mean of q, in its sd; NaN where q was no density
    sd_change: float  # the greatest relative change of an sd of q
    damping: float  # of the round's steps
    remaining: float  # what the changes, going on to shrink as they last did, still add up to, in sd
    improper: float  # the share of clients whose cavity was no density
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Fit:
    """A finished run.

    Attributes:
        posterior: q(φ).
        converged: whether the last changes were below the tolerance.
        rounds: one report each.
        last: the last `Round`, with the clients' sites.
    """

    posterior: MultivariateNormal
    converged: bool
    rounds: tuple[RoundReport, ...]
    last: Round


def fit(
    algorithm: Algorithm,
    population: Population,
    *,
    tolerance: float = 0.01,
    rounds: int = 50,
    patience: int = 1,
    **arguments: Any,
) -> Fit:
    """Runs `ep` until q stands still.

    Args:
        algorithm: made by `ep`.
        population: who computes.
        tolerance: on what the coming rounds would still add up to, in sd, if the changes of means (in sd) and sds
            (relative) went on to shrink as they last did; the last changes must be below ten times as much.
        rounds: at most so many, the summed round included; without convergence a `RuntimeWarning` says so.
        patience: how many rounds in a row must be below the tolerance; with a cohort of M clients, some K / M.
        **arguments: of `ft.run`: seed, cohort, faults, parameters, start.

    Raises:
        RuntimeError: after the last round q is no density, or no cavity is, as with an improper prior and one client.
    """
    reports: list[RoundReport] = []
    still, damping, change, last = 0, math.nan, math.nan, None
    for last in run(algorithm, population, rounds=rounds, **arguments):
        server = last.server
        mean, sd = server.change.tolist()
        before, change = change, max(mean, sd) / damping
        remaining = math.inf if bool(server.back) else _remaining(before, change)
        reports.append(
            RoundReport(
                last.number, mean, sd, damping, remaining, float(server.improper), last.bytes_up, last.bytes_down
            )
        )
        near = remaining <= tolerance and change <= _LARGEST * tolerance
        still = still + 1 if near or (change <= tolerance / _LARGEST and remaining < math.inf) else 0
        damping = float(server.damping)
        if still == patience:
            break
    if last is None:
        raise ValueError(f"Expected at least one round, but got rounds={rounds}")
    if not bool(gaussian.is_proper(last.server.posterior)):
        raise RuntimeError(
            f"Expected the posterior to be a density after {last.number} rounds, but got an indefinite precision; use "
            "a proper prior, more clients, or less damping="
        )
    if float(last.server.improper) == 1:
        raise RuntimeError(
            "Expected a client whose cavity is a density, but got none: what the prior and the others know of what "
            "is shared is not enough; use a proper prior, or more clients"
        )
    if still < patience:
        warnings.warn(
            f"Not converged after {last.number} rounds: the last moved a mean by {reports[-1].mean_change:.2g} sd and "
            f"an sd by {reports[-1].sd_change:.2g} of itself; allow more rounds or less damping=",
            RuntimeWarning,
            stacklevel=2,
        )
    return Fit(posterior(last.server), still >= patience, tuple(reports), last)


def _remaining(before: float, change: float) -> float:
    """The sum of the changes to come, if each is the same fraction of the one before."""
    return change * change / (before - change) if before > change else math.inf


def posterior(server: Server) -> MultivariateNormal:
    """q(φ) of a server's state.

    Raises:
        ValueError: it is no density yet.
    """
    return gaussian.distribution(server.posterior)


def devices(round: Round, algorithm: Algorithm, model: Model, data: FederatedData) -> DevicePosterior:
    """Each device's own posterior given all devices' rows (section 4.2.1), made where its rows are.

    Args:
        round: the last one.
        algorithm: made by `ep` from `model`.
        model: a hierarchical model.
        data: the rows that it was run on.
    """

    def own(cavity: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        return model.devices(gaussian.moments(Natural(**cavity)), model.prepare(block))

    return round.clients.evaluate(algorithm.outbox(round.server), data, own)


def _cavity(inbox: Outbox, state: State) -> Natural:
    return tree.subtract(inbox.posterior, _where(state.sent.waiting > 0, inbox.share, state.sent.site))


def _reply(told: Told, before: State, after: State, improper: Tensor, failed: Tensor) -> Reply:
    change = tree.subtract(told, before.sent)
    info = {"improper": improper, "failed": failed, "moved": change.site.precision.abs().amax(-1)}
    return Reply(Message(Increment(change), Mean(improper, torch.ones_like(improper))), after, info)


def _projected(project: Projection, cavity: Natural, data: Any, key: Tensor) -> Natural:
    """The site that makes q the projection of cavity times factor."""
    projected = project(gaussian.moments(cavity), data, key)
    return tree.subtract(gaussian.natural(projected.tilted), gaussian.natural(projected.reference))


def _product(base: Natural, factors: Natural, prior: Prior) -> Natural:
    """`base` times the sites of the prior's factors."""
    place = torch.tensor([factor.coordinate for factor in prior.factors], dtype=torch.int64, device=base.shift.device)
    diagonal = torch.zeros_like(base.shift).index_add(0, place, factors.precision)
    return Natural(base.shift.index_add(0, place, factors.shift), base.precision + gaussian.pack(torch.diag(diagonal)))


def _jump(before: Natural, after: Natural) -> float:
    """The greatest change of a mean in the sd that it had; 0 where it had none."""
    old, new = gaussian.moments(before), gaussian.moments(after)
    return float(((new.mean - old.mean).abs() / old.covariance.diagonal().sqrt()).amax().nan_to_num(0.0))


def _change(before: Natural, after: Natural) -> Tensor:
    """Changes of the means, in sd, and of the sds; NaN where one is no density."""
    old, new = gaussian.moments(before), gaussian.moments(after)
    sd, old_sd = (m.covariance.diagonal(dim1=-2, dim2=-1).sqrt() for m in (new, old))
    return torch.stack([((new.mean - old.mean).abs() / sd).amax(), ((sd - old_sd).abs() / sd).amax()])


def _where(condition: Tensor, first: Tree, second: Tree) -> Tree:
    return tree.map(lambda a, b: torch.where(_along(condition, a), a, b), first, second)


def _along(condition: Tensor, leaf: Tensor) -> Tensor:
    return condition.reshape(condition.shape + (1,) * (leaf.ndim - condition.ndim))


def _prior(prior: Prior | Natural | MultivariateNormal) -> Prior:
    if isinstance(prior, MultivariateNormal):
        if prior.batch_shape:
            raise ValueError(f"Expected one normal prior, but got a batch of {tuple(prior.batch_shape)}")
        prior = gaussian.natural(Moments(prior.mean.to(torch.float64), prior.covariance_matrix.to(torch.float64)))
    if isinstance(prior, Natural):
        prior = Prior(prior, ())
    if not isinstance(prior, Prior):
        raise TypeError(f"Expected a Prior, a Natural or a MultivariateNormal, but got {type(prior).__name__}")
    return Prior(tree.to(prior.normal, torch.float64), prior.factors)


def _from_the_prior(project: Projection) -> Start:
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


def _where_training_starts(prior: Prior) -> LocalSolver:
    """The prior as the parameters that a run starts from; there is no solver of a client's own loss."""

    def refuse(start: Any, state: Any, data: Any = None, quadratic: Any = None, key: Any = None) -> Any:
        raise TypeError("Expected an algorithm that predicts with parameters; use the model's devices and predictive")

    return LocalSolver(
        solve=refuse,
        parameters=prior.normal._asdict(),
        init=lambda parameters: None,
        predict=refuse,
        tensors=lambda parameters, state: parameters,
        prepare=identity,
        module=None,
    )
