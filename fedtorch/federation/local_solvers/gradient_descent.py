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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import random, tree
from fedtorch.federation.algorithm import BadClients, Local, LocalSolver, Quadratic
from fedtorch.federation.local_solvers.batches import MODULE, Batches
from fedtorch.federation.local_solvers.objective import Loss, Objective, training_copy
from fedtorch.federation.local_solvers.optimisers import (
    Configured,
    MakeOptimizer,
    configure,
    load_state,
    numbers,
    probe,
    rebind,
    state_of,
    zero_step,
)
from fedtorch.federation.local_solvers.prediction import predictor
from fedtorch.federation.local_solvers.stacked_loss import StackedLoss, is_ragged
from fedtorch.federation.local_solvers.together import Problem, answer
from fedtorch.models import functional
from fedtorch.tree import Tree

__all__ = ["LocalState", "gradient_descent", "solve_together", "work"]


_STACK_BYTES = 512 * 2**20  # of parameters, their gradients and rows that a stack of several descents may take
_SOME_STEPS = 100  # of a round, to construct a schedule that asks for their number


class LocalState(NamedTuple):
    """What a client keeps between rounds; leaves `(K, ...)`."""

    optimizer: dict[str, dict[str, Tensor]]  # by parameter, then by the optimiser's own names; empty if reset
    buffers: dict[str, Tensor]  # the client's own buffers
    steps: Tensor | None  # (K,) steps taken so far, None if reset


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
        state = {n: _optimizer_state(optimizer, tensor) for n, tensor in start.items()}
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
        return _Stack(problems, data.batch, count, key).run()
    done = []
    for rows in groups:
        at = rows.to(key.device)
        mine = [p._replace(**tree.take({n: getattr(p, n) for n in _STACKED}, at)) for p in problems]
        batch, keys = tree.take((data.batch, key), at)
        done.append(_Stack(mine, batch, count[rows], keys).run())
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


