"""Post-fit queries to the data holders: this process with its ranks, or sites, each for its own clients.

A `Kind` of query is a function of a `Holder`. For rows in this process it is called directly; sites receive its name
and tensors, look it up in `fedtorch.inference.questions`, compute, and answer as far as their policy allows.

>>> import torch, fedtorch as ft
>>> x = torch.ones(4, 1).double()
>>> data = ft.data.from_tensors([(x, 2 * x[:, 0]), (x, 4 * x[:, 0])])
>>> run = ft.run(ft.ep(ft.models.hierarchical.linear(ft.models.hierarchical.normal(1))), ft.InProcess(data), rounds=2)
>>> rows = Kind("rows", "densities", lambda holder, sent, about: holder.data.counts.sum(), lambda form: torch.zeros(()))
>>> ask(run, rows)
tensor(8)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.posterior import Posterior, posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

_MOST = 2**24  # numbers of one tensor that is sent


class Unanswerable(ValueError):
    """Raised by a holder that cannot answer a query; its message is sent to the caller, and contains nothing about
    rows.
    """


Evaluate = Callable[[FederatedData, Callable[[Tree, ClientData], Tree]], Tree]  # see `Clients.evaluate`


class Holder(NamedTuple):
    """Rows, names and models of a data holder for its answers. Tensors are on the CPU."""

    algorithm: Algorithm
    data: FederatedData  # the rows of its clients
    names: Tensor  # (K,) the numbers of their names, by which they draw
    evaluate: Evaluate
    first: int = 0  # the number of its first client among all
    frame: Any = None  # source of the rows, or rows to average over
    minimum: int = 1  # rows behind each number, for answers that choose the rows of a number
    drawn: Any = None  # source of draws, if they are not sent
    beside: Sequence[tuple[Holder, Mapping[str, Tensor]]] = ()  # other runs' rows, with their sent tensors

    @property
    def numbers(self) -> range:
        """Return the numbers of its clients among all."""
        return range(self.first, self.first + len(self.data))


class Form(NamedTuple):
    """Inputs that determine the shape of an answer."""

    algorithm: Algorithm
    clients: int  # number of the holder's clients
    sent: Mapping[str, Tensor]
    about: Mapping[str, Any]
    nodes: int  # nodes of answered mixtures


class Kind(NamedTuple):
    """Computation of a query, from sent tensors and JSON settings."""

    name: str
    tells: str  # entry required in a site's policy: "effects", "densities", "margins" or "checks"
    answer: Callable[[Holder, Mapping[str, Tensor], Mapping[str, Any]], Tree]
    like: Callable[[Form], Tree]  # zeros in the form of an answer
    tensors: tuple[str, ...] = ()  # names of the tensors that it takes
    settings: tuple[str, ...] = ()  # names of the settings that it takes
    by_client: bool = False  # whether an answer has a row per client, in order; else it is one sum over clients
    alone: bool = False  # whether a sum shows one client's part, as with weights that the server chooses
    answered_by: Callable[[Posterior], bool] = lambda posterior: False  # whether sites answer it after such a fit


def ask(
    run: Run,
    kind: Kind,
    sent: Mapping[str, Tensor] | None = None,
    frame: Any = None,
    *,
    drawn: Any = None,
    beside: Sequence[tuple[Run, Any]] = (),
    **about: Any,
) -> Tree:
    """Return the answer of all holders of a run's rows: a row per client, or a sum.

    Args:
        run: the run whose clients are asked.
        kind: the query.
        sent: tensors with names that `room` knows.
        frame: rows in this process that replace the clients' source.
        drawn: source of draws in this process, in place of sent ones.
        beside: other runs on the same clients, with their sources of draws.
        about: settings.

    Raises:
        ValueError: only some of the runs are on sites.
        RuntimeError: sites do not answer; the message gives the reason, and the policy entry that would allow it.
    """
    clients, tensors = run.clients, dict(sent or {})
    if len({hasattr(each.clients, "ask") for each in (run, *(other for other, _ in beside))}) > 1:
        raise ValueError("Expected runs that are all on sites or all on rows in this process, but got some of each")
    if hasattr(clients, "ask"):
        for i, (_, source) in enumerate(beside):
            tensors |= {f"{name} {i}": leaf for name, leaf in source.sent.items()}
        if beside:
            about["beside"] = [_described(other) for other, _ in beside]
        return clients.ask(run.outbox, kind, tensors, about)
    others: list[tuple[Holder, Mapping[str, Tensor]]] = [
        (local_holder(other)._replace(drawn=source), {}) for other, source in beside
    ]
    return kind.answer(local_holder(run, frame)._replace(drawn=drawn, beside=others), tensors, about)


def sent_beside(sent: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the tensors sent for the other run with this number.

    >>> sent_beside({"phi": torch.zeros(1), "phi 0": torch.ones(1)}, 0)
    {'phi': tensor([1.])}
    """
    return {name.removesuffix(f" {number}"): leaf for name, leaf in sent.items() if name.endswith(f" {number}")}


