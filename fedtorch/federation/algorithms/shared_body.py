r"""A shared body with personal heads: the body is averaged, and an algorithm for linear models trains the heads.

Client k predicts ⟨θ_k, φ_B(x)⟩. The body B is shared and the head θ_k is client k's own; they are trained in turn. In a
round a client

1. computes the features φ_B of its rows with the received body, and takes the round of the heads' algorithm on them,
   which sees a linear model: HM1 (`ft.matrix_normal`), expectation propagation (`ft.ep` of a `hierarchical.Model`) or
   separate heads (`ft.separate`);
2. trains the body with the new θ_k held fixed, and sends the body's change.

The server averages bodies as FedAvg does, and takes the server's step of the heads' algorithm. With one sufficiently
short gradient step, and heads whose round does not increase an objective that contains the clients' losses (HM1's, with
a known noise), no round increases it.

With heads of `ft.separate` in closed form it is FedRep; with `ft.ep` the body is trained with the posterior mean of
θ_k, given the other clients.

Source: Collins et al. (2021), "Exploiting shared representations for personalized federated learning", Algorithm 1,
for heads on their own; Yue, Al Kontar, Estrada Gómez, "Federated data analytics: a study on linear models", for HM1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, random, tree
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply, check_algorithm, check_solver, solved_by
from fedtorch.federation.algorithms.fedavg import LEARNS, Weight, checked_weight, rows_weight
from fedtorch.federation.exchanges.carry import adds_up
from fedtorch.federation.exchanges.exchange import Exchange, Mean, RowsOf, client_count
from fedtorch.federation.exchanges.star import star
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.solvers.prediction import unpadded
from fedtorch.federation.turn import Turn
from fedtorch.learns import tells
from fedtorch.models.linear import LinearHead
from fedtorch.models.rows import refuse
from fedtorch.tree import Tree

_HEAD = "coefficients"  # the name of θ in a LinearHead
_HEADS = 1  # key of the heads' part of a round


class _State(NamedTuple):
    """State of a client; leaves `(K, ...)`."""

    heads: Tree
    solver: Any  # state of the body's solver, with θ_k among its buffers


@tells(LEARNS)
class _Message(NamedTuple):
    """A client's message."""

    body: Mean  # change of the body
    heads: Tree


class _Outbox(NamedTuple):
    """Broadcast of the server; the heads' part has the form of their exchange."""

    body: Tree
    heads: Tree


class SharedBodyServer(NamedTuple):
    """State of the server."""

    body: dict[str, Tensor]  # the parameters of the feature map
    heads: Tree  # the server's state of the heads' algorithm
    total: Tree = None  # sum of the heads' persistent contributions


class _Parts(NamedTuple):
    """Functions and constants of a round."""

    local: LocalSolver
    heads: Algorithm
    weight: Weight
    lr: float

    def heads_of(self, server: SharedBodyServer) -> Tree:
        """Return the state of the heads' server, with the total that the run keeps."""
        return server.heads if self.heads.told is None else server.heads._replace(total=server.total)

    def coefficients(self, inbox: Tree, before: Tree, reply: Reply, rows: Any) -> Tensor:
        """Return θ_k after the heads' part of a round, `(K, p)`."""
        return posterior_of(self.heads).head(self.heads, inbox, before, reply, rows)


