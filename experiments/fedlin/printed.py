"""FedLin, why Tables 1, 3 and 4 do not come out: what the paper says in plain NumPy, beside the package and the paper.

`experiments.fedlin.oracles` has every method once more, from the paper's text alone. Where the package and NumPy are
run on the same rows, "differs by" is the largest difference of a coefficient.

**Table 1.** The text leaves open whether "noise 0.1" is a standard deviation or a variance, and whether the error is
that of f̂ − f or of f̂ − y. Under all four readings the table has least squares and the Bayes estimator that knows Ω and
the noise, which no method can beat on average: what is published lies below it, or so far above that any method of the
paper's does better, under each reading in another case.

**Table 3.** Intervals of the hierarchical ridge by a grid, of the lasso by Gibbs sampling. Also what published counts
would take: the level of intervals at which so many are included.

**Table 4.** Every method at every rate of a grid, and the best of them *on the test rows themselves*, which nobody can
choose in earnest: what is published and lies below that cannot come from this preparation.

Source: Yue, Kontar, Estrada Gómez (2022), Algorithm 1 and sections 5.1, 6.1, 6.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedlin import cmapss, oracles, simulation, student
from experiments.fedlin.common import infer
from fedtorch.models.device_posterior import selected
from fedtorch.models.hierarchical import shrinkage
from fedtorch.models.linear import LinearHead, polynomial

RATES = (0.01, 0.03, 0.1, 0.3)  # of Table 4
STRENGTHS = (0.01, 0.1, 1.0)
SETTLED = 450  # rounds after which HM1 stands still
READING = result_pages.Reading(
    smaller="RMSE|Bayes|separate",
    reasons=(
        result_pages.Reason("Bayes", "even who knows Ω and the noise does worse under this reading"),
        result_pages.Reason(
            "Bayes",
            "least squares, which needs no other device, does better than what is published as Algorithm 1",
            True,
        ),
        result_pages.Reason("included", "two independent computations of the same posterior include far fewer"),
        result_pages.Reason(
            "as printed",
            "printed, it diverges at every rate: with α = 0.9 the least eigenvalue of Ω is soon below the step size",
        ),
        result_pages.Reason(
            "best on the test rows",
            "even the setting that is best on the test rows themselves does worse",
        ),
    ),
)

Rows = list[tuple[oracles.Array, oracles.Array]]


def plain(data: ft.data.FederatedData) -> Rows:
    """The rows as NumPy has them."""
    return [(x.numpy(), y.numpy()) for x, y in data]


def difference(ours: object, theirs: oracles.Array) -> float:
    """The largest difference of a number."""
    return float(np.abs(np.asarray(ours) - theirs).max())


def same(problem: simulation.Problem, rounds: int) -> dict[str, float]:
    """How far the package is from NumPy on the rows of one of the paper's cases."""
    rows = plain(problem.data)
    steps, rate, alpha = simulation.STEPS, simulation.RATE, simulation.ALPHA
    printed = oracles.algorithm_1(rows, rate, steps, rounds, alpha)
    return {
        "separate": difference(simulation.separate(problem, rounds), oracles.descended(rows, rate, steps * rounds)),
        "as printed": difference(simulation.as_printed(problem, rounds), printed),
        "knows Ω": difference(simulation.oracle(problem), oracles.bayes(rows, problem.omega.numpy(), problem.noise)),
        "HM1": difference(simulation.hm1(problem, SETTLED, None)[-1], oracles.joint_mode(rows)),
    }


def readings(name: str, devices: int, seed: int) -> dict[str, dict[str, float]]:
    """Errors of a case of Table 1 under the four readings of "noise" and of the error, by NumPy."""
    drawn, found = simulation.case(name, devices, seed), {}
    stated = 0.05 if name == "I" else 0.1
    omega, truth = drawn.omega.numpy(), drawn.theta.numpy()
    generator = np.random.default_rng(50_000 + seed)
    for said, variance in (("sd", stated**2), ("variance", stated)):
        sd = variance**0.5
        rows = [(x, x @ own + sd * generator.standard_normal(len(x))) for (x, _), own in zip(plain(drawn.data), truth)]
        fits = {
            "Bayes": oracles.bayes(rows, omega, variance),
            "least squares": oracles.least_squares(rows),
            "separate": oracles.descended(rows, simulation.RATE, simulation.STEPS * simulation.ROUNDS),
        }
        inputs = generator.standard_normal((drawn.scored, 1000, truth.shape[1]))
        for of in ("f", "y"):
            noise = generator.standard_normal((drawn.scored, 1000)) * (sd if of == "y" else 0.0)
            test = [(x, x @ truth[k] + noise[k]) for k, x in enumerate(inputs)]
            setting = f"case {name}, noise is a {said}, error of {of}"
            found[setting] = {method: oracles.a_rmse(test, theta[: drawn.scored]) for method, theta in fits.items()}
    return found


