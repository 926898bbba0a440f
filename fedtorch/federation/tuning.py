"""A grid of hyperparameters, all of whose settings run side by side as one more batch axis.

`grid` builds an algorithm for every setting and runs all of them as one: a round is a round of each. What their
clients ask `gradient_descent` for at the same time is solved together, so that S settings of K clients train as S · K
stacked clients. Settings are seeded alike (the same cohorts, faults, minibatches and draws), so that they differ by
what is set.

>>> import torch, fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3, minimum=10), clients=10, seed=0)
>>> module = torch.nn.Linear(64, 10)
>>> def build(lr, mu):
...     local = ft.gradient_descent(module, epochs=1, batch_size=16, loss=torch.nn.functional.cross_entropy,
...                                 optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr))
...     return ft.fedprox(local, mu)
>>> result = ft.grid(build, {"lr": [0.001, 0.1], "mu": [0.0, 0.1]}, ft.InProcess(data), validation=0.3, rounds=5,
...                  metric=ft.metrics.accuracy(), largest_is_best=True, progress=False)
>>> result.best["lr"], result.stacks
(0.1, (4,))
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from fedtorch import plots, tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.coordinator import Progress, begin, run
from fedtorch.federation.distributed import Distributed
from fedtorch.federation.evaluation import Score, Split, check_same_clients, evaluate, inputs_and_targets
from fedtorch.federation.exchange import Exchange
from fedtorch.federation.faults import Faults
from fedtorch.federation.local_solvers.gradient_descent import solve_together, work
from fedtorch.federation.local_solvers.together import together
from fedtorch.federation.population import InProcess, Population
from fedtorch.federation.sampling import Cohort, check_cohort
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Grid", "grid"]

Setting = dict[str, Any]  # a value for every hyperparameter


@dataclasses.dataclass(frozen=True)
class Grid:
    """The settings of a grid and how well each predicts, in the order in which they were given.

    Attributes:
        settings: what `build` was called with.
        scores: the metric on the clients' validation rows; all NaN for a setting that diverged.
        diverged: whether the server's state, a client's model or the score of all rows has NaN or infinite numbers.
        largest_is_best: of the metric.
        stacks: how many settings trained as one stack, for each stack; only ones are settings that ran one after
            another.
    """

    settings: tuple[Setting, ...]
    scores: tuple[Score, ...]
    diverged: tuple[bool, ...]
    largest_is_best: bool
    stacks: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """Places of the settings, best mean over clients first, those that diverged last."""
        sign = -1.0 if self.largest_is_best else 1.0
        return sorted(
            range(len(self.settings)),
            key=lambda i: (self.diverged[i], 0.0 if self.diverged[i] else sign * self.scores[i].mean()),
        )

    @property
    def best(self) -> Setting:
        """The setting with the best mean over clients.

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
        """One row per setting, best first: mean, standard deviation and worst over clients, and all rows together."""
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
            rows.append({**self.settings[i], **row})
        return pd.DataFrame(rows)

    def plot(self, name: str = "score") -> Figure:
        """`ft.plots.heat_map` of this grid."""
        return plots.heat_map(self, name)


