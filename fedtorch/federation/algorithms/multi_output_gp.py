r"""Federated multi-output Gaussian processes: exact by sums, and by averaging as published.

Units share latent processes g, and each has a likelihood, amplitudes and smoothing widths of its own; see
`fedtorch.models.convolved_gp`. In a round of `fedmgp` a unit hears the shared hyperparameters θ and q(g), and

1. takes `steps` steps up its own part of the bound, E_q[log p(y_m | f_m)], in its own hyperparameters φ_m;
2. tells the gradient of that part with respect to θ at fixed q, and
3. what its outputs say of g, its site: for Gaussian noise exactly B_m = V_m'V_m/σ_m² and a_m = V_m'y_m/σ_m².

The server adds the sites up, and q(g) = N(Λ⁻¹ Σ a_m, Λ⁻¹) with Λ = C_gg⁻¹ + Σ B_m is the posterior that a central
computation gives. At that q the gradient at fixed q is the gradient of the collapsed bound (the envelope theorem), so θ
and φ go up the marginal likelihood of all units. θ moves at fixed q(g), not at fixed whitened values, which would tie
q to the covariance that moves. Only sums are needed, so messages may be masked by secure aggregation.

What moves slowly is a common factor of all units' weights: g has unit variance, so the posterior of g holds each unit's
weight where the others' are. Some tenths of a nat to a few nats are left there when everything else has settled;
predictions hardly change with it. Steps of a tenth start fast, shorter ones (lr=0.03) end higher.

For other likelihoods the site is the natural gradient of E_q[log p(y_m | f_m)], taken with a `damping` below 1:
partitioned variational inference, which for Gaussian noise and no damping is the exact sum.

What leaves a unit: B_m and a_m of a unit with no more rows than there are inducing values determine its outputs up to
a scale; sums over several units do not. `fedmgp` warns of such units.

`fedmgp_average` is the source's Algorithm 2, which averages local optima of (μ, Cholesky factor of M). It is biased: a
unit's local optimum weighs the prior as if the unit were alone.

Source: Chung and Al Kontar (2024), "Federated multi-output Gaussian processes", (13) to (16) and Algorithm 2; Bui et
al. (2018), "Partitioned variational inference"; Khan and Lin (2017) for the natural gradients.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.federation.algorithm import Algorithm, BadClients, Local, LocalSolver, Quadratic, Reply
from fedtorch.federation.algorithms.fedavg import Weight, rows_weight
from fedtorch.federation.algorithms.personal import personal_layers
from fedtorch.federation.exchange import Exchange, Increment, Mean, star
from fedtorch.models import functional
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.models.convolved_gp import ConvolvedGP, Site

__all__ = ["fedmgp", "fedmgp_average"]

_MOST_NUMBERS = 2**20  # rows times inducing values of the units that are worked on together
_BETAS = 0.9, 0.99
_POSTERIOR = ("posterior_mean", "posterior_root")


class Told(NamedTuple):
    """What a unit has told of g, or the sum over units."""

    precision: Tensor  # (P (P + 1) / 2,) lower triangle of B
    shift: Tensor  # (P,) a
    constant: Tensor  # () c
    units: Tensor  # () how many


class Message(NamedTuple):
    """What a unit tells the server."""

    site: Increment  # of its `Told`
    gradient: Mean  # of its part of the bound with respect to the shared hyperparameters, by name


class Moments(NamedTuple):
    """Adam's; leaves `(K, ...)` or of one value."""

    first: Tree
    second: Tree
    steps: Tensor


class State(NamedTuple):
    """A unit's own; leaves `(K, ...)`."""

    own: dict[str, Tensor]  # its hyperparameters and scale
    moments: Moments
    sent: Told
    started: Tensor  # bool: whether `own` comes from its own data


class Server(NamedTuple):
    """What the server keeps."""

    shared: dict[str, Tensor]  # θ
    told_at: dict[str, Tensor]  # θ at which the units last told their sites
    heard: Told  # the sum of all `sent`, float64
    mean: Tensor  # (P,) of q(t), g = basis · t
    root: Tensor  # (P (P + 1) / 2,) lower root of its covariance
    moments: Moments
    bound: Tensor  # () of the marginal likelihood, exact for Gaussian noise when all have answered


