r"""Leakage of vertical training: labels to a party that reads gradients, features to a server that keeps values.

*Labels.* A party receives the gradient of row i's log likelihood with respect to its own message: y − p for a Bernoulli
likelihood, whose sign is the label for any noise ρ on z, and 1_y − p for a categorical one, whose largest entry is the
class. `label_scores` is that attack. Parties that combine their messages know p as well, and are left with y and the
server's noise: that attack does not weaken as the network learns.

*Features.* A party's messages in T steps are g + ρε with fresh ε, so their mean has noise ρ²/T (`values_error`). If
rows go through a linear network that learns by plain gradient steps, the changes of z reveal more: z_{t+1} − z_t = η X
Xᵀ g_t, and the server knows g_t, so some steps give all of X Xᵀ, the features up to a rotation (`gram_matrix`).
Networks of any kind with known starting weights, as when all nodes derive them from one key, are inverted by following
their training (`split_inversion`).

`tapped` observes nodes' messages: halves of a protocol are generators, and it passes their messages on.

Sources: Li et al. (2022), "Label leakage and protection in two-party split learning"; Erdoğan, Küpçü and Çiçek (2022),
"UnSplit".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtorch import functional
from fedtorch.protocol.halves import Half, Name, Receive, Send, wrapped
from fedtorch.tree import Tree
from fedtorch.trust.attacks._search import least
from fedtorch.trust.attacks.inversion import Inversion


def tapped(half: Half, observe: Callable[[Name, Tree, bool], Any]) -> Half:
    """Wrap a node's half so that it passes every message to `observe`, and otherwise behaves the same.

    Args:
        half: from `fedtorch.vfl.nodes.iteration.server_half` or `party_half`.
        observe: (the other node, message, whether this node sent it) -> ignored.

    >>> import torch
    >>> from fedtorch.protocol.halves import Receive, Send, together
    >>> def party():
    ...     yield Send(0, torch.tensor([3.0]))
    ...     return (yield Receive(0, torch.zeros(1)))
    >>> def server():
    ...     value = yield Receive(1, torch.zeros(1))
    ...     yield Send(1, 2 * value)
    >>> log = []
    >>> overhear = lambda node, message, sent: log.append(("sent" if sent else "received", float(message)))
    >>> _ = together({0: server(), 1: tapped(party(), overhear)})
    >>> log
    [('sent', 3.0), ('received', 6.0)]
    """

    def show(step: Send | Receive) -> Half:
        answer = yield step
        if isinstance(step, Send):
            observe(step.to, step.message, True)
        else:
            observe(step.sender, answer, False)
        return answer

    return wrapped(half, show)


def label_scores(gradients: Tensor, means: Tensor | None = None) -> Tensor:
    """Score the labels by gradients: large where a row's label is 1, or for each class.

    Args:
        gradients: `(T, ..., C, n)` received by a party, of a log likelihood that is maximised; their mean over the
            steps is used.
        means: `(T, ..., C, n)` p of the likelihood in each step, if parties combine all messages; gradients are then
            those of a row, y − p, and not divided by the number of rows.

    Returns:
        `(..., n)` of one output, whose sign is the guess; `(..., C, n)` of several, whose largest entry is.

    >>> import torch
    >>> label_scores(torch.tensor([[[0.5, -0.75]], [[0.25, -0.25]]]))  # y - p of two rows, in two steps
    tensor([ 0.3750, -0.5000], dtype=torch.float64)
    >>> label_scores(torch.tensor([[[0.1, -0.1]]]), torch.tensor([[[0.9, 0.1]]]))  # y - ½
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    if gradients.ndim < 3:
        raise ValueError(
            "Expected gradients (T, ..., C, n), of T steps and C numbers of each of n rows, but got shape "
            f"{tuple(gradients.shape)}; of steps × rows pass gradients[:, None]"
        )
    mean = gradients.to(torch.float64).mean(0)
    alone = gradients.shape[-2] == 1
    if means is not None:
        mean = mean + means.to(torch.float64).mean(0) - (0.5 if alone else 0.0)
    return mean[..., 0, :] if alone else mean


