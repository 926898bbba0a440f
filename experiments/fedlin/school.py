"""139 London schools: does a school borrow strength from the others?

The examination scores of 15 362 pupils, as used for multi-task learning since Bakker and Heskes (2003): random splits
with 75 % of every school's pupils for training. Settings are chosen on a fifth of the training rows, then the training
rows are fitted as a whole. `explained` is the explained variance of the test scores in per cent, 100 (1 − mean squared
error / variance), over all pupils, as Argyriou, Evgeniou and Pontil (2008) have it; besides, the root mean squared
error.

Every school has few pupils for its 27 features and an intercept, some of which are constant within it.

Why HM1, HM2 and Ditto tie (`results/fedlin_school.md`) can be seen in Ω: it is nearly aI + b11', under which every
school is shrunk towards one common mean. That is what Ditto does. HM1 with that one direction only ("rank 1") tells
whether there is finer structure between the schools to be learnt.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedlin.common import Candidate, choose, errors
from fedtorch.data import FederatedData
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import hyperpriors
from fedtorch.models.linear import LinearHead
from fedtorch.models.low_rank import LowRank
from fedtorch.models.matrix_normal import inverse_wishart

FEATURES = 27  # without the file's constant, which is the head's intercept
YEARS = range(3)  # indicators
BANDS = range(7, 10)  # of verbal reasoning, indicators
PERCENTAGES = slice(3, 5)  # made fractions, so that all features are of one size
TRAINING = 0.75  # of every school's pupils


def load(schools: int) -> FederatedData:
    """The pupils of the first `schools` schools, without the constant column."""

    def of_one_size(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = rows[0][:, :FEATURES].clone()
        x[:, PERCENTAGES] /= 100
        return x, rows[1]

    return ft.data.school(torch.float64).select(range(schools)).map(of_one_size)


def separate(rounds: int) -> dict[str, Candidate]:
    """Every school alone, by gradient steps from zero that stop early, or to the end."""
    return {
        f"{steps} steps": Candidate(ft.separate(ft.least_squares(head(), steps=steps)), 1)
        for steps in (10, 30, 100, 300, 1000, None)
    }


def pooled(rounds: int) -> dict[str, Candidate]:
    """One model for all schools, from all pupils in one place."""
    return {"least squares": Candidate(ft.pooled(ft.least_squares(head())), 1, pooled=True)}


def ditto(rounds: int) -> dict[str, Candidate]:
    """A shared model, and one of each school that is drawn towards it."""
    locals_ = {f"{steps} steps": ft.least_squares(head(), steps=steps) for steps in (500, 5000)}
    return {
        f"strength {strength}, {name}": Candidate(ft.ditto(local, strength), rounds)
        for strength in (0.1, 0.3, 1.0, 3.0, 10.0)
        for name, local in locals_.items()
    }


def hm1(rounds: int, rank: int = 64) -> dict[str, Candidate]:
    """The matrix-normal prior with a learnt correlation between schools, Ω = aI + `rank` directions."""
    local = ft.least_squares(head())
    return {
        f"scale {scale}": Candidate(ft.matrix_normal(local, covariance=inverse_wishart(scale=scale), rank=rank), rounds)
        for scale in (0.01, 0.03, 0.1, 0.3, 1.0)
    }


def hm2(rounds: int) -> dict[str, Candidate]:
    """Hierarchical Bayes by expectation propagation: which coefficients differ between schools, the others shared.

    Random intercepts; with slopes of the examination's years; and with those of the verbal reasoning bands.
    Scores are tens, so that the priors are wide: μ ~ N(0, 30²), log τ ~ N(0, 3²).
    """
    variance = hyperpriors.log_normal(0.0, 3.0)
    years = [FEATURES, *YEARS]
    sets = {"intercepts": [FEATURES], "intercepts and years": years, "years and bands": [*years, *BANDS]}
    found = {}
    for name, which in sets.items():
        model = hierarchical.linear(hierarchical.normal(FEATURES + 1, random=which, sd=30.0, variance=variance))
        found[name] = Candidate(None, 60, model=model)
    return found


# Name -> (rounds -> its settings by name).
METHODS: dict[str, Callable[[int], dict[str, Candidate]]] = {
    "HM1": hm1,
    "HM1, rank 1": partial(hm1, rank=1),
    "HM2": hm2,
    "separate": separate,
    "pooled": pooled,
    "Ditto": ditto,
}
OURS, OTHERS = ("HM1", "HM2"), ("separate", "pooled", "Ditto", "HM1, rank 1")  # shown as differences on equal splits


def head() -> LinearHead:
    """27 features and an intercept."""
    return LinearHead(FEATURES, dtype=torch.float64)


def chosen(method: str, training: FederatedData, rounds: int, seed: int) -> Candidate:
    """A method's best setting on a fifth of the training rows."""
    settings = METHODS[method](rounds)
    return settings[choose(settings, *training.split(0.8, seed + 1000))]


