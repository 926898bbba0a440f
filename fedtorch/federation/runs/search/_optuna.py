"""Searches that an Optuna study leads: its sampler says what is tried, its pruner which trial ends early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fedtorch.federation.runs.search._trial import Trial
from fedtorch.federation.runs.search.tuning import Setting, check_values
from fedtorch.progress import Progress

if TYPE_CHECKING:
    import optuna

_PRIMITIVE = (type(None), bool, int, float, str)  # choices that Optuna can store


def study_of(search: Any, largest_is_best: bool, seed: int, ladder: Sequence[int], factor: int) -> optuna.Study:
    """Return the study that was given, or one with Optuna's sampler TPE and its pruner by successive halving.

    Raises:
        ImportError: Optuna is not installed.
        TypeError: `search` is something else.
        ValueError: the study has another direction than the metric.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("Expected Optuna for this search: pip install 'fedtorch[tune]'") from error
    direction: Literal["minimize", "maximize"] = "maximize" if largest_is_best else "minimize"
    if isinstance(search, str) and search == "tpe":
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=ladder[0], reduction_factor=factor)
        return optuna.create_study(
            direction=direction, sampler=optuna.samplers.TPESampler(seed=seed % 2**32), pruner=pruner
        )
    if not isinstance(search, optuna.Study):
        raise TypeError(f"Expected search='random', 'tpe' or an optuna.Study, but got {search!r}")
    directions = [each.name.lower() for each in search.directions]
    if directions != [direction]:
        raise ValueError(
            f"Expected a study with direction {direction!r}, as the metric says, but got {directions}; make it with "
            f"optuna.create_study(direction={direction!r})"
        )
    return search


def asked(
    study: optuna.Study,
    space: Mapping[str, Any],
    begin: Callable[[Setting], Trial],
    trials: int,
    ladder: Sequence[int],
    shown: Progress,
) -> tuple[list[Trial], Trial | None]:
    """Return the trials that a study asks for, and the best of those that did all rounds.

    Args:
        study: is asked what to try, and told how it went.
        space: by name, values or distributions.
        begin: setting -> trial.
        trials: how many.
        ladder: the rounds after which a trial is scored.
        shown: how far it is.
    """
    distributions, values = _distributions(space)
    sign = -1.0 if study.direction.name == "MAXIMIZE" else 1.0
    tried: list[Trial] = []
    best: Trial | None = None
    pruned = 0
    for number in range(trials):
        asking = study.ask(distributions)
        setting = {name: values[name][x] if name in values else x for name, x in asking.params.items()}
        trial = begin(setting)
        tried.append(trial)
        if _went_through(study, asking, trial, ladder, shown):
            assert trial.score is not None
            if best is None or best.score is None or sign * trial.score.mean() < sign * best.score.mean():
                best, trial = trial, best or trial
        else:
            pruned += 1
        if trial is not best:
            trial.end()
        shown.update((number + 1) * ladder[-1] - shown.done, partial(dict, pruned=pruned))
    return tried, best


def _went_through(
    study: optuna.Study, asking: optuna.Trial, trial: Trial, ladder: Sequence[int], shown: Progress
) -> bool:
    """Return whether a trial did all rounds, and tell the study."""
    from optuna.trial import TrialState

    try:
        for rounds in ladder:
            trial.go_on(rounds, shown)
            if trial.score is None:
                break
            asking.report(trial.score.mean(), rounds)
            if rounds < ladder[-1] and asking.should_prune():
                break
        else:
            assert trial.score is not None
            study.tell(asking, trial.score.mean())
            return True
    except BaseException:
        study.tell(asking, state=TrialState.FAIL)
        raise
    study.tell(asking, state=TrialState.PRUNED)  # TPE takes one without a value for worse than all others
    return False


def _distributions(space: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[Any, Any]]]:
    """Return (Optuna's distributions, the values by their names of choices that it cannot store)."""
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
            f"Expected uniform, loguniform or randint of scipy.stats for {name} in a search by Optuna, but got {kind}; "
            "pass one of optuna.distributions, or search='random'"
        )
    low, high = given.support()
    if kind == "randint":
        return IntDistribution(int(low), int(high))
    return FloatDistribution(float(low), float(high), log=kind != "uniform")
