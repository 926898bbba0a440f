"""Effects of sites: intervals, shrinkage to the mean, and unusual sites given their size.

>>> import torch, fedtorch as ft
>>> from fedtorch.federation.algorithms.ep import settled
>>> from fedtorch.models import hierarchical
>>> x, z = torch.ones(8, 1).double(), ft.random.normal(ft.random.key(0), (5, 8), torch.float64)
>>> data = ft.data.from_tensors([(x, k + z[k]) for k in range(5)], names=["A", "B", "C", "D", "E"])
>>> model = hierarchical.linear(hierarchical.normal(1, sd=5.0, names=["level"]), noise=1.0)
>>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
>>> [text.get_text() for text in forest(run).axes[0].get_yticklabels()]
['A', 'B', 'C', 'D', 'E', 'all sites']
>>> shrinkage(run).axes[0].get_title(), funnel(run).axes[0].get_xlabel()
('level', "precision of the site's own estimate, 1 / se")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedtorch.inference.ranef import SiteEstimates, site_estimates
from fedtorch.plots.charts import GREY, Chart, Label, Series, chart
from fedtorch.plots.forests import LONGEST, Forest, Line, forest as forest_of, shortened
from fedtorch.plots.style import draw, draw_forest, literal, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedtorch.federation.runs.run import Run

_PANELS = 3  # coefficients beside each other
_NAMED = 6  # sites outside the limits of a funnel that are named
_LIMITS = ((1.959964, "95 %"), (3.090232, "99.8 %"))


@literal()
def forest(run: Run, coefficient: str | Sequence[str] | None = None, *, level: float = 0.9) -> Figure:
    """Draw each site's coefficients with their intervals, ordered, with the common coefficient below.

    Args:
        run: of `ft.ep` with a hierarchical model, on rows at hand or on sites whose policies have
            `after_fit=("effects",)`; or of `ft.gibbs` with a regression and a sampler that recorded sites.
        coefficient: one or several names; default: the first three that differ by site.
        level: probability of the intervals.

    Raises:
        TypeError: another kind of run.
        RuntimeError: sites that do not allow effects.
        ValueError: no such coefficient.
    """
    return _forests([site_forest(*each, level=level) for each in _chosen(run, coefficient, level)])


@literal()
def shrinkage(run: Run, coefficient: str | Sequence[str] | None = None, *, level: float = 0.9) -> Figure:
    """Draw each site's own estimate and its partially pooled one; arguments are those of `forest`.

    A site whose rows have no information about a coefficient has no own estimate.
    """
    return _forests([site_forest(*each, level=level, own=True) for each in _chosen(run, coefficient, level)])


@literal()
def funnel(run: Run, coefficient: str | Sequence[str] | None = None) -> Figure:
    """Draw each site's own estimate against its precision, with the limits of random variation.

    Inner limits contain 95 % and outer ones 99.8 % of sites that differ from the mean by chance and by the estimated
    spread between sites; the first of those outside are named. Arguments are those of `forest`.
    """
    made = [site_funnel(*each) for each in _chosen(run, coefficient, 0.9)]
    figure = new_figure(6.4 * len(made), 4.4)
    for axes, one in zip(figure.subplots(1, len(made), squeeze=False)[0], made):
        if one is not None:
            draw(axes, one)
            axes.set_title(one.title, fontsize="medium")
    _share_legend(figure)
    return figure


def site_forest(estimates: SiteEstimates, j: int, *, level: float, own: bool = False) -> Forest | None:
    """Build the forest of a coefficient, with the sites' own estimates if `own`."""
    name = estimates.coefficients[j]
    order = estimates.mean[:, j].argsort(stable=True).tolist()
    columns = (part[:, j].tolist() for part in (estimates.low, estimates.mean, estimates.high, estimates.unpooled))
    every = list(zip(estimates.sites, *columns))
    lines = [Line(*(every[k] if own else every[k][:4])) for k in order]
    low, middle, high = (float(part[j]) for part in (estimates.centre_low, estimates.centre, estimates.centre_high))
    lines.append(Line("all sites", low, middle, high, all=True))
    words = f"partial pooling, {100 * level:g} % interval"
    zero = float(estimates.centre[j]) if own else 0.0
    return forest_of(
        name, estimates.scale, lines, zero=zero, middle=words, other="own estimate", all="mean of all sites"
    )


