"""Compositions beside the best of their parts: what no part alone can do.

A shared body under Bayesian heads; a network whose nodes have models of four kinds; a Pyro model by expectation
propagation; a vertical party that is itself a federation. Of every way the error on what was held out; of each
composition also its ratio to the best of its parts. Rows of Gaussian processes (deep kernels, categories, outputs of
two kinds, deep processes) are those of the pages of `fedmgp.features` and `fedmgp.deep`, with the ratio of their means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from experiments import common
from experiments.compositions import heads, network, party, program
from experiments.result_pages import RESULTS, Reading

READING = Reading(smaller="error")


class Composition(NamedTuple):
    """A composition, and what it is compared with."""

    errors: Callable[[int, int], dict[str, float]]  # (seed, rounds) -> of every way
    composed: str  # its own name there
    parts: tuple[str, ...]  # those of the ways that are its parts; the others are other compositions
    rounds: int
    few: int  # rounds of --smoke


COMPOSITIONS = {
    "shared body": Composition(heads.errors, heads.COMPOSED, heads.PARTS, 400, 2),
    "network of kinds": Composition(network.errors, network.COMPOSED, network.PARTS, 40, 2),
    "Pyro model": Composition(program.errors, program.COMPOSED, program.PARTS, 15, 2),
    "vertical federation": Composition(party.errors, party.COMPOSED, party.PARTS, 200, 2),
}
KEPT = {  # of processes: where the rows are, the composition, and its parts
    "deep kernel": (
        "fedmgp.features",
        "a chirp: deep kernel, the best bound of 4 starts",
        ("a chirp: RBF kernel", "a chirp: deep kernel"),
    ),
    "categories": (
        "fedmgp.features",
        "four categories: a learnt point for each",
        ("four categories: category left out", "four categories: its code as a number"),
    ),
    "outputs of two kinds": (
        "fedmgp.features",
        "answers of yes or no: with units that measure",
        ("answers of yes or no: among themselves",),
    ),
    "deep process": (
        "fedmgp.deep",
        "two layers, shared",
        ("one layer, each unit alone", "one layer, shared", "two layers, each unit alone"),
    ),
}


def kept() -> list[common.Row]:
    """Rows of the last runs of other experiments, and the ratio of the composition's mean to its best part's."""
    rows = []
    for name, (experiment, composed, parts) in KEPT.items():
        found = json.loads((RESULTS / f"{experiment.replace('.', '_')}.json").read_text())["runs"][-1]["rows"]
        of = {row["setting"]: row for row in found if row["metric"] == "rmse"}
        rows += [
            common.Row(f"{name}: {way}", "error", of[way]["ours"], of[way].get("sd"), repeats=of[way]["repeats"])
            for way in (*parts, composed)
        ]
        ratio = of[composed]["ours"] / min(of[part]["ours"] for part in parts)
        rows.append(common.Row(f"{name}: {composed}", "error, of the best of its parts", ratio))
    return rows


def draw(rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """A panel for each composition: a bar for every way, the composition's own dark."""
    figure, panels = common.subplots(len(rows), 1, figsize=(9, 2.6 * len(rows)))
    for axes, (name, errors) in zip(panels, rows.items()):
        ways = sorted(errors, key=lambda way: -errors[way])
        colours = ["C0" if way == COMPOSITIONS[name].composed else "0.75" for way in ways]
        axes.barh(ways, [errors[way] for way in ways], color=colours)
        axes.set_xscale("log")
        axes.set_title(name, loc="left", fontsize=10)
    panels[-1].set_xlabel("error")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run all ways, print the table, and draw it."""
    options = common.arguments(__doc__).parse_args(argv)
    rows, shown = [], {}
    for name, (errors, composed, parts, rounds, few) in COMPOSITIONS.items():
        runs = [errors(seed, few if options.smoke else rounds) for seed in range(options.seeds)]
        means = common.by_metric(runs)
        shown[name] = {way: sum(values) / len(values) for way, values in means.items()}
        rows += [common.row(f"{name}: {way}", "error", values) for way, values in means.items()]
        best = [min(run[way] for way in parts) for run in runs]
        ratios = [run[composed] / least for run, least in zip(runs, best)]
        rows.append(common.row(f"{name}: {composed}", "error, of the best of its parts", ratios))
    rows += kept()
    common.show_rows(f"Compositions ({common.machine()})", rows, ".4f")
    common.finish("compositions.table", rows, options, lambda: {"compositions": draw(shown)})


if __name__ == "__main__":
    main()
