"""Directed graphs without feedback over sites: gene regulation in breast cancer, exactly and without a chain.

The chains of `sparse.directed` do not agree on the genes of the paper's section 3.3. `mixing` says which of their
quantities do not mix. `expression` has another formulation of that study: one acyclic graph of all sites, Laplace
errors, effects that vary over sites (`ft.acyclic_graphs`). One round of sums gives its posterior, of which graphs are
drawn independently; R-hat is that of four sets of draws with keys of their own, and their frequencies stand beside the
exact probabilities. It draws the network in the form of the paper's Figure 2(b), arrows at an expected false discovery
rate of 10 %, and says how the two arrows at AXIN1 and DVL1 depend on how many causes a gene may have (`--parents`).

`simulated` has the six variables of `sparse.directed` without the arrow that closes the loop, and, misspecified, with
it.

Published: Kidd et al. (2023), section 3.3 and Figure 2(b), a picture without numbers, of which the text names two
arrows: AXIN1 to DVL1, and CTNNB1 to MMP7, which is not among the genes that are public.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.sparse.common import Report, Sizes, finish, largest_r_hat, sample, share, shared, standardised
from experiments.sparse.directed import GENES, LEVEL, SHOWN, simulated_sites
from fedtorch.models.gibbs import directed, graphical, sparse

CHAINS = 4
READING = result_pages.Reading()


def posterior(data: ft.data.FederatedData, names: Sequence[str], parents: int) -> tuple[Tensor, Tensor, ft.Run]:
    """Return the probabilities of arrows and the mean effects, `(p, p)` from column to row, and the run."""
    run = ft.run(ft.acyclic_graphs(parents, names=names), ft.InProcess(data), graphical.start(len(names)), rounds=1)
    return run.server.inclusion(), run.server.effects(), run


def by_kind(arrows: Tensor) -> dict[str, Tensor]:
    """Return what there is to say of graphs `(C, T, p, p)`: arrows, pairs that are joined, and which way."""
    rows, columns = torch.triu_indices(arrows.shape[-1], arrows.shape[-1], 1)
    forward, back = arrows[..., rows, columns], arrows[..., columns, rows]
    return {
        "arrows": arrows.flatten(2),
        "joined pairs": torch.maximum(forward, back),
        "directions": forward - back,
        "number of arrows": arrows.sum((2, 3))[..., None],
    }


def simulated(seeds: int) -> Report:
    """Known graphs, one of them with a loop that no acyclic graph has."""
    rows: list[common.Row] = []
    for setting, loop in (("simulated", False), ("simulated, with a loop", True)):
        each = []
        for seed in range(seeds):
            data, truth = simulated_sites(seed, loop)
            inclusion, effects, _ = posterior(data, [f"y{j + 1}" for j in range(6)], 3)
            arrows, true = graphical.edges(inclusion, LEVEL), truth != 0
            each.append(
                {
                    "effects found": share(arrows, true),
                    "false discoveries": share(~true, arrows),
                    "found the wrong way": share(arrows, true.mT & ~true),
                    "inclusion of effects": float(inclusion[true].mean()),
                    "inclusion of zeros": float(inclusion[~true & ~torch.eye(6, dtype=torch.bool)].mean()),
                    "root mean squared error": float((effects - truth).square().sum().div(30).sqrt()),
                }
            )
        rows += common.over_seeds(setting, each)
    common.show_rows(f"simulated graphs, {seeds} repetitions, level {LEVEL}", rows)
    return Report(rows, {})


def expression(data: ft.data.FederatedData, parents: int, draws: int) -> Report:
    """Return the paper's section 3.3 for acyclic graphs."""
    inclusion, effects, run = posterior(data, GENES, parents)
    keys = ft.random.split(ft.random.key(0), CHAINS)
    drawn = torch.stack([run.server.draws(key, draws) for key in keys]).double()
    setting, arrows = "expression", graphical.edges(inclusion, LEVEL)
    figures = {f"largest R-hat of {kind}": largest_r_hat(each) for kind, each in by_kind(drawn).items()}
    figures["largest difference of a frequency from the probability"] = float(
        (drawn.mean((0, 1)) - inclusion).abs().max()
    )
    figures["megabytes from all sites"] = run.bytes_up / 1e6
    figures["arrows found"] = int(arrows.sum())
    figures["expected number of arrows"] = float(inclusion.sum())
    figures[f"genes with {parents} causes, on average"] = float((drawn.sum(-1) == parents).double().mean((0, 1)).sum())
    rows = [common.Row(setting, name, value) for name, value in figures.items()]
    rows.insert(0, common.Row(setting, "AXIN1 → DVL1 is in the network", int(arrows[4, 7]), published=1))
    for most in range(1, parents + 1):
        each = inclusion if most == parents else posterior(data, GENES, most)[0]
        for j, h in ((4, 7), (7, 4)):
            metric = f"inclusion of {GENES[h]} → {GENES[j]}, at most {most} causes"
            rows.append(common.Row(setting, metric, float(each[j, h])))
    order = inclusion.flatten().argsort(descending=True)[: int(arrows.sum())].tolist()
    lines = []
    for place, (j, h) in enumerate(divmod(k, len(GENES)) for k in order):
        q, back, effect = float(inclusion[j, h]), float(inclusion[h, j]), float(effects[j, h] / inclusion[j, h])
        lines.append([f"{GENES[h]} → {GENES[j]}", f"{q:.3f}", f"{back:.3f}", f"{effect:.2f}"])
        if place < SHOWN:
            rows.append(common.Row(setting, f"inclusion of {GENES[h]} → {GENES[j]}, among the strongest", q))
    common.show_rows("expression", rows)
    common.show("arrows found", ["", "inclusion", "other way", "effect"], lines)
    return Report(
        rows,
        {
            "sparse_acyclic_heat_map": ft.plots.inclusion_map(inclusion, GENES, "effect", "cause"),
            "sparse_acyclic_expression": ft.plots.directed_network(torch.where(arrows, inclusion, 0.0), GENES, effects),
        },
    )


