"""Charts, forests and networks of the report, drawn by matplotlib as in `fedtorch.plots`, in the page's colours.

Text in the SVG remains text, and ids are unique to a chart. Colours and font sizes are those of the style sheet, light
or dark. Each picture has a description and a table for readers who cannot see it.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from fedtorch.plots.charts import GREY, Chart, Numbers, Series, number
from fedtorch.plots.forests import Forest
from fedtorch.plots.networks import draw_edges, node_style
from fedtorch.plots.style import draw, draw_forest
from fedtorch.report._words import visible, width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 460.0, 250.0  # of a chart, in pixels
_MOST_LEFT, _LINE = 200.0, 17.0  # of the names beside a forest, and the height of a line of it
_SQUARE = 440.0  # the side of a network
_NAMED = 300  # the most nodes of a network that show their names
_BINS = 180  # of a chart's width; a bin shows its lowest and its highest value
_TABLE = 12  # the most rows of a chart's table
# Colours that matplotlib draws with, and their names in the style sheet; all others are "soft".
_COLOURS = {f"#0000c{i}": f"c{i}" for i in range(1, 7)}
_SHADES = {f"#0000e{i}": f"s{i}" for i in range(5)}
_DRAWN = {**_COLOURS, **_SHADES, "#0000d0": "grid", "#ffffff": "card"}
_STYLE = {
    **{f"{one}.facecolor": "none" for one in ("axes", "figure", "savefig")},
    **{f"{axis}tick.major.{name}": size for axis in "xy" for name, size in (("pad", 6), ("size", 0))},
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "figure.dpi": 72,  # a pixel is a point
    "font.size": 12,
    "grid.color": "#0000d0",
    "svg.fonttype": "none",
    "svg.hashsalt": "fedtorch",  # the same ids for the same drawing
    "text.parse_math": False,
}


class Picture(NamedTuple):
    """A picture with its title, legend, table and notes."""

    title: str
    svg: Markup
    remark: str = ""  # beside the title
    legend: Sequence[tuple[str, str]] = ()  # (classes of the style sheet, label)
    header: Sequence[str] = ()  # of the table
    rows: Sequence[Sequence[str]] = ()
    note: str = ""  # below the picture


def picture(described: Chart | Forest, id: str) -> Picture:
    """Return the picture of a chart or a forest, labelled by the heading with this `id`.

    >>> from fedtorch.plots.forests import Line, forest
    >>> made = picture(forest("Age", "", [Line("a&b", -0.1, 0.2, 0.5)]), "age")
    >>> "a&amp;b" in made.svg, 'aria-labelledby="age"' in made.svg
    (True, True)
    """
    return _chart(described, id) if isinstance(described, Chart) else _forest(described, id)


def _chart(chart: Chart, id: str) -> Picture:
    series = [_thinned(one, chart.x) for one in chart.series if bool(np.isfinite(one.y).any())]
    with _axes(WIDTH, HEIGHT, left=76, right=14, top=12, bottom=38) as (axes, svg):
        axes.grid(axis="y")
        draw(axes, chart._replace(series=series, y_label=""))
        drawn = svg(id, _sentences(chart))
    return Picture(
        title=chart.title,
        svg=drawn,
        remark="(logarithmic)" if chart.logarithmic else "",
        legend=[(_key(one), one.label) for one in series] if len(series) > 1 else [],
        header=[chart.x_label, *(one.label for one in chart.series)],
        rows=_table(chart),
    )


def _forest(forest: Forest, id: str) -> Picture:
    """Return the picture of a forest; names take less than half of its width."""
    names = [line.name for line in forest.lines]
    longest = max(6, int(_MOST_LEFT / max(width(name) / len(name) for name in names)))
    left = min(_MOST_LEFT, max(map(width, names))) + 16
    with _axes(WIDTH, _LINE * len(names) + 34, left=left, right=15, top=4, bottom=30) as (axes, svg):
        axes.grid(axis="x")
        draw_forest(axes, forest._replace(title="", x_label=""), longest)
        drawn = svg(id, " ".join(f"{line.name}: {forest.text_of(line)}." for line in forest.lines))
    if not forest.other:
        return Picture(forest.title, drawn, "means and 95 % intervals")
    keys = (("c1", forest.middle), ("hollow", forest.other), ("c2", forest.all))
    numbers = lambda line: [number(line.middle), f"{number(line.low)} to {number(line.high)}", number(line.other)]
    return Picture(
        title=forest.title,
        svg=drawn,
        legend=[(key, text) for key, text in keys if text],
        header=["", "estimate", "95 % interval", forest.other],
        rows=[[line.name, *numbers(line)] for line in forest.lines],
    )


def network(reduced: dict[str, Any], names: Sequence[str], values: Sequence[float] | None, id: str) -> Picture:
    """Return the picture of a network, with facts in its table.

    Args:
        reduced: the network, as `reduced` returns it.
        names: of all nodes, shown when a reader points at a node.
        values: of all nodes, which give their shades, NaN where unknown.
        id: of its heading.
    """
    shown, places = np.array(reduced["shown"], dtype=np.int64), np.array(reduced["places"], dtype=np.float64)
    edges = np.array(reduced["edges"], dtype=np.int64).reshape(-1, 2)
    facts, (least, mean, most) = reduced["facts"], reduced["facts"]["neighbours"]
    rows = [[name, f"{facts[name]:,}"] for name in ("nodes", "edges", "components")]
    rows.append(["neighbours of a node", f"{least:,} to {most:,}, {mean:.3g} on average"])
    if facts["connectivity"] is not None:
        rows.append(["algebraic connectivity λ₂", f"{facts['connectivity']:.3g}"])
    colours, bounds = _shades(values, len(names))
    with _axes(_SQUARE, _SQUARE) as (axes, svg):
        draw_edges(axes, places, edges, np.ones(len(edges)))
        axes.scatter(places[:, 0], places[:, 1], c=[colours[i] for i in shown], **node_style(len(shown)))
        drawn = svg(id, "".join(f"{name}: {value}. " for name, value in rows))
    if len(shown) <= _NAMED:
        known = iter([escape(visible(names[i] if i < len(names) else i)) for i in shown.tolist()])
        drawn = Markup(re.sub("(<use [^>]*)/>", lambda node: f"{node[1]}><title>{next(known)}</title></use>", drawn))
    few = f"Too large to draw in full: {len(shown):,} of its nodes, and edges between them."
    keys = [("", "last training loss:"), *((f"block s{i}", text) for i, text in enumerate(bounds))]
    return Picture("The network", drawn, "", keys if bounds else (), (), rows, few if reduced["partly"] else "")


def _shades(values: Sequence[float] | None, nodes: int) -> tuple[Sequence[str], list[str]]:
    """Return the colour of each value by its fifth, and the fifths' bounds as text."""
    known = np.array([] if values is None else values, dtype=np.float64)
    finite, shades = known[np.isfinite(known)], list(_SHADES)
    if not len(finite):
        return [shades[2]] * nodes, []
    edges = np.unique(np.quantile(finite, np.linspace(0, 1, len(shades) + 1)))
    place = np.clip(np.searchsorted(edges[1:-1], known, side="right"), 0, len(shades) - 1).tolist()
    bounds = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)] or [f"{edges[0]:.3g}"]
    return [shades[i] if there else "0.4" for i, there in zip(place, np.isfinite(known))], bounds


