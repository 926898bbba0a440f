"""Draws of a run's posterior at the holders of rows, and sums over rows of functions of them.

Every client receives the same draws of φ ~ q(φ), or the corrected posterior's nodes, and draws θ_k ~ p(θ_k | φ, y_k)
for each, so that draw s of all clients is one draw of the joint posterior. Values for single rows stay at their client:
a function returns sums over each client's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random, tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.posterior import Draws, Posterior, posterior_of
from fedtorch.federation.runs.holders import Holder, local_holder, rows_at_hand
from fedtorch.federation.runs.run import Run
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.families import Family
from fedtorch.models.rows import Observations, observations
from fedtorch.tree import Tree

DrawnAt = Callable[[ClientData, Tensor, Tensor], Any]  # (a block of clients, their ids, numbers of their names)
_TOGETHER = 2**20  # numbers of one array over rows and draws


class Drawn(NamedTuple):
    """Draws of the coefficients of `K` clients, and their rows."""

    family: Family
    rows: Observations  # (K, N, ...)
    mask: Tensor  # (K, N)
    theta: Tensor  # (K, S, d), the first are those of x
    scale: Tensor  # (K, S), or (K, 1) if known; (K, S, thresholds) of ordered responses
    keys: Tensor  # (K,) of random numbers for the rows
    efficiency: float = 1.0  # effective draws of each

    def parts(self) -> Iterator[slice]:
        """Yield chunks of rows, so that arrays over rows and draws stay small."""
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
        """Return a column of some rows, `(K, n, 1)`, one on padding."""
        return torch.where(self.mask[:, part], column[:, part], 1.0)[..., None]

    def log_density(self, part: slice) -> Tensor:
        """Return log p(y | draw) of some rows, `(K, n, S)`, times their counts."""
        y, weight = self.rows.y[:, part, None], self.rows.weight
        value = self.family.log_density(y, self.predictor(part), self.scales(part))
        return value if weight is None or self.family.precise else value * self.of(weight, part)

    def replicated(self, part: slice) -> Tensor:
        """Return responses drawn at each draw, `(K, n, S)`; a row's do not depend on the other rows."""
        numbers = torch.arange(part.start, part.stop, device=self.keys.device)
        keys = random.fold_in(self.keys[:, None], numbers)
        uniform = random.uniform(keys, (self.theta.shape[1],), torch.float64).clamp(min=1e-16)
        return self.family.draw(uniform, self.predictor(part), self.scales(part))


def given_shared(model: Model, phi: Tensor, key: Tensor) -> Draws:
    """Return draws of a hierarchical model at draws of the shared φ `(S, p)`; clients draw θ_k given each."""

    def at(block: ClientData, clients: Tensor, names: Tensor) -> Drawn:
        prepared, rows = model.prepare(block), observations(block)
        for_theta, for_rows = random.split(random.fold_in(key, names), 2)
        each = tree.expand(phi.to(rows.x), len(block.count))
        posterior = model.given(each, torch.full_like(each[..., 0], 1 / each.shape[1]), prepared)
        white = random.normal(for_theta, posterior.means.shape[1:], torch.float64).to(rows.x)
        theta = posterior.means + (linalg.square_root(posterior.covariances) @ white[..., None])[..., 0]
        scale = torch.ones_like(each[:, :1, 0]) if family.scale is None else family.scale(prepared)[:, None]
        if not bool(posterior.log_noise.isnan().any()):
            scale = posterior.log_noise.exp()
        if model.ordered is not None:
            scale = theta[..., rows.x.shape[-1] :]
        return Drawn(family, rows, block.mask, theta, scale, for_rows)

    family: Any = model.family
    return Draws(family, at, {"phi": phi, "key": key})


def summed(
    holder: Holder,
    every: Sequence[FederatedData],
    drawn: Sequence[DrawnAt],
    of_rows: Callable[[list[Any], slice], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return sums of a function over all rows, by name.

    Args:
        holder: holder of the clients' rows.
        every: sources of rows, all with the same clients and as many rows for each client.
        drawn: (a block of clients, their ids, numbers of their names) -> draws at these, such as `Draws.at`.
        of_rows: (all draws at some clients, some rows of each) -> values of these rows `(K, n, ...)`.
    """

    def added(sources: list[Any]) -> dict[str, Tensor]:
        mask, parts = sources[0].mask, list(sources[0].parts())
        each = [tree.map(partial(masked_sum, mask=mask[:, part]), of_rows(sources, part)) for part in parts]
        return tree.map(lambda *leaves: torch.stack(leaves).sum(0), *each)

    sums: dict[str, Tensor] = tree.map(lambda leaf: leaf.sum(0), by_client(holder, every, drawn, added))
    return sums


def by_client(
    holder: Holder, every: Sequence[FederatedData], drawn: Sequence[DrawnAt], function: Callable[[list[Any]], Tree]
) -> Tree:
    """Return a function's sums over the rows of each client, `(K, ...)` in their order.

    Arguments are those of `summed`, except that the function, of all draws at some clients, returns a tree of
    `(K, ...)`.
    """
    first = every[0]
    who = torch.stack([torch.tensor(holder.numbers), holder.names], 1)
    of_rows = who.repeat_interleave(first.counts, 0).to(first.device)
    joined = FederatedData(
        {"client": of_rows, "rows": tuple(data.rows for data in every)},
        first.counts,
        first.names,
        allow_empty=True,
        on_disk=first.on_disk,
    )

    def own(model: Tree, block: ClientData) -> Tree:
        who = block.batch["client"][:, 0] if block.mask.shape[1] else block.count[:, None].expand(-1, 2)
        parts = [ClientData(rows, block.count) for rows in block.batch["rows"]]
        return function([draw(part, *who.unbind(1)) for draw, part in zip(drawn, parts)])

    return holder.evaluate(joined, own)


def sent_draws(holder: Holder, sent: Mapping[str, Tensor]) -> Draws:
    """Return the draws that were sent to a holder, see `Draws.sent`, or its own."""
    drawn: Draws = posterior_of(holder.algorithm).received(sent) if holder.drawn is None else holder.drawn
    return drawn


def are_sent(posterior: Posterior) -> bool:
    """Return whether holders of rows rebuild draws of a fit that they are sent, of `even_draws` at least."""
    return type(posterior).received is not Posterior.received


def are_sent_for_rows(posterior: Posterior) -> bool:
    """Return whether holders rebuild draws of a fit that densities of single rows and new responses are of."""
    return are_sent(posterior) and type(posterior).draws is not Posterior.draws


def site_draws(run: Run, drawn: Draws) -> Tensor:
    """Return draws of the coefficients of a run's sites, whose rows are at hand, `(K, S, d)`; in units of rows.

    Draw s of all sites belongs to one draw of the shared parameters.
    """
    theta: Tensor = by_client(local_holder(run), [rows_at_hand(run)], [drawn.at], lambda every: every[0].theta)
    return theta


def masked_sum(values: Any, mask: Tensor) -> Tensor:
    """Return the sum over rows `(K, n, ...)`, without padding, `(K, ...)`."""
    return torch.where(tree.along(mask, values), values, torch.zeros((), dtype=values.dtype)).sum(1)
