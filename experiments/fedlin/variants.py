"""What FedLin names beside its tables: part of the devices in a round, Zhang and Yeung's covariance, other penalties.

**Part of the devices.** S devices a round, drawn anew, in HM1 (Algorithm 1) and in expectation propagation (Algorithms
2 and 3), beside all of them: after as many rounds, and after as many messages. For HM1 the error of `fedlin.simulation`
on related devices. For expectation propagation, on the devices of Figure 4 (right), how far the means of the shared
parameters are from where the fit with all devices comes to rest, the largest in posterior sds; close is a tenth of one.

**Covariances.** Related devices and case II: HM1's defaults, the paper's average (α = 0.1), and Zhang and Yeung's Ω
of trace one and of the trace that is true, which is in units of the coefficients.

**Penalties.** Five devices that share their coefficients, 30 rows each, noise of sd 1. Pairs: columns in pairs with
correlation 0.95, both of a pair with the same coefficient. Steps: a stretch of zeros between two of equal numbers. Root
mean square of θ̂ − θ, over devices and coefficients, by ridge, lasso, elastic net and fused lasso, and least squares.

Source: Yue, Kontar, Estrada Gómez (2022), "Federated data analytics: a study on linear models", sections 3, 4.2, 4.3;
Zhang and Yeung (2010), "A convex formulation for learning task relationships in multi-task learning".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedlin.common import infer
from experiments.fedlin.selection import MEAN, NOISE, VARIANCE, simulate
from experiments.fedlin.simulation import STEPS, Problem, case, error, head, related
from fedtorch.federation.algorithms.ep import posterior
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import shrinkage
from fedtorch.models.linear import SufficientStatistics, ridge
from fedtorch.models.matrix_normal import exponential_average, inverse_wishart, zhang_yeung

SHARES = (1.0, 0.3, 0.1)  # of the devices that are asked in a round
ROUNDS, EP_ROUNDS = 30, 12  # HM1's, and expectation propagation's with all devices
CLOSE = 0.1  # posterior sds
PAIRED = [3.0, 3.0, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0]
STEPPED = [3.0] * 6 + [0.0] * 6 + [3.0] * 6
PENALTIES: dict[str, Callable[[int], Any]] = {
    "ridge": shrinkage.ridge,
    "lasso": shrinkage.lasso,
    "elastic net": shrinkage.elastic_net,
    "fused lasso": shrinkage.fused_lasso,
}


# -- part of the devices -------------------------------------------------------------------------------------------


def asked(devices: int, share: float) -> int:
    return max(round(devices * share), 1)


def hm1_curve(problem: Problem, share: float, rounds: int, seed: int) -> list[float]:
    """The error after each round of HM1 with some devices."""
    algorithm = ft.matrix_normal(ft.least_squares(head(problem), steps=STEPS))
    cohort = asked(len(problem.theta), share) if share < 1 else None
    run = ft.Run(algorithm, ft.InProcess(problem.data), cohort=cohort, seed=seed)
    return [error(problem, round.server.parameters, seed) for round in run.rounds(rounds)]


def of_devices(count: int, seed: int) -> ft.data.FederatedData:
    """Devices with coefficients from N(μ, Σ), as in Figure 4."""
    generator = torch.Generator().manual_seed(seed)
    mean, variance = (torch.tensor(values, dtype=torch.float64) for values in (MEAN, VARIANCE))
    own = mean + variance.sqrt() * torch.randn(count, len(mean), generator=generator, dtype=torch.float64)
    return simulate(own, [100] * count, generator)


def ep_curve(data: ft.data.FederatedData, share: float, rounds: int, seed: int) -> list[float]:
    """How far the posterior is after each round from where it comes to rest with all devices; NaN where it is none."""
    model = hierarchical.linear(hierarchical.normal(len(MEAN)), noise=NOISE**2)
    rest = posterior(infer(model, data, tolerance=1e-6)[0], tolerance=math.inf)
    cohort = asked(len(data), share) if share < 1 else None
    run, gaps = ft.Run(ft.ep(model), ft.InProcess(data), cohort=cohort, seed=seed), []
    for _ in run.rounds(rounds):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a prior in conflict, of a posterior on its way
                found = posterior(run, tolerance=math.inf)
            gaps.append(float(((found.mean - rest.mean) / rest.stddev).abs().max()))
        except RuntimeError:  # of the first devices' sites, which later rounds take back
            gaps.append(math.nan)
    return gaps


def participation(devices: int, rounds: int, ep_rounds: int, seed: int) -> tuple[list[dict], dict[str, list[float]]]:
    """Figures by share, and the curves by round."""
    problem, data = related(devices, 8, 20, seed), of_devices(devices, seed)
    rows, curves = [], {}
    for share in SHARES:
        messages = devices / asked(devices, share)
        hm1 = hm1_curve(problem, share, round(rounds * messages), seed)
        ep = ep_curve(data, share, round(ep_rounds * messages), seed)
        curves[f"HM1, {share:.0%} of the devices"] = hm1
        curves[f"EP, {share:.0%} of the devices"] = ep
        away = [done for done, gap in enumerate(ep, 1) if not gap < CLOSE]
        rows.append(
            {
                f"HM1: error after {rounds} rounds": hm1[rounds - 1],
                f"HM1: error after {rounds} messages a device": hm1[-1],
                f"EP: sds from rest after {ep_rounds} messages a device": ep[-1],
                "EP: messages a device until it is close for good": (away[-1] + 1 if away else 1) / messages,
                "EP: rounds after which it is no density": float(sum(map(math.isnan, ep))),
            }
        )
    return rows, curves


# -- covariances ---------------------------------------------------------------------------------------------------


def by_covariance(problem: Problem, rounds: int, seed: int) -> dict[str, float]:
    """Errors of HM1 by the way in which Ω is learnt, and of least squares."""
    true = float(problem.omega.trace())
    ways: dict[str, Any] = {
        "HM1's default": inverse_wishart(),
        "the paper's average": exponential_average(0.1),
        "Zhang and Yeung, trace 1": zhang_yeung(),
        "Zhang and Yeung, the true trace": zhang_yeung(trace=true),
    }
    found = {"least squares": error(problem, ridge(SufficientStatistics.of(problem.data)), seed)}
    for name, covariance in ways.items():
        algorithm = ft.matrix_normal(ft.least_squares(head(problem), steps=STEPS), covariance=covariance)
        run = ft.run(algorithm, ft.InProcess(problem.data), rounds=rounds)
        found[name] = error(problem, run.server.parameters, seed)
    return found


# -- penalties -----------------------------------------------------------------------------------------------------


def penalised_problem(kind: str, devices: int, rows: int, seed: int) -> tuple[ft.data.FederatedData, Tensor]:
    """Rows of devices with the same coefficients, and these."""
    truth = torch.tensor(PAIRED if kind == "pairs" else STEPPED, dtype=torch.float64)
    generator = torch.Generator().manual_seed(40_000 + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    clients = []
    for _ in range(devices):
        x = draw(rows, len(truth))
        if kind == "pairs":  # correlation 0.95 within a pair
            x[:, 1::2] = 0.95 * x[:, ::2] + (1 - 0.95**2) ** 0.5 * x[:, 1::2]
        clients.append((x, x @ truth + draw(rows)))
    return ft.data.from_tensors(clients), truth


def by_penalty(kind: str, devices: int, rows: int, rounds: int, seed: int) -> dict[str, float]:
    """Errors of devices' coefficients by penalty."""
    data, truth = penalised_problem(kind, devices, rows, seed)
    found = {"least squares": float((ridge(SufficientStatistics.of(data)) - truth).square().mean().sqrt())}
    for name, penalty in PENALTIES.items():
        _, marginals = infer(shrinkage.penalised(penalty(len(truth))), data, rounds=rounds, tolerance=0.05)
        found[name] = float((marginals.mean - truth).square().mean().sqrt())
    return found


