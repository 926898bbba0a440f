"""Extrapolation of a unit's missing half from other units (Table 2 and Figure 3 of Chung and Al Kontar 2024).

Five units share a latent signal; unit 1 has lost (0, 1]. Federated multi-output Gaussian processes, the same model
fitted centrally, units alone, a federated polynomial and independently trained modules that are put together are scored
by the mean squared error against the noisy outputs of the lost range; the noise alone is 0.0100. FedMGP is repeated
with perturbed inducing inputs.

`ft.fedmgp` sums units' statistics, and the server's posterior is exact. What the source's tables call FedMGP-avg is its
Algorithm 2, averages of what units' gradient steps find, `ft.fedmgp_average`: `--average 100` adds it, with twenty
steps of rate 0.01 in each of so many rounds, which takes minutes. Its lengthscale begins at the distance of the
inducing inputs, 0.076. From the module's own start, 0.22, it does not arrive in a thousand rounds: q(g) and the
lengthscale hold each other, and so they do by gradient steps on the sum of all units' risks. Exact sums find q(g) anew
for each lengthscale and do not mind where it begins.

FedPoly does not come near its published error here, nor can it: a polynomial that is held to the shared one follows the
average amplitude in the lost range, and amplitudes are U(0.5, 3). Nor would it with degree and ω chosen for each seed
by the lost outputs themselves, nor the average curve of all units without noise.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedmgp import models as fm
from fedtorch.models.gaussian_process import ConvolvedGP

PUBLISHED = {
    "FedMGP-avg": common.published("0.012 ± 0.003"),
    "FedMGP-avg, inducing inputs ± 0.05": common.published("0.013 ± 0.004"),
    "FedMGP-avg, inducing inputs ± 0.1": common.published("0.012 ± 0.002"),
    "FedPoly": common.published("0.057 ± 0.19"),
    "ModularGP": common.published("0.114 ± 0.109"),
    "IndGP": common.published("2.226 ± 2.112"),
    "CenMGP": common.published("0.010 ± 0.002"),
}
SIZES = {"": 0.0, ", inducing inputs ± 0.05": 0.05, ", inducing inputs ± 0.1": 0.1}
EXACT = [f"FedMGP, exact sums{changed}" for changed in SIZES]
READING = result_pages.Reading(
    smaller="MSE",
    larger="cover",
    reasons=(
        result_pages.Reason(
            "FedPoly", "a polynomial held to the shared one follows the average amplitude, and amplitudes are U(0.5, 3)"
        ),
        result_pages.Reason(
            "FedMGP-avg.*: MSE", "errors of averages still fall; exact sums of the same model are there after 60 rounds"
        ),
    ),
)
WHY = {
    EXACT[0]: "borrows the other units' curves; the server's posterior is exact, so it equals CenMGP's",
    "FedPoly": "a polynomial held to the shared one follows the average amplitude",
    "ModularGP": "units are put together after each was trained alone",
    "IndGP": "alone, nothing tells what comes next, and its intervals say so",
    "CenMGP": "the reference: the same model with all units' points in one place",
}
LEVEL = 2.5758293035489004  # of 99 % intervals


def problem(seed: int) -> tuple[fm.Signals, Tensor, Tensor]:
    """(the signals with unit 1's second half taken away, its inputs there, its outputs there)."""
    drawn = fm.signals(5, 200, (2, 10), seed)
    lost = drawn.x[0] > 0
    kept = drawn._replace(x=[drawn.x[0][~lost], *drawn.x[1:]], y=[drawn.y[0][~lost], *drawn.y[1:]])
    return kept, drawn.x[0][lost], drawn.y[0][lost]


def moved(seed: int, size: float) -> Tensor:
    """The inducing inputs with noise of this sd."""
    shift = ft.random.normal(ft.random.fold_in(ft.random.key(seed), 99), (30,), fm.DTYPE)
    return fm.inducing() + size * shift


def averaged(seed: int, rounds: int, folder: Path | None = None) -> dict[str, fm.Prediction]:
    """Unit 1's predictions in the lost range by the source's Algorithm 2, from the folder of what is done if given."""
    kept, at, _ = problem(seed)

    def work(size: float) -> tuple[Tensor, Tensor | None]:
        inducing = moved(seed, size)
        module = fm.published(inducing, lengthscale=fm.spacing(inducing))
        run = fm.averaged(fm.federated(kept.x, kept.y), module, rounds)
        found = fm.predict(fm.unit_model(run, 0), at)
        return found.mean, found.sd

    return {
        f"FedMGP-avg{changed}": fm.Prediction(
            *common.kept(folder, f"extrapolation_{seed}_{size:g}_{rounds}", partial(work, size))
        )
        for changed, size in SIZES.items()
    }


def predictions(seed: int, rounds: int) -> tuple[dict[str, fm.Prediction], Tensor, list[ConvolvedGP]]:
    """Unit 1's predictions in the lost range by method, the outputs there, and FedMGP's models of all units."""
    kept, at, truth = problem(seed)
    data, inducing = fm.federated(kept.x, kept.y), fm.inducing()
    units = [fm.fedmgp(data, fm.model(moved(seed, size)), rounds)[0] for size in SIZES.values()]
    found = {name: fm.predict(each[0], at) for name, each in zip(EXACT, units)}
    found["FedPoly"] = fm.polynomial(kept.x, kept.y, at)
    found["ModularGP"] = fm.modular(kept.x, kept.y, fm.model(inducing, units=5), 30, at)
    found["IndGP"] = fm.alone(kept.x[0], kept.y[0], at)
    found["CenMGP"] = fm.central(kept.x, kept.y, fm.model(inducing, units=5), at)
    return found, truth, units[0]


def draw(seed: int, units: list[ConvolvedGP]) -> Figure:
    """Figure 3: every unit's points, curve, federated prediction with 99 % intervals; unit 1 also alone."""
    kept, at, truth = problem(seed)
    figure, axes = common.subplots(2, 3, figsize=(12, 6))
    for k, (axis, unit) in enumerate(zip(axes.flat, units)):
        found = fm.predict(unit, kept.grid)
        axis.plot(kept.grid, found.mean, color="C0")
        fm.band(axis, kept.grid, found, LEVEL, color="C0", alpha=0.25, label="FedMGP, 99 %")
        axis.plot(kept.grid, kept.curves[k], color="black", linewidth=1, label="curve")
        axis.plot(kept.x[k], kept.y[k], ".", color="0.5", markersize=3, label="observed")
        axis.set_title(f"unit {k + 1}")
    axes.flat[0].plot(at, truth, ".", color="C3", markersize=3, label="lost")
    last = axes.flat[5]
    found = fm.alone(kept.x[0], kept.y[0], kept.grid)
    last.plot(kept.grid, found.mean, color="C1")
    fm.band(last, kept.grid, found, LEVEL, color="C1", alpha=0.25, label="IndGP, 99 %")
    last.plot(kept.grid, kept.curves[0], color="black", linewidth=1)
    last.plot(kept.x[0], kept.y[0], ".", color="0.5", markersize=3)
    last.plot(at, truth, ".", color="C3", markersize=3)
    last.set_title("unit 1 alone")
    for axis in axes.flat:
        axis.set_xlabel("x")
    parts = {n: p for axis in axes.flat for p, n in zip(*axis.get_legend_handles_labels())}
    figure.legend(parts.values(), parts.keys(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Repeat over seeds, print ours beside the published table and draw the first seed."""
    parser = common.arguments(__doc__)
    parser.add_argument("--average", type=int, default=0, metavar="ROUNDS", help="of the source's Algorithm 2")
    parser.add_argument("--kept", type=Path, help="folder of the averages that are done, where the next call goes on")
    options = parser.parse_args(argv)
    rounds = 8 if options.smoke else 60
    errors: dict[str, list[float]] = {}
    inside: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        found, truth, units = predictions(seed, rounds)
        if options.average:
            found |= averaged(seed, options.average, options.kept)
        if seed == 0:
            first = units
        for name, prediction in found.items():
            errors.setdefault(name, []).append(float((prediction.mean - truth).square().mean()))
            if prediction.sd is not None:
                inside.setdefault(name, []).append(fm.cover(prediction, truth, LEVEL))
    rows, lines = [], []
    for name, values in errors.items():
        known = PUBLISHED.get(name)
        found_of, worst = common.row(name, "MSE", values, known), max(values)
        rows += [found_of, common.Row(name, "worst MSE", worst)]
        line = [name, *(common.number(value, form=".4f") for value in (found_of.ours, found_of.sd, worst))]
        cover = ""
        if name in inside:
            rows.append(common.Row(name, "99 % intervals cover", statistics.mean(inside[name])))
            cover = f"{100 * rows[-1].ours:.1f} %"
        lines.append([*line, cover, "" if known is None else f"{known.figure:.3f} ({known.sd:.3f})"])
    columns = ["", "MSE", "sd", "worst", "99 % intervals cover", "published MSE (sd)"]
    common.show(f"Unit 1's lost half, {options.seeds} seeds, {rounds} rounds", columns, lines)
    sys.stderr.write("\n" + "".join(f"{name:<{max(map(len, WHY))}}  {why}\n" for name, why in WHY.items()))
    common.finish("fedmgp.extrapolation", rows, options, lambda: {"fedmgp_extrapolation": draw(0, first)})


if __name__ == "__main__":
    main()
