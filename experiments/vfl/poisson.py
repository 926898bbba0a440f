"""Multilevel Poisson regression over two parties: marginal densities (Figure 4 of the VFL source).

2000 areas with populations of 250 to 350 and five levels of remoteness, two features at each of two parties, slopes
that vary by level. The true model by NUTS and by mean-field inference, the augmented model at ρ = 1 and 2 by
NUTS (on the collapsed likelihood, whose posterior of the slopes is the same) and with amortised auxiliary variables;
beside them q(s|θ)q(z|s). As printed every area has slopes of its own, with one draw each, which is not identifiable:
here a level has, β_j^r ~ N(μ_j, σ_j). Coefficients are drawn at 0.3 of the prior's scale, so that counts stay in the
tens; the priors are the published ones. The amortised encoders see x_j'θ_j only, so that z learns nothing of a row's
count, and their best answer is to have next to no noise: the posterior is then closer to that of the true model than to
that of the augmented one.

The source gives figures only, hence no published numbers. As there, μ is found by all ways alike (sd 0.07 to 0.09), the
true model's slope has a narrow posterior (sd 0.007 by NUTS, mean field and full covariance), the augmented model's a
wide one, and amortised inference answers with the narrow one: sd 0.008 at ρ = 1 and at ρ = 2, with means 3.5 and 5 such
sds from the truth. The source reads that as accuracy; it is overconfidence: NUTS on the augmented model says 0.076 and
0.098, and the curvature of its collapsed posterior with μ and σ held 0.066 and 0.117. With q(s|θ)q(z|s) the sd is 0.070
and 0.116. Bounds say which is the approximation: −10 023 and −11 370 with q(s|θ)q(z|s), −14 445 and −17 182 amortised
(seed 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common, result_pages
from experiments.vfl import oracles
from fedtorch import random, vfl
from fedtorch.vfl.model import likelihoods

WIDTH, LEVELS, PARTIES, INTERCEPT, SCALE = 2, 5, 2, -2.0, 0.3
RHOS = (1.0, 2.0)
READING = result_pages.Reading(
    remark="A claim is the source's reading of Figure 4: ours is the share of seeds in which it holds, 1 where all.",
    reasons=(
        result_pages.Reason(
            "^true model",
            "holds for all seeds but the third, whose μ lies 2.1 sds of NUTS from the truth, as one of twenty does",
        ),
        result_pages.Reason(
            "^augmented.*NUTS: .*μ's posterior",
            "holds for all seeds but the third, whose levels hardly differ: the true model's sd of μ is 0.016 there, "
            "and the augmented model's two and four times that",
        ),
    ),
)
SHOWN = {"μ of the first feature": 1, "β of its first level": 1 + 2 * WIDTH}  # places in (γ, θ_1, θ_2)
Moments = dict[tuple[float, str], tuple[Tensor, Tensor]]  # means and sds by ρ and way of inference


class Size(NamedTuple):
    """How much is computed."""

    rows: int
    steps: int
    draws: int  # of NUTS


def problem(rows: int, seed: int) -> tuple[vfl.VerticalData, list[float]]:
    """Data and the true values of what is shown."""
    keys = [random.fold_in(random.key(seed), i) for i in range(6)]
    x = random.normal(keys[0], (PARTIES, rows, WIDTH), torch.float64)
    groups = random.randint(keys[1], LEVELS, (rows,))
    offset = (250.0 + random.randint(keys[2], 101, (rows,)).double()).log()
    mean = SCALE * random.normal(keys[3], (PARTIES, 1, WIDTH), torch.float64)
    spread = SCALE * random.normal(keys[4], (PARTIES, 1, WIDTH), torch.float64).abs()
    beta = mean + spread * random.normal(keys[5], (PARTIES, LEVELS, WIDTH), torch.float64)
    log_rate = INTERCEPT + offset + (x * beta[:, groups]).sum((0, 2))
    y = torch.poisson(log_rate.exp(), torch.Generator().manual_seed(seed))
    features = tuple(vfl.by_level(one, groups, LEVELS) for one in x)
    return vfl.VerticalData(features, y, offset), [float(mean[0, 0, 0]), float(beta[0, 0, 0])]


def model(rho: float) -> vfl.VerticalModel:
    """Slopes by level at both parties; every level has many rows, so the slopes themselves are the parameters."""
    return vfl.augmented(likelihoods.poisson(), [vfl.multilevel(WIDTH, LEVELS, centred=True)] * PARTIES, rho)


def variational(
    data: vfl.VerticalData, rho: float, guide: vfl.Guide, steps: int, seed: int, start: vfl.Parameters | None = None
) -> vfl.VariationalFit:
    """A fit in three runs: z drawn from its prior makes the first gradients of counts enormous, and Adam forgets such
    only over thousands of iterations unless it begins anew."""
    short = steps // 10
    for count in (short, short, steps - 2 * short):
        fit = vfl.sfvi(model(rho), guide, data, seed=seed, steps=count, lr=0.02, draws=2, start=start)
        start = fit.parameters
    return fit


def densities(size: Size, seed: int, folder: Path | None = None) -> tuple[Moments, list[float]]:
    """Means and standard deviations of all coordinates, by ρ (0: the true model) and way of inference.

    From the folder of what is done where there is one.
    """
    data, truth = problem(size.rows, seed)
    assert data.offset is not None
    fast = data._replace(
        features=tuple(x.float() for x in data.features), response=data.response.float(), offset=data.offset.float()
    )
    ways = {
        "mean field": ((0.0,), vfl.Guide(vfl.noiseless(), vfl.diagonal(), sd=0.03)),
        "full covariance": ((0.0,), vfl.Guide(vfl.noiseless(), joint=True, sd=0.03)),
        "amortised": (RHOS, vfl.Guide(vfl.amortised(), sd=0.03)),
        "sums": (RHOS, vfl.Guide(vfl.sums(), joint=True, sd=0.03)),
    }

    def fits(way: str) -> Moments:
        rhos, guide = ways[way]
        begin, made = None, {}  # the fit of a larger ρ begins at that of a smaller one
        for rho in rhos:
            fit = variational(fast, rho or 1.0, guide, size.steps, seed, begin)
            begin = fit.parameters
            mean, covariance = (part[0].double() for part in fit.moments())
            made[rho, way] = mean, covariance.diagonal().sqrt()
        return made

    def sampled(rho: float, start: Tensor) -> Moments:
        draws = oracles.nuts_posterior(
            model(rho or 1.0), data, collapsed=rho > 0, adaptive=True, points=16, start=start,
            draws=size.draws, warmup=size.draws // 2, chains=1, seed=seed,
        )  # fmt: skip
        return {(rho, "NUTS"): (draws.flat.mean(0), draws.flat.std(0))}

    found: Moments = {}
    for way in ways:
        found |= common.kept(folder, f"poisson_{seed}_{way}_{size.steps}".replace(" ", "_"), partial(fits, way))
    starts = {rho: mean for (rho, _), (mean, _) in found.items()}
    for rho in (0.0, *RHOS):
        found |= common.kept(folder, f"poisson_{seed}_NUTS_{rho:g}_{size.draws}", partial(sampled, rho, starts[rho]))
    return found, truth


def claims(runs: Sequence[tuple[Moments, list[float]]]) -> list[common.Row]:
    """What the source reads from Figure 4, and in which share of the seeds it holds here."""
    (_, mu), (_, beta) = SHOWN.items()

    def within(found: Moments, truth: list[float], rho: float, way: str) -> dict[str, bool]:
        at = lambda of, how, place: (float(found[of, how][0][place]), float(found[of, how][1][place]))
        if not rho:
            near = all(
                abs(at(0.0, way, place)[0] - value) < 2 * at(0.0, way, place)[1]
                for place, value in zip((mu, beta), truth)
            )
            return {"μ and β are within two sds of the truth": near}
        (mean, sd), (reference, spread) = at(rho, way, mu), at(0.0, "NUTS", mu)
        wide, of_true = at(rho, way, beta)[1], at(0.0, "NUTS", beta)[1]
        alike = abs(mean - reference) < spread and 0.5 < sd / spread < 2
        shape = {"β's posterior is wide, three times the true model's at least": wide > 3 * of_true}
        if way == "amortised":
            shape = {
                "β's sd is nearer to the true model's than NUTS's is": abs(wide - of_true)
                < abs(at(rho, "NUTS", beta)[1] - of_true)
            }
        return {"μ's posterior is comparable to the true model's": alike, **shape}

    made = []
    for rho, way in (
        (0.0, "NUTS"),
        (0.0, "mean field"),
        *((rho, way) for rho in RHOS for way in ("NUTS", "amortised")),
    ):
        held = [within(found, truth, rho, way) for found, truth in runs]
        for claim in held[0]:
            share = sum(each[claim] for each in held) / len(held)
            made.append(common.Row(title(rho, way), f"claim: {claim}", share, None, 1.0, None, len(held)))
    return made


def title(rho: float, way: str) -> str:
    """The model and the way of inference in words."""
    return f"{f'augmented, ρ = {rho:g}' if rho else 'true model'}, {way}"


def draw(found: Moments, truth: list[float]) -> Figure:
    """What is shown in rows, ρ in columns."""
    figure, grid = plt.subplots(len(SHOWN), len(RHOS), figsize=(10, 7), layout="constrained", sharex="row")
    styles = {"NUTS": "-", "mean field": "--", "full covariance": ":", "amortised": "--", "sums": ":"}
    for axes, (name, place), value in zip(grid, SHOWN.items(), truth):
        for axis, rho in zip(axes, RHOS):
            for (of, way), (mean, sd) in found.items():
                if of in (0.0, rho):
                    at = np.linspace(float(mean[place] - 4 * sd[place]), float(mean[place] + 4 * sd[place]), 200)
                    height = np.exp(-0.5 * ((at - float(mean[place])) / float(sd[place])) ** 2)
                    label = f"{'augmented' if of else 'true'}, {way}"
                    axis.plot(at, height, styles[way], color="C3" if of else "0.3", label=label)
            axis.axvline(value, color="C0", linewidth=3, alpha=0.4)
            axis.set(title=f"ρ = {rho:g}", xlabel=name, yticks=[])
    grid[0, -1].set_ylabel("density over its maximum")
    grid[0, -1].legend(frameon=False, fontsize=8)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Fit everything, print the moments of what Figure 4 shows and draw it."""
    parser = common.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="of variational inference (default 4000)")
    parser.add_argument("--draws", type=int, default=400, help="of NUTS (default 400)")
    parser.add_argument("--kept", type=Path, help="folder of the fits that are done, where the next call goes on")
    options = parser.parse_args(argv)
    size = Size(150, 150, 10) if options.smoke else Size(2000, options.steps, options.draws)
    lines = []
    runs = [densities(size, seed, options.kept) for seed in range(options.seeds)]
    rows = claims(runs)
    for rho, way in sorted(runs[0][0]):
        setting = title(rho, way)
        cells = []
        for i, (name, place) in enumerate(SHOWN.items()):
            means = [float(found[rho, way][0][place]) for found, _ in runs]
            sds = [float(found[rho, way][1][place]) for found, _ in runs]
            errors = [mean - truth[i] for mean, (_, truth) in zip(means, runs)]
            for metric, values in {"error of the mean": errors, "sd": sds}.items():
                rows.append(common.row(setting, f"{name}: {metric}", values))
                cells.append(f"{np.mean(values):.4f}")
        lines.append([setting, *cells])
    columns = ["", *(f"{name}: {metric}" for name in SHOWN for metric in ("error of the mean", "sd"))]
    common.show(f"Poisson multilevel regression, {size.rows} areas ({common.machine()})", columns, lines)
    common.finish("vfl.poisson", rows, options, lambda: {"vfl_poisson": draw(*runs[0])})


if __name__ == "__main__":
    main()
