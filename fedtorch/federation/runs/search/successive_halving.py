"""Search of hyperparameters by successive halving: many settings begin, few go on to the last round.

After each rung of rounds the best `1 / factor` of the trials go on from where they stand, the others end there, and
their tensors are freed (Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", 2016). Of 9 trials with at most 9 rounds and factor 3, all do 1 round, 3 go on to 3 rounds and 1 to 9:
9·1 + 3·2 + 1·6 = 21 rounds in place of 81.

>>> rungs(rounds=9, trials=9, factor=3), rungs(rounds=50, trials=27, factor=3), rungs(rounds=50, trials=27, first=5)
([1, 3, 9], [1, 5, 16, 50], [5, 16, 50])
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedtorch.data.digests import noted
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.distributed import Distributed
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.populations.population import Population
from fedtorch.federation.runs.cohorts import Asked, checked_draws
from fedtorch.federation.runs.evaluation import Evaluable, Split, inputs_and_targets
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.search._optuna import asked, study_of
from fedtorch.federation.runs.search._trial import Trial, folder_of
from fedtorch.federation.runs.search.tuning import (
    GridSearch,
    SearchLedger,
    Setting,
    best_end,
    built,
    check_names,
    check_values,
    held_out,
    no_score,
    scored,
)
from fedtorch.progress import Progress

if TYPE_CHECKING:
    import optuna
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class Trials(GridSearch):
    """The trials of a search, in the order in which they began.

    Attributes:
        settings: what `build` was called with.
        scores: the metric on the clients' validation rows when a trial ended; all NaN of one that diverged.
        diverged: whether the server's state, a client's model or the score of all rows has NaN or infinite numbers.
        largest_is_best: of the metric.
        rounds: of each trial, those that it did.
        finished: the run of the best trial; None where all diverged.
    """

    rounds: tuple[int, ...]
    finished: Run | None

    @property
    def order(self) -> list[int]:
        """Return the trials' numbers: those that did more rounds first, of these the better, the diverged last."""
        return sorted(super().order, key=lambda i: (self.diverged[i], -self.rounds[i]))

    @property
    def run(self) -> Run:
        """Return the run of the best setting, all its rounds done.

        Raises:
            ValueError: all trials diverged.
        """
        if self.finished is None:
            raise ValueError(
                f"Expected a setting that converges, but all {len(self.settings)} diverged; widen the space"
            )
        return self.finished

    @property
    def table(self) -> pd.DataFrame:
        """Return a row per trial, best first: its setting, rounds and scores, as `ft.grid` has them."""
        table = super().table
        table.insert(len(self.settings[0]), "rounds", [self.rounds[i] for i in self.order])
        return table