def shared_body(local: LocalSolver, heads: Algorithm, *, lr: float = 1.0, weight: Weight = rows_weight) -> Algorithm:
    """Build an averaged body under heads of another algorithm, trained in turn in every round.

    Args:
        local: solver of the body: of `ft.LinearHead(features, body, given=True)`, with `buffers="local"`.
        heads: an algorithm for linear models on the rows (φ(x), y), with the constant 1 as last feature if the
            `LinearHead` has an intercept: `ft.matrix_normal` or `ft.separate` of
            `ft.least_squares(ft.LinearHead(p, intercept=False))`, or `ft.ep` of
            `hierarchical.linear(hierarchical.normal(p))` and similar.
        lr: the server's step on the body.
        weight: data -> `(K,)` positive weights of the bodies; default: the number of rows.

    Shapes: server state is `SharedBodyServer`; client state has that of the heads' algorithm and of the local solver,
    with θ_k, `(K, p)`. A run's `parameters` are the body's.

    Raises:
        TypeError: a solver of another module, or heads that are no algorithm or have no coefficients.
        ValueError: coefficients that are trained with the body, a body without parameters; heads whose clients receive
            their neighbours' messages; when a population is bound, a number of features other than the heads'; in a
            round, features of a client that are not finite.

    Example:
        >>> import torch, fedtorch as ft
        >>> slope = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> head = ft.LinearHead(1, torch.nn.Sequential(slope, torch.nn.Tanh()), given=True, dtype=torch.float64)
        >>> body = ft.gradient_descent(head, steps=5, loss=torch.nn.functional.mse_loss, buffers="local",
        ...     optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02))
        >>> x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
        >>> data = ft.data.from_tensors([(x, a * torch.tanh(2 * x[:, 0]) + a * a) for a in (1.0, -1.0, 3.0)])
        >>> heads = ft.matrix_normal(ft.least_squares(ft.LinearHead(2, intercept=False, dtype=torch.float64)))
        >>> start = {"feature_map.0.weight": torch.tensor([[1.0]]).double()}
        >>> run = ft.run(ft.shared_body(body, heads), ft.InProcess(data), start, rounds=60)
        >>> run.tensors()["coefficients"].round(decimals=1)  # slope and level of each
        tensor([[ 1.,  1.],
                [-1.,  1.],
                [ 3.,  9.]], dtype=torch.float64)
    """
    check_solver(local)
    check_algorithm(heads)
    expected.positive(lr=lr)
    _check_parts(local, heads)
    parts = _Parts(local, heads, weight, lr)
    told = heads.told
    described = {f"heads.{name}": value for name, value in heads.settings.items()}
    return Algorithm(
        init=partial(_init, parts=parts),
        outbox=lambda server: _Outbox(server.body, heads.outbox(parts.heads_of(server))),
        client=partial(_client, parts=parts),
        server=partial(_server, parts=parts),
        model=partial(_model, parts=parts),
        exchange=heads.exchange if adds_up(heads.exchange) else _beside(heads.exchange),
        prepare=partial(_prepare, parts=parts),
        told=None if told is None else told._replace(of=lambda state: told.of(state.heads)),
        report=None if heads.report is None else partial(_report, heads.report),
        **solved_by(local, algorithm="shared_body", lr=lr, weight=weight, **described),
    )


def _check_parts(local: LocalSolver, heads: Algorithm) -> None:
    head = local.module
    if not isinstance(head, LinearHead):
        raise TypeError(
            f"Expected a local solver of a LinearHead, but got one of {type(head).__name__}; pass the body as its "
            "feature map: ft.LinearHead(features, body, given=True)"
        )
    buffers = getattr(local.init(local.parameters), "buffers", {})
    if _HEAD in local.parameters or _HEAD not in buffers:
        raise ValueError(
            "Expected coefficients that stay at each client while its body is trained, but got trained or averaged "
            'ones; write ft.gradient_descent(ft.LinearHead(features, body, given=True), buffers="local", ...)'
        )
    if not (adds_up(heads.exchange) or _has_rows(heads.exchange)):
        raise ValueError(
            "Expected heads with a server, over a star or private rows, but got another exchange; on a graph write "
            'ft.gtv(local, network, {"feature_map.*": ..., "coefficients": ...})'
        )
    start = heads.start if isinstance(heads.start, dict) else {}
    wanted, got = buffers[_HEAD].shape, start.get(_HEAD, buffers[_HEAD]).shape
    if wanted != got:
        raise ValueError(
            f"Expected heads of {wanted.numel()} coefficients, one for each feature of the body and the intercept, but "
            f"got {got.numel()}; write ft.LinearHead({wanted.numel()}, intercept=False) for the heads"
        )
    if not (_HEAD in start or posterior_of(heads).size):
        raise TypeError(
            f"Expected heads with coefficients, but got an algorithm of {sorted(start)}; use ft.matrix_normal or "
            "ft.separate of a LinearHead, or ft.ep of a hierarchical.Model"
        )


def _has_rows(exchange: Exchange) -> bool:
    """Return whether a client receives its own row of the outbox and the server gets the messages unchanged."""
    one = torch.ones(1)
    return isinstance(exchange.scatter(one, slice(0, 1)), Tensor) and isinstance(
        exchange.gather(Mean(one, one), slice(0, 1)), RowsOf
    )


