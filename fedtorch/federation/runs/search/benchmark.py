"""Algorithms side by side over seeds: the same clients, cohorts and held-out rows for all, and a table."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedtorch import expected
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.population import Population
from fedtorch.federation.runs.cohorts import Asked
from fedtorch.federation.runs.evaluation import Evaluable, Split, inputs_and_targets
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.search.tuning import built, held_out
from fedtorch.metrics.scores import Score
from fedtorch.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

_SAVED = 10.0  # seconds of a run between two checkpoints


@dataclasses.dataclass(frozen=True, repr=False)
class Benchmark:
    """Scores and histories of algorithms over seeds.

    Attributes:
        seeds: seeds of the runs.
        scores: by algorithm and metric, the score after the last round of each seed.
        histories: by algorithm, the history of each seed; `ft.plots.curves(result.histories)` draws them.
    """

    seeds: tuple[int, ...]
    scores: Mapping[str, Mapping[str, tuple[Score, ...]]]
    histories: Mapping[str, tuple[pd.DataFrame, ...]]

    @property
    def table(self) -> pd.DataFrame:
        """Return a row per algorithm with, of each metric, its mean and standard deviation over seeds.

        "worst client" is the mean over seeds of the worst client's score, if the metric has a direction, as by
        `ft.metrics.mean_of(function, largest_is_best=True)` for a function. "minus" is the mean of the differences to
        the first algorithm, seed by seed, with their standard deviation; divide it by the root of the number of seeds
        for a standard error. A standard deviation of one seed is NaN.
        """
        import pandas as pd

        first = next(iter(self.scores))
        table: dict[str, dict[str, float]] = {}
        for name, scores in self.scores.items():
            row = table[name] = {}
            for metric, every in scores.items():
                values, reference = _overall(every), _overall(self.scores[first][metric])
                row[metric], row[f"{metric} sd"] = float(values.mean()), _sd(values)
                if every[0].largest_is_best is not None:
                    row[f"{metric} worst client"] = sum(score.worst() for score in every) / len(every)
                row[f"{metric} minus {first}"] = float((values - reference).mean())
                row[f"{metric} minus {first}, sd"] = math.nan if name == first else _sd(values - reference)
        return pd.DataFrame.from_dict(table, orient="index")

    def __repr__(self) -> str:
        return f"{self.table}\n{len(self.seeds)} seeds"

    def _repr_html_(self) -> str:
        return f"{self.table.to_html(float_format='{:.4g}'.format)}<p>{len(self.seeds)} seeds</p>"


def benchmark(
    algorithms: Mapping[str, Algorithm | Callable[[], Algorithm]],
    population: Population,
    *,
    rounds: int,
    validation: Evaluable | float,
    metrics: Mapping[str, Any],
    seeds: int | Sequence[int] = 5,
    every: int | None = None,
    cohort: Asked = None,
    faults: Faults | None = None,
    split: Split = inputs_and_targets,
    folder: str | Path | None = None,
    progress: bool = True,
) -> Benchmark:
    """Run every algorithm with every seed on the same clients, and score each on the clients' validation rows.

    All algorithms have the same cohorts, faults and held-out rows under a seed, so that differences are paired.

    Args:
        algorithms: by name; the first is the reference for comparisons. A function without arguments is called for each
            seed, with torch's global generator at that seed, so that its modules start from other weights under each.
            An algorithm that is not a function starts from the same weights under all.
        population: the clients, and where they run.
        rounds: communication rounds of each run.
        validation: rows of the same clients; or the fraction of each client's rows that is held out, different rows
            under each seed.
        metrics: by name, of one number each, as in `Run.evaluate`.
        seeds: their number, for 0, 1, …, or a list.
        every: rounds between further scores for the histories; None scores after the last round only.
        cohort: as in `ft.run`.
        faults: as in `ft.run`.
        split: rows -> (inputs, targets).
        folder: folder where runs are saved, every ten seconds and at their end; the same call resumes from there.
        progress: whether a progress bar is shown, after two seconds.

    Raises:
        TypeError: a value is not an algorithm, or a metric is not a number.
        ValueError: nothing to run, a private algorithm without a function for each seed, or a folder of other runs.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=4, seed=0)
        >>> local = ft.least_squares(torch.nn.Linear(10, 1))
        >>> result = ft.benchmark(
        ...     {"alone": ft.separate(local), "FedAvg": ft.fedavg(local)}, ft.InProcess(data), rounds=3, seeds=4,
        ...     validation=0.3, metrics={"error": ft.metrics.mean_squared_error()}, progress=False)
        >>> list(result.table.columns)
        ['error', 'error sd', 'error worst client', 'error minus alone', 'error minus alone, sd']
        >>> bool(result.table["error minus alone"]["FedAvg"] < 0)
        True
    """
    seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not algorithms or not seeds or not metrics or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"Expected algorithms, metrics and different seeds, but got {list(algorithms)}, {list(metrics)} and "
            f"{list(seeds)}"
        )
    expected.positive(rounds=rounds, **({} if every is None else {"every": every}))
    for name, algorithm in algorithms.items():
        if isinstance(algorithm, Algorithm) and algorithm.budget is not None:
            raise ValueError(
                f"Expected a function that makes the private algorithm {name!r} for each seed, for its budget is spent "
                "by a run; pass lambda: …"
            )
    scores: dict[str, dict[str, list[Score]]] = {name: {metric: [] for metric in metrics} for name in algorithms}
    histories: dict[str, list[pd.DataFrame]] = {name: [] for name in algorithms}
    title = f"{len(algorithms)} algorithms × {len(seeds)} seeds"
    with Progress(title, len(algorithms) * len(seeds) * rounds, shown=progress and population.leads) as shown:
        for seed in seeds:
            training, rows = held_out(population, validation, seed)
            for place, (name, given) in enumerate(algorithms.items()):
                algorithm = given if isinstance(given, Algorithm) else built(given, {}, seed)
                run = Run(algorithm, training, cohort=cohort, faults=faults, seed=seed)
                file = None if folder is None else Path(folder) / f"{_file_name(name)}_{place}_{seed}.safetensors"
                score = partial(_scored, rows=rows, metrics=metrics, split=split)
                for metric, each in _finished(run, rounds, file, shown, every, score).items():
                    scores[name][metric].append(each)
                histories[name].append(run.history)
    done = {name: {metric: tuple(each) for metric, each in mine.items()} for name, mine in scores.items()}
    return Benchmark(seeds, done, {name: tuple(tables) for name, tables in histories.items()})


def _finished(
    run: Run,
    rounds: int,
    file: Path | None,
    shown: Progress,
    every: int | None,
    score: Callable[[Run], dict[str, Score]],
) -> dict[str, Score]:
    """Resume a run from its file, if there is one, finish it, and return its scores."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            run.load(file)
            shown.update(run.number)
    saved = time.monotonic()
    for done in run.rounds(rounds):
        shown.update()
        if every is not None and done.number % every == 0 and done.number < rounds:
            _note(run, score(run))
        if file is not None and time.monotonic() - saved > _SAVED:
            run.save(file)
            saved = time.monotonic()
    scores = score(run)
    _note(run, scores)
    if file is not None:
        run.save(file)
    return scores


def _note(run: Run, scores: Mapping[str, Score]) -> None:
    """Write scores into the history of a run, in the row of its last round."""
    columns: dict[str, float] = {}
    for name, each in scores.items():
        columns |= {f"val_{name}": each.overall, f"val_{name}_mean": each.mean()}
        columns |= {f"val_{name}_min": each.worst(True), f"val_{name}_max": each.worst(False)}
    run.log.validated(run.number, columns)


def _scored(run: Run, rows: Evaluable, metrics: Mapping[str, Any], split: Split) -> dict[str, Score]:
    """Return the scores of a run.

    Raises:
        TypeError: a metric that is no number.
    """
    scores = run.evaluate(rows, metrics, split)
    for name, score in scores.items():
        if not score.is_number:
            raise TypeError(
                f"Expected metrics of one number each, but got {name!r} with {type(score.overall).__name__}"
            )
    return scores


def _file_name(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z]+", "-", name).strip("-") or "run"


def _overall(scores: Sequence[Score]) -> torch.Tensor:
    return torch.tensor([float(score.overall) for score in scores], dtype=torch.float64)


def _sd(values: torch.Tensor) -> float:
    return float(values.std()) if len(values) > 1 else math.nan