def table_1(devices: int, seeds: int, rounds: int) -> list[common.Row]:
    """The four cases under four readings, and the differences from the package."""
    rows = []
    for name, (theirs, alone) in simulation.PUBLISHED.items():
        runs = [readings(name, devices, seed) for seed in range(seeds)]
        published = {"Bayes": theirs, "separate": alone}
        for setting in runs[0]:
            rows += common.over_seeds(f"Table 1, {setting}", [run[setting] for run in runs], published)
        gaps = same(simulation.case(name, min(devices, 30), 0), rounds)
        rows += [common.Row(f"Table 1, case {name}", f"{key} differs by", gap) for key, gap in gaps.items()]
    return rows


def table_3(seeds: int, sweeps: int) -> list[common.Row]:
    """How many predictors intervals include at each school, by the package and by NumPy."""
    runs: dict[str, list[dict[str, float]]] = {"ridge": [], "lasso": []}
    for seed in range(seeds):
        training, testing = student.prepare("por", seed)
        for penalty, make in (("ridge", shrinkage.ridge), ("lasso", shrinkage.lasso)):
            _, marginals = infer(shrinkage.penalised(make(testing[0][0].shape[1])), training)
            plainly = plain(training)
            tails = oracles.ridge_tails(plainly) if penalty == "ridge" else oracles.lasso_tails(plainly, sweeps, seed)
            found: dict[str, float] = {}
            for k in (0, 1):
                found[f"included, school {k + 1}, package"] = float(selected(marginals, 0.9)[k].sum())
                found[f"included, school {k + 1}, NumPy"] = float((tails[k] < 0.05).sum())
                published = int(student.PUBLISHED[penalty][1 + k])
                level = 1 - 2 * float(np.sort(tails[k])[published - 1])
                found[f"level at which school {k + 1} has the published count, NumPy"] = level
            runs[penalty].append(found)
    rows = []
    for penalty, each in runs.items():
        counts = student.PUBLISHED[penalty][1:]
        beside = {f"included, school {k + 1}, {who}": counts[k] for k in (0, 1) for who in ("package", "NumPy")}
        rows += common.over_seeds(f"Table 3, {penalty}", each, beside)
    return rows


def grid(rows: Rows, test: Rows, rounds: int) -> dict[str, tuple[float, ...]]:
    """Test errors of every method of Table 4 at every setting."""
    steps = cmapss.STEPS
    alone = [oracles.a_rmse(test, oracles.descended(rows, rate, steps * rounds)) for rate in RATES]
    alone.append(oracles.a_rmse(test, oracles.least_squares(rows)))
    shared = [oracles.federated_average(rows, rate, steps, rounds) for rate in RATES]
    average = [oracles.a_rmse(test, np.tile(theta, (len(rows), 1))) for theta in shared]
    own = [oracles.ditto(rows, rate, steps, rounds, each) for rate in RATES for each in STRENGTHS]
    printed = [oracles.algorithm_1(rows, rate, steps, rounds, 0.9) for rate in RATES]
    finite = [theta for theta in printed if np.isfinite(theta).all()]
    return {
        "separate": tuple(alone),
        "FedAvg": tuple(average),
        "Ditto": tuple(oracles.a_rmse(test, theta) for theta in own),
        "HM1, α = 0.9": tuple(oracles.a_rmse(test, theta) for theta in finite),  # as printed
    }


def of_powers(data: ft.data.FederatedData) -> Rows:
    """Engines' rows with the powers of time that the package's head has, the constant last."""
    order = [*range(1, cmapss.DEGREE + 1), 0]
    return [(np.vander(x[:, 0], cmapss.DEGREE + 1, increasing=True)[:, order], y) for x, y in plain(data)]


