"""The exact posterior of the processes shared by units, from the sum of the units' sites."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.algorithms.fedavg import LEARNS
from fedtorch.federation.algorithms.multi_output_gp._steps import AdamMoments, UnitSteps, adam, no_moments, row_draws
from fedtorch.federation.algorithms.multi_output_gp.stacked import MOMENTS, Contribution, StackedGP
from fedtorch.federation.exchanges.exchange import Mean
from fedtorch.federation.posterior import Posterior
from fedtorch.federation.solvers.prediction import Rowwise
from fedtorch.federation.told import Averages, Told
from fedtorch.federation.turn import Turn
from fedtorch.learns import tells
from fedtorch.models.gaussian import pack, unpack
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.models.gaussian_process import ConvolvedGP


@tells(LEARNS)
class UnitMessage(NamedTuple):
    """A unit's message of a round."""

    gradient: Mean  # of the unit's part of the bound with respect to the shared hyperparameters, by name


class UnitState(NamedTuple):
    """A unit's state; leaves `(K, ...)`."""

    own: dict[str, Tensor]  # the unit's own hyperparameters and scale
    moments: AdamMoments
    told: Contribution


class FedMGPServer(NamedTuple):
    """The server's state."""

    shared: dict[str, Tensor]  # θ
    told_at: dict[str, Tensor]  # θ at which the units last computed their sites
    units: Tensor  # () number of units in the posterior
    mean: Tensor  # (P,) mean of q(t), g = basis · t
    root: Tensor  # (P (P + 1) / 2,) lower root of the covariance of q(t)
    moments: AdamMoments
    own_moments: Tensor  # ((D + 1) (D + 2) / 2,) sum over units of the moments of their own parameters
    bound: Tensor  # () bound of the marginal likelihood, exact for Gaussian noise when all units have answered
    total: Tree = None  # `Contribution`, the sum over all units, float64


class _Outbox(NamedTuple):
    """Broadcast of the server."""

    shared: dict[str, Tensor]
    told_at: dict[str, Tensor]
    mean: Tensor
    root: Tensor
    own_moments: Tensor  # ((D + 1) (D + 2) / 2,) sum over units of the moments of their own parameters
    units: Tensor  # () number of units in the posterior, 0 before the first round


def fedmgp(
    module: ConvolvedGP,
    *,
    steps: int = 5,
    lr: float = 0.1,
    server_lr: float = 0.1,
    batch_size: int | None = None,
    site_batch_size: int | None = None,
    damping: float | None = None,
    exact_units: bool = False,
    accept_disclosure: bool = False,
) -> Algorithm:
    """Build a multi-output Gaussian process over units that keep their data.

    Rows are (x `(d,)`, y), followed by further fields of the likelihood.

    `Federation.client_module(k)` is the unit's `ConvolvedGP` with its posterior, and has observed the unit's rows where
    their residual is kept whole: call it for a `MultivariateNormal` of f, its `predict` for outputs. `evaluate`
    predicts from what units share. `FedMGPServer.bound` is the bound of the marginal likelihood at the hyperparameters
    with which the units last told their sites, and those make the predictions.

    Args:
        module: of one unit, no batch shape; in float64 unless the data are easy. A unit's own parameters start from
            its own data, its weights too (`ConvolvedGP.initial_weights`) unless they are frozen or have a prior.
        steps: Adam steps on a unit's own hyperparameters in each exchange, at fixed q.
        lr: learning rate of these steps.
        server_lr: of the server's Adam step on the shared hyperparameters, once an exchange; 0 keeps them.
        batch_size: rows of a hyperparameter step, drawn anew for each; default: all.
        site_batch_size: rows used to estimate a unit's site in each exchange: stochastic natural gradients, for large
            units; needs damping below 1.
        damping: fraction of the way from the old site to the new one; default: 1 for Gaussian noise, else 0.5.
        exact_units: whether a unit's residual covariance is kept whole, in O(N³); for Gaussian noise.
        accept_disclosure: whether units with no more rows than inducing values may take part without a warning.

    Shapes: server state is `FedMGPServer`, of which the outbox is a part; client state is `UnitState`, `(K, ...)`.

    Raises:
        ValueError: a setting out of range, a module with a batch shape, or rows that do not fit it.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gaussian_process import ConvolvedGP
        >>> x = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None]
        >>> noise = 0.1 * ft.random.normal(ft.random.key(0), (3, 40), torch.float64)
        >>> data = ft.data.from_tensors([(x, a * (6 * x[:, 0]).sin() + e) for a, e in zip((1.0, 2.0, -1.0), noise)])
        >>> algorithm = ft.fedmgp(ConvolvedGP(torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]))
        >>> run = ft.run(algorithm, ft.InProcess(data), rounds=20)
        >>> 20 < float(run.server.bound) < 110
        True
    """
    gp = StackedGP(module, exact_units)
    damping = (1.0 if gp.gaussian else 0.5) if damping is None else damping
    work = UnitSteps(steps, lr, batch_size, site_batch_size, damping).checked(server_lr, gp.exact_units)
    return Algorithm(
        init=partial(_init, gp=gp),
        outbox=partial(_outbox, gp=gp),
        client=partial(_client, gp=gp, work=work),
        server=partial(_server, gp=gp, lr=server_lr),
        model=partial(_model, gp=gp),
        prepare=partial(_prepare, gp=gp, accept_disclosure=accept_disclosure),
        told=Told(lambda state: state.told, Averages.CONVEX),
        settings={"algorithm": "fedmgp", "fixed": gp.fixed, "server_lr": server_lr, "exact_units": exact_units}
        | work._asdict(),
        start=gp.start(),
        predict=Rowwise(gp.predict),
        module=gp.module,
        posterior=_Observed(gp.exact_units),
    )


