"""A grid of hyperparameters: a run of each setting on the same clients, and which predicts best.

All settings have the same seed (the same cohorts, faults, minibatches and draws), so that they differ only by their
values.

>>> import torch, fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3, minimum=10), clients=10, seed=0)
>>> module = torch.nn.Linear(64, 10)
>>> def build(lr, mu):
...     local = ft.gradient_descent(module, epochs=1, batch_size=16, loss=torch.nn.functional.cross_entropy,
...                                 optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr))
...     return ft.fedprox(local, mu)
>>> result = ft.grid(build, {"lr": [0.001, 0.1], "mu": [0.0, 0.1]}, ft.InProcess(data), validation=0.3, rounds=5,
...                  metric=ft.metrics.accuracy(), progress=False)
>>> result.best["lr"]
0.1
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import FederatedData, FederatedLoaders
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.budget import Budget, exhausted
from fedtorch.federation.populations.distributed import Distributed
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.populations.population import Population
from fedtorch.federation.runs.cohorts import Asked, checked_draws
from fedtorch.federation.runs.evaluation import Evaluable, Split, check_same_clients, inputs_and_targets
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.run import Run
from fedtorch.metrics.pooled import any_metrics
from fedtorch.metrics.scores import Score, is_largest_best
from fedtorch.progress import Progress
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd

Setting = dict[str, Any]  # a value for every hyperparameter


@dataclasses.dataclass(frozen=True, repr=False)
class GridSearch:
    """The settings of a grid and their scores, in the given order.

    Attributes:
        settings: arguments of `build`.
        scores: the metric on the clients' validation rows; all NaN for a setting that diverged.
        diverged: whether the server's state, a client's model or the score of all rows has NaN or infinite numbers.
        largest_is_best: of the metric.
        epsilon: of all settings together, by one ledger, if they are private; None otherwise. Scores of clients' rows
            have no noise, and are not included.

    Example:
        >>> import torch, fedtorch as ft
        >>> scores = tuple(ft.Score(s, torch.tensor([s], dtype=torch.float64)) for s in (0.5, 0.9))
        >>> result = GridSearch(({"lr": 0.1}, {"lr": 1.0}), scores, diverged=(False, False), largest_is_best=True)
        >>> result.best
        {'lr': 1.0}
        >>> result
            lr  mean over clients  sd over clients  worst client  all rows  diverged
        0  1.0                0.9              NaN           0.9       0.9     False
        1  0.1                0.5              NaN           0.5       0.5     False
    """

    settings: tuple[Setting, ...]
    scores: tuple[Score, ...]
    diverged: tuple[bool, ...]
    largest_is_best: bool
    epsilon: float | None = dataclasses.field(default=None, kw_only=True)

    def __repr__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return str(self.table.to_html())

    @property
    def order(self) -> list[int]:
        """Return positions of the settings, best mean over clients first, diverged ones last."""
        sign = -1.0 if self.largest_is_best else 1.0
        return sorted(
            range(len(self.settings)),
            key=lambda i: (self.diverged[i], 0.0 if self.diverged[i] else sign * self.scores[i].mean()),
        )

    @property
    def best(self) -> Setting:
        """Return the setting with the best mean over clients.

        Raises:
            ValueError: all settings diverged.
        """
        first = self.order[0]
        if self.diverged[first]:
            raise ValueError(
                f"Expected a setting that converges, but all {len(self.settings)} diverged; widen the grid"
            )
        return dict(self.settings[first])

    @property
    def table(self) -> pd.DataFrame:
        """Return a row per setting, best first: mean, standard deviation and worst over clients, and of all rows.

        For private settings each row has "epsilon of the search", the ε of all settings together.
        """
        import pandas as pd

        rows = []
        for i in self.order:
            score = self.scores[i]
            known = score.clients[~score.clients.isnan()]
            row = {
                "mean over clients": score.mean(),
                "sd over clients": float(known.std()) if len(known) > 1 else math.nan,
                "worst client": score.worst(self.largest_is_best),
                "all rows": score.overall,
                "diverged": self.diverged[i],
            }
            cost = {} if self.epsilon is None else {"epsilon of the search": self.epsilon}
            rows.append({**self.settings[i], **row, **cost})
        return pd.DataFrame(rows)


def grid(
    build: Callable[..., Algorithm],
    settings: Mapping[str, Sequence[Any]],
    population: Population,
    *,
    validation: Evaluable | float,
    metric: Any,
    largest_is_best: bool | None = None,
    rounds: int,
    cohort: Asked = None,
    seed: int = 0,
    faults: Faults | None = None,
    split: Split = inputs_and_targets,
    progress: bool = True,
) -> GridSearch:
    """Run every combination of `settings` on the same clients, and score each on the clients' validation rows.

    Each setting is `ft.run(build(**setting), population, ...)`, one after another. One whose server has NaN or
    infinite numbers ends there. `ft.plots.heat_map` draws the result.

    Private settings spend from one ledger: the `budget=` of a mechanism is that of the whole search, whose ε is in the
    result. Scores on the clients' validation rows have no noise and are not covered.

    Args:
        build: setting -> algorithm, called as `build(**setting)`, with torch's global generator at `seed`, so that its
            modules start from the same weights; the generator is restored afterwards.
        settings: the values to try of each of `build`'s parameters, by name.
        population: the clients, and where they run.
        validation: rows of the same clients; or the fraction of each client's rows to hold out.
        metric: score of predictions: of `ft.metrics`, a torchmetrics metric of one number, a loss of torch, a function
            of a client's (prediction, target), or the name of a log of a LightningModule's own `validation_step`, such
            as "val_loss".
        largest_is_best: whether large values are good, as for accuracy, or small ones, as for errors; default: the
            attribute of `ft.metrics`, torchmetrics and losses of torch; names need the argument.
        rounds: communication rounds of each setting.
        cohort: as in `ft.run`; all settings have the same cohorts.
        seed: seed of all randomness.
        faults: simulated faults, as in `ft.run`.
        split: rows -> (inputs, targets).
        progress: whether a progress bar is shown, after two seconds.

    Raises:
        TypeError: `build` has no such parameters, or needs others, or returns no algorithm.
        ValueError: there is nothing to try, the validation rows are of other clients, some settings are private and
            others exact, or private settings together exceed their budget, or have claims that do not add up.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
        >>> build = lambda mu: ft.fedprox(ft.least_squares(torch.nn.Linear(10, 1)), mu)
        >>> result = ft.grid(build, {"mu": [0.0, 1e9]}, ft.InProcess(data), validation=0.3, rounds=2, progress=False,
        ...                  metric=ft.metrics.mean_squared_error(), largest_is_best=False)
        >>> result.best
        {'mu': 0.0}
    """
    check_names(build, settings)
    for name, values in settings.items():
        check_values(name, values)
    if rounds < 1:
        raise ValueError(f"Expected at least one round, but got {rounds}")
    population, validation = held_out(population, validation, seed)
    checked_draws(cohort, len(population.data))
    largest_is_best = best_end(metric, largest_is_best)
    tried = [dict(zip(settings, values)) for values in itertools.product(*settings.values())]
    algorithms = [built(build, setting, seed) for setting in tried]
    ledger = SearchLedger()
    ledger.join(algorithms, rounds)
    scores: list[Score | None] = []
    title = f"{len(tried)} setting{'s' * (len(tried) > 1)}"
    with Progress(title, len(tried) * rounds, shown=progress and population.leads) as shown:
        for i, algorithm in enumerate(algorithms, 1):
            made = Run(algorithm, population, cohort=cohort, seed=seed, faults=faults, on_bad_message="drop")
            scores.append(scored(made, validation, metric, split) if trained(made, rounds, shown) else None)
            failed = scores.count(None)
            shown.update(i * rounds - shown.done, partial(dict, diverged=failed) if failed else None)
    nothing = no_score(len(validation))
    return GridSearch(
        settings=tuple(tried),
        scores=tuple(nothing if score is None else score for score in scores),
        diverged=tuple(score is None for score in scores),
        largest_is_best=largest_is_best,
        epsilon=ledger.epsilon,
    )


class SearchLedger:
    """The one ledger from which all settings of a search spend: all are private, or none is."""

    def __init__(self) -> None:
        self._budget: Budget | None = None
        self._private: bool | None = None  # None before the first setting

    def check(self, algorithm: Algorithm) -> None:
        """Raise ValueError if some of the settings are private and others exact.

        Even by being chosen or not, an exact setting discloses more about the rows than any ε bounds.
        """
        private = algorithm.budget is not None
        if self._private not in (None, private):
            raise ValueError(
                "Expected settings that are all private or all exact, but got some of each: the search's epsilon would "
                "not cover the exact ones; search them separately, or give each setting a mechanism"
            )
        self._private = private

    def join(self, algorithms: Sequence[Algorithm], rounds: int) -> None:
        """Have algorithms spend from it.

        Raises:
            ValueError: some are private and others exact, or `rounds` of each cost more than it allows.
        """
        for algorithm in algorithms:
            self.check(algorithm)
        budgets = [algorithm.budget for algorithm in algorithms if algorithm.budget is not None]
        if self._budget is None and budgets:
            self._budget, *budgets = budgets
        if self._budget is not None:
            self._budget.join(budgets, rounds)

    @property
    def epsilon(self) -> float | None:
        """Return the cost of all settings together; None if none is private."""
        return None if self._budget is None else self._budget.report()["epsilon"]


def check_names(build: Callable[..., Algorithm], settings: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless `settings` name all parameters that `build` needs, and no others."""
    if not settings:
        raise ValueError("Expected settings to try, but got none; pass for example {'lr': [0.01, 0.1]}")
    parameters = inspect.signature(build).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in settings if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(f"Expected settings among the parameters {named} of build, but got {unknown}")
    required = {p.name for p in parameters if p.name in named and p.default is p.empty}
    if required - set(settings):
        raise TypeError(
            f"Expected values for all that build needs, but got none for {sorted(required - set(settings))}; add them "
            "to the settings, or give build a default"
        )


