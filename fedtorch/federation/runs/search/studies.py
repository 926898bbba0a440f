"""Search of hyperparameters by a study of Optuna: its sampler chooses settings, its pruner ends trials early.

Trials run one after another. A trial is scored after each rung of rounds, where the study's pruner may end it: by
default successive halving, in which one of `factor` trials continues from each rung (Jamieson and Talwalkar,
"Non-stochastic best arm identification and hyperparameter optimization", 2016; asynchronous as in Li et al., "A system
for massively parallel hyperparameter tuning", 2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.distributed import Distributed
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.populations.population import Population
from fedtorch.federation.runs.cohorts import Asked, checked_draws
from fedtorch.federation.runs.evaluation import Evaluable, Split, inputs_and_targets
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.run import Run
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
    trained,
)
from fedtorch.metrics.scores import Score
from fedtorch.progress import Progress

if TYPE_CHECKING:
    import optuna
    import pandas as pd

_PRIMITIVE = (type(None), bool, int, float, str)  # choices that Optuna can store


@dataclasses.dataclass(frozen=True, repr=False)
class Trials(GridSearch):
    """The trials of a search, in the order in which they were done.

    Attributes:
        settings: arguments of `build`.
        scores: the metric on the clients' validation rows when a trial ended; NaN if it diverged.
        diverged: whether the server's state, a client's model or the score of all rows has NaN or infinite numbers.
        largest_is_best: of the metric.
        rounds: finished rounds of each trial.
        finished: the run of the best trial; None where all diverged.
        study: Optuna's, with its own record of the trials.
    """

    rounds: tuple[int, ...]
    finished: Run | None
    study: optuna.Study

    @property
    def order(self) -> list[int]:
        """Return the trials' indices: more rounds first, then better scores, diverged ones last."""
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
    search: Literal["tpe", "random"] | optuna.Study = "tpe",
    cohort: Asked = None,
    seed: int = 0,
    faults: Faults | None = None,
    split: Split = inputs_and_targets,
    progress: bool = True,
) -> Trials:
    """Try settings of `space` that Optuna chooses, end the worse ones after few rounds, and return trials and best run.

    A trial is `ft.run(build(**setting), population, ...)`, which continues or ends after 1, 3, 9, … rounds. It is
    scored on the clients' validation rows, and compared with the earlier trials. All trials have the same seed. A trial
    whose server has NaN or infinite numbers ends there. Two runs are in memory at a time, the best trial's and another.
    Private settings spend from one ledger, as in `ft.grid`: a budget is that of the whole search.

    It needs Optuna: `pip install 'fedtorch[tune]'`.

    Args:
        build: setting -> algorithm, called as `build(**setting)`, with torch's global generator at `seed`, so that its
            modules start from the same weights; the generator is restored afterwards.
        space: by name, for each of `build`'s parameters a list of values, a distribution of `optuna.distributions`, or
            one of `scipy.stats`: uniform, loguniform or randint.
        population: clients in this process or over ranks.
        validation: rows of the same clients; or the fraction of each client's rows to hold out.
        metric: score of predictions, as in `ft.grid`.
        largest_is_best: whether large values are good; default: the metric's own attribute.
        rounds: communication rounds of a trial that is never ended.
        trials: number of settings to try; for a study with trials, additional ones.
        factor: one of this many trials continues from each rung, for this many times as many rounds.
        first: rounds that every trial does before the first rung.
        search: "tpe", tree of Parzen estimators, which learn from earlier trials; "random"; or your own `optuna.Study`,
            with its sampler, pruner and storage.
        cohort: as in `ft.run`; all trials have the same cohorts.
        seed: seed of all randomness, except that of a given study.
        faults: simulated faults, as in `ft.run`.
        split: rows -> (inputs, targets).
        progress: whether a progress bar is shown, after two seconds.

    Raises:
        TypeError: `build` has no such parameters, or needs others, or returns no algorithm.
        ValueError: there is nothing to try, the validation rows are of other clients, some settings are private and
            others exact, the budget of private settings is spent, or a study has another direction than the metric.
        ImportError: Optuna is not installed.

    Example:
        >>> import scipy.stats, torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
        >>> build = lambda mu: ft.fedprox(ft.least_squares(torch.nn.Linear(10, 1)), mu)
        >>> result = ft.tune(build, {"mu": scipy.stats.loguniform(1e-3, 1e9)}, ft.InProcess(data), validation=0.3,
        ...                  metric=ft.metrics.mean_squared_error(), trials=9, rounds=9, progress=False)
        >>> sorted(set(result.rounds)), result.run.number, bool(result.best["mu"] < 1e5)
        ([1, 3, 9], 9, True)
    """
    _check(rounds=rounds, trials=trials, factor=factor, first=first)
    check_names(build, space)
    if not isinstance(population, (InProcess, Distributed)):
        raise TypeError(
            f"Expected clients in this process or over ranks, where runs can begin anew, but got "
            f"{type(population).__name__}; take ft.InProcess or ft.Distributed"
        )
    if not isinstance(search, str) and isinstance(population, Distributed):
        raise ValueError("Expected search='random' or 'tpe' over ranks, but got a study, which each rank would ask")
    population, validation = held_out(population, validation, seed)
    checked_draws(cohort, len(population.data))
    largest_is_best = best_end(metric, largest_is_best)
    study = _study(search, largest_is_best, seed, factor, first)
    distributions, values = _distributions(space)
    ledger, ladder = SearchLedger(), rungs(rounds, factor, first)
    judge = partial(scored, validation=validation, metric=metric, split=split)

    def begin(setting: Setting) -> Run:
        algorithm = built(build, setting, seed)
        ledger.join([algorithm], rounds=0)
        return Run(algorithm, population, cohort=cohort, seed=seed, faults=faults, on_bad_message="drop")

    settings: list[Setting] = []
    scores: list[Score | None] = []
    done: list[int] = []
    best: tuple[float, Run] | None = None
    sign = -1.0 if largest_is_best else 1.0
    title, shows = f"{trials} trial{'s' * (trials > 1)}", progress and population.leads
    with Progress(title, trials * rounds, shown=shows) as shown:
        for number in range(1, trials + 1):
            asked = study.ask(distributions)
            settings.append({name: values[name][x] if name in values else x for name, x in asked.params.items()})
            score, run = _tried(study, asked, partial(begin, settings[-1]), ladder, judge, shown)
            scores.append(score)
            done.append(run.number)
            if score is not None and run.number == rounds and (best is None or sign * score.mean() < best[0]):
                best = sign * score.mean(), run
            pruned = sum(each < rounds for each in done)
            shown.update(number * rounds - shown.done, partial(dict, pruned=pruned))
    return Trials(
        settings=tuple(settings),
        scores=tuple(no_score(len(validation)) if score is None else score for score in scores),
        diverged=tuple(score is None for score in scores),
        largest_is_best=largest_is_best,
        rounds=tuple(done),
        finished=None if best is None else best[1],
        study=study,
        epsilon=ledger.epsilon,
    )


