"""A run: the state and the loop over rounds.

A round is sample, outbox, scatter, client, gather, server, commit. A `Run` has the present state, the history and the
recorders; research code steps through it, `ft.run` runs to the end, a Lightning `Trainer` drives a `Federation`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedtorch import checkpoint, expected, functional, tree
from fedtorch._representation import run_html, run_line
from fedtorch.federation.algorithm import Algorithm, begun, check_algorithm, start_of
from fedtorch.federation.budget import exhausted
from fedtorch.federation.exchanges.carry import carried
from fedtorch.federation.local_schedule import check_length, check_round
from fedtorch.federation.populations.population import Clients, Population, check_population
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.cohorts import Asked, RoundKeys, checked_draws
from fedtorch.federation.runs.evaluation import Newcomers
from fedtorch.federation.runs.faults import Fates, Faults, check_work, fates, shares_of_work
from fedtorch.federation.runs.resuming import Resumable
from fedtorch.federation.runs.scored import Scored
from fedtorch.federation.runs.server_module import Modules
from fedtorch.federation.turn import Turn
from fedtorch.history import History, Recorder, Round, headline
from fedtorch.learns import as_frame, in_brief
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas as pd

    from fedtorch.tables.result_frame import ResultFrame

# rounds after which totals are recomputed from the clients' contributions, to remove accumulated rounding
TOTAL_ANEW = 100

Until = Callable[[History], bool]


class Run(Scored, Resumable):
    """A run of an algorithm on a population, before its first step.

    Args:
        algorithm: computations of clients and server.
        population: the clients, and where they run.
        parameters: start of training; default: the algorithm's own start.
        cohort: clients asked in each round: a number, drawn uniformly without replacement; their ids; or a function of
            the round's key and number, called once a round, such as `ft.poisson_cohort`; None asks all.
        faults: simulated faults; see `ft.dropouts`, `ft.stragglers`, `ft.lost_messages`, `ft.duplicated`.
        seed: seed of all randomness.
        record: recorders that follow the run, such as an `ft.Sampler`; their states are part of the run's.
        keep_losses: number of the clients' latest training losses stored for `client_losses`, 8 bytes each.
        on_bad_message: whether a message with NaN, Inf or a negative weight, or a client whose loader or training
            fails, stops the run before its round is committed, or is dropped, as if it were lost.

    Attributes:
        number: rounds done.
        server: the server's state.
        clients: the population's clients, bound to the algorithm.
        last: the last round that was done here, None before.
        goal: rounds in all that it was told to do last, None if nobody has said.
        ended: reason why it stopped before the requested rounds, "" if it did not.

    Raises:
        ValueError: no parameters to start from, a cohort larger than the population, clients that cannot take part.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor(y)) for y in ([1.0, 2.0], [3.0, 4.0])])
        >>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False))), ft.InProcess(data))
        >>> [round.number for round in run.rounds(2)], run.server["weight"].round(decimals=3)
        ([1, 2], tensor([[2., 3.]]))
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        parameters: Tree = None,
        *,
        cohort: Asked = None,
        faults: Faults | None = None,
        seed: int = 0,
        record: Recorder | Sequence[Recorder] = (),
        keep_losses: int = 1_000_000,
        on_bad_message: Literal["raise", "drop"] = "raise",
    ) -> None:
        if on_bad_message not in ("raise", "drop"):
            raise ValueError(f"Expected on_bad_message='raise' or 'drop', but got {on_bad_message!r}")
        check_algorithm(algorithm)
        check_population(population)
        parameters = start_of(algorithm, parameters)
        if faults is not None:
            expected.kind(faults, Faults, "faults= as made by ft.dropouts(0.3)", "join several by |")
            check_work(faults, algorithm)
        clients = len(population.names)
        self.algorithm, self.population, self.seed = algorithm, population, seed
        self.cohort, self.faults, self.on_bad_message = cohort, faults, on_bad_message
        self.recorders = tuple(record) if isinstance(record, Sequence) else (record,)
        if algorithm.budget is not None:
            cohort, self.recorders = algorithm.budget.cohort(cohort, clients), (*self.recorders, algorithm.budget)
        self._names = numbers(tuple(population.names))
        self._draw = checked_draws(cohort, clients, self._names)
        self.number = self.bytes_up = self.bytes_down = 0
        self.last: Round | None = None
        self.goal: int | None = None
        self.ended = ""
        self.log = History(keep_losses)
        self._begin = partial(begun, algorithm, parameters)
        server, state = self._begin(clients)
        hidden = carried(algorithm, population.carry, type(population).__name__)
        self.network = None
        if faults is not None and faults.twice is not None:
            from fedtorch.federation.runs.deliveries import Deliveries

            self.network = Deliveries(hidden, faults.twice)
        delivered = hidden if self.network is None else self.network.algorithm
        self.clients: Clients = population.bind(delivered, state)
        self._step = self.clients.step if self.network is None else partial(self.network.step, self.clients)
        self._newcomers = Newcomers(algorithm, state, clients, population.device)
        self._modules = Modules(algorithm, self._newcomers.state)
        self.server: Tree = tree.to(server, population.device)
        self._everybody = torch.arange(clients)
        self._keys = RoundKeys(seed)
        self.clients.introduce(lambda: {**self.fingerprint(), "start": checkpoint.describe(parameters)})

    def step(self, **ask: Any) -> Round:
        """Do one round; `ask` are further fields of its `Turn`, such as `limit`."""
        began, algorithm, everybody, self.ended = time.perf_counter(), self.algorithm, self._everybody, ""
        keys, done = self._keys(self.number), self.number
        if algorithm.schedule is not None and algorithm.schedule.rounds is not None:
            check_round(algorithm.schedule, done + 1)
        asked = None if self._draw is None else self._draw(keys.cohort, done)
        if algorithm.budget is not None:
            drawing = self._turn(done).keys(everybody if asked is None else asked)
            algorithm.budget.spend(self.number, asked, drawing)
        fate, share = Fates(asked), None
        if self.faults is not None:
            fate = fates(self.faults, keys.faults, asked, self._names)
            share = shares_of_work(self.faults, keys.faults, fate.hear, self._names)
        turn = self._turn(done, **ask, share=share)
        pending = self._step(algorithm.outbox(self.server), fate.hear, turn, fate.silent)
        if pending.refused or pending.failed:
            pending.check(self.population.names, self.number + 1, self.on_bad_message)
        if pending.aggregate is not None:
            self._take(pending.aggregate, keys.server)
            pending.commit()
        self.number += 1
        anew = algorithm.told is not None and algorithm.told.anew and self.number % TOTAL_ANEW == 0
        if anew and (total := self.clients.total()) is not None:
            self.server = self.server._replace(total=total)
        self.bytes_up, self.bytes_down = self.bytes_up + pending.bytes_up, self.bytes_down + pending.bytes_down
        if len(pending.away) or len(pending.late):
            fate = fate.besides(pending.away, pending.late)
        report = {} if algorithm.report is None else dict(algorithm.report(self.server))
        if algorithm.budget is not None:
            report.update(algorithm.budget.report())
        self.last = Round(
            self.number,
            self.server,
            self.clients,
            pending.ids,
            pending.info,
            pending.bytes_up,
            pending.bytes_down,
            everybody if asked is None else asked,
            *fate[2:],
            pending.repeated,
            torch.tensor(sorted({*pending.refused, *pending.failed}), dtype=torch.int64),
            report,
            self.tensors,
            self.population.names,
        )
        self.log.record(self.last, time.perf_counter() - began)
        for recorder in self.recorders:
            recorder.record(self.last)
        return self.last

    def _turn(self, done: int, **ask: Any) -> Turn:
        """Return the turn of all clients after a number of rounds."""
        return Turn(self._keys(done).client, done, **ask, names=self._names, goal=self.goal)

    def rounds(self, rounds: int | None = None, until: Until | None = None) -> Iterator[Round]:
        """Continue, and yield after each round, until `rounds` are done in total or `until(history)` holds.

        It also ends before a round that would exceed the algorithm's budget. Both conditions refer to the whole run: a
        run that was stopped and resumed ends where an uninterrupted one would.

        Raises:
            ValueError: neither is given.
        """
        if rounds is None and until is None:
            raise ValueError("Expected rounds= or until=, but got neither; to take a single round use run.step()")
        check_round(self.algorithm.schedule, rounds or 0)
        self.goal = rounds
        return self._rounds(rounds, until)

    def _rounds(self, rounds: int | None, until: Until | None) -> Iterator[Round]:
        while rounds is None or self.number < rounds:
            enough = bool(self.number and until is not None and until(self.log))
            if enough or exhausted(self.algorithm.budget):
                many = f"{self.number} rounds" if rounds is None else f"{self.number} of {rounds} rounds"
                self.ended = f"stopped after {many} {'by until=' if enough else 'when its budget was spent'}"
                return
            yield self.step()

    def __repr__(self) -> str:
        return run_line("Run", self, self.algorithm.settings, f"{len(self.population.names)} clients")

    def _repr_html_(self) -> str:
        return run_html("Run", self, self.algorithm.settings, f"{len(self.population.names)} clients")

    def __iter__(self) -> Iterator[Round]:
        raise TypeError("Expected a loop over run.rounds(...), but got one over the run itself; use run.rounds()")

    def _take(self, aggregate: Tree, key: Tensor) -> None:
        """Take the server's step."""
        if self.algorithm.told is not None:
            self.server = self.server._replace(total=tree.add(self.server.total, aggregate.told.value))
            aggregate = aggregate.fresh
        self.server = self.algorithm.server(self.server, aggregate, key)

    # -- results ------------------------------------------------------------------------------------------------------

    @property
    def history(self) -> pd.DataFrame:
        """Return a row per round: clients asked, clients that answered, losses, reports, bytes, time.

        See `fedtorch.history.History.frame`.
        """
        return self.log.frame()

    @property
    def client_losses(self) -> pd.DataFrame:
        """Return the clients' training losses in the rounds that they answered: `round`, `client`, `train_loss`."""
        return self.log.losses(self.population.names)

    def summary(self, level: float = 0.95, **options: Any) -> ResultFrame:
        """Return estimates of the coefficients: `estimate`, `sd`, interval (`low`, `high`), `n`.

        Rows are named by coefficient. `sd(age)` is the sd of a coefficient over clients, `cor(age, sex)` a correlation
        there, `sigma` the sd of the noise; `n` counts the rows behind an estimate, or the clients for parameters of
        their variation. Fits by draws have ArviZ's `r_hat` and `ess`. The frame converts itself to a table:
        `to_markdown()`, `to_html()`, `to_latex()`. If clients have agreed on a formula, means and sds of its columns
        are printed below it, "age: 50 ± 10", and are in `attrs["scales"]`.

        Args:
            level: probability of the intervals.
            options: the algorithm's; for `ft.ep` `given=corrected(run)` and `tolerance=`.

        Raises:
            TypeError: an algorithm without a posterior.

        Example:
            >>> import torch, fedtorch as ft
            >>> from fedtorch.models import hierarchical
            >>> x = torch.ones(20, 1, dtype=torch.float64)
            >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)])
            >>> model = hierarchical.linear(hierarchical.normal(1, names=["level"]), noise=0.1)
            >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30)
            >>> print(run.summary(level=0.9).to_markdown())
            | coefficient | estimate | sd | 90 % interval | n |
            | :-- | --: | --: | --: | --: |
            | level | 1.57 | 0.47 | 0.79 to 2.35 | 80 |
            | sd(level) | 1.05 | 0.37 | 0.56 to 1.73 | 4 |
        """
        table = posterior_of(self.algorithm).estimates(self, **options).table(level)
        if self.design is not None and self.design.constants:
            table.attrs["scales"] = self.design.constants
        return table

    def disclosure(self, brief: bool = False) -> pd.DataFrame:
        """Return the disclosed fields of a client or a site in this run, one row for each.

        Columns: `message` that contains it, `field`, `shape`, `of` (a client, a site's sum, a sum under masks),
        `exactness` (exact, rounded, noised), `reader`, the worst that the reader `learns`, by which `attack`, and the
        protection that `helps`. See `fedtorch.federation.disclosure`.

        Args:
            brief: whether similar fields share a row, with the first of them in `fields`.

        Example:
            >>> import torch, fedtorch as ft
            >>> data = ft.data.from_tensors([(torch.eye(2), torch.ones(2))] * 3)
            >>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False))), ft.InProcess(data))
            >>> set(run.disclosure()["reader"])
            {'the server'}
        """
        turn, carry = self._turn(self.number), self.population.carry
        table = as_frame(self.clients.disclosed(self.algorithm, carry, self.outbox, turn))
        return in_brief(table) if brief else table

    @property
    def outbox(self) -> Tree:
        """Return the server's current broadcast."""
        return self.algorithm.outbox(self.server)

    def tensors(self, clients: Tensor | Sequence[int] | None = None) -> Tree:
        """Return the tensors that clients (distinct numbers, default all) predict with, `(M, ...)`."""
        ids = self._everybody if clients is None else torch.as_tensor(clients, dtype=torch.int64)
        return self.clients.tensors(self.outbox, ids)

    def client_module(self, client: int | str) -> nn.Module:
        """Return a copy of the module with the tensors that `client` (number or name) predicts with."""
        number = expected.client_number(client, self.population.names)
        module = functional.load(self._modules.module, tree.map(lambda leaf: leaf[0].clone(), self.tensors([number])))
        if self.algorithm.posterior is not None:
            self.algorithm.posterior.finish(module, self.population.data[number])
        return module

    def global_module(self) -> nn.Module:
        """Return a copy of the module with the server's tensors; frozen ones, that no training changes, are its own.

        Raises:
            ValueError: the server does not hold a whole model (personal layers, separate training, local buffers).
        """
        holds = self._modules.of_server(self.outbox)
        holds.check_whole(self._modules.module)
        return functional.load(self._modules.module, holds.tensors)

    # Of this class in the reference.
    evaluate, predict, diagnosis = Scored.evaluate, Scored.predict, Scored.diagnosis
    state_dict, load_state_dict, fingerprint = Resumable.state_dict, Resumable.load_state_dict, Resumable.fingerprint
    save, load = Resumable.save, Resumable.load


