"""Logistic regression over two and ten parties: bounds and marginal densities (Figures 2 and 3 of the VFL source).

500 rows, 20 standard normal features, noise ρ of 0.5, 1 and 2, on data with N(0, 1) noise on the linear predictor (as
published) and without. Three models (plain, augmented, power) by NUTS, and by variational inference with mean-field and
with amortised auxiliary variables: the eight combinations of the source's Table 2. Beside them is q(s|θ)q(z|s), and the
log score of 500 held-out rows, because bounds of the power model are not comparable with others (its product of powers
is not a density of y). The noise makes the plain model itself wrong (its slopes are attenuated by 0.847), so both
references are shown. The source gives figures only, hence no published numbers. NUTS runs on collapsed likelihoods,
whose posterior of the coefficients is the same.

Beside the source's figures (bounds in nats at ρ = 0.5, 1, 2; data with noise, seed 0; the plain model's is −179):

- Two parties: augmented −221, −211, −219 with mean field and −190, −217, −297 amortised; power −223, −216, −227 and
  −184, −194, −227. As published, amortised z are better for small ρ and lose that by ρ = 2 (in the augmented model by
  ρ = 1 already), and the power model's bound is above the augmented one's where z are amortised: its encoders see y.
- That order is one of guides, not of models: with q(s|θ)q(z|s) it turns (augmented −179, −179, −184; power −182, −188,
  −209), and held-out log scores of two parties are −0.341 to −0.329 whatever the model, the guide and ρ.
- Ten parties: augmented −231, −252, −335 with mean field and −227, −328, −578 amortised; power −232, −252, −331 and
  −207, −260, −369; with q(s|θ)q(z|s) −179, −186, −209 and −183, −195, −232. The published distance between the models
  shrinks from two to ten parties; here it grows with amortised z and stays as it is with q(s|θ)q(z|s).
- Two parties' posteriors with q(s|θ)q(z|s) are NUTS's for every ρ and both models: no mean is more than 0.092 sd off
  and sds are 0.97 to 1.01 of NUTS's on average. Amortised ones are up to 0.6 sd off with 7 to 32 % smaller sds, growing
  with ρ; mean field's up to 1.8 sd off at ρ = 0.5, with sds smaller by 59 to 84 %. Slopes are 0.91, 1.03 and 1.31 of
  the true ones in the augmented model, 0.89, 0.96 and 1.17 in the power model, 0.87 in the plain one.
- Ten parties' are too: means within 0.080 sd, sds 0.98 to 1.01 of NUTS's on average, at every ρ, for both models and
  both data sets. Amortised ones are up to 3.1 sd off (augmented, ρ = 2), and their sds are 15 to 44 % too small.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common, result_pages
from experiments.vfl import oracles
from fedtorch import random, vfl
from fedtorch.models.encoders import perceptron
from fedtorch.vfl import log_score, noise_variance
from fedtorch.vfl.model import likelihoods

RHOS = (0.5, 1.0, 2.0)
NOISES = ("with noise", "without noise")
READING = result_pages.Reading(
    remark="A claim is the source's reading of its figures: ours is the share of seeds in which it holds, 1 where all.",
    reasons=(
        result_pages.Reason(
            "claim: the power model's bound is above",
            "a product of powers is no density of y, and which of the two bounds is above depends on the guide: with "
            "q(s|θ)q(z|s), whose posteriors are NUTS's, it is the augmented model's",
        ),
        result_pages.Reason(
            "claim: amortised has a higher bound",
            "the bounds change their order between ρ = 0.5 and 1 already: with two parties in the augmented model, "
            "with ten in both",
        ),
        result_pages.Reason(
            "claim: amortised is closer",
            "the largest distance of a mean from NUTS's decides; by standard deviations amortised z are closer in "
            "every setting",
        ),
        result_pages.Reason(
            "claim: mean field is closer",
            "a higher bound is no closer posterior of the coefficients: mean field's sds are far below NUTS's",
        ),
        result_pages.Reason(
            "claim: the models' bounds differ less",
            "with more parties the bounds of both models fall with these guides, and the augmented model's faster",
        ),
    ),
)
WAYS = ("mean field", "amortised")  # the published two
CLOSE = "largest |mean − NUTS| in sd"


class Size(NamedTuple):
    """How much is computed."""

    rows: int
    features: int
    parties: tuple[int, ...]
    steps: int
    draws: int  # of NUTS


class Result(NamedTuple):
    """One combination of model and inference on one data set."""

    bound: float  # nan for NUTS
    score: float  # mean log score of held-out rows, with the model's own noise
    noiseless: float  # the same, without
    mean: Tensor  # (D,) intercept and coefficients
    sd: Tensor  # (D,)


class Problem(NamedTuple):
    """Training and held-out rows, responses with and without noise on the predictor."""

    x: Tensor  # (2, n, p) training and held-out
    y: Tensor  # (2, 2, n) with and without noise, training and held-out
    beta: Tensor  # (p,)


def problem(size: Size, seed: int) -> Problem:
    """Standard normal features, coefficients and noise."""
    keys = [random.fold_in(random.key(seed), i) for i in range(4)]
    x = random.normal(keys[0], (2, size.rows, size.features), torch.float64)
    beta = random.normal(keys[1], (size.features,), torch.float64)
    noise = random.normal(keys[2], (2, size.rows), torch.float64)
    linear = torch.stack([x @ beta + noise, x @ beta])
    uniform = random.uniform(keys[3], (2, size.rows), torch.float64)
    return Problem(x, (uniform < linear.sigmoid()).double(), beta)


def guides() -> dict[str, vfl.Guide]:
    """The two published families of z, and ours."""
    small = perceptron(8)
    return {
        "mean field": vfl.Guide(vfl.mean_field()),
        "amortised": vfl.Guide(vfl.amortised(small)),
        "amortised, y seen": vfl.Guide(vfl.amortised(small, sees_response=True)),
        "sums": vfl.Guide(vfl.sums(), joint=True),
    }


def variational(
    size: Size, data: Problem, parties: int, name: str, guide: vfl.Guide, seed: int, rhos: Sequence[float]
) -> Fits:
    """All ρ, with and without noise, as one batch."""
    make = vfl.power if name == "power" else vfl.augmented
    width = size.features // parties
    rho = torch.tensor(rhos).repeat_interleave(len(NOISES))
    model = make(likelihoods.bernoulli(), [vfl.linear(width)] * parties, rho)
    rows = lambda i: vfl.VerticalData(
        tuple(data.x[i].float().split(width, -1)), data.y[:, i].float().repeat(len(rhos), 1)
    )
    fit = vfl.sfvi(model, guide, rows(0), seed=seed, steps=size.steps, lr=0.02, size=len(rho), every=size.steps // 5)
    mean, covariance = fit.moments()
    thetas = fit.sample(200, seed=int(random.fold_in(random.key(seed), 9)))
    noise = torch.zeros(1) if name == "plain" else noise_variance(model)
    own, bare = (log_score(model, thetas, rows(1), noise=v).mean(-1) for v in (noise, 0.0))
    sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    settings = [(r, n) for r in rhos for n in NOISES]
    return {
        s: Result(float(fit.bounds[-1, b]), float(own[b]), float(bare[b]), mean[b].double(), sd[b].double())
        for b, s in enumerate(settings)
    }


def sampled(size: Size, data: Problem, parties: int, name: str, rho: float, noise: int, seed: int) -> Result:
    """The reference by NUTS."""
    width = size.features // parties
    make = vfl.power if name == "power" else vfl.augmented
    model = make(likelihoods.bernoulli(), [vfl.linear(width)] * parties, rho)
    rows = [vfl.VerticalData(data.x[i].split(width, -1), data.y[noise, i]) for i in range(2)]
    found = oracles.nuts_posterior(
        model, rows[0], collapsed=name != "plain", points=20, draws=size.draws, warmup=size.draws // 2, chains=1,
        seed=seed,
    )  # fmt: skip
    flat = found.flat
    thetas = list(flat[:: max(1, len(flat) // 200)].unsqueeze(0).split(model.sizes, -1))
    variance = torch.zeros(1) if name == "plain" else noise_variance(model)
    own, bare = (float(log_score(model, thetas, rows[1], noise=v).mean()) for v in (variance, 0.0))
    return Result(float("nan"), own, bare, flat.mean(0), flat.std(0))


Fits = dict[tuple[float, str], Result]  # by ρ and data
Key = tuple[int, float, str, str, str]  # parties, ρ, data, model, inference


def combinations(
    size: Size, seed: int, rhos: Sequence[float], folder: Path | None = None
) -> tuple[dict[Key, Result], Problem]:
    """Every combination of the source's Table 2, and ours, from the folder of what is done where there is one."""
    data = problem(size, seed)

    def fitted(parties: int, name: str, guide: vfl.Guide, way: str, of: Sequence[float]) -> Fits:
        title = f"logistic_{seed}_{parties}_{name}_{way}_{size.steps}".replace(" ", "_")

        def work() -> dict[tuple[float, str], Any]:
            fits = variational(size, data, parties, name, guide, seed, of)
            return {setting: tuple(each) for setting, each in fits.items()}

        return {setting: Result(*each) for setting, each in common.kept(folder, title, work).items()}

    def drawn(parties: int, name: str, rho: float, noise: int) -> Result:
        title = f"logistic_{seed}_{parties}_{name}_NUTS_{rho:g}_{noise}_{size.draws}"

        def work() -> Any:
            return tuple(sampled(size, data, parties, name, rho, noise, seed))

        return Result(*common.kept(folder, title, work))

    found: dict[Key, Result] = {}
    plain = fitted(1, "plain", vfl.Guide(vfl.noiseless()), "VI", rhos[:1])
    references = [drawn(1, "plain", 1.0, i) for i in range(len(NOISES))]
    for parties in size.parties:
        for name in ("augmented", "power"):
            of_model = guides()
            del of_model["amortised, y seen" if name == "augmented" else "amortised"]
            for inference, guide in of_model.items():
                way = inference.removesuffix(", y seen")
                for (rho, noise), result in fitted(parties, name, guide, way, rhos).items():
                    found[parties, rho, noise, name, way] = result
            for rho in rhos:
                for i, noise in enumerate(NOISES):
                    found[parties, rho, noise, name, "NUTS"] = drawn(parties, name, rho, i)
        for rho in rhos:
            for i, noise in enumerate(NOISES):
                found[parties, rho, noise, "plain", "VI"] = plain[rhos[0], noise]
                found[parties, rho, noise, "plain", "NUTS"] = references[i]
    return found, data


