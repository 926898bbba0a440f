r"""Subjective explainability: models whose outputs a user can anticipate.

A user i predicts the model's output for some rows, :math:`u_i(x)`. The error of these guesses is the measure (8.11),
:math:`\frac1{t_i} \sum_x (u_i(x) - \hat h_i(x))^2`, and (8.12) adds it, times ρ, to the node's loss:

.. math:: L_i(w) = \frac1{m_i} \sum_r \ell(x_r, y_r; w) + \frac\rho{t_i} \sum_x \ell(x, u_i(x); w).

That is 1 + ρ times the mean loss over training rows and signals, repeated so that the signals have the share ρ/(1 + ρ).
`augmented` repeats the rows, and `explainable` makes a local solver that reads them: it divides the added `Quadratic`
by 1 + ρ, too, so that both keep their proportion, and reports the client's own number of rows to algorithms that
average by rows, such as `ft.fedavg`. No other solver reads such rows. Gradient steps are those on the mean: to equal
those on (8.12), their learning rate has to be 1 + ρ times as large.

Source: Jung, "Federated learning: from theory to practice", section 8.4.

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import explain
>>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1))])  # a row (1, 1), of which the user expects 4
>>> signals = explain.guesses(data, user=lambda x: 4 * x)
>>> for rho in (0.0, 1.0, 3.0):
...     local = explain.explainable(ft.least_squares(torch.nn.Linear(1, 1, bias=False)), rho)
...     run = ft.run(ft.separate(local), ft.InProcess(explain.augmented(data, signals, rho)), rounds=1)
...     print(round(run.tensors()["weight"].item(), 4), round(explain.explainability(run, signals).overall, 4))
1.0 9.0
2.5 2.25
3.25 0.5625
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch._lazy import only
from fedtorch.data import BadClients, ClientData, FederatedData
from fedtorch.data.federated import described_rows
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic
from fedtorch.federation.runs.run import Run
from fedtorch.federation.turn import Turn
from fedtorch.metrics.scores import Score
from fedtorch.tree import Tree

__all__ = ["augmented", "explainable"]
__dir__ = only(__all__)

_ROWS, _TIMES = "augmented", "times"  # fields of augmented rows: rows, and the number of copies of each, 0 for signals


class _Prepared(NamedTuple):
    """A block's data; leaves `(K, ...)`."""

    data: Tree  # prepared by the local solver
    count: Tensor  # type: ignore[assignment]  # (K,) rows of the clients' own, each counted once


def guesses(data: FederatedData, user: Callable[[Tensor], Tensor]) -> FederatedData:
    """Return signals: the rows' features, with a user's guesses as labels.

    Args:
        data: rows (x, y), of which only x is used; use held-out ones.
        user: features `(n, ...)` -> guesses in the form of y.

    >>> import torch, fedtorch as ft
    >>> data = ft.data.from_tensors([(torch.tensor([[1.0], [2.0]]), torch.zeros(2))])
    >>> guesses(data, user=lambda x: 10 * x)[0][1]  # this user thinks that the model answers 10 x
    tensor([10., 20.])
    """
    return data.map(lambda rows: (rows[0], user(rows[0]).to(rows[1].dtype).reshape(rows[1].shape)))


def augmented(data: FederatedData, signals: FederatedData, rho: float, *, most: int = 100) -> FederatedData:
    """Repeat every client's rows and its user's signals until their mean loss is that of (8.12) over 1 + ρ.

    The number of copies is stored with each row, so that `explainable` solvers count a client's own rows once each: in
    FedAvg a client has the same weight as without signals. To pool, pool both first:
    `augmented(data.pool(), signals.pool(), rho)`. Rows are then
    `{"augmented": rows, "times": copies of each, 0 for signals}`.

    Args:
        data: the rows.
        signals: (x, u(x)) of the same clients, at least one each.
        rho: ρ, how much being anticipated counts beside being right, at least 0; 0 leaves the signals out.
        most: most copies of a training row; ρ is exact if these suffice, and else the nearest possible.

    Raises:
        ValueError: another number of clients, a client without signals, or a ρ out of range or too small for `most`.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import explain
        >>> rows = [(torch.ones(1, 1), torch.tensor([1.0])), (torch.ones(3, 1), torch.full((3,), 5.0))]
        >>> data, local = ft.data.from_tensors(rows), ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> signals = ft.data.from_tensors([(2 * x[:1], 2 * y[:1]) for x, y in rows])  # what both solve exactly
        >>> data = explain.augmented(data, signals, rho=0.5)
        >>> data.counts.tolist()  # 2 of a row and 1 of the signal; 2 of each of three rows and 3 of the signal
        [3, 9]
        >>> run = ft.run(ft.fedavg(explain.explainable(local, rho=0.5)), ft.InProcess(data), rounds=1)
        >>> run.server["weight"].round(decimals=4)  # (1 · 1 + 3 · 5) / 4
        tensor([[4.]])
    """
    if not (rho >= 0 and math.isfinite(rho)):
        raise ValueError(f"Expected a finite rho of at least 0, but got {rho}")
    if rho == 0:
        return dataclasses.replace(data, rows=_marked(data.rows, torch.ones(int(data.counts.sum()), dtype=torch.int64)))
    if len(signals) != len(data) or bool((signals.counts == 0).any()):
        raise ValueError(f"Expected signals of all {len(data)} clients, but got {int((signals.counts > 0).sum())}")
    parts, times, counts = [], [], []
    for k, (m, t) in enumerate(zip(data.counts.tolist(), signals.counts.tolist())):
        repeats, signal_repeats = _repeats(rho, m, t, most, data.names[k])
        parts += [_repeated(data[k], repeats), _repeated(signals[k], signal_repeats)]
        times += [torch.full((m * repeats,), repeats), torch.zeros(t * signal_repeats, dtype=torch.int64)]
        counts.append(m * repeats + t * signal_repeats)
    rows = _marked(tree.concatenate(parts), torch.cat(times))
    return dataclasses.replace(data, rows=rows, counts=torch.tensor(counts))