class Outbox(NamedTuple):
    """What the server sends out."""

    shared: dict[str, Tensor]
    told_at: dict[str, Tensor]
    mean: Tensor
    root: Tensor
    units: Tensor  # () that have told, 0 before the first round


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
    """A multi-output Gaussian process over units that keep their data; rows are (x `(d,)`, y) and what the likelihood
    wants besides.

    `Federation.client_module(k)` is the unit's `ConvolvedGP` with its posterior: call it for a `MultivariateNormal` of
    f, its `predict` for outputs. `Server.bound` is the bound of the marginal likelihood at the hyperparameters with
    which the units last told their sites, and those make the predictions.

    Args:
        module: of one unit, no batch shape; in float64 unless the data are easy. A unit's own parameters start from
            its own data.
        steps: of Adam on a unit's own hyperparameters in each exchange, at fixed q.
        lr: of these steps.
        server_lr: of the server's Adam step on the shared hyperparameters, once an exchange; 0 keeps them.
        batch_size: rows of a hyperparameter step, drawn anew for each; default: all.
        site_batch_size: rows that a unit's site is estimated from in each exchange: stochastic natural gradients, for
            units too large to pass over; needs damping below 1.
        damping: by which share a site moves to its new value; default: 1 for Gaussian noise, else 0.5.
        exact_units: whether a unit's residual covariance is kept whole, in O(N³); for Gaussian noise.
        accept_disclosure: whether units with no more rows than inducing values may take part without a warning.

    Shapes: server state is `Server`, outbox `Outbox`; client state is `State`, `(K, ...)`.

    Raises:
        ValueError: a setting out of range, a module with a batch shape, or rows that do not fit it.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.convolved_gp import ConvolvedGP
        >>> x = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None]
        >>> noise = 0.1 * ft.random.normal(ft.random.key(0), (3, 40), torch.float64)
        >>> data = ft.data.from_tensors([(x, a * (6 * x[:, 0]).sin() + e) for a, e in zip((1.0, 2.0, -1.0), noise)])
        >>> algorithm = ft.fedmgp(ConvolvedGP(torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]))
        >>> *_, last = ft.run(algorithm, ft.InProcess(data), rounds=20)
        >>> 20 < float(last.server.bound) < 110
        True
    """
    gp = _Stacked(module, exact_units)
    damping = (1.0 if gp.gaussian else 0.5) if damping is None else damping
    _check_settings(steps, lr, server_lr, batch_size, site_batch_size, damping, exact_units)
    size = gp.module.points

    def init(parameters: Tree, clients: int) -> tuple[Server, State]:
        shared = {name: parameters[name] for name in gp.shared}
        own = {name: parameters.get(name, gp.values[name]).clone() for name in gp.own}
        like = gp.values["posterior_mean"]
        nothing = Told(
            like.new_zeros(size * (size + 1) // 2), torch.zeros_like(like), like.new_zeros(()), like.new_zeros(())
        )
        trained = {name: own[name] for name in gp.trained}
        zero = torch.zeros((), dtype=torch.float64)
        server = Server(
            shared,
            shared,
            tree.to(nothing, torch.float64),
            torch.zeros_like(like, dtype=torch.float64),
            _pack(torch.eye(size, dtype=torch.float64)),
            _no_moments(shared),
            zero,
        )
        return server, State(own, _no_moments(trained), nothing, torch.tensor(False))

    def outbox(server: Server) -> Outbox:
        like = gp.values["posterior_mean"].dtype
        return Outbox(
            server.shared, server.told_at, server.mean.to(like), server.root.to(like), server.heard.units.to(like)
        )

    def client(inbox: Outbox, state: State, data: Any, key: Tensor) -> Reply:
        x, y, *extra = data.batch
        mask, every = data.mask.to(y.dtype), inbox.shared
        inbox = _once(inbox)
        posterior = gp.posterior(inbox.shared, inbox.mean, _unpack(inbox.root, size))
        heard = {**inbox.shared, **posterior}

        def rows(size: int | None, number: int) -> tuple[Tree, Tensor, Tensor]:
            return _some_rows((x, y, tuple(extra)), mask, size, random.fold_in(key, number))

        fresh = gp.module.initial_units(y, mask, *extra)
        own = tree.map(lambda old, new: torch.where(_like(state.started, old), old, new), state.own, fresh)
        moments = state.moments
        for step in range(steps):
            gradient = gp.gradient(heard, own, gp.trained, *rows(batch_size, step))[1]
            trained, moments = _adam({n: own[n] for n in gp.trained}, gradient, moments, lr, inbox.units > 0)
            own = {**own, **trained}
        part, gradient = gp.gradient({**own, **posterior}, every, gp.shared, *rows(batch_size, steps))
        new = gp.site({**heard, **own}, *rows(site_batch_size, steps + 1))
        share = torch.where(state.sent.units > 0, damping, 1.0).to(y.dtype)
        sent = tree.add(tree.scale(state.sent, 1 - share), tree.scale(new, share))
        message = Message(Increment(tree.subtract(sent, state.sent)), Mean(gradient, torch.ones_like(data.count)))
        loss = -part / data.count.clamp(min=1)
        return Reply(message, State(own, moments, sent, torch.ones_like(state.started)), {"loss": loss})

    def server(state: Server, aggregate: Message, key: Tensor) -> Server:
        heard = tree.add(state.heard, aggregate.site.value)
        mean, root, bound = gp.combine(heard)
        shared, moments = state.shared, state.moments
        if float(state.heard.units) > 0 and server_lr > 0 and shared:
            gradient = tree.scale(aggregate.gradient.value, float(state.heard.units))
            gradient = tree.add(gradient, gp.shared_gradient(shared, state.mean, _unpack(state.root, size)))
            shared, moments = _adam(shared, gradient, moments, server_lr, torch.tensor(True))
            mean, root = gp.carry(mean, root, state.shared, shared)
        return Server(shared, state.shared, heard, mean, _pack(root), moments, bound)

    def model(inbox: Outbox, state: State) -> dict[str, Tensor]:
        once = _once(inbox)
        posterior = gp.posterior(once.shared, once.mean, _unpack(once.root, size))
        everybody = {name: value.expand(len(inbox.mean), *value.shape[1:]) for name, value in posterior.items()}
        return {**inbox.told_at, **state.own, **everybody}

    def prepare(data: Any) -> Any:
        gp.check(data)
        few = (data.count <= size).nonzero()[:, 0]
        if len(few) and not accept_disclosure:
            warnings.warn(
                f"{len(few)} units have no more rows than the {size} inducing values: whoever reads such a unit's "
                "message alone learns its outputs. Sum the messages by secure aggregation, take fewer inducing "
                "inputs, or pass accept_disclosure=True",
                stacklevel=2,
            )
        return data

    return Algorithm(
        init=init,
        outbox=outbox,
        client=lambda inbox, state, data, key: _in_parts(client, size * data.mask.shape[1], inbox, state, data, key),
        server=server,
        model=model,
        prepare=prepare,
        local=gp.local(),
        sent=lambda state: Increment(state.sent),
        recount=lambda server, told: server._replace(heard=told.value),
    )


def fedmgp_average(
    module: ConvolvedGP,
    *,
    steps: int = 5,
    lr: float = 0.01,
    server_lr: float = 1.0,
    batch_size: int | None = None,
    units: int,
    exchange: Exchange | None = None,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Algorithm 2 of the source: FedAvg on pseudo-gradients of θ = (hyperparameters, μ, Cholesky factor of M).

    Each unit takes Adam steps on its risk (14), −E_q[log p(y_m | f_m)] + p_m KL(q ‖ p), in all parameters; the server
    averages the changes of the shared ones. Kept as the published baseline: `fedmgp` is exact, and faster.

    Args:
        module: of one unit, no batch shape.
        steps: local iterates E in a round.
        lr: of these steps.
        server_lr: the global step η.
        batch_size: rows of a step; default: all.
        units: how many units there are, M: p_m = 1/M.
        exchange: how changes are averaged; default: the weighted mean of `star()`; see `fedtorch.federation.trust`.
        weight: data -> `(K,)` positive weights.
    """
    _check_settings(steps, lr, server_lr, batch_size, None, 1.0, False)
    if units < 1:
        raise ValueError(f"Expected the number of units, but got {units}")
    gp = _Stacked(module, False)
    own_names = [name for name in gp.own if name in gp.trained]
    everything = [*gp.shared, *own_names, *_POSTERIOR]
    scales = [name for name in gp.own if name not in gp.trained]

    def init(parameters: Tree) -> dict[str, Any]:
        moments = _no_moments({name: parameters[name] for name in everything})
        return {"moments": moments, "scales": {n: gp.values[n].clone() for n in scales}, "started": torch.tensor(False)}

    def solve(start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
        return _in_parts(part, gp.module.points * data.mask.shape[1], start, state, data, key, quadratic)

    def part(start: Tree, state: Tree, data: Any, key: Tensor, quadratic: Quadratic | None) -> Local:
        x, y, *extra = data.batch
        mask = data.mask.to(y.dtype)
        fresh = gp.module.initial_units(y, mask, *extra)
        values = {**start, **state["scales"]}
        own = {name: torch.where(_like(state["started"], values[name]), values[name], fresh[name]) for name in gp.own}
        values = {**values, **own}
        moments, active = state["moments"], torch.ones_like(state["started"])
        loss = y.new_zeros(len(y))
        for step in range(steps):
            rows = _some_rows((x, y, tuple(extra)), mask, batch_size, random.fold_in(key, step))
            trained = {name: values[name] for name in everything}
            risk, gradient = gp.gradient({n: values[n] for n in scales}, trained, everything, *rows, units=units)
            if quadratic is not None:
                towards = {n: trained[n] * tree.along(quadratic.precision_of(n), trained[n]) for n in everything}
                pull = tree.subtract({n: quadratic.shift[n] for n in everything}, towards)
                gradient = tree.add(gradient, pull)
            trained, moments = _adam(trained, gradient, moments, lr, active)
            values, loss = {**values, **trained}, loss - risk / data.count.clamp(min=1) / steps
        new = {"moments": moments, "scales": {n: values[n] for n in scales}, "started": active}
        solved = {name: values[name] for name in start}
        return Local(solved, new, torch.full_like(loss, steps * lr), {"loss": loss})

    local = replace(
        gp.local(),
        solve=solve,
        parameters={name: gp.values[name].clone() for name in everything},
        init=init,
        tensors=lambda parameters, state: {**parameters, **state["scales"]},
    )
    algorithm = personal_layers(local, own_names, lr=server_lr, weight=weight)
    return replace(algorithm, exchange=star() if exchange is None else exchange)


class _Stacked:
    """The module as functions of stacked tensors `(K, ...)`; shared ones may be `(1, ...)`."""

    def __init__(self, module: ConvolvedGP, exact_units: bool) -> None:
        from fedtorch.models.convolved_gp import ConvolvedGP, GaussianLikelihood

        if not isinstance(module, ConvolvedGP):
            raise TypeError(f"Expected a ConvolvedGP, but got {type(module).__name__}")
        if tuple(module.batch_shape):
            raise ValueError(
                f"Expected a module of one unit, but got batch_shape={tuple(module.batch_shape)}; leave it away"
            )
        self.module = copy.deepcopy(module)
        self.module.rebase()
        self.exact_units = exact_units
        self.gaussian = isinstance(module.likelihood, GaussianLikelihood)
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.shared, self.own = list(self.module.shared_names), list(self.module.unit_names)
        self.values = {n: named[n].detach().clone() for n in [*self.shared, *self.own, "basis", *_POSTERIOR]}
        self.trained = [n for n in self.own if getattr(named[n], "requires_grad", False)]

    def on(self, values: dict[str, Tensor], function: Callable[[], Any]) -> Any:
        """`function()` with `values` in the places of the module's tensors."""
        names = [name for name in values if name in self.values]
        with functional.Swap(self.module, names)([values[name] for name in names]):
            return function()

    def gradient(
        self,
        fixed: dict[str, Tensor],
        free: dict[str, Tensor],
        names: Sequence[str],
        rows: Tree,
        mask: Tensor,
        factor: Tensor,
        units: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(each unit's part of the bound plus its priors `(K,)`, gradients with respect to `names` of `free`).

        With `units`, its risk (14) instead, with the sign turned: minus a share of the divergence.
        """
        x, y, extra = rows
        moving = {name: free[name].detach().clone().requires_grad_() for name in names}

        def part() -> Tensor:
            value = self.module.expected_log_likelihood(x, y, mask, *extra, exact_units=self.exact_units)
            value = factor * value
            if units is not None:
                return value - self.module.divergence() / units
            return value + self.module.log_prior(True) if set(names) <= set(self.own) else value

        with torch.enable_grad():
            value = self.on({**fixed, **free, **moving}, part)
            found = torch.autograd.grad(value.sum(), list(moving.values()), allow_unused=True)
        gradient = {n: torch.zeros_like(free[n]) if g is None else g for n, g in zip(names, found)}
        return value.detach(), gradient

    def site(self, values: dict[str, Tensor], rows: Tree, mask: Tensor, factor: Tensor) -> Told:
        """What units tell, `(K, ...)`."""
        x, y, extra = rows
        found: Site = self.on(values, lambda: self.module.site(x, y, mask, *extra, exact_units=self.exact_units))
        told = Told(_pack(found.precision), found.shift, found.constant, torch.ones_like(found.constant))
        return tree.scale(told, factor)._replace(units=told.units)

    def posterior(self, shared: dict[str, Tensor], mean: Tensor, root: Tensor) -> dict[str, Tensor]:
        """q(t) and its basis, by the names of the module's buffers: t is white under the prior at `shared`."""
        with torch.no_grad():
            basis = self.on(shared, self.module.root)
            basis = basis.expand(*mean.shape[:-1], *self.values["basis"].shape)
        return {"basis": basis, "posterior_mean": mean, "posterior_root": root}

    def combine(self, heard: Told) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, root, bound) of q(t) from the prior and the sum of the sites."""
        from fedtorch.models.convolved_gp import posterior

        precision = _symmetric(heard.precision, self.module.points)
        return posterior(torch.eye(self.module.points).to(precision), precision, heard.shift, heard.constant)

    def carry(
        self, mean: Tensor, root: Tensor, before: dict[str, Tensor], after: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The same q(g) in values t that are white under the prior at other shared hyperparameters."""
        with torch.no_grad():
            basis = self.on(before, self.module.root)
            change = self.on({**after, "basis": basis}, self.module.change).to(mean)
        return change @ mean, change @ root

    def shared_gradient(self, shared: dict[str, Tensor], mean: Tensor, root: Tensor) -> dict[str, Tensor]:
        """The gradient of −KL(q ‖ p) and of the shared priors."""
        moving = {name: value.detach().clone().requires_grad_() for name, value in shared.items()}
        like = self.values["posterior_mean"].dtype
        posterior = self.posterior(shared, mean.to(like), root.to(like))
        with torch.enable_grad():
            value = self.on({**moving, **posterior}, lambda: self.module.log_prior(False) - self.module.divergence())
            found = torch.autograd.grad(value, list(moving.values()), allow_unused=True)
        return {n: torch.zeros_like(shared[n]) if g is None else g for n, g in zip(shared, found)}

    def predict(self, tensors: Tree, inputs: Tree) -> Tensor:
        """Means of f, `(K, N)`."""

        def means(tensors: Tree, inputs: Tensor) -> Tensor:
            return self.on(tensors, lambda: self.module.marginals(inputs)[0])

        with torch.no_grad():
            return _in_parts(means, inputs.shape[1] * self.module.points, tensors, inputs)

    def check(self, data: Any) -> Any:
        """Raises unless the rows are (x `(d,)`, y, …) in the module's dtype, and every unit has some."""
        rows = data.batch
        dtype = self.values["posterior_mean"].dtype
        dims = self.module.inducing.shape[-1]
        if not isinstance(rows, tuple) or len(rows) < 2 or rows[0].shape[2:] != (dims,) or rows[1].ndim != 2:
            shapes = [tuple(leaf.shape[2:]) for leaf in tree.leaves(rows)]
            raise ValueError(f"Expected rows (x, y) of shapes ({dims},) and (), but got {shapes}")
        if rows[0].dtype != dtype or rows[1].dtype != dtype:
            raise ValueError(
                f"Expected rows in the module's {dtype}, but got {rows[0].dtype} and {rows[1].dtype}; use data.to"
            )
        empty = (data.count == 0).nonzero()[:, 0]
        if len(empty):
            raise BadClients(empty, "expected at least one row, but got none; leave such clients out with data.select")
        return data

    def local(self) -> LocalSolver:
        """The module for predictions; there is no separate local problem to solve."""

        def solve(start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
            raise NotImplementedError("Expected ft.fedmgp to run the units; it has no local solver to use elsewhere")

        names = [*self.shared, *self.trained]
        return LocalSolver(
            solve=solve,
            parameters={name: self.values[name].clone() for name in names},
            init=lambda parameters: None,
            predict=self.predict,
            tensors=lambda parameters, state: parameters,
            prepare=self.check,
            module=self.module,
        )


def _check_settings(
    steps: int,
    lr: float,
    server_lr: float,
    batch_size: int | None,
    site_batch_size: int | None,
    damping: float,
    exact_units: bool,
) -> None:
    if steps < 0 or not lr > 0 or not server_lr >= 0:
        raise ValueError(f"Expected steps >= 0, lr > 0 and server_lr >= 0, but got {steps}, {lr} and {server_lr}")
    for name, value in (("batch_size", batch_size), ("site_batch_size", site_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"Expected {name} of at least 1, but got {value}")
        if value is not None and exact_units:
            raise ValueError(f"Expected all rows for exact units, but got {name}={value}; leave it away")
    if not 0 < damping <= 1:
        raise ValueError(f"Expected damping above 0 and at most 1, but got {damping}")
    if site_batch_size is not None and damping == 1:
        raise ValueError("Expected damping below 1 with site_batch_size, so that draws average out; try damping=0.1")


def _in_parts(function: Callable[..., Any], numbers: int, *stacked: Tree) -> Any:
    """`function(*stacked)` on as many units at a time as stay in the processor's cache, results side by side.

    Args:
        function: of stacked trees `(K, ...)`.
        numbers: that a unit takes, rows times inducing values.
        stacked: its arguments.
    """
    units, some = len(tree.leaves(stacked)[0]), max(1, _MOST_NUMBERS // max(1, numbers))
    if units <= some:
        return function(*stacked)
    parts = [function(*tree.take(stacked, slice(i, min(i + some, units)))) for i in range(0, units, some)]
    return tree.concatenate(parts)


def _some_rows(rows: Tree, mask: Tensor, size: int | None, key: Tensor) -> tuple[Tree, Tensor, Tensor]:
    """(rows, mask, by what a sum over them stands for that over all `(K,)`): `size` rows of each unit, or all."""
    if size is None or size >= mask.shape[1]:
        return rows, mask, mask.new_ones(len(mask))
    count = mask.sum(-1).long()
    chosen = random.permutation(key, mask.shape[1], count)[:, :size]
    taken = tree.map(
        lambda leaf: leaf.gather(
            1, chosen.reshape(*chosen.shape, *[1] * (leaf.ndim - 2)).expand(-1, -1, *leaf.shape[2:])
        ),
        rows,
    )
    return taken, mask.gather(1, chosen), count.to(mask.dtype) / count.clamp(min=1, max=size)


def _adam(
    parameters: dict[str, Tensor], gradient: dict[str, Tensor], moments: Moments, lr: float, active: Tensor
) -> tuple[dict[str, Tensor], Moments]:
    """One step uphill of those that are `active` `(K,)` or `()`; the others and their moments stay."""
    first = tree.map(lambda m, g: m + (1 - _BETAS[0]) * (g - m), moments.first, gradient)
    second = tree.map(lambda v, g: v + (1 - _BETAS[1]) * (g.square() - v), moments.second, gradient)
    steps = moments.steps + 1
    one, two = (1 - torch.as_tensor(beta, dtype=torch.float64) ** steps for beta in _BETAS)

    def move(value: Tensor, m: Tensor, v: Tensor) -> Tensor:
        step = (m / _like(one, m)) / ((v / _like(two, v)).sqrt() + 1e-8)
        return (value + lr * step).to(value.dtype)

    moved = tree.map(move, parameters, first, second)
    new = Moments(tree.map(lambda a, b: a.to(b.dtype), first, moments.first), second, steps)
    new = new._replace(second=tree.map(lambda a, b: a.to(b.dtype), second, moments.second))
    keep = lambda new, old: torch.where(_like(active, old), new, old)
    return tree.map(keep, moved, parameters), tree.map(keep, new, moments)


def _no_moments(parameters: dict[str, Tensor]) -> Moments:
    zeros = tree.zeros_like(parameters)
    return Moments(zeros, tree.zeros_like(parameters), torch.zeros((), dtype=torch.float64))


def _like(vector: Tensor, leaf: Tensor) -> Tensor:
    """`(K,)` shaped to act on the rows of `leaf`."""
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - vector.ndim))


def _once(inbox: Tree) -> Tree:
    """Views of one value for all units as `(1, ...)`, so that what depends on nothing else is computed once."""
    shared = all(len(leaf) > 1 and leaf.stride(0) == 0 for leaf in tree.leaves(inbox))
    return tree.take(inbox, slice(0, 1)) if shared else inbox


def _pack(matrix: Tensor) -> Tensor:
    """The lower triangle, row by row."""
    rows, columns = torch.tril_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., rows, columns]


def _unpack(packed: Tensor, size: int) -> Tensor:
    """The lower triangular matrix of a packed lower triangle."""
    rows, columns = torch.tril_indices(size, size, device=packed.device)
    matrix = packed.new_zeros(*packed.shape[:-1], size, size)
    matrix[..., rows, columns] = packed
    return matrix


def _symmetric(packed: Tensor, size: int) -> Tensor:
    """The symmetric matrix of a packed lower triangle."""
    lower = _unpack(packed, size)
    return lower + lower.mT - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1))
