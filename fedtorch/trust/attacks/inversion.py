r"""Gradient and model inversion: rows that reproduce an observed message.

*Gradient inversion.* A linear layer with bias reveals a single row x: the gradients of neuron i are δ_i x and δ_i, so
their ratio is x, and so is that of the changes after any number of steps on that one row (`linear_inputs`). For other
layers and more rows, `gradient_inversion` searches for rows whose training reproduces the sent change, by following the
client's steps.

*Model inversion.* A model's predictions, with further knowledge about a person, make some values of a private attribute
more likely than others (`model_inversion`); and a model's typical example of a class resembles its training rows
(`representative`).

Sources: Geiping et al. (2020), "Inverting gradients", Proposition 3.1; Zhu, Liu and Han (2019), "Deep leakage from
gradients"; Fredrikson et al. (2014), "Privacy in pharmacogenetics", and Fredrikson, Jha and Ristenpart (2015), "Model
inversion attacks that exploit confidence information"; Jung, "Federated learning: from theory to practice", section
9.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtorch.federation.solvers.objective import Loss
from fedtorch.trust.attacks._search import descended, least

Predict = Callable[[Tensor], Tensor]  # rows (n, ...) -> outputs (n, ...)


class Inversion(NamedTuple):
    """Rows that a search has reconstructed.

    Example:
        >>> import torch
        >>> from fedtorch.trust import attacks
        >>> module = torch.nn.Linear(2, 1)
        >>> module.weight.data, module.bias.data = torch.zeros(1, 2), torch.zeros(1)
        >>> change = {"weight": torch.tensor([[0.6, 0.8]]), "bias": torch.tensor([0.2])}  # −lr · 2(0 − y) (x, 1)
        >>> attacks.linear_inputs(change["weight"], change["bias"]).round(decimals=3)
        tensor([[3., 4.]], dtype=torch.float64)
        >>> found = attacks.gradient_inversion(
        ...     module, change, torch.nn.functional.mse_loss, shape=(1, 2), targets=torch.ones(1, 1), lr=0.1)
        >>> found.inputs.round(decimals=3), found.distance < 1e-9
        (tensor([[3., 4.]]), True)
    """

    inputs: Tensor  # (n, ...) rows, in arbitrary order
    targets: Tensor | None  # (n, ...) labels, given or recovered as logits; None without labels
    distance: float  # squared distance between the changes by these rows and the sent ones, relative to the latter


def linear_inputs(weight: Tensor, bias: Tensor) -> Tensor:
    """Recover the input of each neuron of a linear layer with bias, from gradients or changes of its parameters.

    Args:
        weight: `(..., o, d)`.
        bias: `(..., o)`.

    Returns:
        `(..., o, d)`: the mean of the rows, weighted by how each moved the neuron, and the row itself where only one
        did; NaN for a neuron that did not move.

    Example:
        >>> import torch
        >>> from fedtorch.trust import attacks
        >>> attacks.linear_inputs(torch.tensor([[0.6, 0.8]]), torch.tensor([0.2]))  # of a step on the row (3, 4)
        tensor([[3.0000, 4.0000]], dtype=torch.float64)
    """
    if weight.shape[:-1] != bias.shape:
        raise ValueError(f"Expected weight (..., o, d) and bias (..., o), but got {weight.shape} and {bias.shape}")
    moved = torch.where(bias == 0, torch.nan, bias.to(torch.float64))
    return weight.to(torch.float64) / moved[..., None]


def gradient_inversion(
    module: nn.Module,
    change: Mapping[str, Tensor],
    loss: Loss,
    *,
    shape: tuple[int, ...],
    targets: Tensor | None = None,
    classes: int | None = None,
    lr: float = 1.0,
    steps: int = 1,
    restarts: int = 4,
    iterations: int = 200,
    seed: int = 0,
) -> Inversion:
    """Search for rows whose training changes a module as a client's message does.

    Args:
        module: with the parameters at the client's start.
        change: of the parameters by name, as sent in federated averaging.
        loss: `(output, target) -> mean loss` of the client.
        shape: shape of its rows, `(n, ...)`.
        targets: `(n, ...)` of the rows, if known; otherwise probabilities of `classes` are searched too.
        classes: number of classes.
        lr: learning rate of the client's gradient steps, each on all of its rows.
        steps: number of these steps.
        restarts: searches from other normal draws.
        iterations: most iterations of each search.
        seed: seed of these draws.

    Raises:
        ValueError: neither targets nor a number of classes, or both.

    Example:
        >>> import torch
        >>> from fedtorch.trust import attacks
        >>> module = torch.nn.Linear(2, 1)
        >>> module.weight.data, module.bias.data = torch.zeros(1, 2), torch.zeros(1)
        >>> change = {"weight": torch.tensor([[0.6, 0.8]]), "bias": torch.tensor([0.2])}  # −lr · 2(0 − y) (x, 1)
        >>> found = attacks.gradient_inversion(
        ...     module, change, torch.nn.functional.mse_loss, shape=(1, 2), targets=torch.ones(1, 1), lr=0.1)
        >>> found.inputs.round(decimals=3), found.distance < 1e-9
        (tensor([[3., 4.]]), True)
    """
    if (targets is None) == (classes is None):
        raise ValueError("Expected targets, or the number of classes of unknown ones, but got neither or both")
    start = {name: parameter.detach() for name, parameter in module.named_parameters() if name in change}
    rows, width = shape[0], 1
    for size in shape[1:]:
        width *= size
    dtype = next(iter(change.values())).dtype

    def parted(nearest: Tensor) -> tuple[Tensor, Tensor]:
        logits = nearest[:, width:]
        return nearest[:, :width].reshape(shape), logits.softmax(1) if targets is None else targets

    def apart(nearest: Tensor) -> Tensor:
        inputs, labels = parted(nearest)
        made = _trained(module, start, inputs, labels, loss, lr, steps)
        wrong = torch.stack([(made[name] - start[name] - change[name]).square().sum() for name in start])
        return wrong.sum() / torch.stack([value.square().sum() for value in change.values()]).sum()

    nearest = least(apart, (rows, width + (classes or 0)), dtype, restarts, iterations, seed)
    inputs, labels = parted(nearest.point)
    return Inversion(inputs, labels, nearest.value)


def _trained(
    module: nn.Module,
    start: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    lr: float,
    steps: int,
) -> dict[str, Tensor]:
    """Return parameters after gradient steps on all rows, with a graph back to the rows."""
    weights = {name: value.detach().requires_grad_() for name, value in start.items()}
    for _ in range(steps):
        value = loss(functional_call(module, weights, (inputs,)), targets)
        slopes = torch.autograd.grad(value, list(weights.values()), create_graph=True)
        weights = {name: weight - lr * slope for (name, weight), slope in zip(weights.items(), slopes)}
    return weights


def model_inversion(
    predict: Predict,
    known: Tensor,
    outputs: Tensor,
    candidates: Tensor,
    columns: list[int],
    log_likelihood: Callable[[Tensor, Tensor], Tensor],
    prior: Tensor | None = None,
) -> Tensor:
    """Compute the probability of each value of a private attribute, given a model's predictions for it.

    Args:
        predict: the model, of rows `(m, d)`.
        known: `(n, d)` rows of which all but `columns` are known.
        outputs: `(n, ...)` known responses of the rows.
        candidates: `(S, a)` values that the private columns may have.
        columns: their places.
        log_likelihood: (model outputs `(n, ...)`, `outputs`) -> `(n,)`.
        prior: `(S,)` probabilities; equal by default.

    Returns:
        `(n, S)` posterior probabilities, float64.

    >>> import math, torch
    >>> known, outputs = torch.tensor([[1.0, torch.nan]]), torch.tensor([2.0])  # a row, its second column private
    >>> likelihood = lambda said, told: -math.log(3.0) * (said - told).square()
    >>> model_inversion(lambda rows: rows.sum(1), known, outputs, torch.tensor([[0.0], [1.0]]), [1], likelihood)
    tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    if candidates.ndim != 2 or candidates.shape[1] != len(columns) or known.ndim != 2:
        raise ValueError(
            f"Expected rows (n, d) and candidates (S, {len(columns)}), but got {tuple(known.shape)} and "
            f"{tuple(candidates.shape)}"
        )
    scores = []
    with torch.no_grad():
        for value in candidates:
            rows = known.clone()
            rows[:, columns] = value.to(rows)
            scores.append(log_likelihood(predict(rows), outputs).to(torch.float64))
    logs = torch.stack(scores, 1)
    return (logs if prior is None else logs + prior.to(torch.float64).log()).softmax(1)


def representative(
    module: nn.Module, label: int, start: Tensor, *, ridge: float = 1e-3, iterations: int = 100
) -> Tensor:
    """Find the row that a classifier takes most surely for a class, with a penalty on its distance from `start`.

    Args:
        module: rows `(n, ...)` to logits `(n, C)`.
        label: the class.
        start: a row `(...)`, such as a known mean of rows.
        ridge: weight of the penalty.
        iterations: most iterations.

    >>> import torch
    >>> module = torch.nn.Linear(2, 2)
    >>> module.weight.data, module.bias.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2)
    >>> ridge = float(torch.tensor(-2.0).sigmoid())  # so that the slopes at 1 balance: 2σ(−2) = 2 · ridge · 1
    >>> representative(module, 0, torch.zeros(2), ridge=ridge).round(decimals=2)
    tensor([1., 0.])
    """
    return descended(partial(_doubt, module, label, start, ridge), start, iterations).point


def _doubt(module: nn.Module, label: int, start: Tensor, ridge: float, row: Tensor) -> Tensor:
    return -module(row[None]).log_softmax(1)[0, label] + ridge * (row - start).square().sum()
