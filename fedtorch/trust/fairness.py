r"""Fairness between clients and between groups: q-FFL, agnostic federated learning, gaps, augmentation.

q-FFL minimises :math:`\sum_k F_k^{q+1}/(q+1)`: the larger q, the more a client with a large loss F_k counts. With the
clients' solutions :math:`\theta_k` and :math:`\Delta_k = (\theta - \theta_k) / \eta` its round is

.. math:: \theta \leftarrow \theta - \frac{\sum_k F_k^q \Delta_k}{\sum_k h_k}, \qquad
    h_k = q F_k^{q-1} \|\Delta_k\|^2 + F_k^q / \eta,

a mean with weights h_k. Agnostic federated learning minimises the largest loss of any mixture of clients,
:math:`\min_\theta \max_\lambda \sum_k \lambda_k F_k(\theta)`: clients with larger losses get larger weights,
:math:`\lambda_k \propto w_k e^{\gamma \sum_t F_k(\theta_t)}`, summed over the rounds since its first. (The source
projects λ + γF onto the simplex in place of this exponentiated step.) A client keeps its weight to itself; its weighted
step and loss are a *persistent* contribution: a client that is not asked in a round counts with its last answer, so
that all are in the mixture. (Means over a cohort do not compare clients that are not asked together.)

Source: Li, Sanjabi, Beirami and Smith (2020), "Fair resource allocation in federated learning", Algorithm 2 (q-FedAvg);
Mohri, Sivek and Suresh (2019), "Agnostic federated learning", equation (6); the memory of last answers is that of
Schmidt, Le Roux and Bach (2017), "Minimizing finite sums with the stochastic average gradient"; requirement KR5 of
Jung, "Federated learning: from theory to practice", section 8.2.5 and figure 8.1.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch._lazy import only
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply, solved_by
from fedtorch.federation.algorithms.fedavg import (
    Message,
    Weight,
    averaged_buffers,
    checked_weight,
    message,
    rows_weight,
    stepped,
    trained,
)
from fedtorch.federation.exchanges.exchange import Mean
from fedtorch.federation.runs.evaluation import inputs_and_targets
from fedtorch.federation.runs.run import Run
from fedtorch.federation.solvers.prediction import unpadded
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

__all__ = ["agnostic", "q_ffl", "swapped", "watch_groups"]
__dir__ = only(__all__)

_MOST = 60.0  # largest logarithm of a weight; e⁶⁰ leaves room in float32 for weighted steps
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs (K, N, ...), targets (K, N, ...)) -> (K, N)


class _Rows(NamedTuple):
    """A block's data."""

    data: Tree  # prepared by the local solver
    rows: ClientData


class _Told(NamedTuple):
    """The running totals of a client of agnostic learning, `(K, ...)` of clients."""

    change: Tree  # of the parameters, and values of the averaged buffers, times the weight
    weight: Tensor  # float64; 0 before its first answer
    loss: Tensor  # at the server's parameters, times the weight


class _AgnosticState(NamedTuple):
    """A client's own; leaves `(K, ...)`."""

    excess: Tensor  # Σ_t F_k − the mixture's loss of the round before
    told: _Told
    solver: Tree


class AgnosticServer(NamedTuple):
    """The server's state, which it sends to the clients."""

    parameters: Tree
    loss: Tensor  # () the mixture's, at the parameters of the round before
    total: Tree = None  # of the persistent contributions