def engines_alike(engines: int, rounds: int, sensor: int) -> dict[str, float]:
    """How far the package's coefficients are from NumPy's on an engine's rows, at one rate and strength."""
    training, _ = cmapss.prepare(sensor, engines, leak=False)
    rows, rate, strength = of_powers(training), RATES[2], STRENGTHS[1]
    head = LinearHead(cmapss.DEGREE, polynomial(cmapss.DEGREE), dtype=torch.float64)
    local, steps = ft.least_squares(head, steps=cmapss.STEPS, lr=rate), cmapss.STEPS
    pairs = {
        "separate": (ft.separate(local), oracles.descended(rows, rate, steps * rounds)),
        "FedAvg": (ft.fedavg(local, weight=cmapss.equal), oracles.federated_average(rows, rate, steps, rounds)),
        "Ditto": (ft.ditto(local, strength, weight=cmapss.equal), oracles.ditto(rows, rate, steps, rounds, strength)),
    }
    found = {}
    for name, (algorithm, theirs) in pairs.items():
        ours = ft.run(algorithm, ft.InProcess(training), rounds=rounds).tensors()["coefficients"]
        found[name] = difference(ours, theirs)
    return found


def table_4(engines: int, rounds: int, sensors: Sequence[int]) -> list[common.Row]:
    """The best that any setting reaches on the test rows, under both preparations; differences from the package."""
    gaps = engines_alike(engines, rounds, sensors[0])
    rows = [common.Row(f"Table 4, sensor {sensors[0]}", f"{name} differs by", gap) for name, gap in gaps.items()]
    for leak in (False, True):
        for sensor in sensors:
            training, test = cmapss.prepare(sensor, engines, leak)
            powers = [of_powers(part) for part in (training, test)]
            setting = f"Table 4, sensor {sensor}, " + ("the authors' preparation" if leak else "honest preparation")
            published = dict(zip(cmapss.PUBLISHED_METHODS, cmapss.PUBLISHED[sensor]))
            for method, found in grid(powers[0], powers[1], rounds).items():
                known = [value for value in found if np.isfinite(value)]
                if known:
                    said = f"{method}, as printed" if method.startswith("HM1") else method
                    metric = f"RMSE of {said}, best on the test rows"
                    rows.append(common.row(setting, metric, [min(known)], published[method]))
    return rows


def draw(rows: Sequence[common.Row]) -> Figure:
    """Table 1: what is published beside the errors of the Bayes estimator and of least squares under four readings."""
    figure, axes = common.subplots(1, 4, figsize=(12, 3.4), sharey=True)
    for axis, (name, theirs) in zip(axes, simulation.PUBLISHED.items()):
        those = [row for row in rows if row.setting.startswith(f"Table 1, case {name},")]
        settings = list(dict.fromkeys(row.setting for row in those))
        for i, method in enumerate(("Bayes", "least squares", "separate")):
            ours = [next(row for row in those if (row.setting, row.metric) == (each, method)) for each in settings]
            places = [place + 0.2 * (i - 1) for place in range(len(settings))]
            axis.errorbar(places, [row.ours for row in ours], [row.sd or 0 for row in ours], fmt="o", label=method)
        for known, style, label in zip(theirs, ("-", "--"), ("Algorithm 1, published", "separate, published")):
            axis.axhline(known.figure, color="0.4", linestyle=style, linewidth=1, label=label)
        labels = [each.partition("noise is a ")[2].replace(", error of ", "\nerror of ") for each in settings]
        axis.set_xticks(range(len(settings)), labels, fontsize=7)
        axis.set_yscale("log")
        axis.set_title(f"case {name}")
    axes[0].set_ylabel("A-RMSE")
    axes[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """All three tables."""
    options = common.arguments(__doc__).parse_args(argv)
    devices, rounds, sweeps = (12, 3, 200) if options.smoke else (100, simulation.ROUNDS, 4000)
    first = table_1(devices, options.seeds, rounds)
    common.show_rows("Table 1 under four readings, by NumPy", first)
    rows = first + table_3(1 if options.smoke else min(options.seeds, 3), sweeps)
    common.show_rows("Table 3", rows[len(first) :])
    last = table_4(*((8, 3, cmapss.SENSORS[:1]) if options.smoke else (100, cmapss.ROUNDS, cmapss.SENSORS)))
    common.show_rows("Table 4, the best on the test rows, by NumPy", last)
    common.finish("fedlin.printed", rows + last, options, lambda: {"fedlin_printed": draw(first)})


if __name__ == "__main__":
    main()