def mixing(data: ft.data.FederatedData, sizes: Sizes) -> Report:
    """Say which quantities of the chains with feedback do not mix."""
    algorithm = ft.gibbs(directed.regression(names=GENES), sparse.hierarchy(), sweeps=sizes.sweeps, chains=sizes.chains)

    def watch(round: ft.Round) -> dict[str, Tensor]:
        site = round.clients.table.read(slice(0, len(data))).variables
        scale = -site.noise.log().transpose(0, 1).flatten(1)
        return {**shared(round), "log tau": -0.5 * round.server.variables.precision.log(), "log b": scale}

    start = graphical.start(len(GENES))
    done = sample(algorithm, data, start, sizes.rounds, sizes.rounds // 3, 0, watch)
    draws = done.sampler.draws()
    p = len(GENES)
    arrows, theta = (graphical.square(draws[name].unflatten(-1, (p, p - 1))) for name in ("included", "theta"))
    quantities = by_kind(arrows) | {
        "global effects": draws["theta"],
        "global effects of pairs that few chains include": draws["theta"][..., draws["included"].mean((0, 1)) < 0.2],
        "scales of deviations": draws["log tau"],
        "scales of errors": draws["log b"],
    }
    rows = [common.Row("with feedback", f"largest R-hat of {kind}", largest_r_hat(q)) for kind, q in quantities.items()]
    within = theta.std(1).mean(0)
    between = theta.mean(1).std(0)
    off = ~torch.eye(len(GENES), dtype=torch.bool)
    rows += [
        common.Row("with feedback", "median sd of a global effect within a chain", float(within[off].median())),
        common.Row("with feedback", "median sd of its mean over chains", float(between[off].median())),
        common.Row("with feedback", "arrows found", int(graphical.edges(arrows.mean((0, 1)), LEVEL).sum())),
    ]
    common.show_rows(f"chains with feedback, {sizes.rounds} rounds", rows)
    return Report(rows, {})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the studies."""
    studies = ("simulated", "expression", "mixing")
    parser = common.arguments(__doc__)
    parser.add_argument("--study", choices=[*studies, "all"], default="all", help="default all")
    parser.add_argument("--parents", type=int, default=3, metavar="N", help="most causes of a gene (default 3)")
    parser.add_argument("--rounds", type=int, default=600, metavar="T", help="of the chains (default 600)")
    options = parser.parse_args(argv)
    chosen = studies if options.study == "all" else (options.study,)
    reports = []
    if "simulated" in chosen:
        reports.append(simulated(options.seeds))
    if {"expression", "mixing"} & set(chosen):
        data = standardised(ft.data.tcga_brca_expression(GENES, minimum=30, dtype=torch.float64))
        if "expression" in chosen:
            reports.append(expression(data, 1 if options.smoke else options.parents, 100 if options.smoke else 1000))
        if "mixing" in chosen:
            reports.append(mixing(data, Sizes(12, 1, 2) if options.smoke else Sizes(options.rounds, 10, 4)))
    finish("sparse.acyclic", reports, options)


if __name__ == "__main__":
    main()