def explainable(local: LocalSolver, rho: float) -> LocalSolver:
    """Build a solver like `local` for `augmented` rows, which minimises (8.12) plus the quadratic.

    Args:
        local: solver of a client's own problem, given its quadratic.
        rho: as for `augmented`.

    Raises:
        ValueError: `local` spends a privacy budget, which takes every repeated row as another person; or, when a
            population is bound, rows that are not from `augmented`, or that have been pooled since.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import explain
        >>> local = explain.explainable(ft.least_squares(torch.nn.Linear(1, 1)), rho=0.5)
        >>> ft.Run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1))])))
        Traceback (most recent call last):
        ValueError: Expected rows of explain.augmented(data, signals, rho), but got 0: float32 (1,), 1: float32 ()
    """
    if local.budget is not None:
        raise ValueError(
            "Expected a local solver without a privacy budget, but got one whose noise hides a row once, not as often "
            "as it is repeated; protect whole clients (privacy.client_level), or leave the signals out"
        )
    settings = {**local.settings, "explainable": rho}
    solve, prepare = partial(_solve, local, rho), partial(_prepare, local)
    return dataclasses.replace(local, solve=solve, prepare=prepare, settings=settings)


def explainability(run: Run, signals: FederatedData) -> Score:
    """Return (8.11) of every client's model: the mean squared difference of guesses and predictions."""
    squared = lambda prediction, guess: (prediction.reshape(guess.shape) - guess).square()
    return run.evaluate(signals, {"explainability": squared})["explainability"]


def _repeats(rho: float, rows: int, signals: int, most: int, name: str) -> tuple[int, int]:
    """Return the number of copies of a client's rows, and of its signals."""
    if rows == 0:
        return 1, 1
    exact = Fraction(rho) * rows / signals
    if exact * most < 1 - Fraction(1, 10**9):
        raise ValueError(
            f"Expected rho of at least {signals / (most * rows):g} for client {name!r} of {rows} rows and {signals} "
            f"signals, but got {rho}; pass most={math.ceil(1 / exact)}, fewer signals, or rho=0 to leave them out"
        )
    ratio = exact.limit_denominator(most)
    return ratio.denominator, ratio.numerator


def _marked(rows: Tree, times: Tensor) -> Tree:
    return {_ROWS: rows, _TIMES: times.to(tree.leaves(rows)[0].device)}


def _repeated(rows: Tree, times: int) -> Tree:
    return tree.map(lambda leaf: leaf.repeat_interleave(times, 0), rows)


def _prepare(local: LocalSolver, data: ClientData) -> _Prepared:
    if not (isinstance(data.batch, dict) and data.batch.keys() == {_ROWS, _TIMES}):
        raise ValueError(
            f"Expected rows of explain.augmented(data, signals, rho), but got {described_rows(data.batch)}"
        )
    times = data.batch[_TIMES] * data.mask
    there, copies = (times > 0).sum(1), times.sum(1)
    mixed = (there * times.square().sum(1) != copies.square()).nonzero()[:, 0]
    if len(mixed):
        raise BadClients(mixed.cpu(), "expected rows that were pooled before they were augmented, but got them after")
    rows = ClientData(data.batch[_ROWS], data.count)
    return _Prepared(local.prepare(rows), there.square() // copies.clamp(min=1))


def _solve(
    local: LocalSolver, rho: float, start: Tree, state: Tree, data: _Prepared, quadratic: Quadratic | None, turn: Turn
) -> Local:
    if quadratic is None:
        return local.solve(start, state, data.data, None, turn)
    share = 1 / (1 + rho)
    shrunk = Quadratic(tree.scale(quadratic.precision, share), tree.scale(quadratic.shift, share))
    return local.solve(start, state, data.data, shrunk, turn)
