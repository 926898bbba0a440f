"""Draws of a run's posterior where the rows are, and sums over rows of what they say.

Every client receives the same draws of φ ~ q(φ), or of the corrected posterior's nodes, and draws θ_k ~ p(θ_k | φ, y_k)
for each, so that draw s of all clients is one draw of the joint posterior. What is computed of a row stays at its
client: a function returns sums over the rows of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtorch import linalg, random, tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.algorithms.ep.estimates import spread_nodes
from fedtorch.federation.runs.drawn import sampler_of
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import SITES, load_arviz
from fedtorch.inference._sites import drawn_coefficients
from fedtorch.inference.holders import Holder, local_holder, rows_at_hand
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.families import Family
from fedtorch.models.rows import Observations, observations
from fedtorch.tree import Tree

_MEASURED = 100  # coefficients whose effective sizes are taken
_TOGETHER = 2**20  # numbers of one array over rows and draws
_SEED = 0
_SPARE = 8  # times as many draws of a density that is restricted


class Origin(Protocol):
    """Where draws of a posterior come from."""

    @property
    def family(self) -> Family:
        """Return the distribution of one response."""
        ...

    def drawn(self, block: ClientData, clients: Tensor) -> Drawn:
        """Return draws at a block of the clients of these numbers."""
        ...


class Drawn(NamedTuple):
    """Hold draws of the coefficients of `K` clients, and their rows."""

    family: Family
    rows: Observations  # (K, N, ...)
    mask: Tensor  # (K, N)
    theta: Tensor  # (K, S, d), of which the first are those of x
    scale: Tensor  # (K, S), or (K, 1) where it is known; (K, S, thresholds) of ordered responses
    keys: Tensor  # (K,) of random numbers for the rows
    efficiency: float = 1.0  # effective draws of each

    def parts(self) -> Iterator[slice]:
        """Yield some rows at a time, so that arrays over rows and draws stay small."""
        clients, rows = self.mask.shape
        size = max(1, _TOGETHER // max(1, clients * self.theta.shape[1]))
        yield from (slice(i, min(i + size, rows)) for i in range(0, rows, size))

    def predictor(self, part: slice) -> Tensor:
        """Return x'θ of some rows, and their offset, `(K, n, S)`."""
        eta, offset = self.rows.x[:, part] @ self.theta[..., : self.rows.x.shape[-1]].mT, self.rows.offset
        return eta if offset is None else eta + offset[:, part, None]

    def scales(self, part: slice) -> Tensor:
        """Return the noise variances of some rows, or their trials, `(K, n or 1, S or 1)`."""
        scale, weight, trials = self.scale[:, None], self.rows.weight, self.rows.trials
        if trials is not None:
            return self.of(trials, part)
        return scale / self.of(weight, part) if self.family.precise and weight is not None else scale

    def of(self, column: Tensor, part: slice) -> Tensor:
        """Return a column of some rows, `(K, n, 1)`, one where there is no row."""
        return torch.where(self.mask[:, part], column[:, part], 1.0)[..., None]

    def log_density(self, part: slice) -> Tensor:
        """Return log p(y | draw) of some rows, `(K, n, S)`, as often as they count."""
        y, weight = self.rows.y[:, part, None], self.rows.weight
        value = self.family.log_density(y, self.predictor(part), self.scales(part))
        return value if weight is None or self.family.precise else value * self.of(weight, part)

    def replicated(self, part: slice) -> Tensor:
        """Return responses drawn anew at each draw, `(K, n, S)`, the same whatever rows are beside a row."""
        numbers = torch.arange(part.start, part.stop, device=self.keys.device)
        keys = random.fold_in(self.keys[:, None], numbers)
        uniform = random.uniform(keys, (self.theta.shape[1],), torch.float64).clamp(min=1e-16)
        return self.family.draw(uniform, self.predictor(part), self.scales(part))


class SiteDraws(NamedTuple):
    """Hold draws of the coefficients of all sites together, each of one draw of what they share; in units of rows."""

    theta: Tensor  # (K, S, d)
    family: Family | None
    phi: Tensor | None = None  # (S, p) of what is shared, of a run of `ft.ep`