def _beside(exchange: Exchange) -> Exchange:
    """Build an exchange of rows in which every client also receives the body."""

    def traffic(outbox: _Outbox, messages: Tree, ids: Any) -> tuple[int, int]:
        up, down = exchange.traffic(outbox.heads, messages, ids)
        return up, down + star().traffic(outbox.body, messages, ids)[1]

    return exchange._replace(
        scatter=lambda outbox, ids: _Outbox(
            tree.expand(outbox.body, client_count(ids)), exchange.scatter(outbox.heads, ids)
        ),
        traffic=traffic,
    )


def _init(parameters: Tree, clients: int, *, parts: _Parts) -> tuple[SharedBodyServer, _State]:
    heads, state = parts.heads.init(parts.heads.start, clients)
    return SharedBodyServer(parameters, heads), _State(state, parts.local.init(parameters))


def _prepare(data: Any, *, parts: _Parts) -> Any:
    """Check that the body takes the rows, and the heads' algorithm its features."""
    prepared = checked_weight(parts.local.prepare(data), parts.weight)
    local, parameters = parts.local, tree.to(parts.local.parameters, data.count.device)
    start, state = tree.expand((parameters, local.init(parameters)), len(data.count))
    parts.heads.prepare(_features(local, start, state, data))
    return prepared


def _features(local: LocalSolver, body: Tree, state: Any, data: Any) -> Any:
    """Return the clients' rows (φ(x), y) in evaluation mode: the head's predictions with unit vectors for θ."""
    theta = state.buffers[_HEAD]
    eye = torch.eye(theta.shape[-1], dtype=theta.dtype, device=data.count.device)
    x, y = data.batch
    tensors = {**local.tensors(body, state), _HEAD: tree.expand(eye, len(theta))}
    phi = unpadded(local.predict, tensors, x, data.mask)
    refuse(
        ~phi.isfinite().flatten(1).all(1),
        "Expected finite features, but the shared body gives NaN or Inf; train it with a smaller learning rate",
    )
    return data._replace(batch=(phi, y))


def _client(inbox: _Outbox, state: _State, data: Any, turn: Turn, *, parts: _Parts) -> Reply:
    """Take the heads' round on the body's features, then the body's steps with the new heads."""
    local, heads = parts.local, parts.heads
    rows = heads.prepare(_features(local, inbox.body, state.solver, data))
    reply = heads.client(inbox.heads, state.heads, rows, turn.with_key(random.fold_in(turn.key, _HEADS)))
    old = state.solver.buffers[_HEAD]
    theta = parts.coefficients(inbox.heads, state.heads, reply, rows).to(old)
    theta = torch.where(theta.isfinite().all(-1, keepdim=True), theta, old)
    solver = state.solver._replace(buffers={**state.solver.buffers, _HEAD: theta})
    solved = local.solve(inbox.body, solver, data, None, turn)
    change = tree.subtract(solved.parameters, inbox.body)
    message = _Message(Mean(change, parts.weight(data)), reply.message)
    return Reply(message, _State(reply.state, solved.state), {**reply.info, **solved.info})


def _server(state: SharedBodyServer, aggregate: Any, key: Tensor, *, parts: _Parts) -> SharedBodyServer:
    """Average the bodies, and take the server's step of the heads' algorithm."""
    if isinstance(aggregate, RowsOf):
        change, rows = aggregate.message
        aggregate = _Message(change._replace(value=_mean(change)), RowsOf(aggregate.ids, rows))
    body = tree.add_scaled(state.body, aggregate.body.value, parts.lr)
    heads = parts.heads.server(parts.heads_of(state), aggregate.heads, key)
    return state._replace(body=body, heads=heads if parts.heads.told is None else heads._replace(total=None))


def _mean(rows: Mean) -> Tree:
    """Return the weighted mean of messages `(M, ...)`, in their dtypes."""
    exchange = star()
    whole = exchange.finish(exchange.gather(rows, slice(0, len(rows.weight)))).value
    return tree.map(lambda mean, row: mean.to(row.dtype), whole, rows.value)


def _model(inbox: _Outbox, state: _State, *, parts: _Parts) -> Tree:
    return parts.local.tensors(inbox.body, state.solver)


def _report(report: Callable[[Tree], Any], server: SharedBodyServer) -> Any:
    return report(server.heads)
