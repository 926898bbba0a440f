r"""A user's own Pyro model as the local factor of expectation propagation.

The model receives the shared parameters φ `(p,)` and a client's rows, samples its own latent variables θ and observes::

    def model(phi, x, y):
        slope = pyro.sample("slope", Normal(phi[0], phi[1].exp()))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", Poisson((slope * x[:, 0]).exp()), obs=y)

    run = ft.run(ft.ep(pyro_factor(model).model(prior)), population, rounds=30, until=settled())

The factor f(φ) = ∫ p(y, θ | φ) dθ is integrated around the mode of θ, in unconstrained coordinates: the nodes of a
rule, moved to the mode and scaled by the curvature there, correct the error of the normal approximation. So θ must be
continuous and its support must not depend on φ.

Clients and nodes are evaluated together by `torch.vmap`, so that a client costs little beside the model's Python code.
Clients of different sizes are padded with copies of a row, and a mask removes these from the observations in a
`pyro.plate` of that size. If padding changes a model's density, which one client shows (a latent variable for each row,
observations outside a plate, a mean over rows), only clients of equal size are stacked. Nodes of φ are first placed
with few nodes of θ, from modes that the previous ones predict. A client with three latent variables, which have 343
nodes, costs several times as much as one with two.

Source: Yue, Kontar, Estrada Gómez (2022), section 4.2; Bingham et al. (2019), "Pyro".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import tree
from fedtorch._lazy import only
from fedtorch.data import BadClients
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical._pyro_program import filled_up, log_joint_of, may_be_filled, refusal, sites_of
from fedtorch.models.hierarchical.factor import Model
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.hierarchical.hyperpriors import Prior
from fedtorch.models.hierarchical.integrals.smooth import Integrated, Search, integrated
from fedtorch.models.hierarchical.projections import Projected, from_the_prior, weighted
from fedtorch.models.quadrature import Nodes, QuadratureRule, default_rule, gauss_hermite, tilt, two_shells
from fedtorch.models.rows import refuse
from fedtorch.stacked_layers import WithoutReading

__all__ = ["pyro_factor"]
__dir__ = only(__all__)

_FEW, _MANY = 2, 20  # dimensions between which φ has two spherical designs as nodes
_AROUND = 7  # points for each of two latent variables around their mode
_STILL = 0.03  # sds of a step that ends the search for the mode; integration about the mode corrects for the rest
_ROUGH = 0.1, 5  # likewise while nodes of φ are placed, and the most evaluations
_ALONE = 3  # most nodes without a preliminary search for the mode between them
_CHUNK = 2**18  # most rows times nodes of φ in a search for modes
_LEAST = 1e-9  # relative variance added in directions in which nodes do not vary
_BEYOND = 1.0  # how far outside a predicted mode may lie, in ranges of the previous modes


def pyro_factor(model: Callable[..., Any], *, rule: QuadratureRule | None = None) -> PyroFactor:
    """Return log f_k(φ) of a Pyro model, for `fedtorch.models.hierarchical.projections`.

    Clients and nodes of φ are evaluated at once by `torch.vmap`.

    Args:
        model: (φ `(p,)`, rows …) -> ignored; the rows are the leaves of the data in order, `(n_k, ...)`.
        rule: nodes over the latent variables; default: 7 × 7 for two, else `quadrature.default_rule`.

    Raises:
        ValueError: in use, a latent variable is discrete.

    >>> import pyro, torch, fedtorch as ft
    >>> from pyro.distributions import Normal
    >>> def model(phi, y):
    ...     level = pyro.sample("level", Normal(phi[0], 1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", Normal(level, 1.0), obs=y)
    >>> data = ft.data.from_tensors([(torch.tensor([2.0]),)])
    >>> phi = torch.tensor([[[0.0], [2.0]]]).double()  # of one client, two nodes
    >>> log_factor = pyro_factor(model)(phi, data.stack([0]))
    >>> (log_factor[0, 0] - log_factor[0, 1]).round(decimals=3)  # of N(2; φ, 2): −2² / 4
    tensor(-1., dtype=torch.float64)
    """
    return PyroFactor(model, rule)


class PyroFactor:
    """Log f_k(φ) as a function of (φ `(K, R, p)`, data), and the clients' own posteriors.

    Args:
        program: the model, as of `pyro_factor`.
        rule: nodes over the latent variables.
    """

    def __init__(self, program: Callable[..., Any], rule: QuadratureRule | None) -> None:
        self.program, self.rule = program, rule
        self._filled: bool | None = None  # whether clients may be padded; None until it has been tested

    def __call__(self, phi: Tensor, data: Any) -> Tensor:
        """Return log f at the nodes φ, `(K, R)`."""
        parts, order = self._parts(phi, data, Starts(len(phi)))
        return torch.cat([part.log_factor for part in parts])[order] if parts else phi.new_zeros(phi.shape[:2])

    def model(
        self, prior: MultivariateNormal | Prior, *, names: Sequence[str] = (), rule: QuadratureRule | None = None
    ) -> Model:
        """Return the hierarchical model for `ft.ep`, with posteriors of φ and of every client's θ.

        Args:
            prior: of φ.
            names: of the coordinates of φ; default: "phi 0", "phi 1", …
            rule: nodes over φ; default: a product rule in two dimensions, two spherical designs in up to twenty.

        Raises:
            ValueError: numbers of names and coordinates differ; at the start of a run, a client without rows, or with
                rows that the program cannot observe.

        >>> import pyro, torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import devices, posterior, settled
        >>> from pyro.distributions import MultivariateNormal, Normal
        >>> def program(phi, y):
        ...     level = pyro.sample("level", Normal(phi[0], 1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", Normal(level, 1.0), obs=y)
        >>> data = ft.data.from_tensors([(torch.tensor(y).double(),) for y in ([1.0, 3.0, 2.0], [6.0])])
        >>> model = pyro_factor(program).model(MultivariateNormal(torch.zeros(1), 100 * torch.eye(1)), names=["centre"])
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=20, until=settled())
        >>> round(float(posterior(run).mean), 2), devices(run).distribution().mean.flatten().round(decimals=2).tolist()
        (3.57, [2.39, 4.79])
        """
        if isinstance(prior, MultivariateNormal):
            moments = Moments(prior.mean.to(torch.float64), prior.covariance_matrix.to(torch.float64))
            prior = Prior(gaussian.natural(moments), ())
        size = len(prior.normal.shift)
        names = tuple(names) or tuple(f"phi {i}" for i in range(size))
        if len(names) != size:
            raise ValueError(f"Expected a name for each of {size} coordinates of phi, but got {len(names)}")
        if rule is None and _FEW < size <= _MANY:
            rule = two_shells(size)  # a product rule would need the mode of θ at hundreds of nodes
        project = partial(self._project, rule)
        return Model(
            names=names,
            hierarchy=_unnamed(names, prior),
            prior=prior,
            project=project,
            start=from_the_prior(project),
            prepare=partial(_checked, self.program, gaussian.moments(prior.normal).mean),
            devices=partial(self.devices, rule=rule),
            log_factor=self,
            given=self._given,
        )

    def _given(self, phi: Tensor, weights: Tensor, data: Any) -> DevicePosterior:
        latent = self._latent(phi, data)
        return DevicePosterior(weights, latent.mean, latent.covariance, torch.full_like(weights, torch.nan))

    def devices(self, cavity: Moments, data: Any, *, rule: QuadratureRule | None = None) -> DevicePosterior:
        """Return the posterior of each client's θ given its rows and the others' information about φ.

        θ is in unconstrained coordinates, latent variables in the model's order of sampling.

        >>> import pyro, torch, fedtorch as ft
        >>> from pyro.distributions import Normal
        >>> def model(phi, y):
        ...     level = pyro.sample("level", Normal(phi[0], 1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", Normal(level, 1.0), obs=y)
        >>> cavity = Moments(torch.zeros(1, 1).double(), torch.full((1, 1, 1), 1e-8).double())  # φ is 0
        >>> rows = ft.data.from_tensors([(torch.tensor([4.0]),)]).stack([0])
        >>> posterior = pyro_factor(model).devices(cavity, rows).distribution()
        >>> posterior.mean.round(decimals=3), posterior.variance.round(decimals=3)  # N(2, 1/2)
        (tensor([[2.]], dtype=torch.float64), tensor([[0.5000]], dtype=torch.float64))
        """
        nodes = self._tilted(rule, cavity, data)
        latent: Integrated = nodes.values
        return DevicePosterior(nodes.weights, latent.mean, latent.covariance, torch.full_like(nodes.weights, torch.nan))

    def _project(self, rule: QuadratureRule | None, cavity: Moments, data: Any, key: Tensor) -> Projected:
        nodes = self._tilted(rule, cavity, data, factors=True)
        return Projected(weighted(nodes.nodes, nodes.weights), cavity)

    def _tilted(self, rule: QuadratureRule | None, cavity: Moments, data: Any, factors: bool = False) -> Nodes:
        """Return nodes of φ, with the moments of θ at them unless only factors are needed.

        Nodes are first placed with few nodes of θ, about approximate modes.
        """
        chosen, starts = default_rule(cavity.mean.shape[1]) if rule is None else rule, Starts(len(cavity.mean))
        every = torch.arange(len(cavity.mean))

        def of(ids: Tensor, rough: bool) -> Callable[[Tensor], tuple[Tensor, Any]]:
            some = data if ids is every else tree.take(data, ids)

            def at(phi: Tensor) -> tuple[Tensor, Any]:
                if factors or rough:
                    parts, order = self._parts(phi, some, starts, ids, rough)
                    values = [part.log_factor for part in parts]
                    return torch.cat(values)[order] if parts else phi.new_zeros(phi.shape[:2]), None
                latent = self._latent(phi, some, starts, ids)
                return latent.log_factor, latent

            return at

        exact, rough = (partial(of, rough=is_rough) for is_rough in (False, True))
        return tilt(cavity, exact(every), chosen, only=exact, rough=(rough(every), rough))

    def _latent(self, phi: Tensor, data: Any, starts: Starts | None = None, which: Tensor | None = None) -> Integrated:
        """Return the integrals over θ at every φ."""
        parts, order = self._parts(phi, data, Starts(len(phi)) if starts is None else starts, which)
        sizes = {part.mean.shape[-1] for part in parts}
        if len(sizes) > 1:
            raise ValueError(
                f"Expected clients with as many latent variables each, but got {sorted(sizes)}; posteriors of latent "
                "variables for each row are not comparable between clients"
            )
        if not parts:
            return Integrated(
                phi.new_zeros(phi.shape[:2]), phi.new_zeros(0, phi.shape[1], 0), phi.new_zeros(0, 0, 0, 0)
            )
        latent: Integrated = tree.take(tree.concatenate(parts), order)
        return latent

    def _parts(
        self, phi: Tensor, data: Any, starts: Starts, which: Tensor | None = None, rough: bool = False
    ) -> tuple[list[Integrated], Tensor]:
        """Return the integrals over θ, with stackable clients together, and the order that restores the clients'.

        Args:
            phi: nodes `(K, R, p)`.
            data: of the clients.
            starts: stores of modes as starts of the search.
            which: their numbers in `starts`; default: the first ones.
            rough: whether by few nodes of θ.
        """
        import pyro

        count = data.count.tolist()
        if not count:
            return [], torch.zeros(0, dtype=torch.int64)
        rows = [_float64(leaf) for leaf in tree.leaves(data.batch)]
        with pyro.validation_enabled(False):
            smallest = count.index(min(count))
            one = [leaf[smallest, : count[smallest]] for leaf in rows]
            sites = sites_of(self.program, phi[smallest, 0], one)
            if len(set(count)) > 1 and self._filled is None:
                self._filled = may_be_filled(self.program, sites, phi[smallest, 0], one)
            groups = [torch.arange(len(count))]
            if len(set(count)) > 1 and not self._filled:
                groups = [torch.tensor([k for k, n in enumerate(count) if n == size]) for size in sorted(set(count))]
            chunks = self._chunks(groups, phi, rows[0])
            which = torch.arange(len(count)) if which is None else which.to("cpu")
            parts = [self._stacked(phi, rows, data.count, ids, starts, which[ids], rough) for ids in chunks]
        return parts, torch.cat(chunks).argsort().to(phi.device)

    def _chunks(self, groups: Sequence[Tensor], phi: Tensor, leaf: Tensor) -> list[Tensor]:
        """Return chunks of clients whose arrays stay small; nodes of θ are processed in parts."""
        size = max(1, _CHUNK // max(1, phi.shape[1] * leaf.shape[1]))
        return [part for ids in groups for part in ids.split(size)]

    def _rule(self, size: int) -> QuadratureRule:
        if self.rule is not None:
            return self.rule
        return gauss_hermite(2, _AROUND) if size == 2 else default_rule(size)

    def _stacked(
        self, phi: Tensor, rows: list[Tensor], count: Tensor, ids: Tensor, starts: Starts, which: Tensor, rough: bool
    ) -> Integrated:
        """Return the integrals over θ of some clients, padded to the largest of them."""
        ids = ids.to(phi.device)
        phi, count = phi[ids], count[ids]
        most = int(count.max())
        mask = torch.arange(most, device=count.device) < count[:, None]
        filled = [filled_up(leaf[ids, :most], mask) for leaf in rows]
        sites = sites_of(self.program, phi[0, 0], [leaf[0] for leaf in filled])
        whole = bool(mask.all())

        def node(theta: Tensor, phi: Tensor, real: Tensor, *mine: Tensor) -> Tensor:
            return log_joint_of(self.program, sites, theta, phi, mine, None if whole else real)

        def log_joint(theta: Tensor, phi: Tensor) -> Tensor:
            """Return log p(y, θ | φ) of θ `(K, R, d)`, `(K, R)`."""

            def client(theta: Tensor, phi: Tensor, real: Tensor, *mine: Tensor) -> Tensor:
                return torch.vmap(lambda theta, phi: node(theta, phi, real, *mine))(theta, phi)

            with WithoutReading():
                return torch.vmap(client)(theta, phi, mask, *filled)

        def only(phi: Tensor, nodes: Tensor) -> Callable[[Tensor], Tensor]:
            """Return log p(y, θ | φ) of θ `(M, d)` at some nodes of the clients."""
            clients = nodes // phi.shape[1]
            given = phi.flatten(0, 1)[nodes], mask[clients], *(leaf[clients] for leaf in filled)

            def some(theta: Tensor) -> Tensor:
                with WithoutReading():
                    return torch.vmap(node)(theta, *given)

            return some

        def integral_at(phi: Tensor, rule: QuadratureRule | None, search: Search) -> Integrated:
            return integrated(log_joint, phi, sites.size, rule, rows=most, only=partial(only, phi), search=search)

        start = starts.at(which, phi, sites.size)
        if start is None and sites.size and phi.shape[1] > _ALONE:
            centre = integral_at(phi.mean(1, keepdim=True), None, Search(None, _STILL))
            start = centre.mean.expand(-1, phi.shape[1], -1)
        rule = _few_nodes(sites.size) if rough else self._rule(sites.size)
        latent = integral_at(phi, rule, Search(start, *(_ROUGH if rough else (_STILL,))))
        starts.keep(which, phi, latent.mean)
        return latent


def _few_nodes(size: int) -> QuadratureRule | None:
    """Return the rule over θ while nodes of φ are placed."""
    if size < 2:
        return gauss_hermite(size, 5)
    return two_shells(size) if size <= _MANY else None


def _unnamed(names: tuple[str, ...], prior: Prior) -> Hierarchy:
    """Return the hierarchy of a program without named coefficients: φ alone."""
    nothing = lambda zeta, *_: zeta.new_zeros(*zeta.shape[:-1], 0, 0)
    return Hierarchy(names, prior.normal.shift.new_zeros(0, len(names)), nothing, nothing, prior)


def _checked(program: Callable[..., Any], phi: Tensor, data: Any) -> Any:
    """Check that each client has rows that the program can observe at the prior's mean φ; return the data."""
    import pyro

    refuse(data.count == 0, "Expected rows to observe, but got none; leave the client out with data.select")
    rows = [_float64(leaf) for leaf in tree.leaves(data.batch)]
    with pyro.validation_enabled(False):
        for k, count in enumerate(data.count.tolist()):
            why = refusal(program, phi.to(rows[0].device), [leaf[k, :count] for leaf in rows])
            if why:
                raise BadClients(torch.tensor([k]), why)
    return data


def _float64(leaf: Tensor) -> Tensor:
    return leaf.to(torch.float64) if leaf.dtype.is_floating_point else leaf


class Starts:
    """The last θ at each client's nodes; modes at other nodes are approximately linear in φ.

    >>> starts, ids = Starts(1), torch.tensor([0])
    >>> starts.at(ids, torch.tensor([[[0.0]]]), 1)  # nothing is known
    >>> starts.keep(ids, torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[5.0], [7.0]]]))
    >>> starts.at(ids, torch.tensor([[[0.5], [2.0], [4.0]]]), 1).round(decimals=3).flatten()  # not too far outside
    tensor([6., 9., 9.])
    """

    def __init__(self, clients: int) -> None:
        self._known = torch.zeros(clients, dtype=torch.bool)
        self._phi = self._theta = torch.zeros(0)

    def at(self, ids: Tensor, phi: Tensor, size: int) -> Tensor | None:
        """Return θ `(M, R, size)` for clients at nodes φ `(M, R, p)`; None if a client has none stored."""
        if not bool(self._known[ids].all()):
            return None
        before, theta = self._phi[ids], self._theta[ids, :, :size]
        if before.shape == phi.shape and torch.equal(before, phi):
            return theta
        centre, middle = before.mean(1, keepdim=True), theta.mean(1, keepdim=True)
        away = before - centre
        gram = away.mT @ away
        still = away.abs().amax(1) == 0
        gram.diagonal(dim1=-2, dim2=-1).mul_(1 + _LEAST).add_(still)
        slope = torch.linalg.solve_ex(gram, away.mT @ (theta - middle)).result
        least, most = theta.amin(1, keepdim=True), theta.amax(1, keepdim=True)
        reach = _BEYOND * (most - least)
        return (middle + (phi - centre) @ slope).clamp(least - reach, most + reach)

    def keep(self, ids: Tensor, phi: Tensor, theta: Tensor) -> None:
        """Store θ `(M, R, d)` at nodes φ `(M, R, p)`."""
        fits = self._phi.shape[1:] == phi.shape[1:] and self._theta.shape[-1] >= theta.shape[-1]
        if not fits:
            self._known.zero_()
            clients, nodes = len(self._known), phi.shape[1]
            self._phi = phi.new_zeros(clients, nodes, phi.shape[2])
            self._theta = theta.new_zeros(clients, nodes, max(theta.shape[-1], self._theta.shape[-1]))
        self._phi[ids], self._known[ids] = phi, theta.isfinite().all((1, 2)).to(self._known.device)
        self._theta[ids, :, : theta.shape[-1]] = theta