def grid(
    build: Callable[..., Algorithm],
    settings: Mapping[str, Sequence[Any]],
    population: Population,
    *,
    validation: FederatedData | float,
    metric: Any,
    largest_is_best: bool,
    rounds: int,
    cohort: int | Cohort | None = None,
    seed: int = 0,
    faults: Faults | None = None,
    split: Split = inputs_and_targets,
    progress: bool = True,
) -> Grid:
    """Runs every combination of `settings` on the same clients, and scores each on the clients' validation rows.

    Each setting gives what `ft.run(build(**setting), population, ...)` gives, up to rounding. Its clients' training is
    stacked with that of all settings whose `gradient_descent` does the same work: the same module, loss, batch size and
    number of steps, whatever optimiser, schedule, λ or server. Modules are compared by the tensor operations of a
    training step, so that `LitModel(lr=lr)` is the same module for every lr, while `LitModel(dropout=p)` is not.
    Other settings run one after another within a round, as do other local solvers, and modules whose step depends on
    its number, on the epoch or on a tensor's value in Python. `Grid.stacks` says what was stacked.

    A setting whose server has NaN or infinite numbers is dropped after that round.

    Args:
        build: setting -> algorithm, called as `build(**setting)`. Meanwhile torch's global generator stands at
            `seed`, so that modules made in it start from the same weights; afterwards it is as before.
        settings: the values to try of each of `build`'s parameters, by name.
        population: who computes, and where.
        validation: rows of the same clients; or the fraction of each client's rows that is held out as such.
        metric: how predictions are scored: of `ft.metrics`, a torchmetrics metric with summed states, or a function
            (prediction, target) -> per-example values.
        largest_is_best: whether the metric is large for good predictions, as accuracy is, and not small, as errors are.
        rounds: communication rounds of each setting.
        cohort: as in `ft.run`; all settings have the same cohorts.
        seed: of all randomness.
        faults: what goes wrong; as in `ft.run`.
        split: rows -> (inputs, targets).
        progress: whether a bar shows the rounds.

    Raises:
        TypeError: `build` has no such parameters, or needs others, or returns no algorithm.
        ValueError: there is nothing to try, or the validation rows are of other clients.
    """
    _check_settings(build, settings)
    if rounds < 1:
        raise ValueError(f"Expected at least one round, but got {rounds}")
    population, validation = _held_out(population, validation, seed)
    check_cohort(cohort, len(population.data))
    tried = [dict(zip(settings, values)) for values in itertools.product(*settings.values())]
    algorithms = {str(i): _built(build, setting, seed) for i, setting in enumerate(tried)}
    everything = _side_by_side(algorithms)
    now = begin(everything, population)
    bar = tqdm(
        total=rounds,
        desc=f"{len(tried)} setting{'s' * (len(tried) > 1)}",
        unit="round",
        disable=not progress,
        file=sys.stdout,
        dynamic_ncols=True,
    )
    with bar:
        while now.number < rounds and now.server:
            done = next(run(everything, population, cohort=cohort, seed=seed, faults=faults, start=now))
            alive = {name: state for name, state in done.server.items() if _is_finite(state)}
            now = Progress(done.number, alive, done.clients)
            bar.set_postfix({"diverged": len(tried) - len(alive)} if len(alive) < len(tried) else {}, refresh=False)
            bar.update()
    scores = [_score(algorithms, name, now, validation, metric, split) for name in algorithms]
    nothing = Score(math.nan, torch.full((len(validation),), math.nan, dtype=torch.float64))
    return Grid(
        settings=tuple(tried),
        scores=tuple(nothing if score is None else score for score in scores),
        diverged=tuple(score is None for score in scores),
        largest_is_best=largest_is_best,
        stacks=_stacks(algorithms, population),
    )


def _check_settings(build: Callable[..., Algorithm], settings: Mapping[str, Sequence[Any]]) -> None:
    """Raises TypeError or ValueError unless `settings` are values of all that `build` needs."""
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
    for name, values in settings.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
            raise ValueError(f"Expected a list of values of {name}, but got {values!r}")
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ValueError(f"Expected different values of {name}, but got {values!r}")


def _held_out(population: Population, validation: FederatedData | float, seed: int) -> tuple[Population, FederatedData]:
    """The population to train on, and the validation rows of its clients."""
    if not isinstance(validation, FederatedData):
        if not 0 < validation < 1:
            raise ValueError(f"Expected validation rows, or a fraction between 0 and 1, but got {validation}")
        if not isinstance(population, (InProcess, Distributed)):
            raise TypeError(
                f"Expected a population in this process or over ranks to hold rows out of, but got "
                f"{type(population).__name__}; split its data with data.split, and pass validation= the held-out rows"
            )
        training, validation = population.data.split(1 - validation, seed)
        population = type(population)(training, chunk=population.chunk)
    check_same_clients(validation, population.data)
    if int(validation.counts.sum()) == 0:
        raise ValueError("Expected validation rows, but no client has any; hold out a larger fraction")
    return population, validation


def _built(build: Callable[..., Algorithm], setting: Setting, seed: int) -> Algorithm:
    with _seeded(seed):
        try:
            algorithm = build(**setting)
        except Exception as error:
            error.add_note(f"in build of the setting {setting}")
            raise
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"Expected build to return an Algorithm, such as ft.fedavg(...), but got {type(algorithm)}")
    if algorithm.local is None:
        raise ValueError("Expected an algorithm with a local solver, whose module makes predictions; it has none")
    return algorithm


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's global generator at `seed`, and afterwards as before."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


class _Rows(NamedTuple):
    """A block's data as prepared by several algorithms."""

    plain: ClientData
    prepared: dict[str, Tree]  # None where that is the plain data

    def of(self, name: str) -> Tree:
        """What the algorithm `name` has prepared."""
        return self.plain if self.prepared[name] is None else self.prepared[name]