def q_ffl(local: LocalSolver, loss: Loss, q: float, *, lr: float) -> Algorithm:
    """Build q-FFL by q-FedAvg; with q = 0 it is FedAvg with equal weights.

    Args:
        local: solver of a client's own problem, by steps.
        loss: per row, not negative, the one that `local` minimises.
        q: degree of fairness, at least 0.
        lr: η, the step of the clients.

    Shapes: server state and outbox are the parameters; client state is the solver's, `(K, ...)`.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import fairness
        >>> one = torch.ones(1, 1)
        >>> data = ft.data.from_tensors([(one, one[0]), (2 * one, -2 * one[0])])  # losses (w − 1)² and 4 (w + 1)²
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False), steps=1, lr=0.1)
        >>> squared = lambda output, y: (output[..., 0] - y).square()
        >>> for q in (0.0, 1.0):  # for large q it would be −1/3, where both losses are 16/9
        ...     algorithm = fairness.q_ffl(local, squared, q, lr=0.1)
        ...     run = ft.run(algorithm, ft.InProcess(data), {"weight": torch.zeros(1, 1)}, rounds=9)
        ...     print(round(run.server["weight"].item(), 2))
        -0.6
        -0.43
    """
    if not (q >= 0 and lr > 0):
        raise ValueError(f"Expected q of at least 0 and a positive lr, but got {q} and {lr}")
    return Algorithm(
        init=lambda parameters, clients: (parameters, local.init(parameters)),
        outbox=lambda parameters: parameters,
        client=partial(_fair_client, local, loss, q, lr),
        server=lambda parameters, aggregate, key: stepped(parameters, aggregate),
        model=local.tensors,
        prepare=lambda data: _Rows(local.prepare(checked_weight(data, rows_weight)), data),
        **solved_by(local, algorithm="q_ffl", q=q, lr=lr),
    )


def agnostic(
    local: LocalSolver, loss: Loss, gamma: float, *, lr: float = 1.0, weight: Weight = rows_weight
) -> Algorithm:
    """Return agnostic federated learning: FedAvg whose weights grow with the clients' losses.

    Args:
        local: solver of a client's own problem.
        loss: per row, the one that `local` minimises.
        gamma: γ, the step of the weights' logarithms, at least 0; 0 is FedAvg. If clients are asked rarely, it and
            their steps have to be small.
        lr: the server's step.
        weight: data -> `(K,)` initial weights.

    Shapes: server state is `AgnosticServer`, outbox the same without the total; client state has the sum of its losses,
    `(K,)`, and its contribution, `(K, ...)`.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> import math, torch, fedtorch as ft
        >>> from fedtorch.trust import fairness
        >>> data = ft.data.from_tensors([(torch.eye(1), torch.tensor([y])) for y in (1.0, 2.0)])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False), steps=1, lr=0.1)
        >>> squared = lambda output, y: (output[..., 0] - y).square()
        >>> algorithm = fairness.agnostic(local, squared, gamma=math.log(2) / 2)
        >>> run = ft.run(algorithm, ft.InProcess(data), {"weight": torch.zeros(1, 1)}, rounds=1)
        >>> run.server.parameters["weight"].round(decimals=4)  # the mean of steps of 0.2 and 0.4
        tensor([[0.3000]])
        >>> _ = run.step()
        >>> run.server.loss.round(decimals=4)  # of 0.49 and 2.89, the second with 2^((2.89 − 0.49) / 2) the weight
        tensor(2.1622, dtype=torch.float64)
    """
    if not (gamma >= 0 and lr > 0):
        raise ValueError(f"Expected gamma of at least 0 and a positive lr, but got {gamma} and {lr}")
    zero = torch.zeros((), dtype=torch.float64)

    def init(parameters: Tree, clients: int) -> tuple[AgnosticServer, _AgnosticState]:
        nothing = _Told(tree.map(torch.zeros_like, parameters), zero, zero)
        return AgnosticServer(parameters, zero), _AgnosticState(zero, nothing, local.init(parameters))

    def server(state: AgnosticServer, aggregate: None, key: Tensor) -> AgnosticServer:
        weight, averaged = float(state.total.weight), averaged_buffers(local)
        mean = tree.scale(state.total.change, 1 / weight)
        received = Message(
            Mean(trained(mean, averaged), state.total.weight),
            Mean({name: mean[name] for name in averaged}, state.total.weight),
        )
        moved = stepped(state.parameters, received, lr)
        return state._replace(parameters=moved, loss=state.total.loss / state.total.weight)

    return Algorithm(
        init=init,
        outbox=lambda state: state._replace(total=None),
        client=partial(_agnostic_client, local, loss, gamma, weight),
        server=server,
        model=lambda inbox, state: local.tensors(inbox.parameters, state.solver),
        prepare=lambda data: _Rows(checked_weight(local.prepare(data), weight), data),
        told=Told(lambda state: state.told),
        report=lambda state: {"mixture_loss": state.loss},
        **solved_by(local, algorithm="agnostic", gamma=gamma, lr=lr, weight=weight),
    )


