"""Networks and servers that fail (sections 8.3.3 and 8.3.4).

Nodes lie in the unit square, and each is linked with its nearest ones. All have the same true parameters and fewer rows
than they would need alone.

- Algorithm 5.1 by gradient steps, over links that lose messages, over links that are late, and with stragglers, which
  is Algorithm 8.1: how far from the minimiser of GTV minimisation it is after so many rounds,
  Σ‖w_i − ŵ_i‖² / Σ‖ŵ_i‖². What is lost and late slows it down and does not lead it elsewhere.
- Links that are lost for good, against a lost server: the mean squared error of the nodes' parameters. On a network
  they are those of GTV minimisation over what is left of it. In a star, who has lost the link to the server learns
  alone, and the others learn by federated averaging; without the server everybody learns alone.

Source: Jung, "Federated learning: from theory to practice".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from fedtorch.networks import solvers

NODES, FEATURES, ROWS, NOISE, NEIGHBOURS = 60, 5, 6, 1.0, 4
ALPHA, RATE = 1.0, 0.02
LOST, DELAYS, LATE = (0.0, 0.3, 0.6, 0.9), (0, 2, 5, 10), (0.0, 0.3, 0.6, 0.9)
GONE = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


def problem(nodes: int, seed: int) -> tuple[ft.data.FederatedData, ft.Network, Tensor]:
    """(rows of every node, network, the true parameters `(d,)`)."""
    keys = ft.random.fold_in(ft.random.key(seed), torch.arange(4))
    truth = ft.random.normal(keys[0], (FEATURES,), torch.float64)
    x = ft.random.normal(keys[1], (nodes, ROWS, FEATURES), torch.float64)
    y = x @ truth + NOISE * ft.random.normal(keys[2], (nodes, ROWS), torch.float64)
    places = ft.random.uniform(keys[3], (nodes, 2), torch.float64)
    return ft.data.from_tensors(list(zip(x, y))), ft.Network.k_nearest(places, NEIGHBOURS), truth


def descent() -> ft.LocalSolver:
    """A gradient step on all rows."""
    return ft.least_squares(common.linear_module(FEATURES), steps=1, lr=RATE)


def imperfect(nodes: int, rounds: Sequence[int], seed: int) -> dict[str, dict[str, float]]:
    """By setting: the distance from the minimiser after so many rounds."""
    data, network, _ = problem(nodes, seed)
    best = solvers.direct(solvers.linear_problem(data, network, ALPHA)).parameters
    exact = ft.gtv(descent(), network, ALPHA)
    ways: dict[str, tuple[ft.Algorithm, ft.Faults | None]] = {}
    for loss in LOST:
        ways[f"messages lost on links, {loss:.0%}"] = exact | ft.unreliable_edges(network, loss=loss), None
    for delay in DELAYS:
        ways[f"up to {delay} rounds late"] = exact | ft.unreliable_edges(network, delay=delay), None
    for share in LATE:
        seconds = torch.ones(nodes, dtype=torch.float64)  # times of mean one are exponential
        slow = ft.stragglers(-float(torch.tensor(share).log()), seconds) if share else None
        ways[f"stragglers, {share:.0%} of the nodes"] = exact, slow
    found: dict[str, dict[str, float]] = {}
    for name, (algorithm, faults) in ways.items():
        run, found[name] = ft.Run(algorithm, ft.InProcess(data), faults=faults, seed=seed), {}
        for count in rounds:
            for _ in run.rounds(count):
                pass
            w = run.tensors()["weight"][:, 0]
            found[name][f"distance after {count} rounds"] = float((w - best).square().sum() / best.square().sum())
    return found


def thinned(network: ft.Network, share: float, key: Tensor) -> ft.Network:
    """The network without a share of its links, drawn at random."""
    kept = ft.random.choice(key, len(network.edges), round((1 - share) * len(network.edges))).sort().values
    return ft.Network(network.edges[kept], nodes=network.nodes)


def lost_for_good(nodes: int, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """By the share of links: the mean squared error of the nodes' parameters, on the network and in the star."""
    data, network, truth = problem(nodes, seed)
    alone = ft.run(ft.separate(ft.least_squares(common.linear_module(FEATURES))), ft.InProcess(data), rounds=1)
    own = (alone.tensors()["weight"][:, 0] - truth).square().sum(1)
    found = {}
    for share, key in zip(GONE, ft.random.fold_in(ft.random.key(seed), torch.arange(len(GONE)))):
        left = thinned(network, share, key)
        w = solvers.direct(solvers.linear_problem(data, left, ALPHA)).parameters
        linked = ft.random.choice(key, nodes, round((1 - share) * nodes)).sort().values
        star = own.clone()
        if len(linked):
            run = ft.run(ft.fedavg(descent()), ft.InProcess(data.select(linked)), rounds=rounds)
            star[linked] = (run.server["weight"][0] - truth).square().sum()
        found[f"links lost for good, {share:.0%}"] = {
            "network": float((w - truth).square().sum(1).mean()),
            "star": float(star.mean()),
        }
    found["server lost"] = {"star": float(own.mean())}
    return found


def draw(rows: Sequence[common.Row]) -> Figure:
    """Distances after the rounds against what is lost and late; errors against links that are lost."""
    figure, grid = common.subplots(2, 2, figsize=(10, 7))
    axes = grid.flatten()
    panels = (("messages lost on links", LOST), ("up to", DELAYS), ("stragglers", LATE))
    names = ("share of messages lost", "longest delay, rounds", "share of stragglers in a round")
    for axis, (setting, places), name in zip(axes, panels, names):
        those = [row for row in rows if row.setting.startswith(setting)]
        for metric in dict.fromkeys(row.metric for row in those):
            axis.semilogy(places, [r.ours for r in those if r.metric == metric], marker="o", label=metric)
        axis.set_xlabel(name)
    axes[0].legend(frameon=False)
    for metric in ("network", "star"):
        values = [r.ours for r in rows if r.metric == metric and r.setting.startswith("links")]
        axes[3].plot(GONE, values, marker="o", label=metric)
    axes[3].axhline(rows[-1].ours, color="0.5", linestyle="--", label="server lost")
    axes[3].set_xlabel("share of links lost for good")
    axes[3].set_ylabel("mean squared error of parameters")
    axes[3].legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.95))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run both parts, print their tables and draw them."""
    options = common.arguments(__doc__).parse_args(argv)
    nodes, rounds, long = (12, (5, 20), 50) if options.smoke else (NODES, (50, 200), 300)
    parts = (
        [imperfect(nodes, rounds, seed) for seed in range(options.seeds)],
        [lost_for_good(nodes, long, seed) for seed in range(options.seeds)],
    )
    tables = [
        [row for setting in runs[0] for row in common.over_seeds(setting, [run[setting] for run in runs])]
        for runs in parts
    ]
    for title, rows in zip(("Losses, delays, stragglers", "Lost for good"), tables):
        common.show_rows(f"{title}: {nodes} nodes, {options.seeds} seeds", rows, ".3g")
    rows = [*tables[0], *tables[1]]
    common.finish("resilience", rows, options, lambda: {"resilience": draw(rows)})


if __name__ == "__main__":
    main()