class _Stack:
    """One group of clients, which differ in rows and number of steps only, once for each of `S` problems.

    The problems are of descents that share steps. Problem s has the rows s·K to (s + 1)·K of every stacked tensor.
    """

    def __init__(self, problems: Sequence[Problem], rows: Tree, count: Tensor, key: Tensor) -> None:
        self.first: _Descent = problems[0].solver
        first, device = self.first, key.device
        first.move(device)
        size, number = len(count), len(problems)
        self.batches = Batches(rows, count, first.batch_size, first.epochs, first.steps, key, number)
        keys = random.fold_in(key, MODULE) if first.loss.random or not first.loss.batched else key
        self.key = keys.repeat(number)
        start = _joined([{name: p.start[name].detach() for name in first.parameters} for p in problems])
        own = _joined([tree.map(torch.detach, p.state.buffers) for p in problems])
        self.tensors = {name: start[name] for name in first.trained}
        self.buffers = {**{name: start[name] for name in first.averaged}, **own}
        self.members = []
        for i, problem in enumerate(problems):
            part = slice(i * size, (i + 1) * size)
            tensors = {n: t[part] for n, t in self.tensors.items()} if number > 1 else self.tensors
            self.members.append(_Member(problem, part, tensors, self.batches.total))
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        self.pulls = _pulls([p.quadratic for p in problems], self.tensors, size)
        self._copies: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def run(self) -> list[Local]:
        """Takes all steps."""
        total, per_epoch = self.batches.total, int(self.batches.per_epoch.max())
        longest, position = int(total.max()), self.members[0].position
        same_epochs = self.first.one_epoch or bool((self.batches.per_epoch == per_epoch).all())
        answers = self.first.objective.trainer.answers
        running = _Running(total.repeat(len(self.members)), self.key.device)
        finished: Tree = None
        for t in range(longest):
            for member in self.members:
                member.set_rate(position + t, per_epoch)
            answers["global_step"] = position + t
            answers["current_epoch"] = (position + t) // per_epoch if same_epochs else None
            losses, logs, self.buffers, gradients = self.first.loss.gradients(
                self.tensors, self.buffers, self.batches[t], t, self.key
            )
            self._descend(gradients)
            running.add(t, losses.detach(), logs)
            ends = total == t + 1
            if t + 1 < longest and bool(ends.any()):
                finished = self._finish(finished, ends)
        finished = self._now() if finished is None else self._finish(finished, total == longest)
        tensors, kept = finished
        info = running.info()
        return [member.local(tensors, state, total, info) for member, state in zip(self.members, kept)]

    def _descend(self, gradients: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            for i, (name, gradient) in enumerate(zip(self.tensors, gradients)):
                if self.pulls is not None:
                    precision, shift = self.pulls[i]
                    pull = precision * self.tensors[name] - shift
                    gradient = pull if gradient is None else gradient + pull
                self._hand_out(name, gradient)
            for member in self.members:
                member.step()

    def _hand_out(self, name: str, gradient: Tensor | None) -> None:
        """Gives every optimiser its rows of a gradient.

        Fused optimisers read memory in order, whatever the strides; one contiguous copy is overwritten at every step.
        """
        if gradient is None or (len(self.members) == 1 and gradient.is_contiguous()):
            for member in self.members:
                member.tensors[name].grad = gradient
            return
        if name not in self._copies:
            whole = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            self._copies[name] = whole, [whole[member.rows] for member in self.members]
        whole, parts = self._copies[name]
        whole.copy_(gradient)
        for member, part in zip(self.members, parts):
            member.tensors[name].grad = part

    def _now(self) -> tuple[Tree, tuple[Tree, ...]]:
        """(tensors and buffers of the stack, each optimiser's state) after the steps so far."""
        tensors = {name: tensor.detach() for name, tensor in (self.tensors | self.buffers).items()}
        return tensors, tuple(member.kept() for member in self.members)

    def _finish(self, finished: Tree, ends: Tensor) -> Tree:
        """`finished` with the clients `ends` `(K,)` as they are now."""
        tensors, kept = self._now()
        before = (None, None) if finished is None else finished
        return _keep_rows(before[0], tensors, ends.repeat(len(self.members))), _keep_rows(before[1], kept, ends)


class _Member:
    """One problem's rows of a stack, and the optimiser that moves them.

    Args:
        problem: of one descent.
        rows: of the stack.
        tensors: these rows of what is trained, as views.
        total: `(K,)` how many steps each client takes.
    """

    def __init__(self, problem: Problem, rows: slice, tensors: dict[str, Tensor], total: Tensor) -> None:
        self.descent: _Descent = problem.solver
        self.rows, self.tensors, self.state = rows, tensors, problem.state
        configured = self.descent.configured(int(total[0]))
        self.schedule = configured.schedule
        self.optimizer = rebind(configured.optimizer, [[tensors[n] for n in group] for group in self.descent.names])
        self.position = 0 if self.state.steps is None else int(self.state.steps[0])
        if self.position:
            _load_optimizer_state(self.optimizer, tensors, self.state.optimizer, self.descent.shared)
        self.rates: list[float] = []

    def set_rate(self, position: int, per_epoch: int) -> None:
        """Gives the optimiser its hyperparameters of a step."""
        self.schedule.apply(self.optimizer, position, per_epoch)
        self.rates.append(float(self.optimizer.param_groups[0]["lr"]))

    def step(self) -> None:
        """Moves by the gradients that the tensors have been given."""
        self.optimizer.step()
        if self.descent.project is not None:
            projected = self.descent.project({name: tensor.detach() for name, tensor in self.tensors.items()})
            for name, tensor in self.tensors.items():
                tensor.copy_(projected[name])

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """The optimiser's state as it is now, if it is kept; what never had a gradient has none in the optimiser."""
        state = self.state.optimizer
        return {n: {**state[n], **_optimizer_state(self.optimizer, self.tensors[n])} for n in state}

    def local(
        self, tensors: dict[str, Tensor], kept: dict[str, dict[str, Tensor]], total: Tensor, info: dict[str, Tensor]
    ) -> Local:
        """The solution, after `total` `(K,)` steps of each client, from the tensors and buffers of the stack."""
        steps, descent = self.state.steps, self.descent
        own = {name: tensors[name][self.rows] for name in descent.buffers}
        new = LocalState(kept, own, None if steps is None else steps + total.to(steps.device))
        taken = torch.tensor([0.0, *self.rates], dtype=torch.float64).cumsum(0)[total]
        return Local(
            {name: tensors[name][self.rows] for name in descent.parameters},
            new,
            taken.to(tensors[descent.trained[0]].device),
            {name: value[self.rows] for name, value in info.items()},
        )


class _Running:
    """Means over each client's own steps, added up at the end."""

    def __init__(self, total: Tensor, device: torch.device) -> None:
        self.total, self.device = total, device
        self.seen: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, step: int, losses: Tensor, logs: dict[str, Tensor]) -> None:
        """Takes in one step."""
        for name, value in {**logs, "loss": losses}.items():
            self.seen.setdefault(name, []).append((step, value.detach()))

    def info(self) -> dict[str, Tensor]:
        """The means, `(K,)` each; NaN for what a client has not told."""
        total = self.total.to(self.device)
        means = {}
        for name, seen in self.seen.items():
            active = torch.tensor([step for step, _ in seen], device=self.device)[:, None] < total
            values = torch.stack([value for _, value in seen])
            means[name] = torch.where(active, values, 0.0).sum(0) / active.sum(0)
        return means