def rungs(rounds: int, factor: int = 3, first: int = 1) -> list[int]:
    """Return the rounds after which a trial may end, the last of them `rounds`.

    >>> rungs(9), rungs(50), rungs(50, first=5), rungs(4, first=9)
    ([1, 3, 9], [1, 3, 9, 27, 50], [5, 15, 45, 50], [4])
    """
    made = [first]
    while made[-1] < rounds:
        made.append(made[-1] * factor)
    return [*made[:-1], rounds]


def _tried(
    study: optuna.Study,
    asked: optuna.Trial,
    begin: Callable[[], Run],
    ladder: Sequence[int],
    judge: Callable[[Run], Score | None],
    shown: Progress,
) -> tuple[Score | None, Run]:
    """Run a trial until its end or its pruning, with reports to the study; return the last score and the run."""
    from optuna.trial import TrialState

    try:
        run = begin()
        for rounds in ladder:
            score = judge(run) if trained(run, rounds, shown) else None
            if score is None:
                break
            asked.report(score.mean(), rounds)
            if rounds < ladder[-1] and asked.should_prune():
                break
    except BaseException as error:
        error.add_note(f"in a trial of the setting {asked.params}")
        study.tell(asked, state=TrialState.FAIL)
        raise
    if score is not None and run.number == ladder[-1]:
        study.tell(asked, score.mean())
    else:  # TPE takes one without a value for worse than all others
        study.tell(asked, state=TrialState.PRUNED)
    return score, run


def _study(search: Any, largest_is_best: bool, seed: int, factor: int, first: int) -> optuna.Study:
    """Return the given study, or one of Optuna's with successive halving.

    Raises:
        ImportError: Optuna is not installed.
        TypeError: `search` is of another type.
        ValueError: the study has another direction than the metric.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("Expected Optuna for a search: pip install 'fedtorch[tune]'; ft.grid needs none") from error
    direction: Literal["minimize", "maximize"] = "maximize" if largest_is_best else "minimize"
    samplers: dict[str, Any] = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    if isinstance(search, str) and search in samplers:
        return optuna.create_study(
            direction=direction,
            sampler=samplers[search](seed=seed % 2**32),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=factor),
        )
    if not isinstance(search, optuna.Study):
        raise TypeError(f"Expected search='tpe', 'random' or an optuna.Study, but got {search!r}")
    directions = [each.name.lower() for each in search.directions]
    if directions != [direction]:
        raise ValueError(
            f"Expected a study with direction {direction!r}, as the metric says, but got {directions}; make it with "
            f"optuna.create_study(direction={direction!r})"
        )
    return search


def _distributions(space: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[Any, Any]]]:
    """Return (Optuna's distributions; for choices of values that it cannot store, the values by name)."""
    from optuna.distributions import BaseDistribution, CategoricalDistribution

    distributions: dict[str, Any] = {}
    values: dict[str, dict[Any, Any]] = {}
    for name, given in space.items():
        if isinstance(given, BaseDistribution):
            distributions[name] = given
        elif hasattr(given, "rvs"):
            distributions[name] = _as_optuna(name, given)
        else:
            check_values(name, given, ", or a distribution such as scipy.stats.loguniform(1e-4, 1.0)")
            if not all(isinstance(value, _PRIMITIVE) for value in given):
                values[name] = {f"{i}: {getattr(value, '__name__', value)}": value for i, value in enumerate(given)}
            distributions[name] = CategoricalDistribution(list(values.get(name, given)))
    return distributions, values


def _as_optuna(name: str, given: Any) -> Any:
    """Return SciPy's frozen distribution as Optuna's."""
    from optuna.distributions import FloatDistribution, IntDistribution

    kind = getattr(getattr(given, "dist", None), "name", type(given).__name__)
    if kind not in ("uniform", "loguniform", "reciprocal", "randint"):
        raise ValueError(
            f"Expected uniform, loguniform or randint of scipy.stats for {name}, but got {kind}; pass one of "
            "optuna.distributions"
        )
    low, high = given.support()
    if kind == "randint":
        return IntDistribution(int(low), int(high))
    return FloatDistribution(float(low), float(high), log=kind != "uniform")


def _check(**numbers: int) -> None:
    """Raise ValueError unless all are whole and large enough."""
    for name, number in numbers.items():
        least = 2 if name == "factor" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"Expected {name} of at least {least}, but got {number!r}")