class Source(NamedTuple):
    """Hold draws of what all clients share, as clients receive them, who draw θ_k given each."""

    model: Model
    family: Family
    phi: Tensor  # (S, p)
    key: Tensor

    @property
    def sent(self) -> dict[str, Tensor]:
        """Return what others make the same of."""
        return {"phi": self.phi, "key": self.key}

    def drawn(self, block: ClientData, clients: Tensor) -> Drawn:
        """Return draws at a block of the clients of these numbers."""
        prepared, rows = self.model.prepare(block), observations(block)
        for_theta, for_rows = random.split(random.fold_in(self.key, clients), 2)
        phi = tree.expand(self.phi.to(rows.x), len(block.count))
        posterior = self.model.given(phi, torch.full_like(phi[..., 0], 1 / phi.shape[1]), prepared)
        white = random.normal(for_theta, posterior.means.shape[1:], torch.float64).to(rows.x)
        theta = posterior.means + (linalg.square_root(posterior.covariances) @ white[..., None])[..., 0]
        known = self.family.scale
        scale = torch.ones_like(phi[:, :1, 0]) if known is None else known(prepared)[:, None]
        if not bool(posterior.log_noise.isnan().any()):
            scale = posterior.log_noise.exp()
        if self.model.ordered is not None:
            scale = theta[..., rows.x.shape[-1] :]
        return Drawn(self.family, rows, block.mask, theta, scale, for_rows)


def origin(run: Run, draws: int, given: Corrected | None, tolerance: float, seed: int) -> Source | Kept:
    """Return where draws of a run's posterior come from; raise like `source`, and like `kept` of a Gibbs sampler."""
    if run.algorithm.settings.get("algorithm") == "gibbs":
        return kept(run, draws, random.fold_in(random.key(seed), 0))
    return source(run, draws, given, tolerance, seed)


def source(run: Run, draws: int, given: Corrected | None, tolerance: float, seed: int) -> Source:
    """Return draws of φ of a run of `ft.ep` that converged.

    Raises:
        TypeError: a run of something else, or of a likelihood without a `family`.
    """
    model = run.algorithm.settings.get("model")
    family = getattr(model, "family", None)
    if not isinstance(model, Model) or family is None:
        raise TypeError(
            "Expected a run of ft.ep with a hierarchical model of known family (linear, logistic, poisson), but got "
            f"{run.algorithm.settings.get('algorithm')!r} with {type(model).__name__}; a likelihood of your own tells "
            "it as DeviceLikelihood(..., family=)"
        )
    key = random.fold_in(random.key(seed), 0)
    if given is not None:
        places = (torch.arange(draws).to(given.weights) + 0.5) / draws
        return Source(model, family, given.nodes[torch.searchsorted(given.weights.cumsum(0), places)], key)
    q = ep.posterior(run, tolerance=tolerance)
    count = draws if model.ordered is None else _SPARE * draws
    white = random.normal(random.fold_in(random.key(seed), 1), (count, len(q.mean)), torch.float64).to(q.mean)
    return Source(model, family, _possible(model, q.mean + white @ q.scale_tril.mT, draws), key)


def _possible(model: Model, phi: Tensor, draws: int) -> Tensor:
    """Return so many draws, of ordered responses of those whose thresholds ascend: others have no probability."""
    if model.ordered is not None and (cuts := model.ordered.differences):
        means = model.hierarchy.mean[-cuts:].to(phi)
        phi = torch.cat([phi[model.ordered.ascend(phi[:, : means.shape[1]] @ means.mT)], phi])
    return phi[:draws]


class Kept(NamedTuple):
    """Hold the draws of every client's coefficients that a Gibbs sampler has kept."""

    family: Family
    theta: Tensor  # (clients, S, d), or (clients, S, 1 + d) with an intercept first
    scale: Tensor  # (clients, S)
    key: Tensor
    efficiency: float

    @property
    def sent(self) -> dict[str, Tensor]:
        """Return nothing, for these draws are where the rows are."""
        return {}

    def drawn(self, block: ClientData, clients: Tensor) -> Drawn:
        """Return the draws of a block of the clients of these numbers."""
        rows = observations(block, extras=())
        if self.theta.shape[-1] == rows.x.shape[-1] + 1:
            rows = rows._replace(x=torch.cat([torch.ones_like(rows.x[..., :1]), rows.x], -1))
        keys = random.fold_in(self.key, clients)
        return Drawn(self.family, rows, block.mask, self.theta[clients], self.scale[clients], keys, self.efficiency)


