r"""Leakage to a neighbour in a network: GTV minimisation sends it models, and differences of models are gradients.

A node with local loss L(w) = wᵀQw − 2qᵀw + const that takes the steps of Algorithm 5.1 or 8.1,

.. math:: w_{t+1} = w_t - \eta \bigl(2 (Q w_t - q) + 2 \alpha \textstyle\sum_j A_j (w_t - w_j)\bigr),

sends the gradient at every w_t to its only neighbour, which has all the rest: after d + 1 steps from points in general
position the neighbour can compute Q and q (`local_problem`), and with them every function of these sums. Inference of a
node's private attributes from its model alone is a learning problem (`learnt_attribute`).

Source: Jung, "Federated learning: from theory to practice", sections 5.2, 8.2 and problem 9.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Quadratics(NamedTuple):
    """Local losses wᵀQw − 2qᵀw, up to a constant."""

    q: Tensor  # (..., d, d) Q, such as X'X/m
    linear: Tensor  # (..., d) q, such as X'y/m

    def nearest(self, known: Quadratics) -> Tensor:
        """Rank known problems `(n, d, d)` from the nearest on, by relative distances of Q and q: indices `(n,)`.

        >>> import torch
        >>> known = Quadratics(q=torch.tensor([[[1.0]], [[2.0]], [[4.0]]]), linear=torch.tensor([[1.0], [1.0], [4.0]]))
        >>> Quadratics(torch.tensor([[3.9]]), torch.tensor([3.8])).nearest(known)
        tensor([2, 1, 0])
        """
        apart = [
            (theirs - mine).flatten(1).square().sum(1) / theirs.flatten(1).square().mean(0).sum()
            for mine, theirs in zip(self, known)
        ]
        return (apart[0] + apart[1]).argsort()


def local_problem(models: Tensor, neighbour: Tensor, lr: float, coupling: float) -> Quadratics:
    """Recover a node's local problem from the models that it and its only neighbour exchanged.

    Args:
        models: `(T + 1, d)` the node's models w_0 … w_T.
        neighbour: `(T, d)` the neighbour's own messages before each step.
        lr: η.
        coupling: αA of the edge.

    Returns:
        Q (symmetric) and q: exact for T > d models in general position, and otherwise the least-squares fit of least
        norm.

    >>> import torch
    >>> q, linear, w = torch.tensor([[2.0]]), torch.tensor([1.0]), torch.zeros(1)
    >>> told = [w]
    >>> for _ in range(2):  # steps of a node whose neighbour always says 0
    ...     w = w - 0.1 * (2 * (q @ w - linear) + 2 * 0.5 * w)
    ...     told.append(w)
    >>> found = local_problem(torch.stack(told), torch.zeros(2, 1), lr=0.1, coupling=0.5)
    >>> found.q.round(decimals=3), found.linear.round(decimals=3)
    (tensor([[2.]], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    if models.ndim != 2 or neighbour.shape != (len(models) - 1, models.shape[1]) or not lr > 0:
        raise ValueError(
            f"Expected models (T + 1, d), the neighbour's (T, d) and a positive lr, but got {tuple(models.shape)}, "
            f"{tuple(neighbour.shape)} and {lr}"
        )
    w, other = models.to(torch.float64), neighbour.to(torch.float64)
    half = -w.diff(dim=0) / (2 * lr) - coupling * (w[:-1] - other)  # Q w_t − q
    centre = w[:-1].mean(0)
    design = torch.cat([w[:-1] - centre, torch.ones(len(neighbour), 1, dtype=torch.float64)], 1)
    fitted = torch.linalg.lstsq(design, half, driver="gelsd").solution
    matrix = (fitted[:-1] + fitted[:-1].T) / 2
    return Quadratics(matrix, matrix @ centre - fitted[-1])


def learnt_attribute(models: Tensor, attributes: Tensor, ridge: float = 1e-3) -> Callable[[Tensor], Tensor]:
    """Learn a linear map from nodes' messages to their private attribute, from nodes whose attribute is known.

    Args:
        models: `(m, D)` the nodes' messages, for example their models side by side over some rounds.
        attributes: `(m,)`.
        ridge: penalty on the coefficients of standardised columns.

    Returns:
        A function of `(n, D)` to `(n,)`.

    >>> import torch
    >>> models = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> guess = learnt_attribute(models, attributes=2 * models[:, 0] + models[:, 1], ridge=1e-9)
    >>> guess(torch.tensor([[2.0, 2.0]])).round(decimals=3)
    tensor([6.], dtype=torch.float64)
    """
    if models.ndim != 2 or attributes.shape != (len(models),) or not ridge > 0:
        raise ValueError(
            f"Expected models (m, D), attributes (m,) and a positive ridge, but got {tuple(models.shape)}, "
            f"{tuple(attributes.shape)} and {ridge}"
        )
    x, s = models.to(torch.float64), attributes.to(torch.float64)
    centre, level = x.mean(0), s.mean()
    scale = x.std(0, correction=0)
    scale = torch.where(scale > 1e-12 * x.abs().amax(0), scale, torch.inf)
    standard = (x - centre) / scale
    gram = standard.T @ standard / len(x) + ridge * torch.eye(x.shape[1], dtype=torch.float64)
    coefficients = torch.linalg.solve(gram, standard.T @ (s - level) / len(x))
    return lambda models: level + (models.to(torch.float64) - centre) / scale @ coefficients
