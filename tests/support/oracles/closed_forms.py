"""Closed forms and data that several tests share; everything in float64, or in another dtype inside `numbers_in`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree
from fedtorch.tree import Tree

# Sums of tens of numbers of order one, over a few rounds, with systems of condition number below a thousand:
# some thousand roundings of 1e-16.
ROUNDING = 1e-12
NUMBERS: ContextVar[torch.dtype] = ContextVar("numbers", default=torch.float64)  # of data and modules


@contextmanager
def numbers_in(dtype: torch.dtype) -> Iterator[None]:
    """Make data and modules in a dtype inside."""
    token = NUMBERS.set(dtype)
    try:
        yield
    finally:
        NUMBERS.reset(token)


def linear_clients(sizes: Sequence[int], features: int = 3, seed: int = 0, outputs: int = 0) -> ft.data.FederatedData:
    """Clients whose rows follow different linear models, y `(n,)` or with `outputs` `(n, o)`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    clients = []
    for size in sizes:
        x = draw(size, features)
        y = x @ draw(features, outputs or 1) + 0.3 * draw(size, outputs or 1) + draw(1)
        clients.append((x.to(NUMBERS.get()), (y if outputs else y[:, 0]).to(NUMBERS.get())))
    return ft.data.from_tensors(clients, [f"client {k}" for k in range(len(sizes))])


def clock_clients(sizes: Sequence[int], noise: float = 0.0, seed: int = 0) -> ft.data.FederatedData:
    """Rows x = (Unix time, N(0, 1)) of a year, y = 1e-9 x₁ + 3 x₂ + noise."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for size in sizes:
        time = 1.7e9 + 3e7 * torch.rand(size, generator=generator, dtype=torch.float64)
        other, error = torch.randn(2, size, generator=generator, dtype=torch.float64)
        clients.append((torch.stack([time, other], 1), 1e-9 * time + 3 * other + noise * error))
    return ft.data.from_tensors(clients)


def linear(features: int = 3, outputs: int = 1, bias: bool = True, seed: int = 0) -> nn.Linear:
    """An `nn.Linear` whose parameters are not zero and do not come from the global generator."""
    module = nn.Linear(features, outputs, bias=bias, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module.to(NUMBERS.get())


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """`mse_loss` for outputs `(n, 1)` and targets `(n,)`."""
    return nn.functional.mse_loss(output.squeeze(-1), target)


def sgd(rate: float, module: nn.Module | None = None, **arguments: Any) -> ft.LocalSolver:
    """Stochastic gradient descent of `linear()`, or of `module`; full batches and one step unless told."""
    if "epochs" not in arguments and "steps" not in arguments:
        arguments["steps"] = 1
    return ft.gradient_descent(
        linear() if module is None else module,
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        **arguments,
    )


def moments(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(A, b) of the mean squared error ½ w'Aw − b'w + constant, w being weight and bias, `(p, o)`."""
    y = y.reshape(len(x), -1)
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    factor = 2 / (len(x) * y.shape[1])
    return factor * design.T @ design, factor * design.T @ y


def joined(parameters: Tree) -> Tensor:
    """Weight and bias of an `nn.Linear` as one matrix `(p, o)`."""
    return torch.cat([parameters["weight"].mT, parameters["bias"][..., None, :]], -2)


def fedprox_fixed_point(data: ft.data.FederatedData, mu: float, weights: Tensor) -> Tensor:
    """Where averaging the minimisers of L_k(x) + μ/2‖x − θ‖² gives back θ, `(p, o)`."""
    share = weights / weights.sum()
    systems = [moments(x, y) for x, y in data]
    eye = torch.eye(len(systems[0][0]), dtype=torch.float64)
    inverses = [torch.linalg.inv(a + mu * eye) for a, _ in systems]
    matrix = eye - mu * sum(p * inverse for p, inverse in zip(share, inverses))
    vector = sum(p * inverse @ b for p, inverse, (_, b) in zip(share, inverses, systems))
    return torch.linalg.solve(matrix, vector)


def distance(first: Tree, second: Tree) -> float:
    """The largest difference of two trees of one structure, relative to the size of their numbers.

    NaN and infinities count as equal in the same places, and else as infinitely far.
    """
    mine, theirs = tree.flatten(first), tree.flatten(second)
    assert mine.keys() == theirs.keys(), (mine.keys(), theirs.keys())
    worst = 0.0
    for name, leaf in mine.items():
        other = theirs[name]
        assert leaf.shape == other.shape, (name, leaf.shape, other.shape)
        assert leaf.dtype == other.dtype, (name, leaf.dtype, other.dtype)
        one, two = leaf.to(torch.float64), other.to(torch.float64)
        finite = one.isfinite() & two.isfinite()
        if not torch.allclose(one[~finite], two[~finite], equal_nan=True):
            return math.inf
        if bool(finite.any()):
            size = max(1.0, float(one[finite].abs().max()))
            worst = max(worst, float((one - two)[finite].abs().max()) / size)
    return worst


def same_bits(first: Tree, second: Tree) -> bool:
    """Whether two trees have the same leaves, bit for bit."""
    one, two = tree.flatten(first), tree.flatten(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def copy_of(value: Tree) -> Tree:
    """A tree with memory of its own."""
    return tree.map(torch.clone, value)


def last(rounds: Any) -> ft.Round:
    """The last round of a finite run."""
    *_, final = rounds
    return final


def client_tensors(clients: Any, outbox: Tree, client: int) -> Tree:
    """The tensors that one client predicts with."""
    return tree.map(lambda leaf: leaf[0], clients.tensors(outbox, torch.tensor([client])))
