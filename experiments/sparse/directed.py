"""Directed graphs with feedback over sites: gene regulation in breast cancer, by federated Metropolis within Gibbs.

`simulated` has a known graph of six variables: a chain of causes with one loop of three, Laplace errors and five sites
of 100 rows, one of which lacks the first effect. It prints every effect beside the truth.

`expression` is the paper's study on other samples: 16 genes of the WNT/β-catenin pathway in the seven tissue source
sites with more than 30 tumours (396 in all), each site's columns centred and scaled. It draws inclusion probabilities
and the ten most probable arrows, and says which of them stand at an expected false discovery rate of 10 %.

The chains do not agree there (`results/sparse_directed.md`), so read its arrows as those of some modes: with Laplace
errors and a determinant the sites' likelihoods are not normal, so that θ cannot move with all θ_k as in the other
models (`models/gibbs/_interweaving.py`). `sparse.acyclic` says which quantities do not mix, and has a formulation
without feedback that needs no chain; `sparse.tempered` moves all effects at once, anneals and tempers.

Published: Kidd et al. (2023), section 3.3, which prints no numbers: an arrow from AXIN1 to DVL1, and one from CTNNB1 to
MMP7. The paper's extract (901 samples of 10 sites, its 16 genes not listed) is not public, and MMP7 is not in this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.sparse.common import Report, Sizes, finish, sample, share, shared, standardised
from fedtorch.models.gibbs import directed, graphical, sparse

GENES = (
    "WNT5A",
    "FZD7",
    "LRP5",
    "LRP6",
    "DVL1",
    "DVL2",
    "DVL3",
    "AXIN1",
    "AXIN2",
    "APC",
    "GSK3B",
    "CSNK1A1",
    "CTNNB1",
    "LEF1",
    "MYC",
    "CCND1",
)
EFFECTS = {(1, 0): 0.8, (2, 1): 0.7, (3, 2): 0.6, (1, 3): -0.6, (4, 3): 0.5, (5, 4): -0.6}  # (effect, cause)
LEVEL = 0.1  # of the false discovery rate
SHOWN = 10  # arrows of the genes


class Found(NamedTuple):
    """What the chains say."""

    inclusion: Tensor  # (p, p), from column to row
    effects: Tensor  # (p, p) posterior means
    r_hat: float
    accepted: float  # share of proposals
    seconds: float


def simulated_sites(seed: int, loop: bool = True) -> tuple[ft.data.FederatedData, Tensor]:
    """Rows, and the effects that most sites have in common, with or without the one that closes the loop."""
    p, n, sites = 6, 100, 5
    truth = torch.zeros(p, p, dtype=torch.float64)
    for pair, size in EFFECTS.items():
        truth[pair] = size
    if not loop:
        truth[1, 3] = 0.0
    keys = ft.random.split(ft.random.fold_in(ft.random.key(2), seed), 2)
    errors = [ft.random.exponential(key, (sites, n, p), torch.float64) for key in keys]
    own = truth.expand(sites, p, p).clone()
    own[-1, 1, 0] = 0.0
    y = torch.linalg.solve(torch.eye(p, dtype=torch.float64) - own, (errors[0] - errors[1]).mT).mT
    return ft.data.from_tensors(list(y)), truth


def analyse(data: ft.data.FederatedData, names: Sequence[str], sizes: Sizes, seed: int) -> Found:
    """The federated analysis."""
    algorithm = ft.gibbs(directed.regression(names=names), sparse.hierarchy(), sweeps=sizes.sweeps, chains=sizes.chains)
    accepted: list[float] = []

    def watch(round: ft.Round) -> dict[str, Tensor]:
        accepted.append(float(round.clients.table.read(slice(0, len(data))).variables.accepted.mean()))
        return shared(round)

    done = sample(algorithm, data, graphical.start(len(names)), sizes.rounds, sizes.rounds // 3, seed, watch)
    inclusion, effects = (graphical.square(done.sampler.mean()[name]) for name in ("included", "theta"))
    return Found(inclusion, effects, done.largest_r_hat("theta"), float(np.mean(accepted)), done.seconds)


def about(setting: str, found: Found) -> list[common.Row]:
    """How the chains went."""
    return [
        common.Row(setting, "largest R-hat", found.r_hat),
        common.Row(setting, "proposals accepted", found.accepted),
        common.Row(setting, "seconds", found.seconds),
    ]


def simulated(sizes: Sizes, seeds: int) -> Report:
    """A known graph."""
    names, figures, each = [f"y{j + 1}" for j in range(6)], [], []
    for seed in range(seeds):
        data, truth = simulated_sites(seed)
        found = analyse(data, names, sizes, seed)
        arrows, true = graphical.edges(found.inclusion, LEVEL), truth != 0
        numbers = {
            "false discoveries": share(~true, arrows),
            "effects found": share(arrows, true),
            "inclusion of effects": float(found.inclusion[true].mean()),
            "inclusion of zeros": float(found.inclusion[~true & ~torch.eye(6, dtype=torch.bool)].mean()),
            "root mean squared error": float((found.effects - truth).square().sum().div(30).sqrt()),
        }
        figures.append(numbers)
        each.append(found)
    first = each[0]
    lines = [
        [f"{names[h]} → {names[j]}", f"{size:.2f}", f"{first.effects[j, h]:.2f}", f"{first.inclusion[j, h]:.3f}"]
        for (j, h), size in EFFECTS.items()
    ]
    title = f"simulated graph, R-hat {first.r_hat:.2f}, {first.accepted:.0%} accepted, {first.seconds:.0f} s"
    common.show(title, ["", "truth", "mean", "inclusion"], lines)
    rows = common.over_seeds("simulated", figures)
    common.show_rows(f"simulated graph, {seeds} repetitions, level {LEVEL}", rows)
    shown = torch.where(graphical.edges(first.inclusion, LEVEL), first.inclusion, 0.0)
    figure = ft.plots.directed_network(shown, names, first.effects)
    return Report([*rows, *about("simulated", first)], {"sparse_directed_simulated": figure})


def expression(sizes: Sizes) -> Report:
    """The paper's section 3.3, on the samples that are public."""
    data = standardised(ft.data.tcga_brca_expression(GENES, minimum=30, dtype=torch.float64))
    found = analyse(data, GENES, sizes, 0)
    arrows = graphical.edges(found.inclusion, LEVEL)
    pairs = [(j, h) for j in range(len(GENES)) for h in range(len(GENES)) if j != h]
    order = sorted(((float(found.inclusion[j, h]), j, h) for j, h in pairs), reverse=True)[:SHOWN]
    strongest = torch.zeros_like(found.inclusion)
    for q, j, h in order:
        strongest[j, h] = q
    lines = [
        [f"{GENES[h]} → {GENES[j]}", f"{q:.3f}", f"{found.effects[j, h]:.2f}", "yes" if arrows[j, h] else "no"]
        for q, j, h in order
    ]
    title = f"expression: the most probable arrows; R-hat {found.r_hat:.2f}, {found.accepted:.0%} accepted"
    columns = ["", "inclusion", "mean effect", f"found at {LEVEL:.0%}"]
    common.show(f"{title}, {found.seconds:.0f} s", columns, lines)
    rows = [*about("expression", found), common.Row("expression", "arrows found", int(arrows.sum()))]
    rows.append(common.Row("expression", "pairs of arrows found", int((arrows & arrows.mT).sum()) // 2))
    for q, j, h in order:
        rows.append(common.Row("expression", f"inclusion of {GENES[h]} → {GENES[j]}, among the strongest", q))
    for cause, effect in (("AXIN1", "DVL1"), ("DVL1", "AXIN1")):
        q = float(found.inclusion[GENES.index(effect), GENES.index(cause)])
        rows.append(common.Row("expression", f"inclusion of {cause} → {effect}", q))
    common.show_rows("expression, named in the paper", rows[-2:])
    figures = {
        "sparse_directed_heat_map": ft.plots.inclusion_map(found.inclusion, GENES, "effect", "cause"),
        "sparse_directed_expression": ft.plots.directed_network(strongest, GENES, found.effects),
    }
    return Report(rows, figures)


def main(argv: Sequence[str] | None = None) -> None:
    """Both studies."""
    parser = common.arguments(__doc__)
    parser.add_argument("--study", choices=["simulated", "expression", "both"], default="both", help="default both")
    parser.add_argument("--rounds", type=int, default=600, metavar="T", help="global steps (default 600)")
    options = parser.parse_args(argv)
    sizes = Sizes(12, 2, 2) if options.smoke else Sizes(options.rounds, 10, 4)
    reports = []
    if options.study in ("simulated", "both"):
        reports.append(simulated(sizes, options.seeds))
    if options.study in ("expression", "both"):
        reports.append(expression(Sizes(9, 1, 2) if options.smoke else sizes))
    finish("sparse.directed", reports, options)


if __name__ == "__main__":
    main()