def site_funnel(estimates: SiteEstimates, j: int) -> Chart | None:
    """Build the funnel of a coefficient, None if no site has an own estimate."""
    effects, sd = estimates.unpooled[:, j].numpy(), estimates.unpooled_sd[:, j].numpy()
    known = np.isfinite(effects) & np.isfinite(sd) & (sd > 0)
    if not known.any():
        return None
    centre, spread = float(estimates.centre[j]), float(estimates.spread[j])
    precision, effect = 1 / sd[known], effects[known]
    x = np.linspace(0.9 * precision.min(), 1.02 * precision.max(), 100)
    width = np.sqrt(1 / x**2 + spread**2)
    series = [
        Series(f"{words} limits", centre + factor * width, GREY, low=centre - factor * width, faint=factor > 2)
        for factor, words in _LIMITS
    ]
    series.append(Series("mean of all sites", np.full_like(x, centre), GREY, "dashed"))
    series.append(Series("site's own estimate", effect, 0, "none", x=precision))
    away = np.abs(effect - centre) / np.sqrt(1 / precision**2 + spread**2)
    names = np.array(estimates.sites, dtype=object)[known]
    worst = [i for i in np.argsort(-away, kind="stable") if away[i] > _LIMITS[0][0]][:_NAMED]
    called = dict(zip(estimates.sites, shortened(estimates.sites, 26)))
    labels = _apart([Label(float(precision[i]), float(effect[i]), called[str(names[i])]) for i in worst])
    name = estimates.coefficients[j]
    label = "precision of the site's own estimate, 1 / se"
    made = chart(name, label, x, series, y_label=name, logarithmic=False)
    return None if made is None else made._replace(labels=labels)


def _apart(labels: Sequence[Label]) -> list[Label]:
    """Return the labels that do not overlap earlier ones."""
    reach = [max((getattr(one, side) for one in labels), default=0.0) for side in ("x", "y")]
    reach = [end - min((getattr(one, side) for one in labels), default=0.0) for end, side in zip(reach, ("x", "y"))]
    shown: list[Label] = []
    for one in labels:
        if all(abs(one.x - k.x) > 0.5 * reach[0] or abs(one.y - k.y) > 0.06 * reach[1] for k in shown):
            shown.append(one)
    return shown


def _chosen(run: Run, coefficient: str | Sequence[str] | None, level: float) -> list[tuple[SiteEstimates, int]]:
    """Return estimates and the indices of the drawn coefficients."""
    estimates = site_estimates(run, level)
    if coefficient is None:
        return [(estimates, j) for j in range(min(_PANELS, len(estimates.coefficients)))]
    names = [coefficient] if isinstance(coefficient, str) else list(coefficient)
    for name in names:
        if name not in estimates.coefficients:
            raise ValueError(f"Expected one of {list(estimates.coefficients)}, which differ by site, but got {name!r}")
    return [(estimates, estimates.coefficients.index(name)) for name in names]


def _forests(made: Sequence[Forest | None]) -> Figure:
    every = [one for one in made if one is not None]
    most = max(len(one.lines) for one in every)
    widest = min(LONGEST, max(len(line.name) for one in every for line in one.lines))
    figure = new_figure((3.2 + 0.075 * widest) * len(every), 1.5 + 0.19 * most)
    for axes, one in zip(figure.subplots(1, len(every), squeeze=False)[0], every):
        draw_forest(axes, one)
    _share_legend(figure)
    return figure


def _share_legend(figure: Figure) -> None:
    """Draw the common legend of all panels, below them."""
    parts = {name: part for axes in figure.axes for part, name in zip(*axes.get_legend_handles_labels())}
    columns = max(1, min(len(parts), int(figure.get_figwidth() / 2.6)))
    figure.legend(
        parts.values(), parts.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize="small"
    )


__all__ = ["forest", "funnel", "shrinkage"]