def slope(result: Result, beta: Tensor) -> float:
    """Regression through zero of the posterior means on the true coefficients: 1 without attenuation or inflation."""
    return float(result.mean[1:] @ beta / (beta @ beta))


def figures(found: dict[Key, Result], data: Problem) -> dict[tuple[Key, str], float]:
    """The numbers of the table."""
    rows = {}
    for key, result in found.items():
        parties, rho, _, name, _ = key
        reference = found[*key[:4], "NUTS"]
        variance = 0.0 if name == "plain" else float(noise_variance(_model(name, parties, rho)))
        rows[key, "bound"] = result.bound
        rows[key, "log score"] = result.score
        rows[key, "log score without noise"] = result.noiseless
        rows[key, "slope"] = slope(result, data.beta)
        rows[key, "slope, corrected"] = slope(result, data.beta) * float(vfl.attenuation(variance))
        rows[key, CLOSE] = float(((result.mean - reference.mean) / reference.sd).abs().max())
        rows[key, "mean sd / NUTS"] = float((result.sd / reference.sd).mean())
    return rows


def claims(tables: Sequence[dict[tuple[Key, str], float]], rhos: Sequence[float]) -> list[common.Row]:
    """What the source reads from Figures 2 and 3, and in which share of the seeds it holds here; data with noise."""
    counts = sorted({key[0] for key, _ in tables[0]})
    held = [_held(table, counts, rhos) for table in tables]
    shares = {of: sum(each[of] for each in held) / len(held) for of in held[0]}
    return [
        common.Row(setting, f"claim: {claim}", share, None, 1.0, None, len(held))
        for (setting, claim), share in shares.items()
    ]


