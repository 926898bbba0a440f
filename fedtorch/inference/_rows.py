"""Draws of a run's posterior where the rows are, and sums over rows of what they say.

Every client receives the same draws of φ ~ q(φ), or of the corrected posterior's nodes, and draws θ_k ~ p(θ_k | φ, y_k)
for each, so that draw s of all clients is one draw of the joint posterior. What is computed of a row stays at its
client: a function returns sums over the rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.runs.run import Run
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.families import Family
from fedtorch.models.rows import Observations, observations
from fedtorch.tree import Tree

_TOGETHER = 2**20  # numbers of one array over rows and draws


class Source(NamedTuple):
    """Hold draws of what all clients share, as clients receive them."""

    model: Model
    family: Family
    phi: Tensor  # (S, p)
    key: Tensor


class Drawn(NamedTuple):
    """Hold draws of the coefficients of `K` clients, and their rows."""

    family: Family
    rows: Observations  # (K, N, ...)
    mask: Tensor  # (K, N)
    theta: Tensor  # (K, S, d)
    scale: Tensor  # (K, S), or (K, 1) where it is known
    keys: Tensor  # (K,) of random numbers for the rows

    def parts(self) -> Iterator[slice]:
        """Yield some rows at a time, so that arrays over rows and draws stay small."""
        clients, rows = self.mask.shape
        size = max(1, _TOGETHER // max(1, clients * self.theta.shape[1]))
        yield from (slice(i, min(i + size, rows)) for i in range(0, rows, size))

    def predictor(self, part: slice) -> Tensor:
        """Return x'θ of some rows, and their offset, `(K, n, S)`."""
        eta, offset = self.rows.x[:, part] @ self.theta.mT, self.rows.offset
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
    white = random.normal(random.fold_in(random.key(seed), 1), (draws, len(q.mean)), torch.float64).to(q.mean)
    return Source(model, family, q.mean + white @ q.scale_tril.mT, key)


def rows_of(run: Run) -> FederatedData:
    """Return a run's data; raise TypeError where rows are not at hand."""
    data = getattr(run.population, "data", None)
    if not isinstance(data, FederatedData):
        raise TypeError(
            f"Expected a population whose rows are at hand, in this process or its ranks, but got {run.population!r}; "
            "sites send only sums that they know, which these are not: let each evaluate its own run"
        )
    return data


def summed(
    run: Run, every: Sequence[FederatedData], sources: Sequence[Source], function: Callable[[list[Drawn]], Tree]
) -> Tree:
    """Return a function's sums over each client's rows, added up over the clients.

    Args:
        run: whose clients compute.
        every: the rows that each source is of; the same clients with as many rows each.
        sources: of draws.
        function: the sources' draws at some clients -> a tree of `(K, ...)`.
    """
    return tree.map(lambda leaf: leaf.sum(0), by_client(run, every, sources, function))


def by_client(
    run: Run, every: Sequence[FederatedData], sources: Sequence[Source], function: Callable[[list[Drawn]], Tree]
) -> Tree:
    """Return a function's sums over the rows of each client, `(K, ...)` in their order; see `summed`."""
    first = every[0]
    numbers = torch.arange(len(first)).repeat_interleave(first.counts).to(first.device)
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
        return function([_drawn(one, part, clients) for one, part in zip(sources, parts)])

    return run.clients.evaluate(run.outbox, joined, own)


def _drawn(source: Source, block: ClientData, clients: Tensor) -> Drawn:
    prepared, rows = source.model.prepare(block), observations(block)
    keys = random.fold_in(source.key, clients)
    for_theta, for_rows = random.split(keys, 2)
    phi = tree.expand(source.phi.to(rows.x), len(block.count))
    posterior = source.model.given(phi, torch.full_like(phi[..., 0], 1 / phi.shape[1]), prepared)
    white = random.normal(for_theta, posterior.means.shape[1:], torch.float64).to(rows.x)
    theta = posterior.means + (_root(posterior.covariances) @ white[..., None])[..., 0]
    known = source.family.scale
    scale = torch.ones_like(phi[:, :1, 0]) if known is None else known(prepared)[:, None]
    if not bool(posterior.log_noise.isnan().any()):
        scale = posterior.log_noise.exp()
    return Drawn(source.family, rows, block.mask, theta, scale, for_rows)


def _root(covariance: Tensor) -> Tensor:
    """Return a square root, also of covariances that rounding leaves without a Cholesky factor, as of fixed effects."""
    factor, failed = torch.linalg.cholesky_ex(covariance)
    bad = failed > 0
    if bool(bad.any()):
        values, vectors = torch.linalg.eigh(covariance[bad])
        factor[bad] = vectors * values.clamp(min=0).sqrt()[..., None, :]
    return factor


def masked_sum(values: Any, mask: Tensor) -> Tensor:
    """Return the sum over rows `(K, n, ...)`, without padding, `(K, ...)`."""
    return torch.where(tree.along(mask, values), values, torch.zeros((), dtype=values.dtype)).sum(1)
