"""Questions of several functions are answered together; operations tell computations apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fedtorch.federation.algorithm import Local
from fedtorch.federation.local_solvers.operations import Operations
from fedtorch.federation.local_solvers.together import Problem, answer, together

KEY = torch.tensor([0])


def ask(number: float) -> Tensor:
    """Twice the number, by somebody else."""
    found = answer(Problem(None, torch.tensor(number), None, None, None, KEY))
    assert found is not None
    return found.parameters


def test_questions_of_the_same_turn_are_answered_in_one_go() -> None:
    turns = []

    def solve(problems: Sequence[Problem]) -> list[Local]:
        turns.append([float(problem.start) for problem in problems])
        return [Local(2 * problem.start, None, KEY, {}) for problem in problems]

    functions: list[Callable[[], float]] = [
        lambda: float(ask(float(ask(1.0)))),
        lambda: -1.0,
        lambda: float(ask(3.0) + ask(4.0) + ask(5.0)),
    ]
    assert together(functions, solve) == [4.0, -1.0, 24.0]
    assert turns == [[1.0, 3.0], [2.0, 4.0], [5.0]]


def test_outside_nobody_answers_and_errors_pass() -> None:
    problem = Problem(None, torch.tensor(1.0), None, None, None, KEY)
    assert answer(problem) is None

    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        together([broken], lambda problems: [])
    assert answer(problem) is None


def taken(function: Callable[[Tensor], Tensor]) -> tuple[str, bool]:
    with Operations() as operations:
        x = torch.linspace(-1, 1, 5).requires_grad_()
        torch.autograd.grad(function(x).sum(), x)
    return operations.digest(), operations.reads


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def test_operations_tell_constants_shapes_and_gradients_apart() -> None:
    huber = lambda delta: lambda x: torch.nn.functional.huber_loss(x, torch.zeros(5), delta=delta)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.square(),
        lambda x: x * 2.0,
        lambda x: x * 3.0,
        lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0]),
        lambda x: x * x.exp() * x.sin(),
        lambda x: x * x.sin() * x.exp(),
        huber(2.0),  # the same numbers: nothing is further out than one
        huber(3.0),
        lambda x: Reversed.apply(x, 1.0),
        lambda x: Reversed.apply(x, -1.0),
    ]
    digests = [taken(function)[0] for function in functions]
    assert len(set(digests)) == len(functions)
    assert digests == [taken(function)[0] for function in functions]


def test_operations_notice_numbers_that_are_read() -> None:
    assert not taken(lambda x: x * 2)[1]
    assert taken(lambda x: x * (2 if x.sum() > 0 else 3))[1]
