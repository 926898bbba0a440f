"""New schools: what a school that took no part has of the others, by how few of its pupils are known.

100 of the 139 London schools are fitted together; the others come later, with none to 40 of their pupils, and all
predict the same other pupils of theirs. *HM2*: the posterior of what schools share is the prior of a new school's
coefficients, which is all that it is sent (section 4.2.1, "fast adaptation"). *Mean, then gradient steps*: the paper's
example, the posterior mean as the start of a school's own training; the number of steps is chosen on the 100 schools.
*Cold start*: ridge regression of the school's own pupils, its penalty chosen on the 100 schools, too, which no school
alone could. *The others' mean*: without its pupils. Settings are chosen for each number of pupils.

Besides, how often intervals of 90 % cover the scores of the pupils that are predicted.

Source: Yue, Kontar, Estrada Gómez (2022), sections 4.2.1 and 5.2; data as in `experiments.fedlin.school`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedlin.school import BANDS, FEATURES, YEARS, load
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.models import hierarchical
from fedtorch.models.device_posterior import interval
from fedtorch.models.hierarchical import hyperpriors

KNOWN, LEVEL = (0, 2, 5, 10, 20, 40), 0.9
STEPS, PENALTIES = (1, 3, 10, 30, 100), (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
READING = result_pages.Reading(across=r"(?P<line>.*) with (?P<column>\d+ pupils)")
METHODS = ("HM2", "mean, then gradient steps", "cold start", "the others' mean")

School = tuple[Tensor, Tensor]  # x with a constant at the end, y


class Split(NamedTuple):
    """Schools that are fitted together, and later ones, their pupils in a random order."""

    together: ft.data.FederatedData
    later: list[School]


def split(schools: int, together: int, seed: int) -> Split:
    """Draw the schools that come later, of those with enough pupils."""
    generator = torch.Generator().manual_seed(seed)
    every = []
    for x, y in load(schools):
        order = torch.randperm(len(y), generator=generator)
        every.append((torch.cat([x, torch.ones_like(x[:, :1])], 1)[order], y[order]))
    places = torch.randperm(len(every), generator=generator).tolist()
    later = [every[k] for k in places[together:] if len(every[k][1]) >= KNOWN[-1] + 20]
    return Split(ft.data.from_tensors([every[k] for k in places[:together]]), later)


def fit(data: ft.data.FederatedData, rounds: int) -> ft.Run:
    """HM2 with intercepts and the effects of years and verbal reasoning bands that differ between schools."""
    hierarchy = hierarchical.normal(
        FEATURES + 1, random=[*YEARS, *BANDS, FEATURES], sd=30.0, variance=hyperpriors.log_normal(0.0, 3.0)
    )
    return ft.run(ft.ep(hierarchical.linear(hierarchy)), ft.InProcess(data), rounds=rounds, until=settled(0.02))


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Ridge regression with a constant that is not penalised."""
    matrix = penalty * torch.eye(x.shape[1], dtype=x.dtype)
    matrix[-1, -1] = 1e-9
    return torch.linalg.solve(x.mT @ x + matrix, x.mT @ y)


def stepped(start: Tensor, x: Tensor, y: Tensor, steps: int) -> Tensor:
    """Gradient steps on the mean squared error, of 1 / its largest curvature."""
    rate = len(y) / torch.linalg.matrix_norm(x, 2).square()
    for _ in range(steps):
        start = start + rate * x.mT @ (y - x @ start) / len(y)
    return start


def error(schools: Sequence[School], known: int, fitted: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The root mean squared error of all pupils beyond the first 40, of models from the first `known`."""
    wrong = []
    for x, y in schools:
        theta = fitted(x[:known], y[:known])
        wrong.append((y - x @ theta)[KNOWN[-1] :])
    return float(torch.cat(wrong).square().mean().sqrt())


def best(schools: Sequence[School], known: int, ways: Sequence[Callable[[Tensor, Tensor], Tensor]]) -> int:
    """The way with the smallest error at schools that are known."""
    errors = [error(schools, known, way) for way in ways]
    return errors.index(min(errors))


def adapted(run: ft.Run, schools: Sequence[School], known: int) -> tuple[Tensor, float]:
    """HM2's coefficients of later schools `(K, d)`, and what intervals of 90 % cover of their other pupils."""
    rows = ft.data.from_tensors([(x[:known], y[:known]) for x, y in schools])
    found = ft.inference.adapted(run, rows, tolerance=0.02).posterior
    size = max(len(y) for _, y in schools) - KNOWN[-1]
    others = [(x[KNOWN[-1] :], y[KNOWN[-1] :]) for x, y in schools]
    inputs = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, size - len(x))) for x, _ in others])
    low, high = interval(found.predictive(inputs), LEVEL)
    inside = [((low[k, : len(y)] < y) & (y < high[k, : len(y)])) for k, (_, y) in enumerate(others)]
    return found.distribution().mean, float(torch.cat(inside).double().mean())


def compare(schools: int, together: int, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Errors of all methods, by method and number of known pupils."""
    drawn = split(schools, together, seed)
    run = fit(drawn.together, rounds)
    mean = posterior(run, tolerance=0.02).mean[: FEATURES + 1]  # the coefficients that schools share
    enough = [school for school in drawn.together if len(school[1]) >= KNOWN[-1] + 20]
    descents = [lambda x, y, steps=steps: stepped(mean, x, y, steps) for steps in STEPS]
    ridges = [lambda x, y, penalty=penalty: ridge(x, y, penalty) for penalty in PENALTIES]
    nothing = error(drawn.later, 0, lambda x, y: mean)
    found: dict[str, dict[str, float]] = {}
    for known in KNOWN:
        found[f"the others' mean with {known} pupils"] = {"rmse": nothing}
        if not known:
            continue
        theta, covered = adapted(run, drawn.later, known)
        own = iter(theta)
        found[f"HM2 with {known} pupils"] = {
            "rmse": error(drawn.later, known, lambda x, y, own=own: next(own)),  # type: ignore[misc]
            "coverage": covered,
        }
        for name, ways in (("mean, then gradient steps", descents), ("cold start", ridges)):
            way = ways[best(enough, known, ways)]
            found[f"{name} with {known} pupils"] = {"rmse": error(drawn.later, known, way)}
    return found


def draw(rows: Sequence[common.Row]) -> Figure:
    """Errors by the number of pupils that are known."""
    figure, axis = common.subplots(figsize=(5.6, 3.8))
    for method in METHODS:
        those = [row for row in rows if row.setting.startswith(f"{method} with") and row.metric == "rmse"]
        known = [int(row.setting.removeprefix(f"{method} with ").split()[0]) for row in those]
        errors = [row.sd or 0.0 for row in those]
        axis.errorbar(known, [row.ours for row in those], errors, fmt="o-", capsize=3, label=method)
    axis.set_xlabel("known pupils of a school that took no part")
    axis.set_ylabel("RMSE of its other pupils, ± sd over splits")
    axis.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Adapt on random splits of the schools."""
    options = common.arguments(__doc__).parse_args(argv)
    sizes = (24, 14, 40) if options.smoke else (139, 100, 40)
    runs = [compare(*sizes, seed) for seed in range(options.seeds)]
    rows = [row for name in runs[0] for row in common.over_seeds(name, [run[name] for run in runs])]
    common.show_rows(f"Schools that come later, {options.seeds} splits", rows)
    common.finish("fedlin.adaptation", rows, options, lambda: {"fedlin_adaptation": draw(rows)})


if __name__ == "__main__":
    main()
