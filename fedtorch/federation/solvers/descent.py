"""Train a block of clients by `gradient_descent`: group those that can share steps, and take the steps."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedtorch import functional, random, tree
from fedtorch.data import BadClients
from fedtorch.data.client_loaders import ClientLoaders
from fedtorch.dispatch.choice import possible
from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.local_schedule import batches_of, limited
from fedtorch.federation.solvers._configured import Configured, check_independent, configure
from fedtorch.federation.solvers._fused import FusedSteps, by_parameter
from fedtorch.federation.solvers._probe import check_batch, check_rows, failure_on_one_row, probe, probe_batch
from fedtorch.federation.solvers._state import LocalState, counts, divided_buffers, ever_trained, joined, keep_rows
from fedtorch.federation.solvers.batches import MODULE, Batches, check_last_batches, is_ragged
from fedtorch.federation.solvers.linear.steps import LinearSteps, linear_steps
from fedtorch.federation.solvers.loaders.alone import evaluated
from fedtorch.federation.solvers.loaders.batches import LoadedBatch, LoadedBatches
from fedtorch.federation.solvers.loaders.descending import OneByOne, check_settings, descend, one_by_one
from fedtorch.federation.solvers.objective import Loss, Objective, training_copy
from fedtorch.federation.solvers.stacked_loss import RoundLogs, StackedLoss
from fedtorch.federation.turn import Turn
from fedtorch.module_randomness.step_draws import StepKeys
from fedtorch.optimisers import DirectSteps, MakeOptimizer, State
from fedtorch.tree import Tree

_SOME_STEPS = 100  # of a round, to construct a schedule that asks for their number
_KEPT = 2**25 - 2**16  # bytes, the most for which glibc still moves its thresholds


class Descent:
    """The settings of `gradient_descent`, and what has been found out about the module.

    Attributes:
        linear: what a program that takes all steps of a round at once has to know; None asks none.
    """

    linear: LinearSteps | None = None

    def __init__(
        self,
        module: nn.Module,
        epochs: int | None = None,
        steps: int | None = None,
        rounds: int | None = None,
        batch_size: int | None = None,
        loss: Loss | None = None,
        make: MakeOptimizer | None = None,
        reset: str = "round",
        buffers: str = "refuse",
        batched: bool | Literal["auto"] = True,
        compile: bool | Literal["auto"] = "auto",
        clip: float | None = None,
        precision: str = "32",
        project: Callable[[Tree], Tree] | None = None,
        ignore_hooks: Sequence[str] = (),
        drop_last: bool = False,
    ) -> None:
        # glibc hands pages back and asks for them anew, every step, until it has seen a large block freed. Untouched.
        torch.empty(_KEPT, dtype=torch.uint8)
        self.module, self._original = copy.deepcopy(module), weakref.ref(module)
        trained = training_copy(module, ignore_hooks)
        self.objective = Objective(trained, loss)
        self.epochs, self.steps, self.rounds, self.batch_size = epochs, steps, rounds, batch_size
        self.make, self.keep, self.clip, self.project, self.drop_last = make, reset == "never", clip, project, drop_last
        self.one_epoch = epochs == 1  # all steps of a round are in the schedule's epoch of that number
        trainable = functional.parameters(trained)
        if not trainable:
            raise ValueError(f"Expected {type(module).__name__} to have trainable parameters, but it has none")
        self.trained = list(trainable)
        self.averaged, self.buffers = divided_buffers(trained, buffers)
        self.counts = counts(trained, self.averaged)
        self.parameters = {**trainable, **self.averaged}
        both = [*self.averaged, *self.buffers]
        self.loss = StackedLoss(self.objective, self.trained, both, batched, compile, precision)
        self._configurations: dict[int | None, Configured] = {}
        self.objective.trainer.answers["max_epochs"] = -1 if epochs is None else rounds and rounds * epochs
        configured = self.configured(_SOME_STEPS)
        check_independent(configured.optimizer)
        self.optimizer_settings = {**configured.settings, **({} if make is None else {"optimizer": make})}
        self.untrained: State = {}
        if self.keep:
            self.untrained = tree.map(lambda s: s[0], configured.optimizer.init(tree.expand(self.parameters, 1)))

    def init(self, parameters: Tree) -> LocalState:
        """Return one client's state before its first round."""
        return LocalState(self.untrained, dict(self.buffers), torch.tensor(0) if self.keep else None)

    def prepare(self, data: Any) -> Any:
        """Look at a block to find out what the module can do; the data stay as they are.

        Raises:
            BadClients: some have no rows, or rows that the module cannot take.
            ValueError: the loss reads parameters that are not trained.
        """
        if isinstance(data, ClientLoaders):  # no batch is read before its time
            check_settings(self.batch_size, drop_last=self.drop_last or None)
            return data
        empty = (data.count == 0).nonzero()[:, 0]
        if len(empty):
            raise BadClients(empty, "Expected at least one row to train on, but got none; leave the client out")
        if len(data.count):
            values = self.tensors(self.parameters, LocalState({}, self.buffers, None))
            check_rows(self.loss, data, values, self._original)
        self._learn(data)
        if len(data.count):
            check = partial(failure_on_one_row, self.loss, data, values)
            check_last_batches(data.count, self.batch_size, self.drop_last, self.steps, check)
        return data

    def _learn(self, data: Any) -> None:
        """Find out what the module can do, as far as this block tells and it is not known."""
        separable = not self.loss.batched or self.loss.separable is False or self.drop_last or not is_ragged(data.count)
        if len(data.count) and not (self.loss.probed and separable):
            self.move(data.count.device)
            probe(self.loss, data, self.tensors(self.parameters, LocalState({}, self.buffers, None)))

    def tensors(self, parameters: Tree, state: LocalState) -> Tree:
        """Return all tensors that clients predict with; see `LocalSolver`."""
        return {**functional.with_counts(parameters, self.counts), **state.buffers}

    def configured(self, total: int) -> Configured:
        """Return optimiser and schedule; of each number of steps of a round if the module has asked for the number."""
        trainer = self.objective.trainer
        trainer.answers["estimated_stepping_batches"] = self.rounds and self.rounds * total
        steps = total if "estimated_stepping_batches" in trainer.asked else None
        if steps not in self._configurations:
            self._configurations[steps] = configure(self.objective.module, self.make)
        return self._configurations[steps]

    def find_linear_steps(self, loss: Loss | None) -> None:
        """Let a program take all steps of a round at once where it knows all that they do."""
        if self.clip is None and self.project is None and self.loss.precision != "bf16":
            configured = self.configured(_SOME_STEPS)
            self.linear = linear_steps(self.objective, loss, self.trained, configured, self.keep)

    def move(self, device: torch.device) -> None:
        """Take the module to the device of the data."""
        if next(self.objective.parameters()).device != device:
            self.objective.to(device)

    def solve(self, start: Tree, state: LocalState, data: Any, quadratic: Quadratic | None, turn: Turn) -> Local:
        """Train the clients of a block, group by group of those that can share steps; see `LocalSolver`."""
        if isinstance(data, ClientLoaders):
            return self._through_loaders(start, state, data, quadratic, turn)
        device, key = data.count.device, lambda: turn.key  # which full batches of a module without draws never ask for
        if len(count := data.count.to("cpu")) == 0:
            nothing = torch.zeros(0, dtype=torch.float64, device=device)
            return Local(start, state, nothing, {"loss": nothing})
        limits, last = (self.batch_size, self.epochs, self.steps), (self.drop_last, turn.limit, turn.share)
        if self.linear is not None and turn.rates is None and self.linear.knows(start, data.batch, quadratic):
            return self.linear.solve(start, state, data, Batches(data.batch, count, *limits, key, *last), quadratic)
        if not self.loss.probed or (self.loss.batched and self.loss.separable is None):
            self._learn(data)
        whole = self.loss.batched and not self.loss.separable and not self.drop_last
        per_epoch = limited(batches_of(count, self.batch_size, self.drop_last), turn.limit)
        groups = self._groups(state, per_epoch, turn.round, [count] if whole else [])
        if len(groups) == 1:
            return _Stack(self, start, state, Batches(data.batch, count, *limits, key, *last), quadratic, turn).run()
        done = []
        for rows in groups:
            first, old, batch, pull = tree.take((start, state, data.batch, quadratic), rows.to(device))
            share = None if turn.share is None else turn.share[rows]
            keys = lambda rows=rows: turn.key[rows.to(device)]
            batches = Batches(batch, count[rows], *limits, keys, *last[:2], share)
            done.append(_Stack(self, first, old, batches, pull, turn.with_key(keys)).run())
        return joined(groups, done)

    def _through_loaders(
        self, start: Tree, state: LocalState, data: ClientLoaders, quadratic: Quadratic | None, turn: Turn
    ) -> Local:
        """Train the clients of a block on the batches of their loaders, one after another unless they are stacked."""
        if (count := len(data.count)) == 0:
            nothing = torch.zeros(0, dtype=torch.float64, device=turn.key.device)
            return Local(start, state, nothing, {"loss": nothing})
        if turn.partial:
            raise ValueError("Expected clients with rows for ft.partial_work, but got loaders; leave one of them out")
        per_epoch, each = torch.tensor([data.steps(k) for k in range(count)]), list(torch.arange(count)[:, None])
        train, block = lambda *group: _Stack(self, *group).run(), (start, state, data, quadratic, turn)
        through = lambda by: joined(by, descend(train, self._look, by, (self.epochs, self.steps), *block))
        try:
            limit = limited(per_epoch, turn.limit)
            return through(self._groups(state, limit, turn.round, []) if self.loss.batched else each)
        except OneByOne:  # as in every later round
            return through(each)

    def _look(self, batch: LoadedBatch, device: torch.device) -> None:
        """Find out what the module can do by the first batch of a loader, if it is not known; see `prepare`."""
        if not self.loss.probed:
            self.move(device)
            values = self.tensors(self.parameters, LocalState({}, self.buffers, None))
            check_batch(self.loss, batch.alone(0), values, device, self._original)
            with one_by_one(self.loss):
                rows = batch.as_rows(0) if self.loss.batched else batch.alone(0)
                probe_batch(self.loss, rows, values, torch.ones(1, dtype=torch.int64, device=device))

    def _groups(self, state: LocalState, per_epoch: Tensor, round: int, traits: list[Tensor]) -> list[Tensor]:
        """Return rows of the block that can share steps exactly; clients of other `traits` `(K,)` cannot anyway."""
        asked = self.objective.trainer.asked
        schedule = self.configured(_SOME_STEPS).schedule
        by_epoch = "current_epoch" in asked or (schedule is not None and schedule.by_epoch)
        by_step = "global_step" in asked or (schedule is not None and schedule.by_step)
        behind = round > 0 and self.epochs is not None  # who has more steps to an epoch has taken more by now
        if "estimated_stepping_batches" in asked or (by_epoch and not self.one_epoch) or (by_step and behind):
            traits.append(per_epoch)
        if state.steps is not None:
            traits.append(state.steps.to("cpu"))
            traits.extend(ever_trained(parts) for parts in state.optimizer.values() if parts)
        traits = [trait for trait in traits if not bool((trait == trait[0]).all())]
        if not traits:
            return [torch.arange(len(per_epoch))]
        group = torch.zeros_like(per_epoch)
        for trait in traits:  # one after another: `unique` of rows takes microseconds a row
            _, code = trait.unique(return_inverse=True)
            _, group = (group * len(per_epoch) + code).unique(return_inverse=True)
        return [(group == g).nonzero()[:, 0] for g in range(int(group.max()) + 1)]


