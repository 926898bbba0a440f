"""Estimates of named quantities: nodes or draws of their posterior, and the table of them.

>>> import torch
>>> from fedtorch.models.estimates import Estimates
>>> draws = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 3.0]]).double()
>>> found = Estimates(("age", "sex"), draws, coefficients=2, n=(40, 40))
>>> print(found.table(0.9)[["estimate", "sd", "n"]].to_markdown())
| coefficient | estimate | sd | n |
| :-- | --: | --: | --: |
| age | 2.0 | 1.0 | 40 |
| sex | 1.0 | 1.7 | 40 |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

from fedtorch.models.device_posterior import interval
from fedtorch.models.gaussian import Moments

if TYPE_CHECKING:
    from fedtorch.tables.result_frame import ResultFrame


class Diagnostics(NamedTuple):
    """ArviZ's diagnostics of draws, `(q,)` each."""

    r_hat: Tensor
    ess: Tensor


class Estimates(NamedTuple):
    """The posterior of `q` named quantities, at nodes or as draws; a point estimate is a single node."""

    names: tuple[str, ...]
    nodes: Tensor  # (R, q)
    weights: Tensor | None = None  # (R,) of sum 1; None: draws, all alike
    coefficients: int = 0  # number of leading quantities that are coefficients, which have linear combinations
    normal: Moments | None = None  # of the coefficients, if their posterior is normal and intervals are exact
    n: tuple[int | None, ...] = ()  # rows behind a quantity; number of clients for parameters of their variation
    diagnostics: Diagnostics | None = None
    chains: int = 1  # number of chains, in draws one after the other
    about: str = ""  # description of the numbers, for the caption of a table

    def table(self, level: float) -> ResultFrame:
        """Return estimates, sds and equal-tailed intervals, by name."""
        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, but got {level}")
        from fedtorch.tables.result_frame import ResultFrame  # needs pandas, which takes its time

        mean, sd = weighted_moments(self.nodes, self.weights)
        low, high = (weighted_quantile(self.nodes, p, self.weights) for p in ((1 - level) / 2, (1 + level) / 2))
        if self.normal is not None:
            c = self.coefficients
            exact_sd = self.normal.covariance.diagonal().sqrt()
            edges = interval(Normal(self.normal.mean, exact_sd, validate_args=False), level)
            mean, sd = torch.cat([self.normal.mean, mean[c:]]), torch.cat([exact_sd, sd[c:]])
            low, high = (torch.cat([edge, other[c:]]) for edge, other in zip(edges, (low, high)))
        columns = {"estimate": mean, "sd": sd, "low": low, "high": high}
        data: dict[str, list[float | int | None]] = {name: values.tolist() for name, values in columns.items()}
        if any(number is not None for number in self.n):
            data["n"] = list(self.n)
        if self.diagnostics is not None:
            data |= {name: values.tolist() for name, values in self.diagnostics._asdict().items()}
        return ResultFrame.of(data, self.names, "coefficient", level=level, about=self.about)

    def combined(self, weights: Tensor, names: tuple[str, ...]) -> Estimates:
        """Return linear combinations of the quantities, a row of `weights` `(c, q)` each."""
        weights = weights.to(self.nodes)
        inside, n = weights[:, : self.coefficients], None
        linear = self.normal is not None and not bool(weights[:, self.coefficients :].any())
        if linear and self.normal is not None:
            n = Moments(inside @ self.normal.mean, inside @ self.normal.covariance @ inside.mT)
        return self._replace(
            names=names,
            nodes=self.nodes @ weights.mT,
            coefficients=len(names),
            normal=n,
            n=(),
            diagnostics=None,
        )


def own_names(names: Iterable[str], taken: Iterable[str]) -> tuple[str, ...]:
    """Return names of quantities that the package itself names, marked where a column is called so.

    Args:
        names: such as `sigma` and `sd(age)`.
        taken: names of coefficients, which are column names.

    >>> own_names(["sd(sigma)", "sigma"], ["age", "sigma"])
    ('sd(sigma)', 'sigma (model)')
    """
    distinct, used = [], set(taken)
    for name in names:
        while name in used:
            name = f"{name} (model)"
        used.add(name)
        distinct.append(name)
    return tuple(distinct)


def over_clients(rows: Tensor, noise: Tensor, columns: Sequence[str], count: int) -> Estimates:
    """Return means and sds over clients of their coefficients, and the sd of their noise: point estimates.

    Args:
        rows: coefficients of each client `(K, p)`.
        noise: variances `(K,)`.
        columns: names of the coefficients, used if their number matches.
        count: number of rows behind the estimates.

    >>> import torch
    >>> found = over_clients(torch.tensor([[1.0], [3.0]]).double(), torch.tensor([4.0, 4.0]).double(), ["age"], 40)
    >>> print(found.table(0.95)[["estimate", "sd", "n"]].to_markdown())
    | coefficient | estimate | sd | n |
    | :-- | --: | --: | --: |
    | age | 2.00 | – | 40 |
    | sd(age) | 1.41 | – | 2 |
    | sigma | 2.00 | – | 40 |
    """
    clients, size = rows.shape
    names = tuple(columns) if len(columns) == size else tuple(map(str, range(size)))
    return Estimates(
        names=(*names, *own_names([*(f"sd({name})" for name in names), "sigma"], names)),
        nodes=torch.cat([rows.mean(0), rows.std(0, correction=min(1, clients - 1)), noise.mean().sqrt()[None]])[None],
        coefficients=size,
        n=(*(count,) * size, *(clients,) * size, count),
        about="point estimates, whose intervals would take all clients' rows together",
    )


def weighted_moments(nodes: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return means and sds over the nodes `(R, ...)`; sds are NaN of a single one.

    >>> import torch
    >>> weighted_moments(torch.tensor([[1.0], [3.0]]), torch.tensor([0.75, 0.25]))
    (tensor([1.5000]), tensor([0.8660]))
    """
    if len(nodes) == 1:
        return nodes[0], torch.full_like(nodes[0], torch.nan)
    if weights is None:
        return nodes.mean(0), nodes.std(0)
    mean = torch.tensordot(weights, nodes, 1)
    return mean, torch.tensordot(weights, (nodes - mean).square(), 1).sqrt()


def weighted_quantile(nodes: Tensor, probability: float, weights: Tensor | None = None) -> Tensor:
    """Return quantiles over the nodes `(R, ...)`, by lines between the middles of their weights; NaN of a single one.

    >>> import torch
    >>> weighted_quantile(torch.tensor([[4.0], [1.0], [2.0], [3.0]]), 0.5)
    tensor([2.5000])
    """
    if len(nodes) == 1:
        return torch.full_like(nodes[0], torch.nan)
    flat = nodes.flatten(1)
    ordered, order = flat.sort(0)
    each = torch.full_like(flat, 1 / len(flat)) if weights is None else weights[order]
    below = each.cumsum(0) - each / 2
    after = (below < probability).sum(0).clamp(1, len(flat) - 1)[None]
    x, p = ((part.gather(0, after - 1)[0], part.gather(0, after)[0]) for part in (ordered, below))
    share = ((probability - p[0]) / (p[1] - p[0]).clamp(min=torch.finfo(flat.dtype).tiny)).clamp(0, 1)
    return (x[0] + share * (x[1] - x[0])).reshape(nodes.shape[1:])
