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
from fedtorch.federation.local_solvers.optimisers import Configured, MakeOptimizer, configure, probe, rebind
from fedtorch.federation.local_solvers.prediction import predictor
from fedtorch.federation.local_solvers.stacked_loss import StackedLoss, is_ragged
from fedtorch.models import functional
from fedtorch.tree import Tree

__all__ = ["LocalState", "gradient_descent"]


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
        configured = self._configured(_SOME_STEPS)
        probe(configured)
        self.names = configured.names
        self.shared: dict[str, type] = {}  # parts of the optimiser's state that are one number, and their type
        self.untrained = self._untrained(configured) if self.keep else {}

    def _untrained(self, configured: Configured) -> dict[str, dict[str, Tensor]]:
        """The optimiser's state of one client before its first round, all zeros, if it is kept between rounds."""
        name = type(configured.optimizer).__name__
        if "estimated_stepping_batches" in self.objective.trainer.asked:
            raise TypeError(
                "Expected configure_optimizers not to ask for trainer.estimated_stepping_batches with reset='never', "
                "because the number of rounds is not known; use reset='round' or name a number of steps"
            )
        start = {n: self.parameters[n][None].clone() for group in self.names for n in group}
        optimizer = rebind(configured.optimizer, [[start[n] for n in group] for group in self.names])
        before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for tensor in start.values():
            tensor.grad = torch.zeros_like(tensor)
        optimizer.step()
        after = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        if before != after:
            raise TypeError(f"{name} keeps its state outside of the parameters; use reset='round'")
        for tensor in start.values():
            for part, value in optimizer.state[tensor].items():
                if not isinstance(value, Tensor) or value.ndim == 0:
                    self.shared[part] = Tensor if isinstance(value, Tensor) else type(value)
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
        self._learn(data)
        return data

    def _learn(self, data: Any) -> None:
        separable = not self.loss.batched or self.loss.separable is False or not is_ragged(data.count)
        if len(data.count) and not (self.loss.probed and separable):
            self._move(data.count.device)
            self.loss.probe(data, {**self.parameters, **self.buffers})

    def solve(self, start: Tree, state: LocalState, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
        """Trains the clients of a block, group by group."""
        if not self.loss.probed or (self.loss.batched and self.loss.separable is None):
            self._learn(data)
        count = data.count.to("cpu")
        if len(count) == 0:
            return Local(start, state, torch.zeros(0, dtype=torch.float64, device=key.device), {})
        groups = self._groups(count, state)
        if len(groups) == 1:
            return self._run(start, state, data.batch, count, quadratic, key)
        done = []
        for rows in groups:
            at = rows.to(key.device)
            mine = tree.take((start, state, data.batch, quadratic, key), at)
            done.append(self._run(mine[0], mine[1], mine[2], count[rows], mine[3], mine[4]))
        back = torch.cat(groups).argsort()
        names = dict.fromkeys(name for local in done for name in local.info)
        filled = [local._replace(info={n: local.info.get(n, local.steps * torch.nan) for n in names}) for local in done]
        return tree.take(tree.concatenate(filled), back.to(key.device))

    def _groups(self, count: Tensor, state: LocalState) -> list[Tensor]:
        """Rows of the block that can share steps exactly."""
        asked = self.objective.trainer.asked
        per_epoch = torch.ones_like(count) if self.batch_size is None else -(-count // self.batch_size)
        traits = []
        if self.loss.batched and not self.loss.separable:
            traits.append(count)
        counts_epochs = "current_epoch" in asked or self._configured(_SOME_STEPS).schedule.by_epoch
        if "estimated_stepping_batches" in asked or (counts_epochs and not self.one_epoch):
            traits.append(per_epoch)
        if state.steps is not None:
            traits.append(state.steps.to("cpu"))
        if not traits:
            return [torch.arange(len(count))]
        _, group = torch.stack(traits, 1).unique(dim=0, return_inverse=True)
        return [(group == g).nonzero()[:, 0] for g in range(int(group.max()) + 1)]

    def _run(
        self, start: Tree, state: LocalState, rows: Tree, count: Tensor, quadratic: Quadratic | None, key: Tensor
    ) -> Local:
        """Trains one group: the clients differ in rows and number of steps only."""
        self._move(key.device)
        batches = Batches(rows, count, self.batch_size, self.epochs, self.steps, key)
        module_key = random.fold_in(key, MODULE) if self.loss.random or not self.loss.batched else key
        total, longest, per_epoch = batches.total, int(batches.total.max()), int(batches.per_epoch.max())
        same_epochs = self.one_epoch or bool((batches.per_epoch == per_epoch).all())
        configured = self._configured(int(total[0]))
        tensors = {name: start[name].detach().clone(memory_format=torch.contiguous_format) for name in self.trained}
        buffers = {name: start[name].detach().clone() for name in self.averaged}
        buffers.update(tree.map(lambda leaf: leaf.detach().clone(), state.buffers))
        optimizer = rebind(configured.optimizer, [[tensors[n] for n in group] for group in self.names])
        position = 0 if state.steps is None else int(state.steps[0])
        if position:
            _load_optimizer_state(optimizer, tensors, state.optimizer, self.shared)
        for tensor in tensors.values():
            tensor.requires_grad_()
        pulls = None if quadratic is None else _pulls(quadratic, tensors)
        answers = self.objective.trainer.answers
        running = _Running(total, key.device)
        finished: Tree = None
        for t in range(longest):
            configured.schedule.apply(optimizer, position + t, per_epoch)
            answers["global_step"] = position + t
            answers["current_epoch"] = (position + t) // per_epoch if same_epochs else None
            losses, logs, buffers, gradients = self.loss.gradients(tensors, buffers, batches[t], t, module_key)
            self._descend(tensors, gradients, pulls, optimizer)
            running.add(t, losses.detach(), logs, optimizer.param_groups[0]["lr"])
            ends = total == t + 1
            if t + 1 < longest and bool(ends.any()):
                finished = _keep_rows(finished, self._result(tensors, buffers, optimizer, state), ends)
        result = self._result(tensors, buffers, optimizer, state)
        if finished is not None:
            result = _keep_rows(finished, result, total == longest)
        parameters, optimizer_state, buffers = result
        new = LocalState(
            optimizer_state,
            {name: buffers[name] for name in self.buffers},
            None if state.steps is None else state.steps + total.to(state.steps.device),
        )
        parameters.update({name: buffers[name] for name in self.averaged})
        return Local({name: parameters[name] for name in self.parameters}, new, running.steps(), running.info())

    def _descend(
        self,
        tensors: dict[str, Tensor],
        gradients: Sequence[Tensor | None],
        pulls: list[tuple[Tensor, Tensor]] | None,
        optimizer: Any,
    ) -> None:
        with torch.no_grad():
            for i, (tensor, gradient) in enumerate(zip(tensors.values(), gradients)):
                if pulls is not None:
                    precision, shift = pulls[i]
                    pull = precision * tensor - shift
                    gradient = pull if gradient is None else gradient + pull
                # Fused optimisers read memory in order, whatever the strides; one copy is overwritten at every step.
                if gradient is None or gradient.is_contiguous():
                    tensor.grad = gradient
                elif tensor.grad is None:
                    tensor.grad = gradient.contiguous()
                else:
                    tensor.grad.copy_(gradient)
            optimizer.step()
            if self.project is not None:
                projected = self.project({name: tensor.detach() for name, tensor in tensors.items()})
                for name, tensor in tensors.items():
                    tensor.copy_(projected[name])

    def _result(
        self, tensors: dict[str, Tensor], buffers: dict[str, Tensor], optimizer: Any, state: LocalState
    ) -> Tree:
        kept = {}
        for name in state.optimizer:  # what never had a gradient has no state in the optimiser
            kept[name] = {**state.optimizer[name], **_optimizer_state(optimizer, tensors[name])}
        return {n: t.detach() for n, t in tensors.items()}, kept, buffers

    def _configured(self, total: int) -> Configured:
        """The optimiser and schedule; a new one per number of steps only if the module asks for that number."""
        trainer = self.objective.trainer
        trainer.answers["estimated_stepping_batches"] = total
        by_total = "estimated_stepping_batches" in trainer.asked
        if (total if by_total else None) not in self._configurations:
            found = configure(self.objective.module, self.make)
            by_total = "estimated_stepping_batches" in trainer.asked
            self._configurations[total if by_total else None] = found
        return self._configurations[total if by_total else None]

    def _move(self, device: torch.device) -> None:
        if next(self.objective.parameters()).device != device:
            self.objective.to(device)


class _Running:
    """Means over each client's own steps, added up at the end."""

    def __init__(self, total: Tensor, device: torch.device) -> None:
        self.total, self.device = total, device
        self.rates: list[float] = []
        self.seen: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, step: int, losses: Tensor, logs: dict[str, Tensor], rate: float | Tensor) -> None:
        """Takes in one step."""
        self.rates.append(float(rate))
        for name, value in {**logs, "loss": losses}.items():
            self.seen.setdefault(name, []).append((step, value.detach()))

    def steps(self) -> Tensor:
        """The sum of the learning rates that each client took, `(K,)` float64."""
        return torch.tensor([0.0, *self.rates], dtype=torch.float64).cumsum(0)[self.total].to(self.device)

    def info(self) -> dict[str, Tensor]:
        """The means, `(K,)` each; NaN for what a client has not told."""
        total = self.total.to(self.device)
        means = {}
        for name, seen in self.seen.items():
            active = torch.tensor([step for step, _ in seen], device=self.device)[:, None] < total
            values = torch.stack([value for _, value in seen])
            means[name] = torch.where(active, values, 0.0).sum(0) / active.sum(0)
        return means


def _pulls(quadratic: Quadratic, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """λ and h of each parameter, in its dtype."""
    return [
        (tree.along(quadratic.precision_of(name).to(tensor), tensor), quadratic.shift[name].to(tensor))  # type: ignore[misc]
        for name, tensor in tensors.items()
    ]


def _optimizer_state(optimizer: Any, tensor: Tensor) -> dict[str, Tensor]:
    """The optimiser's state of one stacked parameter with the clients in front: rows, or one number for all."""
    found = {}
    for name, value in optimizer.state.get(tensor, {}).items():
        if value is None:
            continue
        value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        if value.ndim and value.shape[0] != tensor.shape[0]:
            raise TypeError(
                f"Expected {type(optimizer).__name__}'s state {name!r} to have a row per client, but got shape "
                f"{tuple(value.shape)} for {tensor.shape[0]} clients; use reset='round'"
            )
        found[name] = value.detach() if value.ndim else value.to(tensor.device).expand(len(tensor)).clone()
    return found


def _load_optimizer_state(
    optimizer: Any, tensors: dict[str, Tensor], state: dict[str, dict[str, Tensor]], shared: dict[str, type]
) -> None:
    """Puts kept states back; parts in `shared` are one number for all clients of the group."""
    for name, saved in state.items():
        if not any(bool(value.any()) for value in saved.values()):
            continue  # it has never had a gradient
        for part, value in saved.items():
            kind = shared.get(part)
            one = value.clone() if kind is None else value[0].clone() if kind is Tensor else kind(value[0])
            optimizer.state[tensors[name]][part] = one


def _keep_rows(kept: Tree, now: Tree, rows: Tensor) -> Tree:
    """`kept` with `rows` `(K,)` bool replaced by what they are now; a copy of `now` the first time."""
    if kept is None:
        return tree.map(torch.clone, now)

    def replace(old: Tensor, new: Tensor) -> Tensor:
        at = rows.to(old.device)
        old[at] = new[at]
        return old

    return tree.map(replace, kept, now)