def _left(until: Until, log: History) -> float | None:
    """Return the predicted number of remaining rounds, if `until` has an estimate."""
    trend = getattr(until, "left", None)
    return None if trend is None else trend(log)


def run(
    algorithm: Algorithm,
    population: Population,
    parameters: Tree = None,
    *,
    rounds: int | None = None,
    until: Until | None = None,
    cohort: Asked = None,
    faults: Faults | None = None,
    seed: int = 0,
    record: Recorder | Sequence[Recorder] = (),
    progress: bool = True,
) -> Run:
    """Build a `Run`, do its rounds with a progress bar if wanted, and return it; see `Run` and `Run.rounds`.

    Raises:
        ValueError: neither `rounds` nor `until` is given, or as for `Run`.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))] * 3)
        >>> ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data), rounds=2).number
        2
    """
    from fedtorch.progress import Progress

    made = Run(algorithm, population, parameters, cohort=cohort, faults=faults, seed=seed, record=record)
    check_length(algorithm.schedule, rounds, f"ft.run(…, rounds={rounds})")
    title = str(algorithm.settings.get("algorithm", "Rounds"))
    with Progress(title, rounds, shown=progress and population.leads) as shown:
        for round in made.rounds(rounds, until):
            shown.update(tell=partial(headline, round), left=None if until is None else partial(_left, until, made.log))
    return made
