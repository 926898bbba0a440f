"""Intervals and tests of FedLin's two models: what they cover, and how often a test is wrong where nothing is.

**Coverage.** Coefficients of related devices (Ω = BB'/3 + 0.01 I, noise variance 0.1), intervals of 90 %: each device
alone (Student's t), HM1 with Ω as estimated taken for the truth, HM1 with the uncertainty of each device's row of Ω,
and who knows Ω and the noise. The paper has no intervals for HM1 ("it only returns a point estimate", section 4).

**Tests.** Fifty devices, eight coefficients: four vary between devices around means other than zero, four are zero at
every device. A test of level α at a device rejects where the interval of 1 − α does not cover 0 (section 4.3). The
false-positive rate is the share of rejected zeros, power that of rejected others. Discoveries of all devices are called
at a rate of 10 %: by Benjamini and Hochberg's procedure, a posterior's p value being twice the probability of the wrong
sign; and by `discoveries` from these probabilities, which bounds wrong signs among what is called, and not zeros: it is
for effects none of which is exactly zero.

Source: Yue, Kontar, Estrada Gómez (2022), sections 4.2.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedlin.common import infer
from experiments.fedlin.simulation import Problem, related
from fedtorch.federation.algorithms.matrix_normal import devices
from fedtorch.models import hierarchical
from fedtorch.models.device_posterior import discoveries, interval
from fedtorch.models.linear import SufficientStatistics, ridge

LEVEL, ALPHAS, FDR = 0.9, (0.01, 0.05, 0.1, 0.2), 0.1
EFFECTS = (1.0, -0.6, 0.3, 0.0)  # means of the coefficients that vary, sd 0.3; as many more are zero
READING = result_pages.Reading(across="(?P<line>.*), (?P<column>K = .*)")

Intervals = tuple[Tensor, Tensor]  # low and high, (K, d)


def alone(data: ft.data.FederatedData) -> tuple[Tensor, Tensor, Tensor]:
    """Every device's least squares: estimates, standard errors `(K, d)`, degrees of freedom `(K, 1)`."""
    known = SufficientStatistics.of(data)
    estimate = ridge(known)
    freedom = known.count - estimate.shape[1]
    residual = known.power - (estimate * known.cross).sum(1)
    inverse = torch.linalg.inv(known.gram).diagonal(dim1=1, dim2=2)
    return estimate, (inverse * (residual / freedom)[:, None]).sqrt(), freedom[:, None]


def of_t(data: ft.data.FederatedData, level: float) -> Intervals:
    """Student's intervals of every device alone."""
    estimate, error, freedom = alone(data)
    width = torch.from_numpy(stats.t.ppf((1 + level) / 2, freedom.numpy())) * error
    return estimate - width, estimate + width


def told(problem: Problem, level: float) -> Intervals:
    """Intervals of who knows Ω and the noise, by one dense inverse."""
    known, (units, d) = SufficientStatistics.of(problem.data), problem.theta.shape
    prior = torch.kron(torch.linalg.inv(problem.omega).contiguous(), torch.eye(d, dtype=torch.float64))
    covariance = torch.linalg.inv(torch.block_diag(*(known.gram / problem.noise)) + prior)
    mean = (covariance @ known.cross.flatten() / problem.noise).reshape(units, d)
    width = stats.norm.ppf((1 + level) / 2) * covariance.diagonal().sqrt().reshape(units, d)
    return mean - width, mean + width


def learnt(data: ft.data.FederatedData, rounds: int) -> ft.Run:
    """HM1 on linear devices without intercept."""
    head = ft.LinearHead(data[0][0].shape[1], intercept=False, dtype=torch.float64)
    return ft.run(ft.matrix_normal(ft.least_squares(head)), ft.InProcess(data), rounds=rounds)


