"""Steps of gradient descent that a group of stacked clients take together.

The clients of a stack differ in their rows and in their number of steps only. Descents with the same loss and different
optimisers share one stack: the loss and its gradient are found once for all, and each optimiser moves its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.local_solvers.batches import MODULE, Batches
from fedtorch.federation.local_solvers.optimisers import load_state, rebind, state_of
from fedtorch.federation.local_solvers.together import Problem
from fedtorch.tree import Tree

__all__ = ["LocalState", "Stack", "optimizer_state"]


class LocalState(NamedTuple):
    """What a client keeps between rounds; leaves `(K, ...)`."""

    optimizer: dict[str, dict[str, Tensor]]  # by parameter, then by the optimiser's own names; empty if reset
    buffers: dict[str, Tensor]  # the client's own buffers
    steps: Tensor | None  # (K,) steps taken so far, None if reset


class Stack:
    """One group of clients, which differ in rows and number of steps only, once for each of `S` problems.

    The problems are of descents that share steps. Problem s has the rows s·K to (s + 1)·K of every stacked tensor.
    """

    def __init__(self, problems: Sequence[Problem], rows: Tree, count: Tensor, key: Tensor) -> None:
        self.first = problems[0].solver
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
        self.descent = problem.solver
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
        return {n: {**state[n], **optimizer_state(self.optimizer, self.tensors[n])} for n in state}

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
    return [(tree.along(precision[n].to(tensor), tensor), shift[n].to(tensor)) for n, tensor in tensors.items()]


def optimizer_state(optimizer: Any, tensor: Tensor) -> dict[str, Tensor]:
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