def _described(run: Run) -> dict[str, Any]:
    """Return how a site makes the algorithm and the rows of a run on sites again."""
    design, clients = posterior_of(run.algorithm).design, cast(Any, run.clients)
    return {**clients.described(), "design": None if design is None else design.to_json()}


def local_holder(run: Run, frame: Any = None) -> Holder:
    """Return this process as the holder of a run's rows; raise ValueError where they are at sites."""
    rows, names = rows_at_hand(run), numbers(tuple(run.population.names))
    return Holder(run.algorithm, rows, names, at_clients(run), 0, frame)


def at_clients(run: Run) -> Evaluate:
    """Return `Clients.evaluate` of a run in this process, for functions of models and rows on the CPU."""
    return on_cpu(partial(run.clients.evaluate, run.outbox))


def on_cpu(evaluate: Evaluate) -> Evaluate:
    """Return a version of `evaluate` that hands models and rows to the function on the CPU, and its results too.

    Clients may be trained on another device. Post-fit queries are computed once, in float64, partly by SciPy and
    pandas, which need the CPU.
    """

    def evaluated(data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        def own(model: Tree, block: ClientData) -> Tree:
            return tree.to(function(*tree.to((model, block), "cpu")), block.count.device)

        return tree.to(evaluate(data, own), "cpu")

    return evaluated


def room(shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return zeros for tensors of these shapes by name, in their sent form.

    Raises:
        ValueError: shapes that are none, or too large.

    >>> room({"phi": [2, 3], "key": []})["phi"].shape
    torch.Size([2, 3])
    """
    made = {}
    for name, shape in shapes.items():
        whole = isinstance(shape, list) and len(shape) <= 3 and all(type(n) is int and 0 <= n <= _MOST for n in shape)
        size = 1
        for n in shape if whole else ():
            size *= max(n, 1)
        if not whole or size > _MOST:
            raise ValueError(f"Expected the shape of {name!r}, but got {str(shape)[:100]}")
        made[name] = torch.empty(shape, dtype=torch.int64 if is_key(name) else torch.float64)
    return made


def is_key(name: str) -> bool:
    """Return whether a tensor that is sent under this name is a key of randomness.

    >>> is_key("key"), is_key("key 0"), is_key("phi 0")
    (True, True, False)
    """
    return name.split()[:1] == ["key"]


def rows_at_hand(run: Run) -> FederatedData:
    """Return a run's rows, on the CPU.

    Raises:
        ValueError: the rows are elsewhere.
    """
    if hasattr(run.population, "counts"):
        raise ValueError(
            "Expected rows in this process, but they are at the sites; run.summary() and predictions of new "
            "sites need none, and ranef, predict, marginal_effects, loo, waic, compare of rows, checks and forests "
            "what a site's policy tells, Policy(after_fit=…)"
        )
    return run.population.data.to("cpu")