def check_values(name: str, values: Any, or_else: str = "") -> None:
    """Raise ValueError unless `values` of a hyperparameter are a list of different ones.

    Args:
        name: name of the hyperparameter.
        values: values to check.
        or_else: alternatives for the message; if that is a range, a tuple may be meant as one and is refused.
    """
    if or_else and isinstance(values, tuple):
        raise ValueError(f"Expected a list of values of {name}{or_else}, but got {values!r}, a list or a range")
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
        raise ValueError(f"Expected a list of values of {name}{or_else}, but got {values!r}")
    if any(value in values[:i] for i, value in enumerate(values)):
        raise ValueError(f"Expected different values of {name}, but got {values!r}")


def best_end(metric: Any, largest_is_best: bool | None) -> bool:
    """Return whether large values of a metric are good, by the argument or the metric.

    Raises:
        TypeError: not a metric, or several metrics.
        ValueError: the direction is unknown.
    """
    if isinstance(metric, str):
        if largest_is_best is None:
            raise ValueError(
                f"Expected largest_is_best=True (as of accuracy) or False (as of a loss) with the name of a logged "
                f"metric, but got metric={metric!r} alone"
            )
        return largest_is_best
    known = any_metrics({"metric": metric})
    if set(known) != {"metric"}:
        raise TypeError(f"Expected one metric to compare settings by, but got {len(known)}; pass one of them")
    return is_largest_best(largest_is_best, known["metric"].largest_is_best)


