"""Directed graphs with feedback over sites: moves of all effects at once, annealed starts and tempered chains.

The chains of `sparse.directed` do not agree on the genes of the paper's section 3.3, nor, after as many rounds, on its
simulated graph. Here the same posterior is sampled with all sites in one process (`joint_moves`): it says whether that
is a matter of the moves or of the posterior. `simulated` has the graphs of `sparse.directed`. `expression` has the
genes: the likelihood's power rises to one during the first steps, so that chains can pass from mode to mode, and is one
thereafter. `tempered` has them with chains at several powers, which exchange their powers throughout.

R-hat is that of split, rank-normalised chains, the largest of all coefficients; seconds are those of the processor.

Published: Kidd et al. (2023), section 3.3, which prints no numbers and says nothing of convergence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.sparse.common import Report, finish, largest_r_hat, share, standardised
from experiments.sparse.directed import GENES, LEVEL, simulated_sites
from experiments.sparse.joint_moves import Posterior
from fedtorch.models.gibbs import graphical

READING = result_pages.Reading()
CHAINS = 4
ONE = torch.ones(1, dtype=torch.float64)
HOTTEST = 0.15  # power of the likelihood where annealing begins
RATIO = 0.92  # of neighbours' powers
NEAR = 0.95  # spectral radius from which a site counts as near the boundary


class Length(NamedTuple):
    """How long the chains are."""

    steps: int
    burn_in: int
    annealed: int = 0


class Sampled(NamedTuple):
    """What the chains whose likelihood has the power of one say after the burn-in; `(C, T, ...)`."""

    draws: dict[str, Tensor]
    temperatures: Tensor  # (T, B)
    swapped: Tensor  # (T − 1,)
    accepted: Tensor  # (2,) at the power of one
    seconds: float


def sample(
    data: ft.data.FederatedData,
    length: Length,
    seed: int,
    powers: Tensor = ONE,
    ladders: int = CHAINS,
    together: bool = True,
) -> Sampled:
    """Run the chains from no effects."""
    rows = data.stack(list(range(len(data))))
    posterior, began = Posterior(rows.batch, rows.count, powers, ladders, together=together), time.process_time()
    chains = posterior.start(torch.zeros(posterior.p, posterior.p, dtype=torch.float64))
    key, kept = ft.random.key(seed), []
    for step in range(length.steps):
        left = max(0.0, 1 - step / length.annealed) if length.annealed else 0.0
        posterior.powers = powers * HOTTEST**left
        chains = posterior.step(chains, key, step, adapt=step < length.burn_in)
        if step < length.burn_in:
            continue
        cold = posterior.cold(chains)
        sites, noise = chains.sites[cold], chains.noise[cold]
        draw = {
            "global effects": posterior.entries(chains.theta[cold]),
            "arrows": chains.prior.included[cold],
            "scales of deviations": -0.5 * posterior.entries(chains.precision[cold]).log(),
            "scales of errors": -noise.log().flatten(1),
            "log likelihood": posterior.likelihood(sites, noise).sum(1, keepdim=True),
            "radius": torch.linalg.eigvals(sites).abs().amax(-1),
        }
        kept.append((draw, chains.temperature, chains.swapped, chains.accepted[:, 0]))
    draws, temperatures, swapped, accepted = zip(*kept)
    stacked = {name: torch.stack([draw[name] for draw in draws], 1) for name in draws[0]}
    rates = torch.stack(swapped).mean(0), torch.stack(accepted).mean(0)
    return Sampled(stacked, torch.stack(temperatures), *rates, time.process_time() - began)


def agreement(sampled: Sampled) -> dict[str, float]:
    """R-hat of the coefficients and scales, and what the moves cost."""
    names = ("global effects", "arrows", "scales of deviations", "scales of errors", "log likelihood")
    numbers = {f"largest R-hat of {name}": largest_r_hat(sampled.draws[name]) for name in names}
    numbers["proposals accepted, a site's effects"] = float(sampled.accepted[0])
    numbers["proposals accepted, all effects"] = float(sampled.accepted[1])
    return numbers | {"seconds": sampled.seconds}


def modes(sampled: Sampled) -> dict[str, float]:
    """How far apart the chains are, and where the sites are."""
    likelihood = sampled.draws["log likelihood"][..., 0]
    means, half = likelihood.mean(1), likelihood.shape[1] // 2
    return {
        "log likelihood, the lowest chain's mean": float(means.min()),
        "log likelihood, the highest chain's mean": float(means.max()),
        "log likelihood, sd within a chain": float(likelihood.std(1).mean()),
        "log likelihood, second half less first": float(
            (likelihood[:, half:].mean(1) - likelihood[:, :half].mean(1)).mean()
        ),
        f"share of sites with a spectral radius above {NEAR}": float((sampled.draws["radius"] > NEAR).double().mean()),
    }


def found(sampled: Sampled, names: Sequence[str]) -> dict[str, float]:
    """What the chains say of arrows."""
    each = graphical.square(sampled.draws["arrows"].mean(1).unflatten(-1, (len(names), len(names) - 1)))
    inclusion = each.mean(0)
    numbers = {
        "arrows found": float(graphical.edges(inclusion, LEVEL).sum()),
        "largest inclusion of an arrow": float(inclusion.max()),
        "largest difference of an inclusion between chains": float((each.amax(0) - each.amin(0)).max()),
    }
    for cause, effect in (("AXIN1", "DVL1"), ("DVL1", "AXIN1")):
        numbers[f"inclusion of {cause} → {effect}"] = float(inclusion[names.index(effect), names.index(cause)])
    return numbers


def simulated(length: Length, seeds: int) -> Report:
    """Known graphs, with and without moves of all sites together."""
    rows: list[common.Row] = []
    for setting, together in (("simulated", True), ("simulated, each site given θ", False)):
        each = []
        for seed in range(seeds):
            data, truth = simulated_sites(seed)
            sampled = sample(data, length, seed, together=together)
            inclusion = graphical.square(sampled.draws["arrows"].mean((0, 1)).unflatten(-1, (6, 5)))
            arrows, true = graphical.edges(inclusion, LEVEL), truth != 0
            recovered = {"effects found": share(arrows, true), "false discoveries": share(~true, arrows)}
            each.append(recovered | agreement(sampled))
        rows += common.over_seeds(setting, each)
    common.show_rows(f"simulated graphs, {length.steps} steps", rows)
    return Report(rows, {})


def expression(data: ft.data.FederatedData, length: Length) -> Report:
    """Return the genes, from annealed starts."""
    sampled = sample(data, length, 0)
    figures = agreement(sampled) | modes(sampled) | found(sampled, GENES)
    rows = [common.Row("expression", name, value) for name, value in figures.items()]
    common.show_rows(f"expression, {length.steps} steps", rows)
    return Report(rows, {})


def tempered(data: ft.data.FederatedData, length: Length, temperatures: int) -> Report:
    """Return the genes, with chains at several powers of the likelihood."""
    powers = RATIO ** torch.arange(temperatures, dtype=torch.float64)
    sampled = sample(data, length, 0, powers, 2)
    numbers = {"lowest power": float(powers[-1])} | agreement(sampled) | modes(sampled)
    numbers["exchanges made, the fewest of a pair"] = float(2 * sampled.swapped.min())  # every other step is its turn
    numbers["round trips of a chain"] = float(trips(sampled.temperatures, temperatures - 1))
    rows = [common.Row("tempered", name, value) for name, value in numbers.items()]
    common.show_rows(f"tempered, {length.steps} steps", rows)
    return Report(rows, {})


def trips(temperatures: Tensor, hottest: int) -> float:
    """Return how often a chain has gone from the coldest power to the hottest and back, `(T, B)`, on average."""
    count = 0
    for chain in temperatures.T.tolist():
        ends = [place for place in chain if place in (0, hottest)]
        turns = sum(a != b for a, b in pairwise(ends))
        count += (turns - (bool(ends) and ends[0] != 0)) // 2 if turns else 0
    return count / temperatures.shape[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the studies."""
    studies = ("simulated", "expression", "tempered")
    parser = common.arguments(__doc__)
    parser.add_argument("--study", choices=[*studies, "all"], default="all", help="default all")
    parser.add_argument("--steps", type=int, metavar="T", help="of the chains (default 800, 2400 and 400)")
    parser.add_argument("--temperatures", type=int, default=12, metavar="N", help="of `tempered` (default 12)")
    options = parser.parse_args(argv)
    chosen = studies if options.study == "all" else (options.study,)
    steps = dict(zip(studies, (800, 2400, 400))) if options.steps is None else dict.fromkeys(studies, options.steps)
    if options.smoke:
        steps = dict.fromkeys(studies, 9)
    reports = []
    if "simulated" in chosen:
        reports.append(simulated(Length(steps["simulated"], steps["simulated"] // 3), options.seeds))
    if {"expression", "tempered"} & set(chosen):
        data = standardised(ft.data.tcga_brca_expression(GENES, minimum=30, dtype=torch.float64))
        if "expression" in chosen:
            each = steps["expression"]
            reports.append(expression(data, Length(each, each // 2, each // 8)))
        if "tempered" in chosen:
            each = steps["tempered"]
            reports.append(tempered(data, Length(each, each // 2), 3 if options.smoke else options.temperatures))
    finish("sparse.tempered", reports, options)


if __name__ == "__main__":
    main()