@dataclass(frozen=True)
class _Observed(Posterior):
    """A unit's process given its own rows as well as q(t)."""

    exact_units: bool

    def finish(self, module: Any, rows: Tree) -> None:
        """Condition a unit's module on its own rows (x, y, …)."""
        x, y = tree.to(rows[:2], module.inducing.device)
        module.observe(x, y, exact_units=self.exact_units)


def _init(parameters: Tree, clients: int, *, gp: StackedGP) -> tuple[FedMGPServer, UnitState]:
    """Start with the prior N(0, I) as q(t), before any unit has sent a site."""
    shared = {name: parameters[name] for name in gp.shared}
    unit = {name: parameters.get(name, gp.values[name]).clone() for name in gp.own}
    like, zero = gp.values["posterior_mean"], torch.zeros((), dtype=torch.float64)
    precision = pack(like.new_zeros(len(like), len(like)))
    own_moments = pack(torch.zeros_like(gp.values[MOMENTS]))
    contribution = Contribution(precision, torch.zeros_like(like), zero.to(like), own_moments, zero.to(like))
    server = FedMGPServer(
        shared=shared,
        told_at=shared,
        units=zero,
        mean=torch.zeros_like(like, dtype=torch.float64),
        root=pack(torch.eye(len(like), dtype=torch.float64)),
        moments=no_moments(shared),
        own_moments=own_moments.double(),
        bound=zero,
    )
    return server, UnitState(unit, no_moments({name: unit[name] for name in gp.trained}), contribution)


def _outbox(server: FedMGPServer, *, gp: StackedGP) -> _Outbox:
    """Return the hyperparameters, and q(t) in the units' precision."""
    like = gp.values["posterior_mean"].dtype
    sums = (server.mean, server.root, server.own_moments, server.units)
    return _Outbox(server.shared, server.told_at, *(value.to(like) for value in sums))


def _client(inbox: _Outbox, state: UnitState, data: Any, turn: Turn, *, gp: StackedGP, work: UnitSteps) -> Reply:
    """Compute the units' steps, gradients and sites, in chunks of units."""
    return gp.work(_part, work, turn, data, inbox, state)


def _server(state: FedMGPServer, aggregate: UnitMessage, key: Tensor, *, gp: StackedGP, lr: float) -> FedMGPServer:
    """Update q(t) from the sum of the sites, and step the shared hyperparameters at the q that was broadcast."""
    return gp.at_first_go(partial(_server_step, gp=gp.at(state.mean), lr=lr), state, aggregate)