def coverage(units: int, d: int, rows: int, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """What intervals of 90 % cover of the truth, and how long they are, by method."""
    problem = related(units, d, rows, seed)
    run = learnt(problem.data, rounds)
    intervals = {
        "each device alone": of_t(problem.data, LEVEL),
        "HM1, Ω as estimated": interval(devices(run, known=True).marginals(), LEVEL),
        "HM1": interval(devices(run).marginals(), LEVEL),
        "knows Ω and the noise": told(problem, LEVEL),
    }
    return {
        name: {
            "coverage": float(((low < problem.theta) & (problem.theta < high)).double().mean()),
            "length": float((high - low).mean()),
        }
        for name, (low, high) in intervals.items()
    }


def with_zeros(units: int, rows: int, seed: int) -> tuple[ft.data.FederatedData, Tensor]:
    """Devices of the tests, and their coefficients `(K, 8)`."""
    generator = torch.Generator().manual_seed(40_000 + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    theta = torch.zeros(units, 2 * len(EFFECTS), dtype=torch.float64)
    theta[:, : len(EFFECTS)] = torch.tensor(EFFECTS) + 0.3 * draw(units, len(EFFECTS))
    x = draw(units, rows, theta.shape[1])
    return ft.data.from_tensors(list(zip(x, (x @ theta[..., None])[..., 0] + draw(units, rows)))), theta


def p_values(data: ft.data.FederatedData, rounds: int) -> dict[str, Tensor]:
    """Twice the probability of the wrong sign, `(K, d)`: below α where the interval of 1 − α does not cover 0."""
    estimate, error, freedom = alone(data)
    run = learnt(data, rounds)
    _, marginals = infer(hierarchical.linear(hierarchical.normal(estimate.shape[1])), data)
    by_posterior = {
        "HM1, Ω as estimated": devices(run, known=True).marginals(),
        "HM1": devices(run).marginals(),
        "HM2": marginals,
    }
    below = {name: found.cdf(torch.zeros_like(estimate)) for name, found in by_posterior.items()}
    below["each device alone"] = torch.from_numpy(stats.t.cdf(-(estimate / error).numpy(), freedom.numpy()))
    return {name: 2 * torch.minimum(part, 1 - part) for name, part in below.items()}


def tests(units: int, rows: int, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """False-positive rates and power of tests at every level, and of discoveries at a rate of 10 %, by method."""
    data, theta = with_zeros(units, rows, seed)
    zero, found = theta == 0, {}
    for name, p in p_values(data, rounds).items():
        adjusted = torch.from_numpy(stats.false_discovery_control(p.flatten().numpy())).reshape(p.shape)
        called = {"Benjamini and Hochberg": adjusted < FDR}
        if name != "each device alone":
            called["by signs"] = discoveries(p / 2, FDR)
        of_levels = {f"false positives at {alpha}": float((p[zero] < alpha).double().mean()) for alpha in ALPHAS}
        found[name] = of_levels | {
            "power at 0.05": float((p[~zero] < 0.05).double().mean()),
        }
        for how, which in called.items():
            found[name][f"false discoveries, {how}"] = float((which & zero).sum() / which.sum().clamp(min=1))
            found[name][f"power, {how}"] = float(which[~zero].double().mean())
    return found


def draw(rows: Sequence[common.Row], settings: Sequence[str], tested: Mapping[str, list[dict[str, float]]]) -> Figure:
    """Coverage of each method in each setting, and false-positive rates against the level of the test."""
    figure, (left, right) = common.subplots(1, 2, figsize=(10.5, 3.8))
    names = list(dict.fromkeys(row.setting.partition(", K = ")[0] for row in rows if row.metric == "coverage"))
    for i, name in enumerate(names):
        places = [j + 0.16 * (i - 1.5) for j in range(len(settings))]
        ours = [row for row in rows if row.metric == "coverage" and row.setting.partition(", K = ")[0] == name]
        left.errorbar(places, [row.ours for row in ours], [row.sd or 0 for row in ours], fmt="o", label=name)
    left.axhline(LEVEL, color="0.6", linewidth=1)
    left.set_xticks(range(len(settings)), settings, fontsize=8)
    left.set_ylabel("coverage of 90 % intervals, ± sd over runs")
    left.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for name, runs in tested.items():
        rates = [sum(run[f"false positives at {alpha}"] for run in runs) / len(runs) for alpha in ALPHAS]
        right.plot(ALPHAS, rates, "o-", label=name)
    right.plot([0, ALPHAS[-1]], [0, ALPHAS[-1]], color="0.6", linewidth=1)
    right.set_xlabel("level of the test")
    right.set_ylabel("false-positive rate")
    right.legend(frameon=False, fontsize=8)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Coverage and tests over simulated federations."""
    options = common.arguments(__doc__).parse_args(argv)
    shapes, rounds = ([(12, 3, 8)], 10) if options.smoke else ([(100, 8, 20), (30, 40, 60), (300, 5, 10)], 40)
    rows, settings = [], []
    for units, d, points in shapes:
        settings.append(f"K = {units}, d = {d}, N = {points}")
        runs = [coverage(units, d, points, rounds, seed) for seed in range(options.seeds)]
        for name in runs[0]:
            rows += common.over_seeds(f"{name}, {settings[-1]}", [run[name] for run in runs])
    common.show_rows(f"Intervals of 90 %, {options.seeds} runs", rows)
    every = [tests(*((8, 14) if options.smoke else (50, 30)), rounds, seed) for seed in range(options.seeds)]
    tested = {name: [run[name] for run in every] for name in every[0]}
    of_tests = [row for name, runs in tested.items() for row in common.over_seeds(f"tests: {name}", runs)]
    common.show_rows(f"Tests at a device, {options.seeds} runs", of_tests)
    common.finish(
        "fedlin.intervals", rows + of_tests, options, lambda: {"fedlin_intervals": draw(rows, settings, tested)}
    )


if __name__ == "__main__":
    main()