@contextmanager
def _axes(wide: float, high: float, **margins: float) -> Iterator[tuple[Axes, Callable[[str, str], Markup]]]:
    """Yield axes with margins in pixels, and a function of an id and a description that returns their SVG."""
    from cycler import cycler
    from matplotlib import style
    from matplotlib.figure import Figure

    left, right, top, bottom = (margins.get(side, 0.0) for side in ("left", "right", "top", "bottom"))
    with style.context(["default", {**_STYLE, "axes.prop_cycle": cycler(color=list(_COLOURS))}]):
        figure = Figure(figsize=(wide / 72, high / 72))

        def svg(id: str, sentences: str) -> Markup:
            written = io.StringIO()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has its own fonts
                figure.savefig(written, format="svg")
            drawn = written.getvalue()
            parts = drawn[drawn.index("<g ") : drawn.rindex("</svg>")]  # without metadata and style sheet
            parts = re.sub("<[^>]*>", lambda tag: _tag(tag[0], id), re.sub(r">\s+<", "><", parts))
            return Markup(
                f'<svg class="chart" viewBox="0 0 {wide:g} {high:g}" role="img" aria-labelledby="{id}" '
                f'aria-describedby="{id}-text"><desc id="{id}-text">{escape(visible(sentences, len(sentences)))}</desc>'
                f"{parts}</svg>"
            )

        yield figure.add_axes((left / wide, bottom / high, 1 - (left + right) / wide, 1 - (top + bottom) / high)), svg