def tune(
    build: Callable[..., Algorithm],
    space: Mapping[str, Any],
    population: Population,
    *,
    validation: Evaluable | float,
    metric: Any,
    largest_is_best: bool | None = None,
    rounds: int,
    trials: int,
    factor: int = 3,
    first: int = 1,
    search: Literal["random", "tpe"] | optuna.Study = "random",
    folder: Path | str | None = None,
    cohort: Asked = None,
    seed: int = 0,
    faults: Faults | None = None,
    split: Split = inputs_and_targets,
    progress: bool = True,
) -> Trials:
    """Try settings drawn from `space`, end the worse ones after few rounds, and return all trials and the best run.

    A trial is `ft.run(build(**setting), population, ...)`, which is stopped or goes on after each rung of rounds. It is
    scored on the clients' validation rows. All trials are seeded alike. One whose server has NaN or infinite numbers
    ends there. At most `1 + trials // factor` runs are in memory at once. Private settings spend from one ledger, as in
    `ft.grid`: a budget is that of the whole search.

    Args:
        build: setting -> algorithm, called as `build(**setting)`. Meanwhile torch's global generator stands at
            `seed`, so that modules made in it start from the same weights; afterwards it is as before.
        space: by name, for each of `build`'s parameters a list of values, or a distribution such as
            `scipy.stats.loguniform(1e-4, 1.0)`. Lists alone are drawn without repetition.
        population: who computes: clients in this process or over ranks.
        validation: rows of the same clients; or the fraction of each client's rows that is held out as such.
        metric: how predictions are scored, as in `ft.grid`.
        largest_is_best: whether the metric is large for good predictions; default: what it says of itself.
        rounds: communication rounds of a trial that is never stopped.
        trials: how many settings are tried.
        factor: one of so many trials goes on from each rung, and does so many times as many rounds.
        first: rounds that every trial does before the first rung, at least.
        search: "random"; "tpe", Optuna's tree of Parzen estimators, which learns from the trials before; or an
            `optuna.Study` of your own, whose sampler and pruner are asked. With Optuna trials run one after another,
            and each is compared with those before it (`pip install 'fedtorch[tune]'`).
        folder: where trials are kept between rungs, one run in memory at a time; called again with the same
            arguments, a search that was interrupted goes on from there. For searches without Optuna, whose studies
            have storages of their own.
        cohort: as in `ft.run`; all trials have the same cohorts.
        seed: of all randomness, that of a given study apart.
        faults: what goes wrong; as in `ft.run`.
        split: rows -> (inputs, targets).
        progress: whether it is shown how far a search is that takes longer than two seconds.

    Raises:
        TypeError: `build` has no such parameters, or needs others, or returns no algorithm.
        ValueError: there is nothing to try, the validation rows are of other clients, the folder is of another search,
            some settings are private and others exact, the budget of private settings is spent.
        ImportError: Optuna is not installed.

    Example:
        >>> import scipy.stats, torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
        >>> build = lambda mu: ft.fedprox(ft.least_squares(torch.nn.Linear(10, 1)), mu)
        >>> result = ft.tune(build, {"mu": scipy.stats.loguniform(1e-3, 1e9)}, ft.InProcess(data), validation=0.3,
        ...                  metric=ft.metrics.mean_squared_error(), trials=9, rounds=9, progress=False)
        >>> result.table["rounds"].tolist()
        [9, 3, 3, 1, 1, 1, 1, 1, 1]
        >>> result.run.number, bool(result.best["mu"] < 1e5)
        (9, True)
    """
    _check(rounds=rounds, trials=trials, factor=factor, first=first)
    check_names(build, space)
    if not isinstance(population, (InProcess, Distributed)):
        raise TypeError(
            f"Expected clients in this process or over ranks, where runs can stand side by side, but got "
            f"{type(population).__name__}; take ft.InProcess or ft.Distributed"
        )
    population, validation = held_out(population, validation, seed)
    checked_draws(cohort, len(population.data))
    largest_is_best = best_end(metric, largest_is_best)
    judge = partial(scored, validation=validation, metric=metric, split=split)
    ladder = rungs(rounds, trials, factor, first)

    ledger = SearchLedger()

    def begin(setting: Setting) -> Run:
        algorithm = built(build, setting, seed)
        ledger.join([algorithm], rounds=0)
        return Run(algorithm, population, cohort=cohort, seed=seed, faults=faults, on_bad_message="drop")

    title, shows = f"{trials} trial{'s' * (trials > 1)}", progress and population.leads
    if isinstance(search, str) and search == "random":
        settings = drawn(space, trials, seed)
        for setting in settings:  # what cannot be built is refused before anything is trained
            algorithm = built(build, setting, seed)
            ledger.check(algorithm)
            budget = algorithm.budget
            if folder is not None and budget is not None and not budget.kept:
                raise ValueError(
                    "Expected ledger= a file for private settings whose trials are kept in a folder, but got a ledger "
                    "in memory, which forgets what trials before an interruption have spent"
                )
        if folder is not None:
            about = {
                "build": build,
                "settings": settings,
                "rounds": ladder,
                "factor": factor,
                "seed": seed,
                "cohort": cohort,
            }
            about |= {"faults": faults, "metric": metric, "split": split, "clients": population.names}
            about |= {"rows": dict(population.noted()), "validation rows": noted(validation)}
            folder = folder_of(folder, about, population.leads)
        places = [None if folder is None else Path(folder) / f"trial_{number:04}" for number in range(trials)]
        tried = [Trial(setting, begin, judge, place) for setting, place in zip(settings, places)]
        with Progress(title, planned(ladder, trials, factor), shown=shows) as shown:
            best = _halved(tried, ladder, factor, largest_is_best, shown)
    else:
        if folder is not None:
            raise ValueError("Expected no folder= for a search by Optuna, but got one; give a study with a storage=")
        if not isinstance(search, str) and isinstance(population, Distributed):
            raise ValueError("Expected search='random' or 'tpe' over ranks, but got a study, which each rank would ask")
        study = study_of(search, largest_is_best, seed, ladder, factor)
        with Progress(title, trials * rounds, shown=shows) as shown:
            tried, best = asked(study, space, lambda setting: Trial(setting, begin, judge), trials, ladder, shown)
    return Trials(
        settings=tuple(trial.setting for trial in tried),
        scores=tuple(trial.score or no_score(len(validation)) for trial in tried),
        diverged=tuple(trial.score is None for trial in tried),
        largest_is_best=largest_is_best,
        rounds=tuple(trial.rounds for trial in tried),
        finished=None if best is None else best.run(),
        epsilon=ledger.epsilon,
    )


