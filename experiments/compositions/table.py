"""Compositions beside the best of their parts: what no part alone can do.

A shared body under Bayesian heads; a network whose nodes have models of four kinds. Of every way the error on what was
held out; of each composition also its ratio to the best of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from experiments import common
from experiments.compositions import heads, network
from experiments.result_pages import Reading

READING = Reading(smaller="error")
PARTS: Mapping[str, tuple[str, Callable[[int, int], dict[str, float]], int, int]] = {
    "shared body": (heads.COMPOSED, heads.errors, 400, 2),  # its name there, what runs, rounds, and rounds of --smoke
    "network of kinds": (network.COMPOSED, network.errors, 40, 2),
}


def draw(rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """A panel for each composition: a bar for every way, the composition's own dark."""
    figure, panels = common.subplots(len(rows), 1, figsize=(9, 2.6 * len(rows)))
    for axes, (name, errors) in zip(panels, rows.items()):
        ways = sorted(errors, key=lambda way: -errors[way])
        colours = ["C0" if way == PARTS[name][0] else "0.75" for way in ways]
        axes.barh(ways, [errors[way] for way in ways], color=colours)
        axes.set_xscale("log")
        axes.set_title(name, loc="left", fontsize=10)
    panels[-1].set_xlabel("error")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run all ways, print the table, and draw it."""
    options = common.arguments(__doc__).parse_args(argv)
    rows, shown = [], {}
    for name, (composed, errors, rounds, few) in PARTS.items():
        runs = [errors(seed, few if options.smoke else rounds) for seed in range(options.seeds)]
        means = common.by_metric(runs)
        shown[name] = {way: sum(values) / len(values) for way, values in means.items()}
        rows += [common.row(f"{name}: {way}", "error", values) for way, values in means.items()]
        best = [min(value for way, value in run.items() if way != composed) for run in runs]
        ratios = [run[composed] / least for run, least in zip(runs, best)]
        rows.append(common.row(f"{name}: {composed}", "error, of the best of its parts", ratios))
    common.show_rows(f"Compositions ({common.machine()})", rows, ".4f")
    common.finish("compositions.table", rows, options, lambda: {"compositions": draw(shown)})


if __name__ == "__main__":
    main()
