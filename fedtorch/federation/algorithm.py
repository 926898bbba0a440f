"""The interface of algorithms. Read this file first.

An *algorithm* is a value of pure functions. In a communication round the server's `outbox` is scattered by the
`exchange` to the clients of the cohort, each runs `client` on its own data, their messages are gathered, and `server`
takes the aggregate. The client axis is a batch dimension: every per-client tensor is `(K, ...)`, one client is `K = 1`
and an empty block `K = 0`, so an algorithm is written once and runs stacked, in chunks, over ranks and elsewhere.

Functions must not change their arguments in place: inboxes, states and data may be views of shared memory.

A user-defined algorithm whose server averages its clients' solutions:

>>> import torch, fedtorch as ft
>>> from fedtorch.federation.algorithm import check_solver, identity, solved_by
>>> def plain_mean(local: ft.LocalSolver) -> ft.Algorithm:
...     check_solver(local)
...     def client(inbox, state, data, turn):
...         solved = local.solve(inbox, state, data, None, turn)
...         return ft.Reply(ft.Mean(solved.parameters, torch.ones(len(turn.key))), solved.state, solved.info)
...     return ft.Algorithm(
...         init=lambda parameters, clients: (parameters, local.init(parameters)),
...         outbox=identity,
...         client=client,
...         server=lambda parameters, aggregate, key: aggregate.value,
...         model=local.tensors,
...         prepare=local.prepare,
...         **solved_by(local, algorithm="plain mean"),
...     )
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor(y)) for y in ([1.0, 2.0], [3.0, 4.0])])
>>> algorithm = plain_mean(ft.least_squares(torch.nn.Linear(2, 1, bias=False)))
>>> ft.run(algorithm, ft.InProcess(data), rounds=1).server["weight"].round(decimals=3)
tensor([[2., 3.]])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from fedtorch import expected, functional, tree
from fedtorch._representation import method, one_line
from fedtorch.federation.budget import Budget
from fedtorch.federation.exchanges.exchange import Exchange, sum_over
from fedtorch.federation.exchanges.star import star
from fedtorch.federation.local_schedule import LocalSchedule
from fedtorch.federation.posterior import Posterior
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


class Reply(NamedTuple):
    """Return value of `Algorithm.client` for `K` clients.

    Example:
        >>> import torch, fedtorch as ft
        >>> ft.Reply(ft.Sum(torch.ones(2, 3)), {}, {"loss": torch.zeros(2)}).message.value.shape  # of two clients
        torch.Size([2, 3])
    """

    message: Tree  # its nodes are Mean or Sum; None without a message
    state: Tree  # (K, ...) never leaves the client
    info: dict[str, Tensor]  # (K,) each, diagnostics for the log; no algorithm reads them


class Quadratic(NamedTuple):
    r"""Quadratic term added to a client's loss: :math:`\frac{\lambda}{2}\|x\|^2 - \langle h, x\rangle`.

    Example:
        >>> import torch, fedtorch as ft
        >>> near_two = ft.Quadratic(torch.tensor([1.0]), {"weight": torch.tensor([[2.0]])})  # ½x² − 2x, of one client
        >>> near_two.precision_of("weight")
        tensor([1.])
    """

    precision: Tensor | dict[str, Tensor]  # (K,) λ, one for all parameters or one for each by name
    shift: Tree  # (K, ...) h, in the structure of the parameters

    def precision_of(self, name: str) -> Tensor:
        """Return the λ of one parameter, `(K,)`."""
        return self.precision[name] if isinstance(self.precision, dict) else self.precision


class Local(NamedTuple):
    """Return value of a local solver for `K` clients.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))])
        >>> local = ft.least_squares(torch.nn.Linear(2, 1, bias=False))
        >>> start = ft.tree.expand(local.parameters, 1)
        >>> rows = local.prepare(data.stack(torch.tensor([0])))
        >>> solved = local.solve(start, local.init(start), rows, None, ft.Turn(ft.random.key(0)[None], 0))
        >>> solved.parameters["weight"].round(decimals=3)
        tensor([[[1., 2.]]])
    """

    parameters: Tree  # (K, ...)
    state: Tree  # (K, ...) state for the next round
    lr_sum: Tensor  # (K,) sum of the learning rates over steps
    info: dict[str, Tensor]  # (K,) each


class Solve(Protocol):
    """Solve the local problems of `K` clients, the signature of local solvers.

    Example:
        >>> import dataclasses, torch, fedtorch as ft
        >>> exact = ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> def halfway(start, state, data, quadratic, turn):  # from where the client starts to its solution
        ...     solved = exact.solve(start, state, data, quadratic, turn)
        ...     return solved._replace(parameters=ft.tree.map(lambda a, b: (a + b) / 2, start, solved.parameters))
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([8.0]))])
        >>> algorithm = ft.fedavg(dataclasses.replace(exact, solve=halfway))
        >>> run = ft.run(algorithm, ft.InProcess(data), {"weight": torch.zeros(1, 1)}, rounds=2)
        >>> run.server["weight"].round(decimals=3)
        tensor([[6.]])
    """

    def __call__(self, start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, turn: Turn) -> Local: ...


@dataclass(frozen=True)
class LocalSolver:
    """Describe how a client's problem is solved: `local.solve(start, state, data, quadratic, turn) -> Local`.

    Attributes:
        solve: the solver itself, on stacked clients.
        parameters: start of training, one client's tree `{name: tensor}`.
        init: parameters -> one client's solver state (optimiser moments, schedule position, buffers).
        predict: (tensors `(K, ...)`, inputs `(K, N, ...)`) -> outputs `(K, N, ...)`, in evaluation mode.
        tensors: (parameters, solver state) -> all tensors that a client predicts with, buffers included.
        prepare: data -> data, once per block: checks, Gram matrices, factorisations.
        module: the `nn.Module` of these parameters, a private copy.
        settings: the solver's arguments, by name.
        statistics: prepared data -> `SufficientStatistics`, if the solver has them and they are the only permitted use
            of rows; None if they are computed from the rows.
        budget: the privacy budget of its rounds, if it protects the rows it trains on.
        schedule: its learning rates and minibatches; None if it ignores `rates` and `limit` of a turn.
        family: distribution of responses whose mean negative log-likelihood it minimises; "gaussian": the mean squared
            error.

    Example:
        >>> import torch, fedtorch as ft
        >>> local = ft.least_squares(torch.nn.Linear(2, 1))
        >>> sorted(local.parameters)
        ['bias', 'weight']
    """

    solve: Solve
    parameters: dict[str, Tensor]
    init: Callable[[Tree], Tree]
    predict: Callable[[Tree, Tree], Tree]
    tensors: Callable[[Tree, Tree], Tree]
    prepare: Callable[[Any], Any]
    module: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    statistics: Callable[[Any], Any] | None = None
    budget: Budget | None = None
    schedule: LocalSchedule | None = None
    family: str = "gaussian"

    def __repr__(self) -> str:
        return one_line(partial(method, {"solver": "LocalSolver", **self.settings}))


def check_solver(local: LocalSolver) -> None:
    """Raise TypeError unless it is a local solver."""
    advice = "make one of a module: ft.gradient_descent(module, epochs=1), ft.lightning_fit or ft.least_squares"
    expected.kind(local, LocalSolver, "a local solver", advice)


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise TypeError unless it is an algorithm.

    Example:
        >>> import fedtorch as ft
        >>> check_algorithm(ft.fedavg)  # not called
        Traceback (most recent call last):
        TypeError: Expected an algorithm, but got function; make one with ft.fedavg(...) or another of the package
    """
    advice = "make one with ft.fedavg(ft.gradient_descent(module, epochs=1)) or another of the package"
    expected.kind(algorithm, Algorithm, "an algorithm", advice)


