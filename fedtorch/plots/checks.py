"""Predictions of a fitted model with observations: calibration, and replicated responses.

>>> import torch, fedtorch as ft
>>> from fedtorch.federation.algorithms.ep import settled
>>> from fedtorch.models import hierarchical
>>> uniform = ft.random.uniform(ft.random.key(0), (5, 40), torch.float64)
>>> data = ft.data.from_tensors([(torch.ones(40, 1).double(), (uniform[k] < 0.3 + 0.1 * k).double()) for k in range(5)])
>>> model = hierarchical.generalised.logistic(hierarchical.normal(1))
>>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
>>> calibration(run).axes[0].get_xlabel(), predictive_check(run).axes[0].get_title()
('predicted probability, without the row itself', 'share of yes by site')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fedtorch.inference import checks
from fedtorch.inference.checks import Calibration, Histograms, SiteMeans
from fedtorch.plots.charts import GREY, Chart, Series, chart
from fedtorch.plots.forests import Forest, Line, forest
from fedtorch.plots.style import draw, draw_forest, literal, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedtorch.federation.runs.run import Run

__all__ = ["calibration", "predictive_check"]


def calibration(run: Run, *, bins: int = 10, level: float = 0.9) -> Figure:
    """Draw observed frequencies of yes/no responses by predicted probability, with intervals and the isotonic curve.

    Args:
        run: of `ft.ep` with a hierarchical logistic model, on rows at hand or on sites whose policies have
            `after_fit=("checks",)`; or of `ft.gibbs` with a sampler that recorded sites.
        bins: number of bins, with about equally many rows.
        level: probability of the intervals.

    Raises:
        TypeError: another kind of run.
        RuntimeError: sites that do not allow checks.
    """
    figure = new_figure(5.2, 4.8)
    axes = figure.subplots()
    made = calibration_chart(checks.calibration(run, bins=bins, level=level), level)
    if made is not None:
        draw(axes, made)
    axes.legend(frameon=False, fontsize="small")
    return figure


@literal()
def predictive_check(run: Run, *, of: str = "", level: float = 0.9) -> Figure:
    """Draw observed responses with replicated ones.

    Args:
        run: as for `calibration`, with any hierarchical model.
        of: "rows", the density of numbers or the square roots of the frequencies of counts (a rootogram); or "sites",
            each site's mean, for yes/no responses its share of yes. Default: rows, and sites for yes/no responses.
        level: probability of the bands.

    Raises:
        TypeError: another kind of run, or `of="rows"` for yes/no responses.
        RuntimeError: sites that do not allow checks.
    """
    if of not in ("", "rows", "sites"):
        raise ValueError(f"Expected of= 'rows' or 'sites', but got {of!r}")
    binary = checks.is_binary(run)
    if of == "sites" or (not of and binary):
        made = site_check(checks.site_means(run), level, binary)
        figure = new_figure(6.8, 1.5 + 0.19 * (0 if made is None else len(made.lines)))
        axes = figure.subplots()
        if made is not None:
            draw_forest(axes, made)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize="small")
        return figure
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    if (described := histogram_chart(checks.histograms(run), level)) is not None:
        draw(axes, described)
    axes.legend(frameon=False, fontsize="small")
    return figure


def calibration_chart(calibration: Calibration, level: float) -> Chart | None:
    """Return the chart of a calibration.

    >>> half = torch.tensor([0.5])
    >>> found = Calibration(half, half, half - 0.1, half + 0.1, half * 20, half.expand(1, 2))
    >>> calibration_chart(found, level=0.9).y_label
    'observed share'
    """
    x, diagonal = calibration.predicted.numpy(), np.array([0.0, 1.0])
    series = [
        Series(f"{100 * level:g} % interval of the bins", calibration.high.numpy(), low=calibration.low.numpy()),
        Series("perfect", diagonal, GREY, "dashed", x=diagonal),
        Series("isotonic", calibration.curve[:, 1].numpy(), 1, x=calibration.curve[:, 0].numpy()),
        Series("bins of rows", calibration.observed.numpy(), 0, "none"),
    ]
    label = "predicted probability, without the row itself"
    return chart("Calibration", label, x, series, y_label="observed share", logarithmic=False)


def histogram_chart(histograms: Histograms, level: float) -> Chart | None:
    """Return observed counts over the band of replicated ones: a density, or a rootogram of counts.

    >>> bins = torch.arange(3.0).double()
    >>> made = histogram_chart(Histograms(bins, 1.0, bins, bins.expand(5, 3), counts=True), level=0.9)
    >>> made.y_label, made.series[-1].y.round(1).tolist()
    ('√ rows', [0.0, 1.0, 1.4])
    """
    tails = torch.tensor([(1 - level) / 2, 0.5, (1 + level) / 2], dtype=histograms.replicated.dtype)
    scaled = (
        (lambda rows: rows.sqrt())
        if histograms.counts
        else (lambda rows: rows / (histograms.observed.sum() * histograms.width))
    )
    low, middle, high = scaled(histograms.replicated.quantile(tails, 0)).numpy()
    series = [
        Series(f"{100 * level:g} % of replicated responses", high, low=low),
        Series("their median", middle, 0, "dashed"),
        Series("observed", scaled(histograms.observed).numpy(), 1),
    ]
    label = "response" + (f", {histograms.places[-1]:.0f} or more in the last place" if histograms.counts else "")
    y_label = "√ rows" if histograms.counts else "density"
    title = "Counts, observed and replicated" if histograms.counts else "Responses, observed and replicated"
    return chart(title, label, histograms.places.numpy(), series, y_label=y_label, logarithmic=False)


def site_check(means: SiteMeans, level: float, binary: bool) -> Forest | None:
    """Return each site's replicated means with the observed one.

    >>> made = site_check(SiteMeans(("a",), torch.ones(1), torch.rand(1, 9)), level=0.9, binary=False)
    >>> made.lines[0].name, made.lines[0].other
    ('a', 1.0)
    """
    tails = torch.tensor([(1 - level) / 2, 0.5, (1 + level) / 2], dtype=means.replicated.dtype)
    low, middle, high = means.replicated.quantile(tails, 1).tolist()
    order = means.observed.argsort(stable=True).tolist()
    lines = [Line(means.sites[k], low[k], middle[k], high[k], float(means.observed[k])) for k in order]
    words = "share of yes by site" if binary else "mean response by site"
    return forest(
        words, words.removesuffix(" by site"), lines, middle=f"replicated, {100 * level:g} %", other="observed"
    )
