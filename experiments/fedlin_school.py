"""139 London schools: does a school borrow strength from the others?

The examination scores of 15 362 pupils, as used for multi-task learning since Bakker and Heskes (2003): random splits
with 75 % of every school's pupils for training. Settings are chosen on a fifth of the training rows, then the training
rows are fitted as a whole. `explained` is the explained variance of the test scores in per cent, 100 (1 − mean squared
error / variance), over all pupils, as Argyriou, Evgeniou and Pontil (2008) have it; besides, the root mean squared
error.

Every school has few pupils for its 27 features and an intercept, some of which are constant within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedlin_common import Candidate, choose, errors
from fedtorch.data import FederatedData
from fedtorch.models import hierarchical, hyperpriors
from fedtorch.models.linear import LinearHead
from fedtorch.models.matrix_normal import inverse_wishart

FEATURES = 27  # without the file's constant, which is the head's intercept
YEARS = range(3)  # indicators
BANDS = range(7, 10)  # of verbal reasoning, indicators
PERCENTAGES = slice(3, 5)  # made fractions, so that all features are of one size


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


def hm1(rounds: int) -> dict[str, Candidate]:
    """The matrix-normal prior with a learnt correlation between schools."""
    local = ft.least_squares(head())
    return {
        f"scale {scale}": Candidate(ft.matrix_normal(local, covariance=inverse_wishart(scale=scale)), rounds)
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
        algorithm = ft.ep(model.project, model.prior, start=model.start, prepare=model.prepare)
        found[name] = Candidate(algorithm, 60, model=model)
    return found


# Name -> (rounds -> its settings by name).
METHODS = {"HM1": hm1, "HM2": hm2, "separate": separate, "pooled": pooled, "Ditto": ditto}


def head() -> LinearHead:
    """27 features and an intercept."""
    return LinearHead(FEATURES, dtype=torch.float64)


def scores(method: str, data: FederatedData, rounds: int, seed: int) -> dict[str, float]:
    """Explained variance and error of one method on one split."""
    training, test = data.split(0.75, seed)
    settings = METHODS[method](rounds)
    best = choose(settings, *training.split(0.8, seed + 1000))
    wrong = errors(settings[best], training, test)
    error = float(wrong.sum() / test.counts.sum())
    variance = float(test.rows[1].var(correction=0))
    by_school = (wrong / test.counts)[test.counts > 0]
    return {
        "explained": 100 * (1 - error / variance),
        "rmse": error**0.5,
        "worst school's rmse": float(by_school.max()) ** 0.5,
    }


def draw(data: FederatedData, rounds: int, folder: Path) -> list[Path]:
    """The learnt correlation between schools, and every school's error under HM1 against separate training."""
    training, test = data.split(0.75, 0)
    found = {}
    for method in ("HM1", "separate"):
        settings = METHODS[method](rounds)
        best = settings[choose(settings, *training.split(0.8, 1000))]
        found[method] = (errors(best, training, test) / test.counts).sqrt()
        if method == "HM1":
            *_, last = ft.run(best.algorithm, ft.InProcess(training), rounds=rounds)
            correlation = ft.plots.device_correlation(last.server.covariance, data.names)
    figure, axis = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
    axis.scatter(found["separate"], found["HM1"], s=training.counts / 4, alpha=0.5, linewidths=0)
    limits = [min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])]
    axis.plot(limits, limits, color="0.6", linewidth=1)
    axis.set_xlabel("RMSE of a school on its own")
    axis.set_ylabel("RMSE of a school under HM1 (area: pupils)")
    axis.spines[["top", "right"]].set_visible(False)
    return [
        common.save(figure, folder, "fedlin_school"),
        common.save(correlation, folder, "fedlin_school_correlation"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """All methods on `--seeds` random splits; the literature uses ten."""
    options = common.arguments(__doc__ or "").parse_args(argv)
    schools, rounds = (12, 5) if options.smoke else (139, 60)
    data = load(schools)
    rows, lines = [], []
    for method in METHODS:
        runs = [scores(method, data, rounds, seed) for seed in range(options.seeds)]
        line = [method]
        for metric in runs[0]:
            values = [run[metric] for run in runs]
            sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
            rows.append(common.Row(method, metric, float(np.mean(values)), sd))
            line.append(f"{np.mean(values):.2f}" + ("" if sd is None else f" ± {sd:.2f}"))
        lines.append(line)
    common.show(f"{schools} schools, {options.seeds} random splits", ["", *runs[0]], lines)
    common.write("fedlin_school", rows, options.json)
    if options.out is not None:
        for path in draw(data, rounds, options.out):
            common.show_path(path)


if __name__ == "__main__":
    main()