def swapped(data: FederatedData, column: int, values: Sequence[float]) -> FederatedData:
    """Return each row once with each value of a sensitive feature, so that labels cannot depend on it (figure 8.1).

    Args:
        data: rows (x `(d,)`, y).
        column: index of the sensitive feature in x.
        values: its possible values.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import fairness
        >>> data = ft.data.from_tensors([(torch.tensor([[5.0, 1.0]]), torch.tensor([7.0]))])
        >>> fairness.swapped(data, column=1, values=[0.0, 1.0])[0]
        (tensor([[5., 0.],
                [5., 1.]]), tensor([7., 7.]))
    """
    x, y = data.rows
    wide = x[:, None].repeat(1, len(values), 1)
    wide[:, :, column] = torch.tensor(list(values), dtype=x.dtype, device=x.device)
    rows = wide.flatten(0, 1), y.repeat_interleave(len(values), 0)
    return dataclasses.replace(data, rows=rows, counts=data.counts * len(values))


def group_scores(
    run: Run, data: FederatedData, metric: Any, group: Callable[[Tree], Tensor], groups: Sequence[float]
) -> dict[float, float]:
    """Return a metric over the rows of every group; the gap between groups is the largest minus the smallest.

    Args:
        run: provides the clients' models.
        data: rows of its clients.
        metric: as for `Run.evaluate`.
        group: rows -> the group of every row, `(total,)`.
        groups: all groups.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import fairness
        >>> data = ft.data.from_tensors([(torch.tensor([[0.0], [0.0], [1.0]]), torch.tensor([1.0, 3.0, 4.0]))])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> run = ft.Run(ft.fedavg(local), ft.InProcess(data), {"weight": torch.zeros(1, 1)})  # predicts 0
        >>> squared = lambda output, y: (output[..., 0] - y).square()
        >>> fairness.group_scores(run, data, squared, group=lambda rows: rows[0][:, 0], groups=[0.0, 1.0])
        {0.0: 5.0, 1.0: 16.0}
    """
    member, scores = group(data.rows), {}
    client = torch.arange(len(data)).repeat_interleave(data.counts)
    for value in groups:
        chosen = (member == value).nonzero()[:, 0]
        counts = torch.bincount(client[chosen.cpu()], minlength=len(data))
        part = dataclasses.replace(data, rows=tree.take(data.rows, chosen), counts=counts, allow_empty=True)
        scores[value] = run.evaluate(part, {"metric": metric})["metric"].overall
    return scores


def watch_groups(
    run: Run,
    data: FederatedData,
    metrics: Mapping[str, Any],
    group: Callable[[Tree], Tensor],
    groups: Sequence[float],
    *,
    largest_is_best: bool | None = None,
) -> dict[str, float]:
    """Add scores by group and client after the run's last round to its history, and return them.

    Columns for every metric: `val_<metric>` over all rows; its `_mean`, `_min`, `_max` and `_worst_decile` (the mean of
    the worst tenth) over clients; `_group_<group>` over the rows of each group, and `_gap`, the largest of these minus
    the smallest. `ft.plots.groups` draws them, and `ft.plots.curves`.

    A group without rows is warned of: its column is NaN, and the gap is that of the others, NaN of fewer than two. A
    group whose score is NaN makes the gap NaN.

    Args:
        run: a run with at least one round.
        data: rows of its clients.
        metrics: as for `Run.evaluate`.
        group: rows -> the group of every row, `(total,)`.
        groups: all groups.
        largest_is_best: whether the worst clients have the lowest values; default: each metric's own attribute.
    """
    present, values = _present(data, group, groups), dict[str, float]()
    for name, score in run.evaluate(data, metrics).items():
        column = f"val_{name}"
        values |= {column: score.overall, f"{column}_mean": score.mean()}
        values |= {f"{column}_min": score.worst(True), f"{column}_max": score.worst(False)}
        values[f"{column}_worst_decile"] = score.worst_decile(largest_is_best)
        by_group = group_scores(run, data, metrics[name], group, groups)
        values |= {f"{column}_group_{value:g}": each for value, each in by_group.items()}
        values[f"{column}_gap"] = _gap([each for value, each in by_group.items() if value in present])
    run.log.validated(run.number, values)
    return values


