r"""Subjective explainability: models that a user can anticipate.

A user i guesses what the model will say of some rows, :math:`u_i(x)`. How far off they are is the measure (8.11),
:math:`\frac1{t_i} \sum_x (u_i(x) - \hat h_i(x))^2`, and (8.12) adds it, times ρ, to the node's loss:

.. math:: L_i(w) = \frac1{m_i} \sum_r \ell(x_r, y_r; w) + \frac\rho{t_i} \sum_x \ell(x, u_i(x); w).

That is 1 + ρ times the mean loss of rows among which training rows and signals are repeated so often that the signals
have the part ρ/(1 + ρ). So any local solver takes it: `augmented` repeats the rows, and `explainable` divides what the
others think by 1 + ρ, too, that both keep their proportion. Gradient steps are those on the mean: their learning rate
has to be 1 + ρ times as large to be those on (8.12).

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
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import FederatedData
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic, Turn
from fedtorch.federation.evaluation import Score
from fedtorch.federation.run import Run
from fedtorch.tree import Tree


def guesses(data: FederatedData, user: Callable[[Tensor], Tensor]) -> FederatedData:
    """Signals: the rows' features, and a user's guesses in place of the labels.

    Args:
        data: rows (x, y), of which x is looked at; take held-out ones.
        user: features `(n, ...)` -> guesses like y.

    >>> import torch, fedtorch as ft
    >>> data = ft.data.from_tensors([(torch.tensor([[1.0], [2.0]]), torch.zeros(2))])
    >>> guesses(data, user=lambda x: 10 * x)[0][1]  # this user thinks that the model answers 10 x
    tensor([10., 20.])
    """
    return data.map(lambda rows: (rows[0], user(rows[0]).to(rows[1].dtype).reshape(rows[1].shape)))


def augmented(data: FederatedData, signals: FederatedData, rho: float, *, most: int = 100) -> FederatedData:
    """Every client's rows and its user's signals, repeated so that their mean loss is that of (8.12) over 1 + ρ.

    Args:
        data: the rows.
        signals: (x, u(x)) of the same clients, at least one each.
        rho: ρ, how much being anticipated counts beside being right, at least 0; 0 leaves the signals out.
        most: how often a row may be repeated; ρ is exact where so many are enough, and else the nearest that is.

    Raises:
        ValueError: another number of clients, a client without signals, or a ρ out of range.
    """
    if not rho >= 0:
        raise ValueError(f"Expected rho of at least 0, but got {rho}")
    if rho == 0:
        return data
    if len(signals) != len(data) or bool((signals.counts == 0).any()):
        raise ValueError(f"Expected signals of all {len(data)} clients, but got {int((signals.counts > 0).sum())}")
    parts, counts = [], []
    for rows, said, m, t in zip(data, signals, data.counts.tolist(), signals.counts.tolist()):
        ratio = (Fraction(rho).limit_denominator(10**6) * m / t).limit_denominator(most)  # signal rows per training row
        twice, once = max(ratio.numerator, 1), ratio.denominator
        parts += [_repeated(rows, once), _repeated(said, twice)]
        counts.append(m * once + t * twice)
    return dataclasses.replace(data, rows=tree.concatenate(parts), counts=torch.tensor(counts))


def explainable(local: LocalSolver, rho: float) -> LocalSolver:
    """`local` on `augmented` rows, minimising (8.12) beside what the others think."""
    settings = {**local.settings, "explainable": rho}
    return dataclasses.replace(local, solve=partial(_solve, local, rho), settings=settings)


def explainability(run: Run, signals: FederatedData) -> Score:
    """(8.11) of every client's model: the mean squared difference of guesses and predictions."""
    squared = lambda prediction, guess: (prediction.reshape(guess.shape) - guess).square()
    return run.evaluate(signals, {"explainability": squared})["explainability"]


def _repeated(rows: Tree, times: int) -> Tree:
    return tree.map(lambda leaf: leaf.repeat_interleave(times, 0), rows)


def _solve(
    local: LocalSolver, rho: float, start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, turn: Turn
) -> Local:
    if quadratic is None:
        return local.solve(start, state, data, None, turn)
    share = 1 / (1 + rho)
    shrunk = Quadratic(tree.scale(quadratic.precision, share), tree.scale(quadratic.shift, share))
    return local.solve(start, state, data, shrunk, turn)