def rungs(rounds: int, trials: int, factor: int = 3, first: int = 1) -> list[int]:
    """Return the rounds after which trials are compared, the last of them `rounds`.

    One of `factor` trials goes on from each, so that there are as many as `trials` allows; the first is `first` rounds
    at least.
    """
    made = [rounds]
    while trials >= factor and made[0] // factor >= first:
        made.insert(0, made[0] // factor)
        trials //= factor
    return made


def planned(ladder: Sequence[int], trials: int, factor: int) -> int:
    """Return the rounds of all trials together, where none diverges: Σ_k ⌊trials / factor^k⌋ (r_k − r_{k−1}).

    >>> planned([1, 3, 9], trials=9, factor=3)
    21
    """
    return sum(trials // factor**k * (end - start) for k, (start, end) in enumerate(zip([0, *ladder], ladder)))


def drawn(space: Mapping[str, Any], trials: int, seed: int) -> list[Setting]:
    """Return settings of a space; of lists alone without repetition.

    >>> drawn({"lr": [0.1, 1.0], "mu": [0.0, 0.5]}, trials=3, seed=0)
    [{'lr': 1.0, 'mu': 0.0}, {'lr': 1.0, 'mu': 0.5}, {'lr': 0.1, 'mu': 0.5}]
    """
    from sklearn.model_selection import ParameterSampler

    lists = {name: values for name, values in space.items() if not hasattr(values, "rvs")}
    for name, values in lists.items():
        check_values(name, values, ", or a distribution such as scipy.stats.loguniform(1e-4, 1.0)")
    most = math.prod(len(values) for values in lists.values())
    if len(lists) == len(space) and most < trials:
        raise ValueError(
            f"Expected at most {most} trials, the combinations of the space's values, but got {trials}; ft.grid runs "
            "all of them to the last round"
        )
    settings = ParameterSampler(
        dict(space), trials, random_state=np.random.RandomState(np.random.MT19937(seed % 2**64))
    )
    plain = lambda value: value.item() if isinstance(value, np.generic) else value
    return [{name: plain(setting[name]) for name in space} for setting in settings]


def _halved(
    tried: Sequence[Trial], ladder: Sequence[int], factor: int, largest_is_best: bool, shown: Progress
) -> Trial | None:
    """Train trials rung by rung, and return the best that is left; None where all diverged."""
    going = list(tried)
    sign = -1.0 if largest_is_best else 1.0
    for k, rounds in enumerate(ladder, 1):
        most = len(tried) // factor**k if rounds < ladder[-1] else 1
        best: list[Trial] = []
        for trial in going:
            trial.go_on(rounds, shown)
            if trial.score is not None:
                best = sorted([*best, trial], key=lambda each: sign * _mean(each))
            for worse in [each for each in (*best, trial) if each not in best[:most]]:
                worse.end()
            best = best[:most]
        going = [trial for trial in going if trial in best]  # in the order in which they began
    return going[0] if going else None


def _mean(trial: Trial) -> float:
    return math.nan if trial.score is None else trial.score.mean()


def _check(**numbers: int) -> None:
    """Raise ValueError unless all are whole and large enough."""
    for name, number in numbers.items():
        least = 2 if name == "factor" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"Expected {name} of at least {least}, but got {number!r}")