def draw(curves: dict[str, list[float]], devices: int) -> Figure:
    """Errors by messages a device."""
    figure, axes = common.subplots(1, 2, figsize=(10, 3.8))
    for axis, method in zip(axes, ("HM1", "EP")):
        for share in SHARES:
            values = curves[f"{method}, {share:.0%} of the devices"]
            each = asked(devices, share) / devices
            axis.plot([each * (done + 1) for done in range(len(values))], values, label=f"{share:.0%} of the devices")
        axis.set_yscale("log")
        axis.set_xlabel("messages a device")
        axis.legend(frameon=False, fontsize="small")
    axes[0].set_ylabel("error of HM1")
    axes[1].set_ylabel("EP: posterior sds from rest")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all three."""
    options = common.arguments(__doc__).parse_args(argv)
    devices, rounds, ep_rounds = (10, 4, 2) if options.smoke else (100, ROUNDS, EP_ROUNDS)
    seeds, rows = range(options.seeds), []
    parts = [participation(devices, rounds, ep_rounds, seed) for seed in seeds]
    for place, share in enumerate(SHARES):
        rows += common.over_seeds(f"{share:.0%} of {devices} devices", [found[place] for found, _ in parts])
    for name, make in {
        f"related, K = {devices}, d = 8, N = 20": partial(related, devices, 8, 20),
        f"case II, K = {devices}": partial(case, "II", devices),
    }.items():
        rows += common.over_seeds(name, [by_covariance(make(seed), rounds, seed) for seed in seeds])
    kinds, count, most = (("pairs",), 2, 2) if options.smoke else (("pairs", "steps"), 5, 15)
    for kind in kinds:
        rows += common.over_seeds(f"penalties, {kind}", [by_penalty(kind, count, 30, most, seed) for seed in seeds])
    common.show_rows("Part of the devices, covariances, penalties", rows, ".4g")
    common.finish("fedlin.variants", rows, options, lambda: {"fedlin_variants": draw(parts[0][1], devices)})


if __name__ == "__main__":
    main()
