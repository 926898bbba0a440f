"""Several functions that call local solvers, run so that what they ask for at the same time is solved in one go.

The functions are pure, as `Algorithm.client` is. So nothing has to be suspended: a function that asks for a solution is
left by an exception, the problems of all functions are solved together, and each is called again with the answers that
are known. It repeats what it has computed before its question, which is cheap beside the solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.tree import Tree

__all__ = ["Problem", "answer", "together"]

Value = TypeVar("Value")


class Problem(NamedTuple):
    """What a local solver is asked to solve for `K` clients; see `algorithm.LocalSolver`."""

    solver: Any  # who is asked
    start: Tree
    state: Tree
    data: Any
    quadratic: Quadratic | None
    key: Tensor


class _Unsolved(BaseException):
    """Leaves a function at a problem whose answer is not known yet; no business of `except Exception`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem


_answers: ContextVar[Iterator[Local] | None] = ContextVar("answers", default=None)


def answer(problem: Problem) -> Local | None:
    """The answer that is known, inside of `together`; None outside, where the solver finds it by itself."""
    known = _answers.get()
    if known is None:
        return None
    for found in known:
        return found
    raise _Unsolved(problem)


def together(
    functions: Sequence[Callable[[], Value]], solve: Callable[[Sequence[Problem]], Sequence[Local]]
) -> list[Value]:
    """What the functions return, in their order.

    Args:
        functions: pure, and called once more for every problem that they put to `answer`.
        solve: problems -> solutions in the same order.
    """
    known: list[list[Local]] = [[] for _ in functions]
    values: dict[int, Value] = {}
    waiting = list(range(len(functions)))
    while waiting:
        problems: dict[int, Problem] = {}
        for i in waiting:
            token = _answers.set(iter(known[i]))
            try:
                values[i] = functions[i]()
            except _Unsolved as unsolved:
                problems[i] = unsolved.problem
            finally:
                _answers.reset(token)
        for i, local in zip(problems, solve(list(problems.values())) if problems else ()):
            known[i].append(local)
        waiting = list(problems)
    return [values[i] for i in range(len(functions))]
