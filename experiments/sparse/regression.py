"""Sparse Bayesian regression over hospitals: a horseshoe around a spike-and-slab, by federated Gibbs sampling.

Four studies. `simulated` copies the paper's setting, whose patients are private: 4 sites with 100 to 150 rows and 11
covariates, three effects of 0.5 and noise of standard deviation 1, T = 1000 rounds of L = 100 local sweeps; then again
with one site whose first effect is −0.5. `heart` is the four-hospital heart disease data with 13 real
covariates and a binary response. Each prints posterior means and inclusion probabilities as the paper's Table 1 does,
beside pooled rows as if they were alike, every site for itself (averages and votes) and consensus Monte Carlo, where
a coefficient counts as included when its 95 % interval leaves out zero.

`calibration` draws coefficients and scales from the prior, for as many federations as `--federations` says, and counts
how many 95 % intervals cover the truth, and which share of the discoveries at a rate of 10 % are false.

`noise` infers σ_k jointly (the paper's section 2.2.1: "can be easily extended"): twelve sites, six of 6 rows and six
of 120, with σ_k² ~ IG(3, 27), whose mean is 13.5. Each σ_k has its own inverse gamma prior, with b_σ = 1, the default,
or b_σ is the server's variable with a gamma prior, so that sites learn of each other's noise from Σ 1/σ_k².

Published, on private data: Kidd et al. (2023), Table 1: SpO2 0.673 with inclusion probability 0.777, ten others at
most 0.306. There is nothing to compare them with here: the simulated study reports the rates that it must reach
(`results/sparse_regression.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.sparse import baselines
from experiments.sparse.common import Sampled, Sizes, interval, sample, share, shared
from fedtorch.models import gibbs
from fedtorch.models.device_posterior import discoveries
from fedtorch.models.gibbs import logistic, sparse

EFFECTS, COVARIATES = 3, 11
RATE = 0.1  # of false discoveries
SHAPE = 3.0  # a_σ of the study of noise


class Found(NamedTuple):
    """What one way of analysis says of each coefficient."""

    mean: Tensor  # (p,)
    inclusion: Tensor  # (p,)
    seconds: float
    megabytes: float
    r_hat: dict[str, float]  # the largest of θ and of log τ, where there are chains to compare


def simulated(seed: int, odd: float = 0.5) -> ft.data.FederatedData:
    """Sites of 100, 120, 140 and 150 rows; the last one's first effect is `odd`, the others' 0.5."""
    keys = ft.random.fold_in(ft.random.key(seed), torch.arange(2))
    counts = torch.tensor([100, 120, 140, 150])
    x = ft.random.normal(keys[0], (int(counts.sum()), COVARIATES), torch.float64)
    effects = torch.zeros(len(counts), COVARIATES, dtype=torch.float64)
    effects[:, :EFFECTS] = 0.5
    effects[-1, 0] = odd
    mean = (x * effects.repeat_interleave(counts, 0)).sum(-1)
    y = mean + ft.random.normal(keys[1], (len(x),), torch.float64)
    return ft.data.FederatedData((x, y), counts, features=tuple(f"x{j + 1}" for j in range(COVARIATES)))


def watched(round: ft.Round) -> dict[str, Tensor]:
    """The global coefficients, their indicators, and the scales of the sites' deviations."""
    return {**shared(round), "log tau": -0.5 * round.server.variables.precision.log()}


