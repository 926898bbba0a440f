r"""The mean and covariance of all sites' rows, some of whose values are missing, by EM.

Rows are draws of one normal distribution, with values missing at random: some sites may lack a covariate altogether. An
iteration needs from each site only the sums Σ E[z] and Σ E[z z'] about the present mean, given the observed values.
`fedtorch.models.gibbs.imputation` fills the gaps from the result.

With `draws` the same sums give draws of mean and covariance from their posterior, of which proper multiple imputation
uses one for each completed data set; see `_augmentation`.

Source: Dempster, Laird and Rubin (1977), "Maximum likelihood from incomplete data via the EM algorithm", JRSS B 39,
section 4.1.3 (normal data).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import Design
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.algorithms._augmentation import augmentation, far, start
from fedtorch.federation.exchanges.exchange import Mean
from fedtorch.federation.populations.population import feature_names, row_counts
from fedtorch.federation.posterior import Named
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.models.estimates import Estimates
from fedtorch.models.incomplete_normal import Normal, conditional, incomplete_rows


def normal_em(draws: int | None = None, *, between: bool = True, columns: int | Design | None = None) -> Algorithm:
    """Build EM for the normal distribution of all sites' rows; a round is an iteration.

    Run it on data of `imputation.incomplete(...)`. Its parameters are where it starts, a `Normal` such as mean 0 and
    covariance I; the server's state is a `Normal`.

    Columns that are exact linear functions of others, constant ones too, have no such distribution and end in a
    `torch.linalg.LinAlgError`; leave them out. Draws have a weak prior, and no need to.

    Args:
        draws: None for the estimate. Otherwise the number of chains of data augmentation, whose latest draws of mean
            and covariance are `server.normal`, `(draws, ...)`; the chains forget their start after some rounds.
        between: with draws, whether the sites' means differ, by variances that are drawn too.
        columns: number of columns, or the design that reads them; no start parameters are needed then, and sites build
            the algorithm so.

    Raises:
        ValueError: fewer than one draw.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.normal_em import normal_em
        >>> from fedtorch.models.gibbs import imputation
        >>> x = torch.tensor([[1.0], [2.0], [float("nan")], [4.0]])
        >>> data = imputation.incomplete([(x, torch.tensor([1.0, 3.0, 2.5, 4.0]))])
        >>> start = imputation.Normal(torch.zeros(2).double(), torch.eye(2).double())
        >>> final = ft.run(normal_em(), ft.InProcess(data), start, rounds=200)
        >>> imputation.impute(data, final.server)[0][0][2].round(decimals=3)
        tensor([2.1790], dtype=torch.float64)
    """
    if draws is not None and draws < 1:
        raise ValueError(f"Expected at least one draw, but got draws={draws}; leave it away for the estimate")
    if draws is not None:
        return Algorithm(**augmentation(draws, between, columns))
    return Algorithm(
        start=start(columns),
        settings={"algorithm": "normal_em"},
        init=lambda parameters, clients: (tree.to(parameters, torch.float64), ()),
        outbox=lambda server: server,
        client=_client,
        server=_server,
        model=lambda inbox, state: inbox,
        posterior=Named(_estimates),
    )


@tells(Learns("means and products of a client's columns, exactly: of fewer rows than columns, the rows"))
class _Moments(NamedTuple):
    """A client's sums over its rows, completed by conditional means."""

    mean: Tensor  # (K, p) from where the server's is
    second: Tensor  # (K, p, p) about it


def _client(inbox: Normal, state: Any, data: Any, turn: Turn) -> Reply:
    expected, spread, _ = conditional(incomplete_rows(data.batch), inbox)
    rows = data.mask.to(expected.dtype)
    count = data.count.clamp(min=1).to(expected.dtype)
    away = expected - inbox.mean[:, None]  # sums about zero would lose the digits of columns far from it
    first = (away * rows[..., None]).sum(1) / count[:, None]
    outer = away[..., :, None] * away[..., None, :] + spread
    second = (outer * rows[..., None, None]).sum(1) / count[:, None, None]
    return Reply(Mean(_Moments(first, second), data.count.to(expected.dtype)), state, {})


def _server(state: Normal, aggregate: Mean, key: Tensor) -> Normal:
    moved, second = aggregate.value
    covariance = second - moved[:, None] * moved
    mean = state.mean + moved
    return Normal(mean, state.covariance if far(moved, mean, covariance.diagonal()) else covariance)


def _estimates(run: Any) -> Estimates:
    """Return the maximum likelihood estimates, which have no intervals: means, SDs and correlations of the columns."""
    mean, covariance = run.server
    size, rows = len(mean), int(row_counts(run.population).sum())
    columns = feature_names(run.population)
    columns = columns if len(columns) == size else tuple(map(str, range(size)))  # the response's is the last
    sd = covariance.diagonal().sqrt()
    below = torch.tril_indices(size, size, -1)
    pairs = list(zip(*below.tolist()))
    names = (
        *(f"mean({name})" for name in columns),
        *(f"sd({name})" for name in columns),
        *(f"cor({columns[j]}, {columns[i]})" for i, j in pairs),
    )
    values = torch.cat([mean, sd, (covariance / sd / sd[:, None])[below[0], below[1]]])
    return Estimates(names, values[None], coefficients=size, n=(rows,) * len(names), about="maximum likelihood")