def learnt_covariance(data: FederatedData, rounds: int) -> LowRank:
    """HM1's Ω on the first split."""
    training, _ = data.split(TRAINING, 0)
    best = chosen("HM1", training, rounds, 0).algorithm
    assert best is not None
    return ft.run(best, ft.InProcess(training), rounds=rounds).server.covariance


def scores(method: str, data: FederatedData, rounds: int, seed: int) -> dict[str, float]:
    """Explained variance and error of one method on one split."""
    training, test = data.split(TRAINING, seed)
    wrong = errors(chosen(method, training, rounds, seed), training, test)
    error = float(wrong.sum() / test.counts.sum())
    variance = float(test.rows[1].var(correction=0))
    by_school = (wrong / test.counts)[test.counts > 0]
    return {
        "explained": 100 * (1 - error / variance),
        "rmse": error**0.5,
        "worst school's rmse": float(by_school.max()) ** 0.5,
    }


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float | None]:
    """The mean of first − second over equal splits, and its standard error; None for one split.

    The splits share pupils, so that their differences are not independent: the variance of the mean is that of the
    differences times 1/n + 1/3, n the number of splits and 1/3 the test pupils for each training pupil (Nadeau and
    Bengio, "Inference for the generalization error", 2003, equation 10).
    """
    found = np.subtract(first, second)
    n = len(found)
    sd = common.spread(found.tolist())
    return float(found.mean()), None if sd is None else sd * (1 / n + (1 - TRAINING) / TRAINING) ** 0.5


def shared(covariance: LowRank) -> list[common.Row]:
    """How near Ω is to aI + b11', by which every school is shrunk towards one common mean."""
    first, *others = covariance.values.tolist()
    cosine = float(covariance.vectors[:, 0].sum().abs()) / len(covariance.vectors) ** 0.5
    return [
        common.Row("HM1, Ω", "share of its trace in one direction", first / float(covariance.diagonal().sum())),
        common.Row("HM1, Ω", "cosine of that direction with equal weights", cosine),
        common.Row("HM1, Ω", "variance of the next, relative to a", 1 + others[0] / float(covariance.multiple)),
    ]


def draw(data: FederatedData, rounds: int, covariance: LowRank) -> dict[str, Figure]:
    """The learnt correlation between schools, and every school's error under HM1 against separate training."""
    training, test = data.split(TRAINING, 0)
    found = {}
    for method in ("HM1", "separate"):
        best = chosen(method, training, rounds, 0)
        found[method] = (errors(best, training, test) / test.counts).sqrt()
    correlation = ft.plots.device_correlation(covariance, data.names)
    figure, axis = common.subplots(figsize=(4.6, 4.2))
    axis.scatter(found["separate"], found["HM1"], s=training.counts / 4, alpha=0.5, linewidths=0)
    limits = [min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])]
    axis.plot(limits, limits, color="0.6", linewidth=1)
    axis.set_xlabel("RMSE of a school on its own")
    axis.set_ylabel("RMSE of a school under HM1 (area: pupils)")
    return {"fedlin_school": figure, "fedlin_school_correlation": correlation}


def main(argv: Sequence[str] | None = None) -> None:
    """All methods on `--seeds` random splits; the literature uses ten."""
    warnings.filterwarnings(
        "ignore", message="Expected columns of rank"
    )  # indicators of one school are dependent; the priors decide
    options = common.arguments(__doc__).parse_args(argv)
    schools, rounds = (12, 5) if options.smoke else (139, 60)
    data = load(schools)
    runs = {method: [scores(method, data, rounds, seed) for seed in range(options.seeds)] for method in METHODS}
    found = {method: common.over_seeds(method, each) for method, each in runs.items()}
    rows = [row for each in found.values() for row in each]
    lines = [[method, *(common.number(row.ours, row.sd, ".2f") for row in each)] for method, each in found.items()]
    title = f"{schools} schools, {options.seeds} random splits"
    common.show(f"{title}: mean ± sd", ["", *runs["HM1"][0]], lines)
    explained = {method: common.by_metric(each)["explained"] for method, each in runs.items()}
    lines = []
    for method in OURS:
        differences = [paired(explained[method], explained[other]) for other in OTHERS]
        rows += [common.Row(method, f"explained, more than {other}", *both) for other, both in zip(OTHERS, differences)]
        lines.append([method, *(common.number(*both, ".2f") for both in differences)])
    common.show(f"{title}: explained on the same split, more than …, ± standard error", ["", *OTHERS], lines)
    covariance = learnt_covariance(data, rounds)
    of_omega = shared(covariance)
    common.show_rows("HM1's Ω on the first split", of_omega, ".2f")
    common.finish("fedlin.school", rows + of_omega, options, lambda: draw(data, rounds, covariance))


if __name__ == "__main__":
    main()
