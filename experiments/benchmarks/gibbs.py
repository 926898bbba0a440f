"""Federated Gibbs sampling of sparse regression: its speed, beside Pyro's NUTS and beside a loop over clients.

- `sweeps`: the paper's setting, 4 sites of 100 to 150 rows, 11 covariates, T = 1000 rounds of L = 100 sweeps, 4 chains.
- `nuts`: effective samples of the global coefficients per second of processor time, the smallest over coefficients, on
  the same data and model, with 4 chains, with 4 that do not interweave, and with 32; NUTS has the indicators and the
  sites' coefficients integrated out and runs one chain. Ours also of log τ, the logarithms of the scales of the sites'
  deviations, which mix slowest.
- `clients`: 1000 sites, 10 covariates, stacked against one site after another.

The runs of `sweeps` and `clients` are repeated and medians reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure
from experiments.sparse.regression import COVARIATES, simulated
from fedtorch.models.gibbs import sparse

REPETITIONS = 3


def sweeps(smoke: bool) -> list[common.Row]:
    """Seconds for all sweeps of the paper's setting."""
    rounds = 5 if smoke else 1000
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=100, chains=4)
    population = ft.InProcess(simulated(0))

    def chains(rounds: int) -> ft.Run:
        start, sampler = torch.zeros(COVARIATES), ft.Sampler(keep=False)
        return ft.run(algorithm, population, start, rounds=rounds, record=sampler)

    chains(1)
    spent = statistics.median(common.seconds(lambda: chains(rounds)) for _ in range(1 if smoke else REPETITIONS))
    setting = f"4 sites, {COVARIATES} covariates, 4 chains, {100 * rounds} sweeps"
    return [common.Row(setting, "seconds", spent), common.Row(setting, "µs a sweep", spent / rounds / 100 * 1e6)]


def nuts(smoke: bool) -> list[common.Row]:
    """Effective samples of the worst coefficient's θ per second of processor time, ours and NUTS'; ours of log τ, too.

    Other programs on the machine hardly change that time. NUTS has γ and θ_k integrated out, its density traced by
    TorchScript, and trees of at most 2⁸ steps. Its worst coefficient has few effective samples of 300 draws, so the
    ratio is no more than an order of magnitude.
    """
    import arviz

    from experiments.benchmarks.parts import pyro_programs

    data = simulated(0)
    rounds, many, sizes = (30, 6, (5, 5)) if smoke else (1000, 32, (300, 200))
    ways = {
        "4 chains": (4, sparse.INTERWEAVE),
        "4 chains that do not interweave": (4, 0),
        f"{many} chains": (many, sparse.INTERWEAVE),
    }
    rows: list[common.Row] = []
    ours: dict[str, float] = {}
    for name, (chains, interweave) in ways.items():
        algorithm = ft.gibbs(sparse.regression(interweave=interweave), sparse.hierarchy(), sweeps=10, chains=chains)
        sampler = ft.Sampler(burn_in=rounds // 10, watch=_watched)
        start, population = torch.zeros(COVARIATES), ft.InProcess(data)
        sampling = partial(ft.run, algorithm, population, start, rounds=rounds, record=sampler)
        spent = common.seconds(sampling, time.process_time)
        setting = f"Gibbs, {name}, {rounds} rounds of 10 sweeps"
        table = sampler.summary()
        for quantity in ("theta", "log tau"):
            part = table[table.index.str.startswith(quantity)]
            per_second = float(part["ess_bulk"].min()) / spent
            ours.setdefault(name, per_second)  # of theta
            rows.append(common.Row(setting, f"effective samples of {quantity} a second", per_second))
            rows.append(common.Row(setting, f"largest R-hat of {quantity}", float(part["r_hat"].max())))
        rows.append(common.Row(setting, "ms a round", spent / rounds * 1e3))
    depth = 3 if smoke else 8
    found: dict[str, torch.Tensor] = {}
    program = pyro_programs.collapsed_regression(data)

    def run() -> None:
        found.update(pyro_programs.nuts(program, draws=sizes[0], warmup=sizes[1], depth=depth, compile=not smoke))

    spent = common.seconds(run, time.process_time)
    draws = arviz.convert_to_dataset({"theta": found["theta"][None].numpy()})
    theirs = float(arviz.ess(draws)["theta"].min()) / spent
    setting = f"NUTS, one chain of {sizes[0]} draws"
    rows.append(common.Row(setting, "effective samples of theta a second", theirs))
    return [*rows, *(common.Row(f"Gibbs, {name}, against NUTS", "ratio", each / theirs) for name, each in ours.items())]


def _watched(round: ft.Round) -> dict[str, torch.Tensor]:
    variables = round.server.variables
    return {"theta": variables.theta, "log tau": -variables.precision.log() / 2}


def clients(smoke: bool) -> list[common.Row]:
    """Seconds a round of stacked clients and of a loop over them."""
    count, rows, covariates = (50 if smoke else 1000), 30, 10
    x = ft.random.normal(ft.random.key(0), (count * rows, covariates), torch.float64)
    y = x[:, 0] + ft.random.normal(ft.random.key(1), (len(x),), torch.float64)
    data = ft.data.FederatedData((x, y), torch.full((count,), rows))
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=20, chains=1)
    ways = {}
    for name, chunk in (("stacked", None), ("a loop over clients", 1)):
        ways[name] = ft.Run(algorithm, ft.InProcess(data, chunk), torch.zeros(covariates)).step
    medians = measure.medians(measure.interleaved(ways, 1 if smoke else REPETITIONS))
    found = [common.Row(f"{count} clients, {name}", "s a round of 20 sweeps", value) for name, value in medians.items()]
    ratio = medians["a loop over clients"] / medians["stacked"]
    return [*found, common.Row(f"{count} clients, stacked against a loop", "ratio", ratio)]


def parts(smoke: bool) -> measure.Parts:
    """The benchmarks by name."""
    return {"clients": partial(clients, smoke), "nuts": partial(nuts, smoke), "sweeps": partial(sweeps, smoke)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all parts, or one."""
    measure.run("gibbs", __doc__, parts, argv)


if __name__ == "__main__":
    main()