def held_out(population: Population, validation: Evaluable | float, seed: int) -> tuple[Population, Evaluable]:
    """Return the population to train on, and the validation rows of its clients."""
    if not isinstance(validation, (FederatedData, FederatedLoaders)):
        if isinstance(population.data, FederatedLoaders):
            raise TypeError(
                f"Expected validation= with loaders of the same clients, from which rows are not held out, but got "
                f"{validation}; pass ft.data.from_loaders({{name: loader}}), or population.data.for_stage('validate')"
            )
        if not 0 < validation < 1:
            raise ValueError(f"Expected validation rows, or a fraction between 0 and 1, but got {validation}")
        if not isinstance(population, (InProcess, Distributed)):
            raise TypeError(
                f"Expected a population in this process or over ranks to hold rows out of, but got "
                f"{type(population).__name__}; split its data with data.split, and pass validation= the held-out rows"
            )
        held: tuple[FederatedData, FederatedData] = population.data.split(1 - validation, seed)
        training, validation = held
        population = type(population)(training, chunk=population.chunk, carry=population.carry)
    check_same_clients(validation, population.names)
    if int(validation.counts.sum()) == 0:
        raise ValueError("Expected validation rows, but no client has any; hold out a larger fraction")
    return population, validation


def built(build: Callable[..., Algorithm], setting: Setting, seed: int) -> Algorithm:
    """Return the algorithm of a setting, made while torch's global generator stands at `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            algorithm = build(**setting)
        except Exception as error:
            error.add_note(f"in build of the setting {setting}")
            raise
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"Expected build to return an Algorithm, such as ft.fedavg(...), but got {type(algorithm)}")
    if algorithm.predict is None:
        raise ValueError("Expected an algorithm that predicts, but got one without `predict`")
    return algorithm


def trained(run: Run, rounds: int, shown: Progress) -> bool:
    """Continue a run until `rounds` are done in total; return whether its messages and its server are finite.

    Raises:
        ValueError: the search's budget is spent before.
    """
    for done in run.rounds(rounds):
        shown.update()
        if len(done.refused) or not _is_finite(done.server):
            return False
    if run.number < rounds and exhausted(run.algorithm.budget):
        raise ValueError(
            f"Expected {rounds} rounds of every setting, but the search's budget was spent after {run.number}; a "
            "budget is that of the whole search: try fewer settings or rounds, add noise, or raise budget="
        )
    return True


def no_score(clients: int) -> Score:
    """Return the score of a setting that diverged."""
    return Score(math.nan, torch.full((clients,), math.nan, dtype=torch.float64))


def scored(run: Run, validation: Evaluable, metric: Any, split: Split) -> Score | None:
    """Return the score of a setting; None if it has diverged."""
    if not (_is_finite(run.server) and _predict_with_finite(run, validation)):
        return None
    score = (
        _logged(run, validation, metric)
        if isinstance(metric, str)
        else run.evaluate(validation, {"metric": metric}, split)["metric"]
    )
    if not score.is_number:
        got = score.overall
        got = f"one of shape {tuple(got.shape)}" if isinstance(got, Tensor) else f"a {type(got).__name__} of them"
        raise TypeError(f"Expected a metric that is one number to compare settings by, but got {got}")
    failed = score.failed is not None and bool(score.failed.any())  # models are finite, and outputs are not
    return score if math.isfinite(score.overall) and not failed else None


def _logged(run: Run, validation: Evaluable, name: str) -> Score:
    """Return the score that the module's own `validation_step` logs under a name.

    Raises:
        ValueError: the module logs nothing of this name.
    """
    logged = run.evaluate(validation)
    if name not in logged:
        raise ValueError(f"Expected metric= to name what validation_step logs, one of {list(logged)}, but got {name!r}")
    return logged[name]


def _predict_with_finite(run: Run, validation: Evaluable) -> bool:
    """Return whether all tensors that clients predict with are finite."""
    if isinstance(validation, FederatedLoaders):
        return all(bool(_are_finite(run.tensors([client]), 1).all()) for client in range(len(validation)))
    finite = lambda tensors, block: _are_finite(tensors, len(block.count))
    return bool(run.clients.evaluate(run.outbox, validation, finite).all())


def _is_finite(state: Tree) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tree.leaves(state))


def _are_finite(tensors: Tree, clients: int) -> Tensor:
    """Return which of `clients` stacked clients have finite numbers only, `(K,)`."""
    each = [leaf.isfinite().reshape(clients, -1).all(1) for leaf in tree.leaves(tensors)]
    return torch.stack(each).all(0)
