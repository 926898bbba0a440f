"""Learning rates of clients over the rounds of a run, and the length of the run that their schedules were made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from fedtorch.optimisers import options


class LocalOptimizer(NamedTuple):
    """Description of one optimiser of a client.

    Attributes:
        kind: the name of its class.
        name: name of its scheduler, if the module sets one.
        scheduled: whether it has a scheduler.
        groups: the hyperparameters of each parameter group, means over clients.
        settings: arguments of it and its scheduler, by name; values that differ between clients are text, from those of
            the client with the fewest steps to those of the one with the most. Empty if unknown.
    """

    kind: str
    name: str | None
    scheduled: bool
    groups: list[dict[str, Any]]
    settings: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class LocalSchedule:
    """Learning rates of a local solver, which a `Turn` with rates overrides.

    Attributes:
        rounds: number of rounds of a run, as passed to the solver; None for any number.
        batches: rows of clients `(K,)` -> minibatches per epoch, `(K,)`.
        at: (minibatches of an epoch of clients `(K,)`, rounds done) -> their optimisers as the next round finds them.
        takes_limit: whether the minibatches of an epoch can be limited by a `Turn`.
        slow: whether `at` starts Trainers.
        takes_share: whether clients support a share of their work, as in `Turn`.
    """

    rounds: int | None
    batches: Callable[[Tensor], Tensor]
    at: Callable[[Tensor, int], list[LocalOptimizer]]
    takes_limit: bool = True
    slow: bool = False
    takes_share: bool = False


def check_length(schedule: LocalSchedule | None, rounds: int | None, setting: str) -> None:
    """Raise ValueError unless a run of this many rounds (None: unknown) matches the length of the schedules.

    Example:
        >>> schedule = LocalSchedule(50, batches=lambda count: count, at=lambda batches, round: [])
        >>> check_length(schedule, 10, "max_epochs=10 of the Trainer")
        Traceback (most recent call last):
        ValueError: Expected a run of 50 rounds, for which rounds=50 of the local solver makes schedules, but got ...
    """
    if schedule is not None and schedule.rounds is not None and rounds not in (None, schedule.rounds):
        raise ValueError(
            f"Expected a run of {schedule.rounds} rounds, for which rounds={schedule.rounds} of the local solver makes "
            f"schedules, but got {setting}; give both the same number"
        )


def check_round(schedule: LocalSchedule | None, round: int) -> None:
    """Raise ValueError if schedules end before the round of this number, the first being 1.

    Example:
        >>> schedule = LocalSchedule(5, batches=lambda count: count, at=lambda batches, round: [])
        >>> check_round(schedule, 5)
        >>> check_round(schedule, 6)
        Traceback (most recent call last):
        ValueError: Expected at most 5 rounds, for which rounds=5 of the local solver makes schedules, but got 6; ...
    """
    if schedule is not None and schedule.rounds is not None and round > schedule.rounds:
        raise ValueError(
            f"Expected at most {schedule.rounds} rounds, for which rounds={schedule.rounds} of the local solver makes "
            f"schedules, but got {round}; give the local solver the rounds of the whole run"
        )


def mean_groups(groups: Sequence[Sequence[Mapping[str, Any]]], clients: Sequence[int]) -> list[dict[str, Any]]:
    """Return means of hyperparameters over groups with numbers of clients; non-numbers are the first group's.

    Example:
        >>> mean_groups([[{"lr": 1.0, "betas": (0.9, 0.99)}], [{"lr": 4.0, "betas": (0.9, 0.99)}]], clients=[2, 1])
        [{'lr': 2.0, 'betas': (0.9, 0.99)}]
    """

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(map(mean, zip(*values)))
        if isinstance(values[0], bool) or not isinstance(values[0], (int, float)) or len(set(values)) == 1:
            return values[0]
        return sum(value * count for value, count in zip(values, clients)) / sum(clients)

    return [{name: mean([part[i][name] for part in groups]) for name in group} for i, group in enumerate(groups[0])]


def local_schedule(
    configured: Callable[[int], Any],
    batches: Callable[[Tensor], Tensor],
    epochs: int | None,
    steps: int | None,
    rounds: int | None,
    takes_limit: bool = True,
) -> LocalSchedule:
    """Build the description of a solver's learning rates on stacked clients.

    Args:
        configured: steps of a round -> its optimiser and schedule.
        batches: rows of clients `(K,)` -> minibatches per epoch.
        epochs, steps, rounds: of the solver.
        takes_limit: see `LocalSchedule`.
    """

    def at(per_epoch: Tensor, round: int) -> list[LocalOptimizer]:
        sizes, clients = per_epoch.unique(return_counts=True)
        totals = [(steps or 0) if epochs is None else epochs * size for size in sizes.tolist()]
        parts = [configured(total) for total in totals]
        groups = [_groups_at(part, round * t, size) for part, t, size in zip(parts, totals, sizes.tolist())]
        schedule = parts[0].schedule
        return [
            LocalOptimizer(
                type(parts[0].optimizer.original).__name__,
                None if schedule is None else schedule.name,
                schedule is not None,
                mean_groups(groups, clients.tolist()),
                _from_to(parts[0].settings, parts[-1].settings),
            )
        ]

    return LocalSchedule(rounds, batches, at, takes_limit, takes_share=takes_limit)


def _from_to(first: Any, last: Any) -> Any:
    """Merge a setting of two clients: the value if it is the same, else both as text."""
    if isinstance(first, Mapping) and isinstance(last, Mapping) and first.keys() == last.keys():
        return {name: _from_to(value, last[name]) for name, value in first.items()}
    if isinstance(first, list) and isinstance(last, list) and len(first) == len(last):
        return [_from_to(*each) for each in zip(first, last)]
    return first if repr(first) == repr(last) else f"{first} to {last}"


def _groups_at(configured: Any, position: int, per_epoch: int) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group at a step, with so many steps per epoch."""
    groups: Any = SimpleNamespace(param_groups=[options(g) for g in configured.optimizer.original.param_groups])
    if configured.schedule is not None:
        configured.schedule.apply(groups, position, per_epoch)
    return groups.param_groups