def identity(value: Any) -> Any:
    """Return its argument."""
    return value


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm; vary one by `algorithm | wrapper`, see `Wrapper`, or `dataclasses.replace`.

    Attributes:
        init: (parameters, number of clients) -> (server state, one client's state).
        outbox: server state -> broadcast.
        client: (inbox, state, data, turn), all `(K, ...)` -> `Reply`.
        server: (server state, aggregate, key) -> server state; not called without answers. The aggregate has the dtypes
            of the messages, except integers, whose sums and means are float64.
        model: (inbox, state), `(K, ...)` -> the tensors each client predicts with, `(K, ...)`.
        exchange: routing and aggregation of messages.
        prepare: data -> data, once per block.
        told: persistent contributions of clients, such as control variates, sites or models on a graph; None without
            any.
        report: server state -> numbers for the history after every round, by name.
        settings: the algorithm's arguments, by name, for fingerprints and loggers.
        start: default start parameters.
        predict: (tensors `(K, ...)`, inputs `(K, N, ...)`) -> outputs `(K, N, ...)`, for evaluation.
        module: module for `client_module` and `global_module`, which return copies.
        budget: privacy budget of its rounds, which a run checks before every round.
        schedule: of the clients' local solver; None without one.
        weight: data -> `(K,)` weights of messages in a `Mean`; a server compares numbers of rows with those reported by
            sites. None if messages have others.
        wrapped: stages of the wrappers that have been applied, by name, the innermost first.
        posterior: post-fit queries, such as named quantities for `Run.summary`: only the algorithm can interpret its
            server's state. None if there are parameters only.

    Example:
        >>> import dataclasses, torch, fedtorch as ft
        >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))
        >>> algorithm.settings["algorithm"]
        'fedavg'
        >>> watched = dataclasses.replace(algorithm, report=lambda server: {"norm": server["weight"].norm()})
    """

    init: Callable[[Tree, int], tuple[Tree, Tree]]
    outbox: Callable[[Tree], Tree]
    client: Callable[[Tree, Tree, Any, Turn], Reply]
    server: Callable[[Tree, Tree, Tensor], Tree]
    model: Callable[[Tree, Tree], Tree]
    exchange: Exchange = field(default_factory=star)
    prepare: Callable[[Any], Any] = identity
    told: Told | None = None
    report: Callable[[Tree], Mapping[str, float | Tensor]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    start: Tree = None
    predict: Callable[[Tree, Tree], Tree] | None = None
    module: nn.Module | None = None
    budget: Budget | None = None
    schedule: LocalSchedule | None = None
    weight: Callable[[Any], Tensor] | None = None
    wrapped: Mapping[str, int] = field(default_factory=dict)
    posterior: Posterior | None = None

    def __repr__(self) -> str:
        return one_line(partial(method, self.settings))

    def __or__(self, wrapper: Callable[[Algorithm], Algorithm]) -> Algorithm:
        """Return the wrapped algorithm, the left wrapper innermost; see `fedtorch.federation.wrapper`."""
        if not (callable(wrapper) and hasattr(wrapper, "stage")):
            kind = getattr(wrapper, "__qualname__", type(wrapper).__qualname__)
            raise TypeError(
                "Expected a wrapper such as attacks.sign_flip([0]) or robust.rule(robust.median()), but got "
                f"{kind}; call the function that makes it, or make one with ft.Wrapper"
            )
        return wrapper(self)


def solved_by(local: LocalSolver, *, weight: Callable[[Any], Tensor] | None = None, **settings: Any) -> dict[str, Any]:
    """Return the fields of an algorithm whose clients solve with `local`: start, prediction, weight and settings."""
    settings = settings if weight is None else {**settings, "weight": weight}
    settings = {**settings, **{f"local.{name}": value for name, value in local.settings.items()}}
    same = {"start": local.parameters, "predict": local.predict, "module": local.module, "budget": local.budget}
    return {"settings": settings, "schedule": local.schedule, "weight": weight, **same}


def start_of(algorithm: Algorithm, parameters: Tree = None) -> Tree:
    """Return where a run starts: at `parameters`, in the dtypes of the algorithm's own start, or at that.

    Raises:
        ValueError: neither is given, or the parameters are not finite or have other names or shapes.

    Example:
        >>> import torch, fedtorch as ft
        >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False)))
        >>> start_of(algorithm, {"weight": torch.tensor([[1.0, 2.0]], dtype=torch.float64)})  # float32, as the module
        {'weight': tensor([[1., 2.]])}
    """
    if parameters is None:
        if algorithm.start is None:
            raise ValueError(
                "Expected parameters= to start from, because this algorithm has no start of its own; such as "
                "ft.run(ft.gibbs(…), population, torch.zeros(3)) for three coefficients, or ft.normal_em(columns=3)"
            )
        return algorithm.start
    if algorithm.start is not None:
        advice = (
            "pass a tree like algorithm.start, such as dict(module.named_parameters()), with the module's buffers "
            "where they are averaged"
        )
        parameters = _as_sent(algorithm, parameters)
        expected.like(parameters, algorithm.start, "parameter", advice)
        parameters = tree.map(lambda start, new: new.to(start.dtype), algorithm.start, parameters)
    for name, leaf in tree.items(parameters):
        if not bool(leaf.isfinite().all()):
            raise ValueError(f"Expected finite parameters, but got NaN or Inf in {name!r}; start from others")
    return parameters


def _as_sent(algorithm: Algorithm, parameters: Tree) -> Tree:
    """Return parameters in the averaged form, in which buffers with infinite or NaN entries are in two parts."""
    start = algorithm.start
    if algorithm.module is None or not isinstance(parameters, dict) or not isinstance(start, dict):
        return parameters
    parted = [n for n, original in algorithm.module.named_buffers() if n in start and start[n].shape != original.shape]
    unparted = {name: leaf for name, leaf in parameters.items() if name in parted and leaf.shape != start[name].shape}
    return {**parameters, **{name: functional.finite_parts(leaf) for name, leaf in unparted.items()}}


def first_total(algorithm: Algorithm, state: Tree, clients: int) -> Tree:
    """Return the total of the persistent contributions with all clients in their initial `state`.

    Example:
        >>> import torch, fedtorch as ft
        >>> path = ft.Network.from_edges([(0, 1), (1, 2)])
        >>> algorithm = ft.gtv(ft.least_squares(torch.nn.Linear(1, 1, bias=False)), path, alpha=0.5)
        >>> _, state = algorithm.init({"weight": torch.ones(1, 1)}, 3)
        >>> first_total(algorithm, state, clients=3)["weight"].flatten()  # each hears ones of its neighbours
        tensor([1., 2., 1.], dtype=torch.float64)
    """
    assert algorithm.told is not None
    initial = algorithm.told.of(tree.expand(state, 1))
    everybody = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape[1:]), initial)
    return sum_over(algorithm.exchange, everybody, slice(0, clients))


def begun(algorithm: Algorithm, parameters: Tree, clients: int) -> tuple[Tree, Tree]:
    """Return (server state, one client's state) before the first round, with the total of contributions.

    Example:
        >>> import torch, fedtorch as ft
        >>> algorithm = ft.scaffold(ft.least_squares(torch.nn.Linear(1, 1, bias=False)))
        >>> server, state = begun(algorithm, {"weight": torch.ones(1, 1)}, clients=3)
        >>> server.population, server.total.clients
        (tensor(3), tensor(0., dtype=torch.float64))
    """
    server, state = algorithm.init(tree.map(lambda leaf: leaf.detach().clone(), parameters), clients)
    if algorithm.told is not None:
        server = server._replace(total=first_total(algorithm, state, clients))
    return server, state