def _held(
    table: dict[tuple[Key, str], float], counts: Sequence[int], rhos: Sequence[float]
) -> dict[tuple[str, str], bool]:
    """Whether each claim holds in one seed, by setting and claim."""

    def at(metric: str, parties: int, rho: float, model: str, way: str) -> float:
        return table[(parties, rho, NOISES[0], model, way), metric]

    def gap(parties: int, rho: float, way: str) -> float:
        """How far the power model's bound is above the augmented one's."""
        return at("bound", parties, rho, "power", way) - at("bound", parties, rho, "augmented", way)

    held = {}
    for parties, rho in itertools.product(counts, rhos):
        setting = f"J = {parties}, ρ = {rho:g}"
        for way in WAYS:
            held[setting, f"the power model's bound is above the augmented one's, {way}"] = gap(parties, rho, way) > 0
        other, better = WAYS if rho <= 1 else WAYS[::-1]
        for model in ("augmented", "power"):
            best, rest = (at("bound", parties, rho, model, way) for way in (better, other))
            held[setting, f"{better} has a higher bound than {other}, {model}"] = best > rest
            best, rest = (at(CLOSE, parties, rho, model, way) for way in (better, other))
            held[setting, f"{better} is closer to NUTS than {other}, {model}"] = best < rest
    if len(counts) > 1:
        few, many = counts
        for rho, way in itertools.product(rhos, WAYS):
            claim = f"the models' bounds differ less with {many} parties than with {few}, {way}"
            held[f"ρ = {rho:g}", claim] = abs(gap(many, rho, way)) < abs(gap(few, rho, way))
    return held


def _model(name: str, parties: int, rho: float) -> vfl.VerticalModel:
    make = vfl.power if name == "power" else vfl.augmented
    return make(likelihoods.bernoulli(), [vfl.linear(1)] * parties, rho)