def _joined(trees: Sequence[Tree]) -> Tree:
    """Copies of stacked trees one after the other, contiguous."""
    if len(trees) > 1:
        return tree.concatenate(trees)
    return tree.map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), trees[0])


def _pulls(
    quadratics: Sequence[Quadratic | None], tensors: Mapping[str, Tensor], size: int
) -> list[tuple[Tensor, Tensor]] | None:
    """λ and h of each parameter, in its dtype, for stacks of `size` clients; None where nobody has any."""
    known = next((quadratic for quadratic in quadratics if quadratic is not None), None)
    if known is None:
        return None
    none = tree.map(torch.zeros_like, known)
    given = [none if quadratic is None else quadratic for quadratic in quadratics]
    precision, shift = _joined([({name: q.precision_of(name) for name in tensors}, q.shift) for q in given])
    return [(tree.along(precision[n].to(tensor), tensor), shift[n].to(tensor)) for n, tensor in tensors.items()]  # type: ignore[misc]


def _optimizer_state(optimizer: Any, tensor: Tensor) -> dict[str, Tensor]:
    """The optimiser's state of one stacked parameter with the clients in front: rows, or one number for all."""
    found = state_of(optimizer, tensor)
    for name, value in found.items():
        if value.ndim and value.shape[0] != tensor.shape[0]:
            raise TypeError(
                f"Expected {type(optimizer).__name__}'s state {name!r} to have a row per client, but got shape "
                f"{tuple(value.shape)} for {tensor.shape[0]} clients; use reset='round'"
            )
    clients = len(tensor)
    return {n: v if v.ndim else v.to(tensor.device).expand(clients).clone() for n, v in found.items()}


def _load_optimizer_state(
    optimizer: Any, tensors: dict[str, Tensor], state: dict[str, dict[str, Tensor]], shared: dict[str, type]
) -> None:
    """Puts kept states back; parts in `shared` are one number for all clients of the group."""
    for name, saved in state.items():
        if not any(bool(value.any()) for value in saved.values()):
            continue  # it has never had a gradient
        one = {part: value[0] if part in shared else value for part, value in saved.items()}
        load_state(optimizer, tensors[name], one, shared)


def _keep_rows(kept: Tree, now: Tree, rows: Tensor) -> Tree:
    """`kept` with `rows` `(K,)` bool replaced by what they are now; a copy of `now` the first time."""
    if kept is None:
        return tree.map(torch.clone, now)

    def replace(old: Tensor, new: Tensor) -> Tensor:
        at = rows.to(old.device)
        old[at] = new[at]
        return old

    return tree.map(replace, kept, now)