def kept(run: Run, most: int, key: Tensor) -> Kept:
    """Return at most so many draws of a sampler that has recorded the sites, spread over its chains.

    Raises:
        TypeError: a kernel that does not say the family of a response, or a sampler without the sites.
    """
    family = run.algorithm.settings["local"].family
    if family is None:
        raise TypeError(
            "Expected a sampler of regressions with all their coefficients, such as sparse.regression() or "
            "logistic_regression(), but got another; add a column of ones to x in place of intercept=True"
        )
    total, _ = drawn_coefficients(run)  # (C, T, K, d)
    step = -(-total.shape[0] * total.shape[1] // most)
    joined = lambda leaf: leaf[:, ::step].flatten(0, 1).transpose(0, 1)
    theta, scale = joined(total), torch.ones_like(joined(total)[..., 0])
    if family.precise:
        scale = 1 / joined(sampler_of(run).draws()[f"{SITES}noise"])
    return Kept(family, theta, scale, key, _efficiency(total, theta.shape[1]))


def _efficiency(total: Tensor, draws: int) -> float:
    """Return how many effective draws one of so many is, of the mean of a coefficient."""
    stack = total.flatten(2)[..., :_MEASURED].numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what never moves has no size
        sizes = torch.tensor([float(load_arviz().ess(stack[..., i], method="mean")) for i in range(stack.shape[-1])])
    known = sizes[sizes.isfinite()]
    return min(1.0, float(known.mean()) / draws) if len(known) else 1.0


def summed(
    holder: Holder, every: Sequence[FederatedData], sources: Sequence[Origin], function: Callable[[list[Drawn]], Tree]
) -> Tree:
    """Return a function's sums over each client's rows, added up over the clients.

    Args:
        holder: whose clients compute.
        every: the rows that each source is of; the same clients with as many rows each.
        sources: of draws.
        function: the sources' draws at some clients -> a tree of `(K, ...)`.
    """
    return tree.map(lambda leaf: leaf.sum(0), by_client(holder, every, sources, function))


def by_client(
    holder: Holder, every: Sequence[FederatedData], sources: Sequence[Origin], function: Callable[[list[Drawn]], Tree]
) -> Tree:
    """Return a function's sums over the rows of each client, `(K, ...)` in their order; see `summed`."""
    first = every[0]
    numbers = torch.tensor(holder.numbers).repeat_interleave(first.counts).to(first.device)
    joined = FederatedData(
        {"client": numbers, "rows": tuple(data.rows for data in every)},
        first.counts,
        first.names,
        allow_empty=True,
        on_disk=first.on_disk,
    )

    def own(model: Tree, block: ClientData) -> Tree:
        clients = block.batch["client"][:, 0] if block.mask.shape[1] else block.count
        parts = [ClientData(rows, block.count) for rows in block.batch["rows"]]
        return function([one.drawn(part, clients) for one, part in zip(sources, parts)])

    return holder.evaluate(joined, own)


def sent_source(holder: Holder, sent: Mapping[str, Tensor]) -> Origin:
    """Return the draws that were sent to a holder, see `Source.sent`, or those that it has."""
    if holder.drawn is not None:
        source: Origin = holder.drawn
        return source
    model = holder.algorithm.settings["model"]
    return Source(model, model.family, sent["phi"], sent["key"])


def site_draws(
    run: Run, draws: int, given: Corrected | None = None, tolerance: float = 0.01, *, even: bool = False
) -> SiteDraws:
    """Return draws of the coefficients of a run's sites, whose rows are at hand.

    Args:
        run: of `ft.ep` with a hierarchical model of known family, or of `ft.gibbs` with a sampler that recorded sites.
        draws: at least so many; of a sampler at most.
        given, tolerance: as of `ranef`.
        even: whether what is shared is spread evenly over q(φ), for means; it is drawn otherwise.
    """
    if run.algorithm.settings.get("algorithm") == "gibbs":
        total, _ = drawn_coefficients(run)
        every = max(1, -(-total.shape[0] * total.shape[1] // draws))
        theta = total[:, ::every].flatten(0, 1).transpose(0, 1)
        return SiteDraws(theta, run.algorithm.settings["local"].family)
    drawn = (even_source if even and given is None else source)(run, draws, given, tolerance, _SEED)
    theta = by_client(local_holder(run), [rows_at_hand(run)], [drawn], lambda every: every[0].theta)
    return SiteDraws(theta, drawn.family, drawn.phi)


def even_source(run: Run, draws: int, given: Corrected | None, tolerance: float, seed: int) -> Source:
    """Return what `source` does, of nodes that are spread evenly over q(φ), or drawn of the corrected posterior."""
    drawn = source(run, draws, given, tolerance, seed)
    if given is not None:
        return drawn
    q = ep.posterior(run, tolerance=torch.inf)
    nodes, _ = spread_nodes(Moments(q.mean, q.covariance_matrix), draws)
    return Source(drawn.model, drawn.family, nodes, random.key(seed))


def masked_sum(values: Any, mask: Tensor) -> Tensor:
    """Return the sum over rows `(K, n, ...)`, without padding, `(K, ...)`."""
    return torch.where(tree.along(mask, values), values, torch.zeros((), dtype=values.dtype)).sum(1)