def _server_step(state: FedMGPServer, aggregate: UnitMessage, *, gp: StackedGP, lr: float) -> FedMGPServer:
    mean, root, bound = gp.combine(state.total)
    shared, moments = state.shared, state.moments
    if lr > 0 and shared:
        any_unit = state.units > 0
        gradient = tree.scale(aggregate.gradient.value, state.units)
        gradient = tree.add(gradient, gp.shared_gradient(shared, state.mean, unpack(state.root).tril()))
        shared, moments = adam(shared, gradient, moments, lr, any_unit)
        mean, root = tree.where(any_unit, gp.carry(mean, root, state.shared, shared), (mean, root))
    new = state._replace(mean=mean, root=pack(root), bound=bound, units=state.total.units)
    new = new._replace(own_moments=state.total.own_moments)
    return new._replace(shared=shared, told_at=state.shared, moments=moments)


def _model(inbox: _Outbox, state: UnitState, *, gp: StackedGP) -> dict[str, Tensor]:
    """Return the tensors of each unit's `ConvolvedGP`."""
    once = _once(inbox)
    same = {**_posterior(once, gp.at(once.mean)), MOMENTS: unpack(once.own_moments)}
    everybody = {name: value.expand(len(inbox.mean), *value.shape[1:]) for name, value in same.items()}
    return {**inbox.told_at, **state.own, **everybody}


def _prepare(data: Any, *, gp: StackedGP, accept_disclosure: bool) -> Any:
    """Check the rows; warn about units whose message discloses their outputs."""
    gp.at(data.mask).check(data)
    size = gp.module.points
    few = (data.count <= size).nonzero()[:, 0]
    if len(few) and not accept_disclosure:
        warnings.warn(
            f"{len(few)} units have no more rows than the {size} inducing values: whoever reads such a unit's "
            "message alone learns its outputs. Sum the messages by secure aggregation, take fewer inducing "
            "inputs, or pass accept_disclosure=True",
            stacklevel=2,
        )
    return data


def _part(inbox: _Outbox, state: UnitState, data: Any, key: Tensor, *, gp: StackedGP, work: UnitSteps) -> Reply:
    x, y, *extra = data.batch
    mask, once = data.mask.to(y.dtype), _once(inbox)
    posterior = _posterior(once, gp)
    received, draw = {**once.shared, **posterior}, row_draws(data, key)
    unit = state.own
    # Units start twice: from their own outputs, and, before their first step, from the shared posterior of the curves.
    stepped = state.moments.steps > 0
    if not bool(stepped.all()):
        initial = gp.initial_units(received, (x, y, tuple(extra)), mask, work.steps > 0)
        unit = tree.where(stepped, unit, initial)
    scales = {name: unit[name] for name in gp.scales}

    def gradient(step: int, trained: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return gp.gradient(received, {**scales, **trained}, gp.trained, *draw(work.batch_size, step))

    trained, moments, _ = work.ascend(gradient, {n: unit[n] for n in gp.trained}, state.moments, once.units > 0)
    unit = {**unit, **trained}
    bound, of_shared = gp.gradient({**unit, **posterior}, inbox.shared, gp.shared, *draw(work.batch_size, work.steps))
    site = gp.site({**received, **unit}, *draw(work.site_batch_size, work.steps + 1))
    share = torch.where(state.told.units > 0, work.damping, 1.0).to(y.dtype)
    contribution = tree.add(tree.scale(state.told, 1 - share), tree.scale(site, share))
    info = {"loss": -bound / data.count.clamp(min=1)}
    message = UnitMessage(Mean(of_shared, torch.ones_like(data.count)))
    return Reply(message, UnitState(unit, moments, contribution), info)


def _posterior(inbox: _Outbox, gp: StackedGP) -> dict[str, Tensor]:
    """Return q(t) and its basis, by the names of the module's buffers."""
    return gp.posterior(inbox.shared, inbox.mean, unpack(inbox.root).tril())


def _once(inbox: Tree) -> Tree:
    """Shrink leaves that are one expanded value to `(1, ...)`, so that results that depend only on them are computed
    once.
    """
    shared = all(len(leaf) > 1 and leaf.stride(0) == 0 for leaf in tree.leaves(inbox))
    return tree.take(inbox, slice(0, 1)) if shared else inbox