def run(
    algorithm: ft.Algorithm,
    data: ft.data.FederatedData,
    sizes: Sizes,
    seed: int,
    watch: Callable[[ft.Round], dict[str, Tensor]] = watched,
) -> Sampled:
    """Chains from zero, of whose rounds a fifth is burnt in."""
    start = torch.zeros(data[0][0].shape[1])
    return sample(algorithm, data, start, sizes.rounds, sizes.rounds // 5, seed, watch)


def federated(data: ft.data.FederatedData, local: gibbs.LocalKernel, sizes: Sizes, seed: int) -> Found:
    """The hierarchy of sites."""
    algorithm = ft.gibbs(local, sparse.hierarchy(), sweeps=sizes.sweeps, chains=sizes.chains)
    done = run(algorithm, data, sizes, seed)
    mean, traffic = done.sampler.mean(), (done.run.bytes_up + done.run.bytes_down) / 1e6
    r_hat = {name: done.largest_r_hat(name) for name in ("theta", "log tau")}
    return Found(mean["theta"], mean["included"], done.seconds, traffic, r_hat)


def alone(data: ft.data.FederatedData, sizes: Sizes, seed: int, share: int = 1) -> tuple[Tensor, Tensor, float]:
    """Draws of each site for itself: θ `(K, T, p)` and γ likewise, and the seconds."""
    local = baselines.lone_regression(sites=share)
    sweeps = max(1, sizes.sweeps // 20)  # without a server, rounds only say how often a draw is kept
    algorithm = ft.gibbs(local, baselines.nothing_shared(), sweeps=sweeps, chains=sizes.chains)

    def watch(round: ft.Round) -> dict[str, Tensor]:
        own = round.clients.table.read(slice(0, len(data))).variables
        return {"theta": own.theta.transpose(0, 1), "included": own.included.transpose(0, 1)}

    done = run(algorithm, data, sizes, seed, watch)
    draws = done.sampler.draws()
    theta, included = (draws[name].flatten(0, 1).transpose(0, 1) for name in ("theta", "included"))
    return theta, included, done.seconds


def analyses(data: ft.data.FederatedData, sizes: Sizes, seed: int) -> dict[str, Found]:
    """The federated analysis of a continuous response, and what it is compared with."""
    found = {"federated": federated(data, sparse.regression(), sizes, seed)}
    theta, included, seconds = alone(data.pool(), sizes, seed)
    found["pooled as iid"] = Found(theta.mean((0, 1)), included.mean((0, 1)), seconds, 0.0, {})
    theta, included, seconds = alone(data, sizes, seed)
    found["sites, averaged"] = Found(theta.mean((0, 1)), included.mean((0, 1)), seconds, 0.0, {})
    votes = baselines.majority_vote(included.mean(1)).double()
    found["sites, majority"] = Found(theta.mean(1).median(0).values, votes, seconds, 0.0, {})
    theta, included, seconds = alone(data, sizes, seed, share=len(data))
    joined = baselines.consensus(theta)
    ends = interval(joined)
    excluded = ((ends > 0).all(0) | (ends < 0).all(0)).double()
    found["consensus"] = Found(joined.mean(0), excluded, seconds, theta.nbytes / 1e6, {})
    return found


def compare(sizes: Sizes, seeds: int, odd: float) -> list[dict[str, Found]]:
    """The analyses of as many simulated federations as there are seeds."""
    return [analyses(simulated(seed, odd), sizes, seed) for seed in range(seeds)]


def figures(found: Found) -> dict[str, float]:
    """What is reported where the truth is known."""
    truth = torch.zeros(COVARIATES, dtype=torch.float64)
    truth[:EFFECTS] = 0.5
    return {
        "inclusion of effects": float(found.inclusion[:EFFECTS].mean()),
        "inclusion of zeros": float(found.inclusion[EFFECTS:].mean()),
        "false discoveries": false_share(found.inclusion, truth != 0),
        "root mean squared error": float((found.mean - truth).square().mean().sqrt()),
        "seconds": found.seconds,
        "megabytes": found.megabytes,
    }


def report(setting: str, runs: Sequence[dict[str, Found]]) -> list[common.Row]:
    """Rows of inclusion of effects and zeros, error, time and traffic."""
    rows, lines = [], []
    for name in runs[0]:
        runs_of = [figures(run[name]) for run in runs]
        rows += common.over_seeds(f"{setting}, {name}", runs_of)
        lines.append([name, *map(common.mean_with_error, common.by_metric(runs_of).values())])
    columns = ["", "effects included", "zeros included", "false discoveries", "RMSE", "seconds", "MB"]
    title = f"{setting}, {len(runs)} repetitions, averages and their standard errors ({common.machine()})"
    common.show(title, columns, lines)
    return rows


def false_share(inclusion: Tensor, true: Tensor) -> float:
    """Which share of the discoveries at `RATE` are false; 0 where there are none."""
    return share(~true, discoveries(1 - inclusion, RATE))


def from_the_prior(seed: int) -> tuple[ft.data.FederatedData, Tensor, Tensor]:
    """Four sites of 125 rows, the global coefficients `(p,)`, and which are effects; all of it by the default prior."""
    sites, rows, p = 4, 125, COVARIATES
    keys = ft.random.split(ft.random.fold_in(ft.random.key(4), seed), 10)
    f64 = torch.float64
    cauchy = lambda key, shape: (torch.pi / 2 * ft.random.uniform(key, shape, f64)).tan()
    effect = ft.random.uniform(keys[0], (p,), f64) < ft.random.uniform(keys[1], (), f64)
    variance = 0.5 * ft.random.inverse_gamma(keys[2], 2.0, (p,), f64)
    theta = (torch.where(effect, 1.0, 0.01) * variance).sqrt() * ft.random.normal(keys[3], (p,), f64)
    spread = cauchy(keys[4], (p,)) * cauchy(keys[5], (sites, p))
    own = theta + spread * ft.random.normal(keys[6], (sites, p), f64)
    x = ft.random.normal(keys[7], (sites, rows, p), f64)
    noise = ft.random.inverse_gamma(keys[8], 1.0, (sites, 1), f64).sqrt() * ft.random.normal(
        keys[9], (sites, rows), f64
    )
    y = (x @ own[..., None])[..., 0] + noise
    return ft.data.from_tensors([(x[k], y[k]) for k in range(sites)]), theta, effect


def calibration(sizes: Sizes, federations: int) -> list[common.Row]:
    """Whether intervals and discoveries are what they claim to be, when the truth is drawn from the prior."""
    found = []
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=sizes.sweeps, chains=sizes.chains)
    for seed in range(federations):
        data, theta, effect = from_the_prior(seed)
        sampler = run(algorithm, data, sizes, seed).sampler
        low, high = interval(sampler.draws()["theta"].flatten(0, 1))
        inclusion = sampler.mean()["included"]
        found.append(
            {
                "cover of 95 % intervals": float(((low < theta) & (theta < high)).double().mean()),
                "inclusion probability": float(inclusion.mean()),
                "share of effects": float(effect.double().mean()),
                f"false discoveries at {RATE:.0%}": false_share(inclusion, effect),
            }
        )
    lines = [[name, common.mean_with_error(values)] for name, values in common.by_metric(found).items()]
    common.show(f"truth from the prior, {federations} federations of 4 sites", ["", "average"], lines)
    return common.over_seeds("truth from the prior", found)


def noisy(seed: int) -> tuple[ft.data.FederatedData, Tensor]:
    """Twelve sites of few or many rows, and their σ_k."""
    keys = ft.random.fold_in(ft.random.key(seed), torch.arange(3))
    counts = torch.tensor([6, 120] * 6)
    x = ft.random.normal(keys[0], (int(counts.sum()), COVARIATES), torch.float64)
    sd = (27.0 * ft.random.inverse_gamma(keys[1], SHAPE, (len(counts),), torch.float64)).sqrt()
    noise = sd.repeat_interleave(counts) * ft.random.normal(keys[2], (len(x),), torch.float64)
    return ft.data.FederatedData((x, x[:, :EFFECTS].sum(-1) / 2 + noise), counts), sd


def noise(sizes: Sizes, seeds: int) -> list[common.Row]:
    """How well each σ_k is found where its prior is as given, and where sites learn it from each other."""
    ways = {"b_σ = 1": None, "b_σ with sites' σ_k": (1.0, 1.0)}
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        data, truth = noisy(seed)
        few = data.counts < 20
        for name, prior in ways.items():
            shared = sparse.hierarchy(noise_prior=prior, noise_shape=SHAPE)
            local = sparse.regression(noise_shape=SHAPE)
            algorithm = ft.gibbs(local, shared, sweeps=sizes.sweeps, chains=sizes.chains)

            def watch(round: ft.Round, clients: int = len(data)) -> dict[str, Tensor]:
                own = round.clients.table.read(slice(0, clients)).variables
                return {"log sd": -0.5 * own.noise.log().transpose(0, 1), "theta": round.server.variables.theta}

            draws = run(algorithm, data, sizes, seed, watch).sampler.draws()
            each = draws["log sd"].flatten(0, 1)
            (low, high), away = interval(each), (each.mean(0) - truth.log()).square()
            inside = ((low < truth.log()) & (truth.log() < high)).double()
            target = torch.zeros(COVARIATES, dtype=torch.float64)
            target[:EFFECTS] = 0.5
            error = draws["theta"].flatten(0, 1).mean(0) - target
            of = {"root mean squared error of θ": float(error.square().mean().sqrt())}
            for size, those in {"6 rows": few, "120 rows": ~few}.items():
                of[f"root mean squared error of log σ_k, {size}"] = float(away[those].mean().sqrt())
                of[f"cover of 95 % intervals of σ_k, {size}"] = float(inside[those].mean())
            found.setdefault(name, []).append(of)
    rows = [row for name, runs in found.items() for row in common.over_seeds(f"noise, {name}", runs)]
    common.show_rows("σ_k of twelve sites", rows)
    return rows


def table(title: str, names: Sequence[str], found: dict[str, Found]) -> list[common.Row]:
    """The paper's Table 1: posterior mean and inclusion probability of each covariate."""
    lines, rows = [], []
    for j, covariate in enumerate(names):
        line = [covariate]
        for name, result in found.items():
            line += [f"{float(result.mean[j]):.3f}", f"{float(result.inclusion[j]):.3f}"]
            rows.append(common.Row(f"{title}, {name}, {covariate}", "posterior mean", float(result.mean[j])))
            rows.append(common.Row(f"{title}, {name}, {covariate}", "inclusion", float(result.inclusion[j])))
        lines.append(line)
    columns = ["", *(part for name in found for part in (name, "incl."))]
    common.show(f"{title}: posterior means and inclusion probabilities", columns, lines)
    return rows


def heart(sizes: Sizes, seed: int) -> tuple[tuple[str, ...], dict[str, Found]]:
    """Heart disease in four hospitals: logistic regression, and linear regression of the standardised disease."""
    data = ft.data.heart_disease(standardise=True, dtype=torch.float64)
    # Pólya–Gamma numbers take their time, and it is rounds that move a chain from mode to mode.
    short = Sizes(3 * sizes.rounds, max(1, sizes.sweeps // 100), sizes.chains)
    logits = federated(data, logistic.logistic_regression(), short, seed)
    frequency = data.pool()[0][1].double().mean()
    scale = (frequency * (1 - frequency)).sqrt()  # the prior's scales are those of a response of variance 1
    linear = ft.data.from_tensors([(x, (y.double() - y.double().mean()) / scale) for x, y in data], list(data.names))
    return data.features, {"logistic, federated": logits, **analyses(linear, sizes, seed)}


def draw(names: Sequence[str], found: dict[str, Found]) -> Figure:
    """Inclusion probabilities and posterior means by covariate."""
    figure, (left, right) = common.subplots(1, 2, figsize=(9, 0.32 * len(names) + 1.7), sharey=True)
    place = np.arange(len(names))
    for i, (name, result) in enumerate(found.items()):
        shift = (i - (len(found) - 1) / 2) * 0.14
        left.plot(result.inclusion, place + shift, "o", markersize=4.5, color=f"C{i}", label=name)
        right.plot(result.mean, place + shift, "o", markersize=4.5, color=f"C{i}")
    left.set_yticks(place, names)
    left.invert_yaxis()
    left.set_xlim(-0.03, 1.03)
    left.set_xlabel("inclusion probability")
    right.axvline(0, color="0.8", linewidth=1, zorder=0)
    right.set_xlabel("posterior mean of the coefficient")
    for axes in (left, right):
        axes.grid(axis="y", color="0.93")
        axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=min(3, len(found)), frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """All studies."""
    studies = ("simulated", "calibration", "heart", "noise")
    parser = common.arguments(__doc__)
    parser.add_argument("--study", choices=[*studies, "all"], default="all", help="default all")
    parser.add_argument("--rounds", type=int, default=1000, metavar="T", help="global steps (default 1000)")
    parser.add_argument("--sweeps", type=int, default=100, metavar="L", help="local sweeps a round (default 100)")
    parser.add_argument("--federations", type=int, default=60, metavar="N", help="of the calibration (default 60)")
    options = parser.parse_args(argv)
    chosen = studies if options.study == "all" else (options.study,)
    sizes = Sizes(30, 5, 2) if options.smoke else Sizes(options.rounds, options.sweeps, 4)
    rows: list[common.Row] = []
    drawn: dict[str, tuple[Sequence[str], dict[str, Found]]] = {}
    if "simulated" in chosen:
        for setting, odd in (("alike", 0.5), ("one site differs", -0.5)):
            runs = compare(sizes, options.seeds, odd)
            rows += report(setting, runs)
            rows += table(setting, simulated(0).features, runs[0])
            drawn[setting.replace(" ", "_")] = (simulated(0).features, runs[0])
    if "calibration" in chosen:
        rows += calibration(sizes, 2 if options.smoke else options.federations)
    if "noise" in chosen:
        rows += noise(sizes, options.seeds)
    if "heart" in chosen:
        names, found = heart(sizes, 0)
        rows += table("heart disease", names, found)
        chains = [(name, what, r) for name, each in found.items() for what, r in each.r_hat.items()]
        common.show("heart disease: largest R-hat", ["", "of", "R-hat"], [[n, w, f"{r:.3f}"] for n, w, r in chains])
        rows += [common.Row(f"heart disease, {name}", f"largest R-hat of {what}", r) for name, what, r in chains]
        drawn["heart"] = (names, found)
    draws = lambda: {f"sparse_regression_{name}": draw(*each) for name, each in drawn.items()}
    common.finish("sparse.regression", rows, options, draws)


if __name__ == "__main__":
    main()
