"""Predictive checks: predictions of a fitted model compared with observations, by sums over the rows of all sites.

- `calibration`: the observed frequency of yes by predicted probability, for yes/no responses. A row's probability is
  predicted without the row itself, by smoothed importance sampling. Clients count their rows in fine cells of the
  predicted probability. From the cells' sums the server makes bins of about equal size, and an isotonic curve.
- `histograms`: responses replicated from the model, counted in the same bins as the observed ones. Bins are set from
  means and variances, so that no site discloses its extremes.
- `site_means`: each site's mean response beside those of replicated responses.

Between organisations a site joins neighbouring cells, or bins, until each has the minimum number of rows of the site's
policy (`joined`), and sends the sums of these.

>>> import torch, fedtorch as ft
>>> from fedtorch.federation.algorithms.ep import settled
>>> from fedtorch.models import hierarchical
>>> uniform = ft.random.uniform(ft.random.key(0), (5, 40), torch.float64)
>>> data = ft.data.from_tensors([(torch.ones(40, 1).double(), (uniform[k] < 0.3 + 0.1 * k).double()) for k in range(5)])
>>> model = hierarchical.generalised.logistic(hierarchical.normal(1))
>>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
>>> made = calibration(run, bins=2)
>>> made.rows.sum(), bool((made.low <= made.observed).all() and (made.observed <= made.high).all())
(tensor(200., dtype=torch.float64), True)
>>> low, high = site_means(run).replicated.quantile(torch.tensor([0.025, 0.975]).double(), 1)
>>> bool((low < 0.7).all() and (high > 0.3).all())
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.holders import Form, Holder, Kind, ask
from fedtorch.federation.runs.posterior_draws import Drawn, by_client, masked_sum, sent_draws, summed
from fedtorch.federation.runs.run import Run
from fedtorch.inference._pareto import smoothed
from fedtorch.models.hierarchical.families import LOGISTIC

_CELLS = 200  # of predicted probabilities
_HALVED = 6  # cells are halved so many times at most, so that a site sends at most 64 groups of rows
_REACH = 4.0  # the bins extend so many sds from the mean
_FAR, _MOST_COUNTS = 8.0, 60  # bins of counts extend so many sds from the mean, and up to this count


class Calibration(NamedTuple):
    """Predicted and observed shares in ascending bins of rows, and the isotonic curve over cells."""

    predicted: Tensor  # (B,)
    observed: Tensor  # (B,)
    low: Tensor  # (B,) of the observed share, had the bin's rows this probability in common (Wilson's interval)
    high: Tensor
    rows: Tensor  # (B,) yes/no responses
    curve: Tensor  # (M, 2) predicted probability and isotonic share


class Histograms(NamedTuple):
    """Counts of observed and replicated responses in common bins."""

    places: Tensor  # (B,) middle of each bin; for counts, the count
    width: float
    observed: Tensor  # (B,) rows
    replicated: Tensor  # (S, B)
    counts: bool  # whether responses are counts; then the last bin has all larger ones


class SiteMeans(NamedTuple):
    """Each site's mean response; for yes/no responses, its share of yes."""

    sites: tuple[str, ...]
    observed: Tensor  # (K,)
    replicated: Tensor  # (K, S)


def calibration(
    run: Run, *, bins: int = 10, draws: int = 500, level: float = 0.9, tolerance: float = 0.01, seed: int = 0
) -> Calibration:
    """Compare the predicted probability of yes/no responses with the observed frequency.

    Raises:
        TypeError: responses that are not yes or no.
        RuntimeError: sites whose policies do not allow checks.
    """
    one = posterior_of(run.algorithm).draws(run, draws, None, tolerance, seed)
    if one.family is not LOGISTIC:
        raise TypeError(
            f"Expected yes/no responses, but got a {one.family.name} model; see ft.plots.predictive_check(run)"
        )
    sums = ask(run, CALIBRATION, one.sent, drawn=one)
    known = sums["rows"] > 0
    rows, predicted, yes = (sums[name][known] for name in ("rows", "predicted", "yes"))
    before = rows.cumsum(0) - rows / 2
    bin = (before / rows.sum() * bins).long().clamp(max=bins - 1)
    total = lambda column: column.new_zeros(bins).index_add(0, bin, column)
    count = total(rows)
    filled = count > 0
    count, share = count[filled], (total(yes) / count)[filled]
    low, high = _wilson(share, count, level)
    curve = torch.stack([predicted / rows, _isotonic(yes / rows, rows)], 1)
    return Calibration((total(predicted)[filled] / count), share, low, high, count, curve)