def _tag(tag: str, id: str) -> str:
    """Convert a tag of matplotlib's SVG for the page: its style, ids, colours and digits."""
    if tag.startswith("<text"):
        tag = re.sub(r'style="[^"]*(text-anchor: \w+)[^"]*"', r'style="\1"', tag)
    tag = re.sub(r'( id="|href="#|url\(#)', rf"\1{id}-", tag.replace("xlink:href", "href"))
    tag = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda colour: f"var(--{_DRAWN.get(colour[0], 'soft')})", tag)
    tag = re.sub(r"-?\d+\.\d+", lambda digits: f"{round(float(digits[0]), 1) + 0:g}", tag)
    return re.sub(r"\s+", " ", re.sub(r"\s*\b([MLQC])\s", r"\1", tag))


def _thinned(one: Series, x: Numbers) -> Series:
    """Return a series with the first, lowest, highest and last point of each bin only."""
    x, low = x if one.x is None else one.x, one.y if one.low is None else one.low
    known = np.flatnonzero(np.isfinite(one.y) & np.isfinite(low))
    shown = {
        int(place)
        for part in np.array_split(known, max(1, min(_BINS, len(known))))
        if len(part)
        for place in (part[0], part[-1], part[one.y[part].argmax()], part[low[part].argmin()])
    }
    places = sorted(shown)
    return one._replace(x=x[places], y=one.y[places], low=None if one.low is None else one.low[places])


def _key(one: Series) -> str:
    """Return the style classes of a series in the legend."""
    if one.low is not None:
        return "band faint" if one.faint else "band"
    return f"{'soft' if one.colour == GREY else f'c{one.colour % len(_COLOURS) + 1}'} {one.line}"


def _table(chart: Chart) -> list[list[str]]:
    """Return rows of a chart's numbers, evenly spread."""
    rows = np.unique(np.linspace(0, len(chart.x) - 1, min(_TABLE, len(chart.x))).round().astype(int))
    shown = chart.text_of
    cell = lambda one, i: shown(one.y[i]) if one.low is None else f"{shown(one.low[i])} to {shown(one.y[i])}"
    return [[number(chart.x[i]), *(cell(one, i) for one in chart.series)] for i in rows]


def _sentences(chart: Chart) -> str:
    """Return the description of a chart, a sentence for each line of it."""
    sentences, shown = [f"By {chart.x_label}."], chart.text_of
    for one in chart.series:
        known = np.isfinite(one.y)
        if one.low is None and known.any():
            y, x = one.y[known], chart.x[known]
            span = f"from {shown(y[0])} to {shown(y[-1])}" if len(y) > 1 else shown(y[0])
            ends = ", ".join(
                f"{name} {shown(y[i])} at {number(x[i])}"
                for name, i in (("lowest", int(y.argmin())), ("highest", int(y.argmax())))
            )
            sentences.append(f"{one.label}: {span}, {ends}.")
    return " ".join(sentences)