def _side_by_side(algorithms: Mapping[str, Algorithm]) -> Algorithm:
    """Several algorithms as one, whose states, outboxes and messages are those of each by name.

    A name that is missing from the server's state is left out of the round; its clients' states stay as they are.
    """

    def init(parameters: Tree, clients: int) -> tuple[Tree, Tree]:
        started = {name: algorithm.init(parameters[name], clients) for name, algorithm in algorithms.items()}
        return {name: server for name, (server, _) in started.items()}, {n: state for n, (_, state) in started.items()}

    def client(inbox: Tree, state: Tree, data: _Rows, key: Tensor) -> Reply:
        ask = [
            functools.partial(algorithms[name].client, inbox[name], state[name], data.of(name), key) for name in inbox
        ]
        replies = dict(zip(inbox, together(ask, solve_together)))
        messages = {name: reply.message for name, reply in replies.items()}
        return Reply(messages, {**state, **{name: reply.state for name, reply in replies.items()}}, {})

    def prepare(data: ClientData) -> _Rows:
        prepared = {name: algorithm.prepare(data) for name, algorithm in algorithms.items()}
        return _Rows(data, {name: None if found is data else found for name, found in prepared.items()})

    def sent(state: Tree) -> Tree:
        return {name: a.sent(state[name]) for name, a in algorithms.items() if a.sent is not None}

    def recount(server: Tree, told: Tree) -> Tree:
        counts = {name: algorithms[name].recount for name in told if name in server}
        return {**server, **{name: count(server[name], told[name]) for name, count in counts.items() if count}}

    some = next(iter(algorithms.values())).local
    assert some is not None
    starts: dict[str, Any] = {name: a.local.parameters for name, a in algorithms.items() if a.local is not None}
    tells = any(algorithm.sent is not None for algorithm in algorithms.values())
    return Algorithm(
        init=init,
        outbox=lambda server: {name: algorithms[name].outbox(state) for name, state in server.items()},
        client=client,
        server=lambda server, aggregate, key: {
            name: algorithms[name].server(state, aggregate[name], key) for name, state in server.items()
        },
        model=lambda inbox, state: {name: algorithms[name].model(inbox[name], state[name]) for name in inbox},
        exchange=_exchange({name: algorithm.exchange for name, algorithm in algorithms.items()}),
        prepare=prepare,
        local=dataclasses.replace(some, parameters=starts),  # where all start, and how large a client is
        sent=sent if tells else None,
        recount=recount if tells else None,
    )


def _exchange(exchanges: Mapping[str, Exchange]) -> Exchange:
    """Several exchanges as one, of messages by name."""

    def traffic(outbox: Tree, messages: Tree, ids: tree.Rows) -> tuple[int, int]:
        each = [exchanges[name].traffic(outbox[name], message, ids) for name, message in messages.items()]
        return sum(up for up, _ in each), sum(down for _, down in each)

    return Exchange(
        scatter=lambda outbox, ids: {name: exchanges[name].scatter(sent, ids) for name, sent in outbox.items()},
        gather=lambda messages, ids: {name: exchanges[name].gather(m, ids) for name, m in messages.items()},
        merge=lambda partials: {name: exchanges[name].merge([part[name] for part in partials]) for name in partials[0]},
        finish=lambda partial: {name: exchanges[name].finish(part) for name, part in partial.items()},
        traffic=traffic,
        additive=all(exchange.additive for exchange in exchanges.values()),
    )


def _score(
    algorithms: Mapping[str, Algorithm], name: str, now: Progress, validation: FederatedData, metric: Any, split: Split
) -> Score | None:
    """How well a setting predicts; None if it has diverged."""
    local = algorithms[name].local
    if name not in now.server or local is None:
        return None
    outbox = {name: algorithms[name].outbox(now.server[name])}
    finite = now.clients.evaluate(outbox, validation, lambda tensors, block: _are_finite(tensors, len(block.count)))
    if not bool(finite.all()):
        return None
    predict = lambda tensors, inputs: local.predict(tensors[name], inputs)
    score = evaluate(now.clients, outbox, predict, validation, {"metric": metric}, split)["metric"]
    return score if math.isfinite(score.overall) else None


def _is_finite(state: Tree) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in tree.leaves(state))


def _are_finite(tensors: Tree, clients: int) -> Tensor:
    """Which of `clients` stacked clients have finite numbers only, `(K,)`."""
    each = [leaf.isfinite().reshape(clients, -1).all(1) for leaf in tree.leaves(tensors)]
    return torch.stack(each).all(0)


def _stacks(algorithms: Mapping[str, Algorithm], population: Population) -> tuple[int, ...]:
    """How many settings share their work, largest first."""
    sample = population.data.stack([0])
    names = [work(algorithm.local, sample) for algorithm in algorithms.values() if algorithm.local is not None]
    alone = sum(name is None for name in names)
    shared = Counter(name for name in names if name is not None)
    return tuple(sorted(shared.values(), reverse=True)) + (1,) * alone