def histograms(run: Run, *, bins: int = 30, draws: int = 200, tolerance: float = 0.01, seed: int = 0) -> Histograms:
    """Return histograms of the observed responses and of responses replicated from the model.

    Raises:
        TypeError: yes/no responses, whose histogram is not informative.
        RuntimeError: sites whose policies do not allow checks.
    """
    one = posterior_of(run.algorithm).draws(run, draws, None, tolerance, seed)
    if one.family is LOGISTIC:
        raise TypeError('Expected responses that are not yes or no; ask for predictive_check(run, of="sites")')
    power = ask(run, POWERS, one.sent, drawn=one)
    mean = power[1] / power[0]
    square = power[2] / power[0]
    least = (torch.finfo(square.dtype).eps * square).clamp(min=torch.finfo(square.dtype).tiny)  # below is rounding
    sd = (square - mean.square()).maximum(least).sqrt()
    counts = one.family.name == "poisson"
    if counts:
        last = min(float((mean + _FAR * sd).ceil()), _MOST_COUNTS)
        places = torch.arange(int(last) + 1).to(mean)
    else:
        edges = torch.linspace(-_REACH, _REACH, bins + 1).to(mean) * sd + mean
        places = (edges[1:] + edges[:-1]) / 2
    width = float(places[1] - places[0])
    inner = (places[1:] + places[:-1]) / 2
    rows = ask(run, HISTOGRAM, {**one.sent, "edges": inner}, drawn=one)
    return Histograms(places, width, rows[:, 0], rows[:, 1:].T, counts)


def site_means(run: Run, *, draws: int = 200, tolerance: float = 0.01, seed: int = 0) -> SiteMeans:
    """Return each site's mean response, observed and replicated; raises RuntimeError as `histograms` does."""
    one = posterior_of(run.algorithm).draws(run, draws, None, tolerance, seed)
    totals = ask(run, MEANS, one.sent, drawn=one)
    return SiteMeans(
        tuple(run.population.names),
        totals["observed"] / totals["count"],
        totals["replicated"] / totals["count"][:, None],
    )


def is_binary(run: Run) -> bool:
    """Return whether a run's responses are yes or no, or successes of trials."""
    return posterior_of(run.algorithm).draws(run, 1, None, math.inf, 0).family is LOGISTIC


def _cells(drawn: Drawn, part: slice) -> dict[str, Tensor]:
    """Return rows, trials, predicted and observed yes responses in cells of predicted probability `(K, n, cells)`."""
    weights = smoothed(-drawn.log_density(part), drawn.efficiency).log_weights.exp()
    p = (weights * drawn.family.mean(drawn.predictor(part))).sum(-1)
    trials = drawn.scales(part)[..., 0].expand(p.shape)
    inside = torch.nn.functional.one_hot((p * _CELLS).long().clamp(max=_CELLS - 1), _CELLS)
    columns = {"members": torch.ones_like(p), "rows": trials, "predicted": trials * p, "yes": drawn.rows.y[:, part]}
    return {name: inside * column[..., None] for name, column in columns.items()}


def _powers(drawn: Drawn, part: slice) -> dict[str, Tensor]:
    y = drawn.rows.y[:, part]
    return {"powers": torch.stack([torch.ones_like(y), y, y.square()], -1)}


def _counted(drawn: Drawn, edges: Tensor) -> Tensor:
    """Return counts of rows between the edges, observed and replicated, `(K, bins, 1 + S)`."""
    total = drawn.theta.new_zeros(len(drawn.theta), len(edges) + 1, 1 + drawn.theta.shape[1])
    for part in drawn.parts():
        every = torch.cat([drawn.rows.y[:, part, None], drawn.replicated(part)], -1)
        inside = drawn.mask[:, part, None].expand_as(every).to(total)
        total.scatter_add_(1, torch.bucketize(every.contiguous(), edges.to(every)), inside)
    return total


def _totals(drawn: Drawn) -> dict[str, Tensor]:
    """Return clients' sums of responses, observed `(K,)` and replicated `(K, S)`, and their numbers."""
    parts = []
    for part in drawn.parts():
        mask, y = drawn.mask[:, part], drawn.rows.y[:, part]
        each = drawn.scales(part).expand(*y.shape, -1)[..., 0] if drawn.family is LOGISTIC else torch.ones_like(y)
        columns = {"observed": y, "replicated": drawn.replicated(part), "count": each}
        parts.append(tree.map(lambda column, mask=mask: masked_sum(column, mask), columns))
    return tree.map(lambda *leaves: torch.stack(leaves).sum(0), *parts)


def _wilson(share: Tensor, count: Tensor, level: float) -> tuple[Tensor, Tensor]:
    z = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=share.dtype))
    middle = (share + z.square() / (2 * count)) / (1 + z.square() / count)
    half = z / (1 + z.square() / count) * (share * (1 - share) / count + z.square() / (4 * count.square())).sqrt()
    return (middle - half).clamp(min=0), (middle + half).clamp(max=1)