class _Stack:
    """One group of clients, which differ in their rows and in their number of steps only."""

    def __init__(
        self,
        descent: Descent,
        start: Tree,
        state: LocalState,
        batches: Batches | LoadedBatches,
        quadratic: Quadratic | None,
        turn: Turn,
    ) -> None:
        self.device = device = next(iter(start.values())).device
        descent.move(device)
        self.descent, self.state, self.batches = descent, state, batches
        drawn = descent.loss.random if descent.loss.batched else batches.known
        self.keys = StepKeys(lambda: random.fold_in(turn.key, MODULE) if drawn else turn.key)
        contiguous = lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format)
        tensors = tree.map(contiguous, descent.tensors({n: start[n] for n in descent.parameters}, state))
        self.tensors = {name: tensors.pop(name) for name in descent.trained}
        self.buffers = tensors
        self.pulls = None if quadratic is None else _pulls(quadratic, self.tensors)
        configured = descent.configured(int(batches.planned[0]))
        self.schedule, self.state_of = configured.schedule, configured.optimizer.state
        self.position = turn.round * self.batches.round  # where those stand who have been away, too
        self.rates = turn.rates or ()
        begun = state.steps is not None and bool(state.steps[0])
        self.optimizer = configured.optimizer.bind(self.tensors, state.optimizer if begun else None)
        fused = possible(device) and batches.known and FusedSteps.knows(self.optimizer)
        self.direct = DirectSteps(self.optimizer)
        self.fused = FusedSteps(self.optimizer, self.batches.total, descent.clip) if fused else None

    def run(self) -> Local:
        """Take all steps."""
        batches, loss = self.batches, self.descent.loss
        total, per_epoch, longest = batches.total, int(batches.per_epoch.max()), batches.longest
        same_epochs = self.descent.one_epoch or batches.alike or bool((batches.per_epoch == per_epoch).all())
        same_steps = self.position == 0 or batches.together
        answers = self.descent.objective.trainer.answers
        rates, seen = [0.0], RoundLogs(loss, total, longest if batches.alike else None)
        finished: Tree = None
        loaded = None if isinstance(batches, Batches) else evaluated(loss, batches, self.tensors, self.buffers)
        with loaded or nullcontext(loss.gradients) as gradients_of:
            steps: Any = iter(batches)
            for t, batch in enumerate(steps):
                if (ended := batches.ended(t)) is not None:
                    finished = keep_rows(finished, self._now(), ended)
                position = self.position + t
                if self.schedule is not None:
                    self.schedule.apply(self.optimizer, position, per_epoch)
                for group, rate in zip(self.optimizer.param_groups, self.rates):
                    group["lr"] = rate
                rates.append(float(self.optimizer.param_groups[0]["lr"]))
                answers["global_step"] = position if same_steps else None
                answers["current_epoch"] = position // per_epoch if same_epochs else None
                computed = gradients_of(self.tensors, self.buffers, batch, t, self.keys)
                losses, logs, self.buffers, gradients, recorded = computed
                self._descend(t, gradients)
                seen.add(t, {**logs, "loss": losses}, recorded, batch)
        finished = self._now() if finished is None else keep_rows(finished, self._now(), total == total.max())
        tensors, kept = finished
        return self._local(tensors, kept, torch.tensor(rates, dtype=torch.float64).cumsum(0), seen.reduced())

    def _descend(self, t: int, gradients: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            if self.fused is not None:
                pulls = {} if self.pulls is None else by_parameter(self.tensors, self.pulls)
                self.fused.step(t, by_parameter(self.tensors, gradients), pulls)
            else:
                self._step_by_step(gradients)
            if self.descent.project is not None:
                for name, value in self.descent.project(dict(self.tensors)).items():
                    self.tensors[name].copy_(value)

    def _step_by_step(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the quadratic, clip and step, one after the other."""
        for i, (tensor, gradient) in enumerate(zip(self.tensors.values(), gradients)):
            if self.pulls is not None:
                precision, shift = self.pulls[i]
                pull = precision * tensor - shift
                gradient = pull if gradient is None else gradient + pull
            if gradient is None or gradient.is_contiguous():
                tensor.grad = gradient
            elif tensor.grad is None:  # fused optimisers read memory in order, whatever the strides
                tensor.grad = gradient.contiguous()
            else:
                tensor.grad.copy_(gradient)
        if self.descent.clip is not None:
            _clip([p for group in self.optimizer.param_groups for p in group["params"]], self.descent.clip)
        self.direct.step()

    def _now(self) -> tuple[dict[str, Tensor], State]:
        """Return (tensors and buffers, the optimiser's state if it is kept) after the steps so far."""
        kept = self.state_of(self.optimizer, self.tensors, self.state.optimizer) if self.descent.keep else {}
        return {**self.tensors, **self.buffers}, kept

    def _local(self, tensors: dict[str, Tensor], kept: State, rates: Tensor, info: dict[str, Tensor]) -> Local:
        descent, steps, total = self.descent, self.state.steps, self.batches.total
        return Local(
            {n: tensors[n].double() if n in descent.counts else tensors[n] for n in descent.parameters},
            LocalState(
                kept,
                {name: tensors[name] for name in descent.buffers},
                None if steps is None else steps + total.to(steps.device),
            ),
            rates[total].to(self.device),
            info,
        )


def _clip(tensors: Sequence[Tensor], most: float) -> None:
    """Scale the gradients of each client whose norm over all `tensors` is above `most`."""
    held = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
    if held:
        squares = [gradient.reshape(len(gradient), -1).square().sum(1) for _, gradient in held]
        share = (most / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1)
        for tensor, gradient in held:
            tensor.grad = gradient * tree.along(share, gradient)


def _pulls(quadratic: Quadratic, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Tensor]]:
    """Return λ and h of each parameter, in its dtype."""
    precision, shift = {name: quadratic.precision_of(name) for name in tensors}, quadratic.shift
    return [(tree.along(precision[n].to(tensor), tensor), shift[n].to(tensor)) for n, tensor in tensors.items()]