COLOURS = {"mean field": "C0", "amortised": "C1", "sums": "C2", "NUTS": "0.3", "VI": "C4"}


def draw(found: dict[Key, Result], data: Problem, parties: int, rhos: Sequence[float]) -> Figure:
    """Bounds over ρ above, marginal densities of the first coefficient below; data with noise, as published."""
    figure = plt.figure(figsize=(4 * max(2, len(rhos)), 9), layout="constrained")
    top, middle, bottom = np.asarray(figure.subfigures(3, 1))
    for axis, name in zip(top.subplots(1, 2), ("augmented", "power")):
        for inference in ("mean field", "amortised", "sums"):
            values = [found[parties, rho, NOISES[0], name, inference].bound for rho in rhos]
            axis.plot(rhos, values, "o-", color=COLOURS[inference], label=inference)
        plain = found[parties, rhos[0], NOISES[0], "plain", "VI"].bound
        axis.axhline(plain, color=COLOURS["VI"], label="plain model")
        axis.set(title=f"{name} model, {parties} parties", xlabel="ρ", ylabel="bound (nats)")
        axis.legend(frameon=False, fontsize=8)
    for part, inferences in ((middle, ("NUTS",)), (bottom, ("mean field", "amortised", "sums"))):
        for axis, rho in zip(np.atleast_1d(part.subplots(1, len(rhos), sharex=True)), rhos):
            _density(axis, found[parties, rho, NOISES[0], "plain", "NUTS"], "plain, NUTS", COLOURS["NUTS"], ":")
            for name, style in (("augmented", "-"), ("power", "--")):
                for inference in inferences:
                    colour = COLOURS[inference] if len(inferences) > 1 else {"augmented": "C3", "power": "C5"}[name]
                    label = f"{name}, {inference}"
                    _density(axis, found[parties, rho, NOISES[0], name, inference], label, colour, style)
            axis.axvline(float(data.beta[0]), color="C0", linewidth=3, alpha=0.4)
            axis.set(title=f"ρ = {rho:g}", xlabel="first coefficient", yticks=[])
        axis.legend(frameon=False, fontsize=7)
    return figure


def _density(axis: plt.Axes, result: Result, label: str, colour: str, style: str) -> None:
    mean, sd = float(result.mean[1]), float(result.sd[1])
    at = np.linspace(mean - 4 * sd, mean + 4 * sd, 200)
    axis.plot(at, np.exp(-0.5 * ((at - mean) / sd) ** 2) / sd, style, color=colour, label=label, linewidth=1.3)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit all combinations, print a table per number of parties and draw the figures."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--parties", type=int, choices=(2, 10), action="append", help="only this number of parties")
    parser.add_argument("--steps", type=int, default=5000, help="of variational inference (default 5000)")
    parser.add_argument("--draws", type=int, default=800, help="of NUTS (default 800)")
    parser.add_argument("--kept", type=Path, help="folder of the fits that are done, where the next call goes on")
    options = parser.parse_args(argv)
    size = Size(60, 4, (2,), 100, 20) if options.smoke else Size(500, 20, (2, 10), options.steps, options.draws)
    size = size._replace(parties=tuple(options.parties or size.parties))
    rhos = RHOS[1:2] if options.smoke else RHOS
    runs = [combinations(size, seed, rhos, options.kept) for seed in range(options.seeds)]
    tables = [figures(*run) for run in runs]
    rows = claims(tables, rhos)
    for key, metric in tables[0]:
        values = [table[key, metric] for table in tables]
        parties, rho, noise, name, inference = key
        if np.isnan(values).any():
            continue
        setting = f"J = {parties}, ρ = {rho:g}, {noise}, {name}, {inference}"
        rows.append(common.row(setting, metric, values))
    metrics = list(dict.fromkeys(metric for _, metric in tables[0]))
    for parties in size.parties:
        for noise in NOISES:
            lines = []
            for key in runs[0][0]:
                if key[0] == parties and key[2] == noise:
                    values = [float(np.mean([table[key, metric] for table in tables])) for metric in metrics]
                    cells = ["–" if np.isnan(v) else f"{v:.1f}" if i == 0 else f"{v:.3f}" for i, v in enumerate(values)]
                    lines.append([f"ρ = {key[1]:g}, {key[3]}, {key[4]}", *cells])
            common.show(f"{parties} parties, data {noise} on the predictor", ["", *metrics], sorted(lines))
    draws = lambda: {f"vfl_logistic_{parties}_parties": draw(*runs[0], parties, rhos) for parties in size.parties}
    common.finish("vfl.logistic", rows, options, draws)


if __name__ == "__main__":
    main()