def _isotonic(share: Tensor, weight: Tensor) -> Tensor:
    """Return the isotonic regression of the shares."""
    from sklearn.isotonic import isotonic_regression

    return torch.from_numpy(isotonic_regression(share.cpu().numpy(), sample_weight=weight.cpu().numpy()))


# -- what holders of rows compute ------------------------------------------------------------------------------------


def joined(rows: Tensor, minimum: int) -> Tensor:
    """Group neighbouring cells so that each group has the minimum of rows in all columns; return their groups `(B,)`.

    Groups are halved while both halves have the minimum, as `fedtorch.data.agreement.histogram` halves bins. If groups
    ended as soon as they had the minimum, their ends would disclose the values of rows. With a minimum of 1 every cell
    is a group, also an empty one.

    >>> joined(torch.tensor([[0.0], [5.0], [1.0], [3.0], [2.0], [9.0]]), minimum=4)
    tensor([0, 0, 0, 1, 1, 1])
    >>> joined(torch.tensor([[0.0], [3.0]]), minimum=1)
    tensor([0, 1])
    """
    if minimum <= 1:
        return torch.arange(len(rows))
    below = torch.cat([torch.zeros_like(rows[:1]), rows.cumsum(0)])
    starts = torch.zeros(len(rows), dtype=torch.int64)
    starts[_halved(below, 0, len(rows), minimum, _HALVED)] = 1
    return starts.cumsum(0)


def _halved(below: Tensor, first: int, last: int, minimum: int, times: int) -> list[int]:
    """Return the first cell of each group but the first group, from the rows `below` each cell `(B + 1, columns)`."""
    while times and last - first > 1:
        middle = (first + last) // 2
        left, right = below[middle] - below[first], below[last] - below[middle]
        if bool((left >= minimum).all() and (right >= minimum).all()):
            halves = (first, middle), (middle, last)
            before, after = (_halved(below, *half, minimum, times - 1) for half in halves)
            return [*before, middle, *after]
        if bool(left.min() > right.min()):
            last = middle
        else:
            first = middle
    return []


def _calibrated(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the sums of a holder's cells; the sums of a group are in the cell of its mean prediction."""
    sums = summed(holder, [holder.data], [sent_draws(holder, sent).at], lambda every, part: _cells(every[0], part))
    group = joined(sums.pop("members")[:, None], holder.minimum)
    if holder.minimum <= 1:
        return sums
    added = lambda column, places: torch.zeros_like(column).index_add(0, places, column)
    totals = {name: added(column, group) for name, column in sums.items()}
    mean = totals["predicted"] / totals["rows"].where(totals["rows"] > 0, 1.0)
    return {name: added(column, (mean * _CELLS).long().clamp(max=_CELLS - 1)) for name, column in totals.items()}


def _histogram(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> Tensor:
    """Return a holder's numbers of rows by bin, `(B, 1 + S)`; the rows of a group are spread evenly over its bins.

    Groups have the minimum of observed rows, and on average the minimum of replicated ones. They end where halves of
    the bins do.
    """
    arguments, edges = (holder, [holder.data], [sent_draws(holder, sent).at]), sent["edges"]
    rows: Tensor = by_client(*arguments, lambda every: _counted(every[0], edges)).sum(0)
    group = joined(torch.stack([rows[:, 0], rows[:, 1:].mean(1)], 1), holder.minimum)
    totals, sizes = torch.zeros_like(rows).index_add(0, group, rows), torch.bincount(group)
    return totals[group] / sizes[group, None]


def _responses(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> Tensor:
    arguments = (holder, [holder.data], [sent_draws(holder, sent).at])
    return summed(*arguments, lambda every, part: _powers(every[0], part))["powers"]


def _means(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    return by_client(holder, [holder.data], [sent_draws(holder, sent).at], lambda every: _totals(every[0]))


def _room(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float64)


def _of_clients(form: Form) -> dict[str, Tensor]:
    each = dict.fromkeys(("observed", "count"), _room(form.clients))
    return {**each, "replicated": _room(form.clients, len(form.sent["phi"]))}


_DRAWS = ("phi", "key")
CALIBRATION = Kind(
    "calibration",
    "checks",
    _calibrated,
    lambda form: dict.fromkeys(("rows", "predicted", "yes"), _room(_CELLS)),
    _DRAWS,
)
POWERS = Kind("powers", "checks", _responses, lambda form: _room(3), _DRAWS)
HISTOGRAM = Kind(
    "histogram",
    "checks",
    _histogram,
    lambda form: _room(len(form.sent["edges"]) + 1, 1 + len(form.sent["phi"])),
    (*_DRAWS, "edges"),
)
MEANS = Kind("means", "checks", _means, _of_clients, _DRAWS, by_client=True)
