"""Gradient descent of any module on stacked clients.

All clients of a block take their steps together: `vmap(loss)(stacked, batches).sum().backward(); optimizer.step()`.
Each gets what a loop of its own would have given: its own minibatches, its own number of steps, its own draws. Clients
share a step only where that is exact; otherwise they are grouped (by steps per epoch when the schedule or the module
counts epochs, by number of rows when a batch's loss or logs are not the means of its examples', by position when the
optimiser's state is kept between rounds). Whether they are means is tried out on up to 16 rows of each ragged block
and on one row for each value of its integer fields.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch.data import BadClients
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic
from fedtorch.federation.local_solvers.objective import Loss, Objective, training_copy
from fedtorch.federation.local_solvers.optimisers import (
    Configured,
    MakeOptimizer,
    configure,
    numbers,
    probe,
    zero_step,
)
from fedtorch.federation.local_solvers.prediction import predictor
from fedtorch.federation.local_solvers.stack import LocalState, Stack, optimizer_state
from fedtorch.federation.local_solvers.stacked_loss import StackedLoss, is_ragged
from fedtorch.federation.local_solvers.together import Problem, answer
from fedtorch.tree import Tree

__all__ = ["gradient_descent", "solve_together", "work"]


_STACK_BYTES = 512 * 2**20  # of parameters, their gradients and rows that a stack of several descents may take
_SOME_STEPS = 100  # of a round, to construct a schedule that asks for their number


def gradient_descent(
    module: nn.Module,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    reset: Literal["round", "never"] = "round",
    buffers: Literal["refuse", "local", "average"] = "refuse",
    batched: bool = True,
    compile: bool = False,
    project: Callable[[Tree], Tree] | None = None,
    ignore_hooks: Sequence[str] = (),
) -> LocalSolver:
    """A local solver that trains `module` by its own optimiser, on stacked clients.

    The added `Quadratic` enters as its gradient λx − h, before the optimiser's step. `Local.info` has `loss`, the mean
    training loss over the client's steps, and what the module logs by `self.log`.

    Args:
        module: an unmodified LightningModule, or an `nn.Module` together with `loss` and `optimizer`. Parameters with
            `requires_grad=False` stay as they are and are never sent.
        epochs: passes over a client's rows in each round; exactly one of `epochs` and `steps` is given.
        steps: minibatches in each round, going through as many epochs as that takes.
        batch_size: rows of a minibatch; None takes all of a client's rows in every step.
        loss: `(output, target) -> mean loss` of a batch `(input, target)`, for a plain `nn.Module`.
        optimizer: `parameters -> torch.optim.Optimizer`; default: the module's `configure_optimizers`.
        reset: "round" starts optimiser and schedule afresh each round; "never" keeps both in the client's state, its
            epoch then being all steps it has taken divided by its steps per epoch.
        buffers: what happens to buffers that training changes, such as BatchNorm's statistics. "refuse" raises an
            error, "local" keeps each client's own, "average" treats floating-point buffers as parameters.
        batched: False evaluates the loss client by client, for modules that `vmap` cannot run (LSTM, `.item()`,
            boolean masks); everything else stays stacked.
        compile: True traces a step's tensor operations once per shape and replays them, two to three times faster
            for small modules. The module's Python code then runs once only: it must not depend on the batch index, the
            trainer's counters or anything else that changes from step to step. Modules that draw random numbers or
            have stacked buffers run untraced.
        project: applied to the stacked parameters after every step, for constraints.
        ignore_hooks: names of overridden Lightning hooks that training does not depend on.

    Raises:
        TypeError, ValueError: at construction or on first sight of the data (when a population is bound), if the
            module cannot run stacked; the message says what to do.

    Example:
        >>> import torch, fedtorch as ft
        >>> local = ft.gradient_descent(
        ...     torch.nn.Linear(3, 1), epochs=1, batch_size=8, loss=torch.nn.functional.mse_loss,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> sorted(local.parameters)
        ['bias', 'weight']
    """
    if (epochs is None) == (steps is None):
        raise ValueError(f"Expected either epochs= or steps=, but got epochs={epochs} and steps={steps}")
    for name, value in (("epochs", epochs), ("steps", steps), ("batch_size", batch_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"Expected {name} to be a whole number of at least 1, but got {value}")
    if reset not in ("round", "never"):
        raise ValueError(f"Expected reset='round' or reset='never', but got {reset!r}")
    if buffers not in ("refuse", "local", "average"):
        raise ValueError(f"Expected buffers='refuse', 'local' or 'average', but got {buffers!r}")
    descent = _Descent(
        module, epochs, steps, batch_size, loss, optimizer, reset, buffers, batched, compile, project, ignore_hooks
    )
    return LocalSolver(
        solve=descent.solve,
        parameters=descent.parameters,
        init=descent.init,
        predict=predictor(descent.module, batched),
        tensors=lambda parameters, state: {**parameters, **state.buffers},
        prepare=descent.prepare,
        module=descent.module,
    )


class _Descent:
    """The solver's fixed parts, and what the probe found out about the module."""

    def __init__(
        self,
        module: nn.Module,
        epochs: int | None,
        steps: int | None,
        batch_size: int | None,
        loss: Loss | None,
        make: MakeOptimizer | None,
        reset: str,
        buffers: str,
        batched: bool,
        compile: bool,
        project: Callable[[Tree], Tree] | None,
        ignore_hooks: Sequence[str],
    ) -> None:
        self.module = copy.deepcopy(module)
        trained = training_copy(module, ignore_hooks)
        self.objective = Objective(trained, loss)
        self.epochs, self.steps, self.batch_size = epochs, steps, batch_size
        self.make, self.keep, self.policy = make, reset == "never", buffers
        self.project = project
        self.one_epoch = epochs == 1 and not self.keep  # every step is in the schedule's first epoch
        every = {} if buffers == "refuse" else functional.buffers(trained)
        averaged = {n: b for n, b in every.items() if buffers == "average" and b.is_floating_point()}
        self.buffers = {n: b for n, b in every.items() if n not in averaged}  # the client's own
        self.averaged = list(averaged)
        self.parameters = {**functional.parameters(trained), **averaged}
        if not functional.parameters(trained):
            raise ValueError(f"Expected {type(module).__name__} to have trainable parameters, but it has none")
        self.trained = [name for name in self.parameters if name not in averaged]
        self.loss = StackedLoss(self.objective, self.trained, [*averaged, *self.buffers], batched, compile)
        self._configurations: dict[int | None, Configured] = {}
        self.objective.trainer.answers.update(max_epochs=-1 if epochs is None else epochs)
        configured = self.configured(_SOME_STEPS)
        probe(configured)
        self.names = configured.names
        self.shared: dict[str, type] = {}  # parts of the optimiser's state that are one number, and their type
        self.untrained = self._untrained(configured) if self.keep else {}
        self._work: str | Literal[False] | None = False  # not looked at yet

    def _untrained(self, configured: Configured) -> dict[str, dict[str, Tensor]]:
        """The optimiser's state of one client before its first round, all zeros, if it is kept between rounds."""
        if "estimated_stepping_batches" in self.objective.trainer.asked:
            raise TypeError(
                "Expected configure_optimizers not to ask for trainer.estimated_stepping_batches with reset='never', "
                "because the number of rounds is not known; use reset='round' or name a number of steps"
            )
        start = {n: self.parameters[n][None].clone() for group in self.names for n in group}
        groups = [[start[n] for n in group] for group in self.names]
        optimizer = zero_step(configured.optimizer, groups, "use reset='round'")
        self.shared = numbers(optimizer)
        state = {n: optimizer_state(optimizer, tensor) for n, tensor in start.items()}
        return tree.map(lambda leaf: torch.zeros_like(leaf[0]), state)

    def init(self, parameters: Tree) -> LocalState:
        """One client's state before its first round."""
        return LocalState(self.untrained, dict(self.buffers), torch.tensor(0) if self.keep else None)

    def prepare(self, data: Any) -> Any:
        """Looks at a block to find out what the module can do; the data stay as they are.

        Raises:
            BadClients: some have no rows.
        """
        empty = (data.count == 0).nonzero()[:, 0]
        if len(empty):
            raise BadClients(empty, "Expected at least one row to train on, but got none; leave the client out")
        self.learn(data)
        return data

    def learn(self, data: Any) -> None:
        """Finds out what the module can do, as far as this block tells and it is not known."""
        separable = not self.loss.batched or self.loss.separable is False or not is_ragged(data.count)
        if len(data.count) and not (self.loss.probed and separable):
            self.move(data.count.device)
            self.loss.probe(data, {**self.parameters, **self.buffers})

    def solve(self, start: Tree, state: LocalState, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
        """Trains the clients of a block, at once or together with what else is asked for inside of `together`."""
        problem = Problem(self, start, state, data, quadratic, key)
        known = answer(problem)
        return solve_together([problem])[0] if known is None else known

    def work(self, data: Any) -> str | None:
        """What this descent does with a client but for its optimiser, the same for descents that can share steps.

        None if that cannot be told; see `StackedLoss.work`.
        """
        if self._work is False:
            self.move(data.count.device)
            found = self.loss.work(data, {**self.parameters, **self.buffers})
            shapes = {
                name: (tuple(leaf.shape), leaf.dtype) for name, leaf in {**self.parameters, **self.buffers}.items()
            }
            fixed = (self.epochs, self.steps, self.batch_size, self.keep, self.policy, self.loss.batched)
            self._work = None if found is None else f"{found} {shapes} {fixed} {self.loss.compile}"
        return self._work

    def configured(self, total: int) -> Configured:
        """The optimiser and schedule; a new one per number of steps only if the module asks for that number."""
        trainer = self.objective.trainer
        trainer.answers["estimated_stepping_batches"] = total
        by_total = "estimated_stepping_batches" in trainer.asked
        if (total if by_total else None) not in self._configurations:
            found = configure(self.objective.module, self.make)
            by_total = "estimated_stepping_batches" in trainer.asked
            self._configurations[total if by_total else None] = found
        return self._configurations[total if by_total else None]

    def move(self, device: torch.device) -> None:
        """Takes the module to the device of the data."""
        if next(self.objective.parameters()).device != device:
            self.objective.to(device)


def solve_together(problems: Sequence[Problem]) -> list[Local]:
    """Trains for several descents; those of the same work on the same clients take their steps together.

    The loss and its gradient do not know the optimiser, so one stack of all their clients serves all of them, and each
    optimiser moves its own rows of the stack.
    """
    solved: dict[int, Local] = {}
    for stack in _stacks(problems):
        solved.update(zip(stack, _solve([problems[i] for i in stack])))
    return [solved[i] for i in range(len(problems))]


def work(local: LocalSolver, data: Any) -> str | None:
    """What a local solver does with clients, the same for those that `solve_together` can stack; see `_Descent.work`.

    Args:
        local: any local solver.
        data: a block of clients, looked at if the solver has not been asked yet.

    Returns:
        None for what is solved alone: solvers other than `gradient_descent`, and modules that cannot be compared.
    """
    descent = getattr(local.solve, "__self__", None)
    return descent.work(data) if isinstance(descent, _Descent) else None


def _stacks(problems: Sequence[Problem]) -> list[list[int]]:
    """Places of the problems that can share steps, as many together as memory allows."""
    stacks: list[list[int]] = []
    for i, problem in enumerate(problems):
        most = max(1, _STACK_BYTES // max(1, _copied_bytes(problem)))
        fitting = (s for s in stacks if _shares(problems[s[0]], problem) and len(s) < most)
        stack = next(fitting, None)
        stacks.append([i]) if stack is None else stack.append(i)
    return stacks


def _copied_bytes(problem: Problem) -> int:
    """What one more descent takes: parameters with gradients and moments, and a batch of its own."""
    size, rows = problem.solver.batch_size, tree.leaves(problem.data.batch)[0].shape[1]
    share = 1.0 if size is None else min(1.0, size / max(1, rows))
    return int(4 * tree.nbytes(problem.start) + share * tree.nbytes(problem.data.batch))


def _shares(first: Problem, second: Problem) -> bool:
    if second.data is not first.data or not torch.equal(second.key, first.key):
        return False
    steps = first.state.steps, second.state.steps
    if steps[0] is not None and steps[1] is not None and not torch.equal(*steps):
        return False
    work = first.solver.work(first.data)
    return work is not None and work == second.solver.work(second.data)


def _solve(problems: Sequence[Problem]) -> list[Local]:
    """Trains the clients of a block for descents that share steps, group by group of clients."""
    first, data, key = problems[0].solver, problems[0].data, problems[0].key
    if not first.loss.probed or (first.loss.batched and first.loss.separable is None):
        first.learn(data)
    count = data.count.to("cpu")
    if len(count) == 0:
        nothing = torch.zeros(0, dtype=torch.float64, device=key.device)
        return [Local(problem.start, problem.state, nothing, {}) for problem in problems]
    groups = _groups(problems, count)
    if len(groups) == 1:
        return Stack(problems, data.batch, count, key).run()
    done = []
    for rows in groups:
        at = rows.to(key.device)
        mine = [p._replace(**tree.take({n: getattr(p, n) for n in _STACKED}, at)) for p in problems]
        batch, keys = tree.take((data.batch, key), at)
        done.append(Stack(mine, batch, count[rows], keys).run())
    back = torch.cat(groups).argsort().to(key.device)
    return [tree.take(tree.concatenate(_same_info(parts)), back) for parts in zip(*done)]


_STACKED = ("start", "state", "quadratic")  # what a problem has a row of per client


def _same_info(parts: Sequence[Local]) -> list[Local]:
    """The solutions of groups of clients, NaN for what only others have told."""
    names = dict.fromkeys(name for local in parts for name in local.info)
    return [local._replace(info={n: local.info.get(n, local.steps * torch.nan) for n in names}) for local in parts]


def _groups(problems: Sequence[Problem], count: Tensor) -> list[Tensor]:
    """Rows of the block that can share steps exactly."""
    first, state = problems[0].solver, problems[0].state
    asked = set().union(*(p.solver.objective.trainer.asked for p in problems))
    per_epoch = torch.ones_like(count) if first.batch_size is None else -(-count // first.batch_size)
    traits = []
    if first.loss.batched and not first.loss.separable:
        traits.append(count)
    by_epoch = any(p.solver.configured(_SOME_STEPS).schedule.by_epoch for p in problems)
    if "estimated_stepping_batches" in asked or (("current_epoch" in asked or by_epoch) and not first.one_epoch):
        traits.append(per_epoch)
    if state.steps is not None:
        traits.append(state.steps.to("cpu"))
    if not traits:
        return [torch.arange(len(count))]
    _, group = torch.stack(traits, 1).unique(dim=0, return_inverse=True)
    return [(group == g).nonzero()[:, 0] for g in range(int(group.max()) + 1)]