def guessed_labels(gradients: Tensor, means: Tensor | None = None) -> Tensor:
    """Return the labels `(..., n)` with the best `label_scores`, int64.

    Args:
        gradients: `(T, ..., C, n)`, as for `label_scores`.
        means: as for `label_scores`.

    Raises:
        ValueError: gradients of another form.

    >>> import torch
    >>> gradients = torch.tensor([[[0.4, -0.6]]])  # y - p of two rows, in one step
    >>> guessed_labels(gradients)
    tensor([1, 0])
    """
    scores = label_scores(gradients, means)
    return (scores > 0).long() if gradients.shape[-2] == 1 else scores.argmax(-2)


def values_error(rho: float, steps: int) -> float:
    """Return ρ/√T, the error of the mean of T values with independent noise.

    >>> values_error(rho=1.0, steps=100)
    0.1
    """
    if not 0 <= rho < math.inf or steps < 1:
        raise ValueError(f"Expected rho of at least 0 and at least one step, but got {rho} and {steps}")
    return rho / math.sqrt(steps)


def gram_matrix(values: Tensor, gradients: Tensor, lr: float) -> Tensor:
    """Recover X Xᵀ of the rows `(n, d)` of a party whose linear network learns by gradient steps of size `lr`.

    Args:
        values: `(T + 1, n)` that it sent, without noise.
        gradients: `(T, n)` that it was sent between them, to go up along.
        lr: η.

    Returns:
        `(n, n)`, symmetric; exact once the gradients span all rows, and until then on their span.

    >>> import torch
    >>> x, gradients = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.eye(2)
    >>> weights = torch.cat([torch.zeros(1, 2), 0.5 * (gradients @ x).cumsum(0)])  # of a party that takes two steps
    >>> gram_matrix(weights @ x.T, gradients, lr=0.5).round(decimals=3)
    tensor([[1., 1.], [1., 5.]], dtype=torch.float64)
    """
    if values.ndim != 2 or gradients.shape != (len(values) - 1, values.shape[1]) or not lr > 0:
        raise ValueError(
            f"Expected values (T + 1, n), gradients (T, n) and a positive lr, but got {tuple(values.shape)}, "
            f"{tuple(gradients.shape)} and {lr}"
        )
    given, moved = gradients.to(torch.float64), values.to(torch.float64).diff(dim=0) / lr
    gram = torch.linalg.lstsq(given, moved, driver="gelsd").solution
    return (gram + gram.T) / 2


def split_inversion(
    bottom: nn.Module,
    values: Tensor,
    gradients: Tensor,
    *,
    shape: tuple[int, ...],
    lr: float,
    restarts: int = 4,
    iterations: int = 200,
    seed: int = 0,
) -> Inversion:
    """Recover the rows of a party whose bottom network starts from known weights and learns by gradient steps.

    Args:
        bottom: the network with the weights that it started from, rows `(n, ...)` to `(n, C)`.
        values: `(T + 1, C, n)` that it sent.
        gradients: `(T, C, n)` that it was sent between them, to go up along.
        shape: shape of its rows, `(n, ...)`.
        lr: its learning rate.
        restarts: searches from other normal draws.
        iterations: most iterations of each search.
        seed: seed of these draws.

    >>> import torch
    >>> bottom = torch.nn.Linear(2, 2, bias=False, dtype=torch.float64)
    >>> bottom.weight.data = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    >>> values = torch.tensor([[[3.0], [-1.0]]], dtype=torch.float64)  # before any step: the sum and the difference
    >>> found = split_inversion(bottom, values, values[:0], shape=(1, 2), lr=0.1)
    >>> found.inputs.round(decimals=3)
    tensor([[1., 2.]], dtype=torch.float64)
    """
    follow = partial(_off, bottom, functional.parameters(bottom), values, gradients, lr)
    nearest = least(follow, shape, values.dtype, restarts, iterations, seed)
    return Inversion(nearest.point, None, nearest.value)


def _off(
    bottom: nn.Module, start: dict[str, Tensor], values: Tensor, gradients: Tensor, lr: float, rows: Tensor
) -> Tensor:
    """Return the relative squared distance of rows' outputs from `values`."""
    weights = {name: weight.requires_grad_() for name, weight in start.items()}
    apart = values.new_zeros(())
    for step, value in enumerate(values):
        output = functional_call(bottom, weights, (rows,)).mT
        apart = apart + (output - value).square().sum()
        if step < len(gradients):
            slopes = torch.autograd.grad((output * gradients[step]).sum(), list(weights.values()), create_graph=True)
            weights = {name: weight + lr * slope for (name, weight), slope in zip(weights.items(), slopes)}
    return apart / values.square().sum()