def _present(data: FederatedData, group: Callable[[Tree], Tensor], groups: Sequence[float]) -> set[float]:
    """Return the groups that have rows; of others the user is warned."""
    member = group(data.rows)
    present = {value for value in groups if bool((member == value).any())}
    absent = ", ".join(f"{value:g}" for value in groups if value not in present)
    if absent:
        text = f"Expected rows of every group, but got none of {absent}; the gap is that of the others"
        warnings.warn(text, stacklevel=3)
    return present


def _gap(scores: Sequence[float]) -> float:
    """Return the maximum minus the minimum; NaN if a value is NaN, or without values."""
    known = torch.tensor(scores, dtype=torch.float64)
    return float(known.amax() - known.amin()) if len(scores) > 1 else math.nan


def _fair_client(
    local: LocalSolver, loss: Loss, q: float, lr: float, inbox: Tree, state: Tree, data: _Rows, turn: Turn
) -> Reply:
    solved = local.solve(inbox, state, data.data, None, turn)
    risk = _risk(local, loss, local.tensors(inbox, state), data.rows)
    if bool((risk < 0).any()):
        raise ValueError(
            f"Expected losses of at least 0, which have powers, but got {float(risk.min())}; add a constant"
        )
    averaged = averaged_buffers(local)
    sent = message(solved.parameters, inbox, averaged, torch.ones_like(risk))
    change = sent.change.value
    real = tree.leaves(tree.as_real(change))
    squares = sum(leaf.to(torch.float64).square().flatten(1).sum(1) for leaf in real) / lr**2
    tiny = torch.finfo(torch.float64).tiny
    power = risk.clamp(min=tiny) ** q
    weight = q * risk.clamp(min=tiny) ** (q - 1) * squares + power / lr
    step = tree.scale(change, torch.where(weight > 0, power / lr / weight, 0.0))
    reply_message = sent._replace(change=Mean(step, weight.clamp(min=tiny)))
    return Reply(reply_message, solved.state, {**solved.info, "risk": risk})


def _agnostic_client(
    local: LocalSolver,
    loss: Loss,
    gamma: float,
    weight: Weight,
    inbox: AgnosticServer,
    state: _AgnosticState,
    data: _Rows,
    turn: Turn,
) -> Reply:
    solved = local.solve(inbox.parameters, state.solver, data.data, None, turn)
    risk = _risk(local, loss, local.tensors(inbox.parameters, state.solver), data.rows)
    before = state.told.weight > 0  # a client starts with its weight, as the mixture does
    excess = torch.where(before, state.excess + risk - inbox.loss, 0.0)
    share = weight(data.rows).to(torch.float64) * (gamma * excess).clamp(-_MOST, _MOST).exp()
    sent = message(solved.parameters, inbox.parameters, averaged_buffers(local), share)
    values = {**sent.change.value, **({} if sent.buffers is None else sent.buffers.value)}
    contribution = _Told({name: tree.scale(values[name], share) for name in solved.parameters}, share, risk * share)
    return Reply(None, _AgnosticState(excess, contribution, solved.state), {**solved.info, "risk": risk})


def _risk(local: LocalSolver, loss: Loss, tensors: Tree, rows: ClientData) -> Tensor:
    """Return the mean loss of every client's rows, `(K,)` float64."""
    inputs, targets = inputs_and_targets(rows.batch)
    with torch.no_grad():
        each = loss(unpadded(local.predict, tensors, inputs, rows.mask), targets).to(torch.float64)
    return torch.where(rows.mask, each, 0.0).sum(1) / rows.count.clamp(min=1)
