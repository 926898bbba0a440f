"""Training of a block of clients by `gradient_descent`: group clients that can share steps, and take the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedtorch import functional, random, tree
from fedtorch._devices import every_generator, restored
from fedtorch._untrained import Remembered
from fedtorch.data import BadClients
from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.solvers._configured import Configured, StepRefused, check_steps, configure, own_optimizer
from fedtorch.federation.solvers._probe import check_batch, check_rows, failure_on_one_row, first_rows, observe
from fedtorch.federation.solvers._state import LocalState, divided_buffers, ever_trained, joined
from fedtorch.federation.solvers.batches import (
    MODULE,
    OPTIMIZER,
    Batches,
    batches_of,
    check_last_batches,
    is_ragged,
    limited,
)
from fedtorch.federation.solvers.host_state import HostGenerators, SharedDraws
from fedtorch.federation.solvers.objective import AnswersDiffer, Loss, Objective, training_copy, with_recorders
from fedtorch.federation.solvers.plain_layers import RowwiseLoss, is_linear
from fedtorch.federation.solvers.python_state import PythonState, StateRead, hidden, refuse_late
from fedtorch.federation.solvers.stacked_loss import NotCaptured, RoundLogs, StackedLoss, StepResult
from fedtorch.federation.solvers.step_check import StateKept, StepCheck, StepsDiffer
from fedtorch.federation.turn import Turn
from fedtorch.module_randomness.interception import Seeded
from fedtorch.module_randomness.step_draws import StepKeys
from fedtorch.optimisers import DirectSteps, MakeOptimizer, State, elementwise
from fedtorch.programs.choice import possible
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.data.client_loaders import ClientLoaders
    from fedtorch.federation.solvers._client_optimizers import Parts
    from fedtorch.federation.solvers.linear_steps import LinearSteps
    from fedtorch.federation.solvers.loaded_batches import LoadedBatch, LoadedBatches

_LOG = logging.getLogger(__name__)
_SOME_STEPS = 100  # steps of a round, to construct a schedule that depends on their number
_KEPT = 2**25 - 2**16  # bytes, the most for which glibc still moves its thresholds


class Descent:
    """The settings of `gradient_descent`, and findings about the module.

    Attributes:
        linear: inputs of a program for all steps of a round at once; None uses none.
        promised: whether padded steps rest on the user's word.
    """

    linear: LinearSteps | None = None
    promised = False
    _advised = False  # whether the advice about rowwise=True has been logged

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
        batched: bool | Literal["auto"] = "auto",
        compile: bool = False,
        clip: float | None = None,
        precision: str = "32",
        project: Callable[[Tree], Tree] | None = None,
        ignore_hooks: Sequence[str] = (),
        drop_last: bool = False,
        rowwise: bool = False,
    ) -> None:
        # glibc returns pages and requests them again in every step, until it has seen a large block freed. The block
        # stays untouched.
        torch.empty(_KEPT, dtype=torch.uint8)
        trained = training_copy(module, ignore_hooks)
        self.module, self._original = functional.copied(module), Remembered(module)
        self.objective = Objective(trained, loss)
        self.rowwise = rowwise
        self._by_type: RowwiseLoss | None = RowwiseLoss(self.module, loss)
        self.epochs, self.steps, self.rounds, self.batch_size = epochs, steps, rounds, batch_size
        self.make, self.keep, self.clip, self.project, self.drop_last = make, reset == "never", clip, project, drop_last
        self.one_epoch = epochs == 1  # then the schedule's epoch contains all steps of a round
        trainable = functional.parameters(trained)
        if not trainable:
            raise ValueError(f"Expected {type(module).__name__} to have trainable parameters, but it has none")
        self.trained = list(trainable)
        self.averaged, self.buffers = divided_buffers(trained, buffers)
        self.parameters = {**trainable, **self.averaged.start}
        self._stacked_buffers = [*self.averaged.start, *self.buffers]
        self.loss = StackedLoss(self.objective, self.trained, self._stacked_buffers, batched, compile, precision)
        self._outside = PythonState(trained, loss, make)
        self.check = StepCheck(self.module, self.twin)
        self.loss.look = partial(self.check.path, self.loss)
        self._configurations: dict[int | None, Configured] = {}
        self.objective.trainer.answers["max_epochs"] = -1 if epochs is None else rounds and rounds * epochs
        configured = self.configured(_SOME_STEPS)
        self._check_optimizer(configured.optimizer.original)
        self.optimizer_settings = {**configured.settings, **({} if make is None else {"optimizer": make})}
        self.untrained: State = {}
        self.template: dict[str, Parts] = {}  # state parts of an optimiser that each client has separately
        if self.keep:
            self.untrained = self._untrained(configured)

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        check_steps(optimizer)
        if not elementwise(optimizer):
            _LOG.info(
                "%s is not one of torch's elementwise optimisers, so every client has its own optimiser, and a step of "
                "K clients takes K steps in Python",
                type(optimizer).__name__,
            )

    def _untrained(self, configured: Configured) -> State:
        """Return the optimiser's state of one client before its first step."""
        tensors = tree.expand({name: self.parameters[name] for name in self.trained}, 1)
        if elementwise(configured.optimizer.original):
            return tree.map(lambda part: part[0], configured.optimizer.init(tensors))
        from fedtorch.federation.solvers._client_optimizers import ClientOptimizers, untrained

        tensors = tree.map(torch.clone, tensors)
        one = ClientOptimizers(self.own_optimizer, tensors, True, {}, {})
        one.step(tensors, tree.zeros_like(tensors), {}, StepKeys(random.key(0)[None])[0])
        self.template = one.template()
        return untrained(self.template)

    def own_optimizer(self, values: Mapping[str, Tensor]) -> tuple[Optimizer, dict[str, nn.Parameter]]:
        """Return one client's optimiser, with its parameters by name."""
        return own_optimizer(self.module, self.make, self.objective.trainer, values)

    def init(self, parameters: Tree) -> LocalState:
        """Return one client's state before its first round."""
        return LocalState(self.untrained, dict(self.buffers), torch.tensor(0) if self.keep else None)

    def twin(self, module: nn.Module, cast: Callable[[Tensor], Tensor] | None = None) -> StackedLoss:
        """Return the stacked loss of a copy of the user's module, for steps that leave no trace; it may be cast."""
        loss = vars(self.objective)["loss"]
        loss = functional.copied(loss) if isinstance(loss, nn.Module) else loss
        if cast is not None:
            module._apply(cast)
            loss = loss._apply(cast) if isinstance(loss, nn.Module) else loss
        copy = Objective(with_recorders(module), loss)
        return StackedLoss(copy, self.trained, self._stacked_buffers, self.loss.batched)

    def prepare(self, data: Any) -> Any:
        """Try the module on a block; the data are returned unchanged.

        Raises:
            BadClients: some have no rows, or rows that the module cannot take.
            ValueError: the loss reads parameters that are not trained.
        """
        self.check.forget()
        if _has_loaders(data):  # no batch is read before its time
            from fedtorch.federation.solvers.loaded_batches import check_settings

            check_settings(self.batch_size, drop_last=self.drop_last or None)
            return data
        empty = (data.count == 0).nonzero()[:, 0]
        if len(empty):
            raise BadClients(empty, "Expected at least one row to train on, but got none; leave the client out")
        if len(data.count):
            values = self.tensors(self.parameters, LocalState({}, self.buffers, None))
            with restored(every_generator()):  # a module may set a seed
                check_rows(self.loss, data, values, self._original)
                self._learn(data)
                check = partial(failure_on_one_row, self.loss, data, values)
                check_last_batches(data.count, self.batch_size, self.drop_last, self.steps, check)
        return data

    def _learn(self, data: Any) -> None:
        """Try the module on rows of a block, once."""
        if len(data.count) and not self.loss.observed:
            self._observe(first_rows(data), data.count.device)

    def _observe(self, rows: Any, device: torch.device) -> None:
        self.move(device)
        values = self.tensors(self.parameters, LocalState({}, self.buffers, None))
        with HostGenerators.seeded(0), torch.inference_mode(False), torch.enable_grad():
            observe(self.loss, self.twin, self.module, rows, values, device)

    def padded(self, data: Any, count: Tensor) -> bool:
        """Return whether clients of unequal size share padded steps, by the user's word or by the types."""
        if not is_ragged(count) or not self.loss.batched:
            return False
        by_type = self._by_type
        known = by_type is not None and by_type.holds(data.batch, data.count)
        self.promised = self.rowwise and not known
        by_layers = known or (self.promised and by_type is not None and by_type.has_rows(data.batch))
        self.objective.rows = by_type if by_layers else None
        return self.rowwise or known

    def tensors(self, parameters: Tree, state: LocalState) -> Tree:
        """Return all tensors that clients predict with; see `LocalSolver`."""
        return {**self.averaged.tensors(parameters), **state.buffers}

    def configured(self, total: int) -> Configured:
        """Return optimiser and schedule, for each number of steps of a round if the module uses that number."""
        trainer = self.objective.trainer
        trainer.answers["estimated_stepping_batches"] = self.rounds and self.rounds * total
        steps = total if "estimated_stepping_batches" in trainer.asked else None
        if steps not in self._configurations:
            self._configurations[steps] = configure(self.objective.module, self.make)
        return self._configurations[steps]

    def find_linear_steps(self, loss: Loss | None) -> None:
        """Find a program for all steps of a round at once, if one implements their settings."""
        plain = self.clip is None and self.project is None and self.loss.precision != "bf16"
        if plain and is_linear(self.module):
            from fedtorch.federation.solvers.linear_steps import linear_steps

            self.linear = linear_steps(self.module, loss, self.trained, self.configured(_SOME_STEPS), self.keep)

    def move(self, device: torch.device) -> None:
        """Take the module to the device of the data."""
        if next(self.objective.parameters()).device != device:
            self.objective.to(device)

    def solve(self, start: Tree, state: LocalState, data: Any, quadratic: Quadratic | None, turn: Turn) -> Local:
        """Train the clients of a block in groups that can share steps; see `LocalSolver`."""
        if "padded" in turn.refused:
            self._by_type = None
        if "stacked" in turn.refused:
            self.loss.batched = False
        if _has_loaders(data):
            return self._through_loaders(start, state, data, quadratic, turn)
        if len(data.count) == 0:
            nothing = torch.zeros(0, dtype=torch.float64, device=data.count.device)
            return Local(start, state, nothing, {"loss": nothing})
        if self.linear is not None and turn.rates is None:
            family = self.linear.family(start, data.batch, quadratic)
            if family is not None:
                batches = self._batches(data.batch, data.count.to("cpu"), turn, lambda: turn.key, turn.share, False)
                return self.linear.solve(family, start, state, data, batches, quadratic)
        self._learn(data)
        return self._stackable(lambda: self._in_groups(start, state, data, quadratic, turn), turn)

    def _stackable(self, train: Callable[[], Local], turn: Turn) -> Local:
        """Return the solution of a block, of clients one by one where they cannot be stacked and may be so.

        Ways of sharing steps that fail are added to `turn.refused`.
        """
        asked, generators, torch_state = (
            set(self.objective.trainer.asked),
            HostGenerators.state(),
            torch.get_rng_state(),
        )
        seed = torch.initial_seed()
        state, name = self._outside, type(self.module).__name__
        before = state.snapshot()
        try:
            with state.left_alone(before):
                with hidden(self.loss, before, name):
                    solution = train()
                if self.loss.random and torch.initial_seed() != seed:
                    raise Seeded
                refuse_late(name, before, state.snapshot(), self.loss.kept)
            if not HostGenerators.moved(generators) or self.loss.host:
                return solution
            if self.loss.batched:
                raise SharedDraws(self.module)
            self.loss.host = True
            return train()
        except AnswersDiffer:
            HostGenerators.restore(generators)
            if asked == self.objective.trainer.asked:
                raise
            return self._stackable(train, turn)  # in groups with the same trainer attributes
        except StateKept:
            if self.loss.host or not HostGenerators.moved(generators):
                raise
            if self.loss.batched:
                return self._alone_from_now(train, turn, SharedDraws(self.module))
            self.loss.host = True
            return self._stackable(train, turn)
        except Seeded:
            torch.set_rng_state(torch_state)
            raise
        except (NotCaptured, StateRead, StepRefused):
            raise
        except StepsDiffer as error:
            if HostGenerators.moved(generators):  # which may explain the difference
                return self._alone_from_now(train, turn, SharedDraws(self.module))
            if error.padded and not self.rowwise:
                self._by_type = None
                turn.refused.add("padded")
                _LOG.warning("%s; clients of unequal size train without padding", error)
                return self._stackable(train, turn)
            if error.padded:
                raise ValueError(f"{error}, so rowwise=True does not hold; leave it away") from error
            return self._alone_from_now(train, turn, error)
        except Exception as error:
            HostGenerators.restore(generators)
            return self._alone_from_now(train, turn, error)

    def _alone_from_now(self, train: Callable[[], Local], turn: Turn, error: Exception) -> Local:
        """Train clients one by one, after an error of their stack, where the user leaves it open."""
        if not (self.loss.automatic and self.loss.batched):
            from fedtorch.federation.solvers.advice import explained, of_torch

            if of_torch(error):
                dtype = next(iter(self.parameters.values())).dtype
                raise type(error)(explained(error, self.module, (), dtype)) from error
            raise error
        self.loss.batched = False
        turn.refused.add("stacked")
        level = logging.WARNING if isinstance(error, StepsDiffer) else logging.INFO
        text = error.difference if isinstance(error, StepsDiffer) else str(error)
        why = text.splitlines()[0] if text else type(error).__name__
        name = type(self.module).__name__
        _LOG.log(level, "batched='auto' evaluates the clients of %s one by one from now on: %s", name, why)
        return self._stackable(train, turn)

    def _in_groups(self, start: Tree, state: LocalState, data: Any, quadratic: Quadratic | None, turn: Turn) -> Local:
        """Train groups of clients that take their steps together."""
        device, count = data.count.device, data.count.to("cpu")
        padded = self.padded(data, count)
        if is_ragged(count) and self.loss.batched and not padded and not self._advised:
            self._advised = True
            _LOG.info(
                "clients of unequal size share steps where their batches have the same shapes; rowwise=True lets them "
                "share all steps, if a batch's loss is the mean of its rows' losses"
            )
        per_epoch = limited(batches_of(count, self.batch_size, self.drop_last), turn.limit)
        groups = self._groups(state, per_epoch, turn.round)
        if len(groups) == 1:
            batches = self._batches(data.batch, count, turn, lambda: turn.key, turn.share, padded)
            return _Stack(self, start, state, batches, quadratic, turn).run()
        done = []
        for rows in groups:
            first, old, batch, pull = tree.take((start, state, data.batch, quadratic), rows.to(device))
            share = None if turn.share is None else turn.share[rows]
            keys = lambda rows=rows: turn.key[rows.to(device)]
            batches = self._batches(batch, count[rows], turn, keys, share, padded)
            done.append(_Stack(self, first, old, batches, pull, turn.with_key(keys)).run())
        return joined(groups, done)

    def _batches(
        self, rows: Tree, count: Tensor, turn: Turn, key: Callable[[], Tensor], share: Tensor | None, padded: bool
    ) -> Batches:
        limits = (self.batch_size, self.epochs, self.steps)
        batches = Batches(rows, count, *limits, key, self.drop_last, turn.limit, share, padded)
        turn.takes(batches.taken, count)
        return batches

    def _through_loaders(
        self, start: Tree, state: LocalState, data: ClientLoaders, quadratic: Quadratic | None, turn: Turn
    ) -> Local:
        """Train the clients of a block on the batches of their loaders, one after another unless they are stacked."""
        from fedtorch.federation.solvers.loaded_batches import OneByOne, descend

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
            groups = lambda: self._groups(state, limit, turn.round) if self.loss.batched else each
            return self._stackable(lambda: through(groups()), turn)
        except OneByOne:  # as in every later round
            return through(each)

    def _look(self, batch: LoadedBatch, device: torch.device) -> None:
        """Try the module on the first batch of a loader, if that has not been done; see `prepare`."""
        if not self.loss.observed:
            from fedtorch.federation.solvers.loaded_batches import one_by_one

            asked = set(self.objective.trainer.asked)
            self.move(device)
            values = self.tensors(self.parameters, LocalState({}, self.buffers, None))
            check_batch(self.loss, batch.alone(0), values, device, self._original)
            with one_by_one(self.loss):
                self._observe(batch.as_rows(0) if self.loss.batched else batch.alone(0), device)
            if self.objective.trainer.asked != asked:  # the grouping depends on it
                raise AnswersDiffer

    def _groups(self, state: LocalState, per_epoch: Tensor, round: int) -> list[Tensor]:
        """Return rows of the block that can take their steps together: their clocks and optimisers stand alike."""
        asked, traits = self.objective.trainer.asked, list[Tensor]()
        schedule = self.configured(_SOME_STEPS).schedule
        by_epoch = "current_epoch" in asked or (schedule is not None and schedule.by_epoch)
        by_step = "global_step" in asked or (schedule is not None and schedule.by_step)
        behind = round > 0 and self.epochs is not None  # clients with more steps per epoch have taken more by now
        if (
            {"estimated_stepping_batches", "batch_idx"} & asked
            or (by_epoch and not self.one_epoch)
            or (by_step and behind)
        ):
            traits.append(per_epoch)
        if state.steps is not None:
            counted, columns = self.configured(_SOME_STEPS).optimizer.counts, [state.steps]
            for parts in state.optimizer.values():
                columns.extend([ever_trained(parts)] if parts else [])
                columns.extend(value for name, value in parts.items() if name in counted)
            traits.extend(torch.stack([each.to(state.steps.device, torch.float64) for each in columns]).cpu())
        traits = [trait for trait in traits if not bool((trait == trait[0]).all())]
        if not traits:
            return [torch.arange(len(per_epoch))]
        group = torch.zeros_like(per_epoch)
        for trait in traits:  # one after another: `unique` of rows takes microseconds a row
            _, code = trait.unique(return_inverse=True)
            _, group = (group * len(per_epoch) + code).unique(return_inverse=True)
        return [(group == g).nonzero()[:, 0] for g in range(int(group.max()) + 1)]


def _has_loaders(data: Any) -> bool:
    """Return whether the clients of a block have loaders in place of rows, as `ClientLoaders`."""
    return hasattr(data, "source")


class _Stack:
    """One group of clients, which differ in their rows and in their number of steps only.

    Attributes:
        here: `(M,)` places of the clients that still train; tensors, buffers and keys are theirs.
        divided: tensors that the optimiser holds in pieces, by name.
    """

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
        self.descent, self.state, self.batches, self.turn = descent, state, batches, turn
        self.keys = StepKeys(lambda: random.fold_in(turn.key, MODULE))
        contiguous = lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format)
        tensors = tree.map(contiguous, descent.tensors({n: start[n] for n in descent.parameters}, state))
        self.tensors = {name: tensors.pop(name) for name in descent.trained}
        self.buffers = tensors
        self.pulls = None if quadratic is None else _pulls(quadratic, self.tensors)
        configured = descent.configured(int(batches.planned[0]))
        self.schedule, self.state_of = configured.schedule, configured.optimizer.state
        self.names = [name for group in configured.optimizer.names for name in group]  # of the stepped parameters
        self.position = turn.round * self.batches.round  # position of all clients, including those that missed rounds
        self.round, self.rates = turn.round, turn.rates or ()
        begun = state.steps is not None and bool(state.steps[0])
        earlier = state.optimizer if begun else {}
        self.by_client = not elementwise(configured.optimizer.original)
        if not self.by_client:
            self.optimizer: Any = configured.optimizer.bind(self.tensors, earlier)
        else:
            from fedtorch.federation.solvers._client_optimizers import ClientOptimizers

            self.draws = StepKeys(lambda: random.fold_in(turn.key, OPTIMIZER))
            make_optimizer = descent.own_optimizer
            self.optimizer = ClientOptimizers(make_optimizer, self.tensors, descent.keep, earlier, descent.template)
        self.fuses = possible(device) and batches.known
        self.here = torch.arange(len(batches.total))
        self.divided: dict[str, list[Piece]] = {}
        self.finished: Tree = None
        self.fresh: set[Any] = set()  # step shapes that this stack has not seen before
        self._bind()

    def _bind(self) -> None:
        """Use the optimiser's present tensors in the loss."""
        self.direct, self.fused = DirectSteps(self.optimizer), None
        if self.fuses:
            from fedtorch.federation.solvers._fused import FusedSteps

            self.fuses = FusedSteps.knows(self.optimizer)
            self.fused = FusedSteps(self.optimizer, self.descent.clip) if self.fuses else None

    def run(self) -> Local:
        """Take all steps."""
        batches, loss = self.batches, self.descent.loss
        total, per_epoch, longest = batches.total, int(batches.per_epoch.max()), batches.longest
        same_epochs = self.descent.one_epoch or batches.alike or bool((batches.per_epoch == per_epoch).all())
        same_steps = self.position == 0 or batches.together
        same_batches, least = (
            batches.alike or bool((batches.per_epoch == per_epoch).all()),
            int(batches.per_epoch.min()),
        )
        trainer = self.descent.objective.trainer
        answers, differs = trainer.answers, trainer.DIFFERS
        if not bool((batches.planned == batches.planned[0]).all()):
            answers["estimated_stepping_batches"] = differs
        own_rates = torch.zeros(len(total), dtype=torch.float64)  # sums of rates of the clients' own optimisers
        rates, seen = [0.0], RoundLogs(loss, len(total), longest if batches.alike else None)
        steps: Any = iter(batches)
        for t, batch in enumerate(steps):
            if (ended := batches.ended(t)) is not None:
                self._leave(ended[self.here], t)
            position = self.position + t
            if self.schedule is not None:
                self.schedule.apply(self.optimizer, position, per_epoch)
            for group, rate in zip(self.optimizer.param_groups, cycle(self.rates)):
                group["lr"] = rate
            rates.append(float(self.optimizer.param_groups[0].get("lr", torch.nan)))
            answers["global_step"] = position if same_steps else differs
            answers["current_epoch"] = position // per_epoch if same_epochs else differs
            answers["batch_idx"] = t % per_epoch if same_batches or t < least else differs
            self._check(batch, t)
            result = loss.gradients(self.tensors, self.buffers, batch, t, self.keys)
            self.buffers = result.buffers
            self._descend(result, t)
            if self.by_client:
                own_rates[self.here] += self.optimizer.rates()
            seen.add(t, result, batch, self.here)
        loss.release()
        loss.unchanged.check()
        self._finish(torch.ones_like(self.here, dtype=torch.bool))
        tensors, optimizer_state = self.finished
        for name, rows in seen.of_batches().items():
            self.turn.takes(rows, batches.count, name)
        lr_sum = own_rates if self.by_client else torch.tensor(rates, dtype=torch.float64).cumsum(0)[total]
        return self._local(tensors, optimizer_state, lr_sum, seen.reduced())

    def _leave(self, ended: Tensor, t: int) -> None:
        """Remove clients `(M,)` bool that have taken their last step from the stack."""
        self._finish(ended)
        left = (~ended).nonzero()[:, 0]
        self.here, self.keys = self.here[left], self.keys.some(left, t)
        if self.pulls is not None:
            self.pulls = [tree.take(pull, left) for pull in self.pulls]
        self.buffers = tree.take(self.buffers, left)
        if self.by_client:
            self.tensors, self.draws = tree.take(self.tensors, left), self.draws.some(left, t)
            self.optimizer.keep(left)
            return
        places = torch.full_like(ended, -1, dtype=torch.int64)
        places[left] = torch.arange(len(left))
        for name, tensor in self.tensors.items():
            if name in self.divided:
                remaining = [
                    (piece, at) for piece in self.divided[name] if len(at := (~ended[piece.rows]).nonzero()[:, 0])
                ]
                for piece in self.divided[name]:
                    if bool(ended[piece.rows].all()):
                        divide(self.optimizer, piece.tensor, [])
                self.divided[name] = [
                    Piece(places[piece.rows[at]], divide(self.optimizer, piece.tensor, [at])[0])
                    for piece, at in remaining
                ]
                self.tensors[name] = tensor.index_select(0, left.to(tensor.device))
            else:
                self.tensors[name] = divide(self.optimizer, tensor, [left])[0]
        self._bind()

    def _check(self, batch: Any, t: int) -> None:
        """Compare a step's stacks with single clients, if their shapes are new."""
        loss = self.descent.loss
        values = (*(self.tensors[n] for n in loss.tensors), *(self.buffers[n] for n in loss.buffers))
        self.descent.check.repeats(loss, values, batch, t, self.keys)
        for at, part in loss.shared(batch) if loss.batched else ():
            some, keys = (values, self.keys) if at is None else (tree.take(values, at), self.keys.some(at, t))
            self.descent.check(loss, some, part, t, keys, self.round, self.descent.promised, self.fresh)

    def _descend(self, result: StepResult, t: int) -> None:
        with torch.no_grad():
            missing = {} if self.pulls is not None else result.missing
            if missing:
                self.fuses, self.fused = False, None
            if self.fused is not None:
                tensors = self.tensors.values()
                self.fused.step(dict(zip(tensors, result.gradients)), dict(zip(tensors, self.pulls or ())))
            else:
                self._step_by_step(result.gradients, missing, t)
            if self.descent.project is not None:
                for name, value in self.descent.project(dict(self.tensors)).items():
                    self.tensors[name].copy_(value)
                if self.by_client:
                    self.optimizer.load(self.tensors)
                for name, pieces in self.divided.items():
                    for piece in pieces:
                        piece.tensor.copy_(self.tensors[name][piece.rows])

    def _step_by_step(self, gradients: Sequence[Tensor | None], missing: Mapping[str, Tensor], t: int) -> None:
        """Add the quadratic, clip and step, one after the other; parameters without a gradient do not change."""
        whole: dict[str, Tensor | None] = {}
        for i, ((name, tensor), gradient) in enumerate(zip(self.tensors.items(), gradients)):
            if self.pulls is not None:
                precision, shift = self.pulls[i]
                pull = precision * tensor - shift
                gradient = pull if gradient is None else gradient + pull
            whole[name] = gradient
        if self.descent.clip is not None:
            _clip(whole, self.names, self.descent.clip)
        if self.by_client:
            self.optimizer.step(self.tensors, whole, missing, self.draws[t])
            return
        for name, gradient in whole.items():
            if name in missing or name in self.divided:
                self._divide(name, gradient, missing.get(name))
                continue
            tensor = self.tensors[name]
            if gradient is None or gradient.is_contiguous():
                tensor.grad = gradient
            elif tensor.grad is None:  # fused optimisers need contiguous gradients
                tensor.grad = gradient.contiguous()
            else:
                tensor.grad.copy_(gradient)
        self.direct.step()
        for name, pieces in self.divided.items():
            for piece in pieces:
                self.tensors[name].index_copy_(0, piece.rows.to(self.device), piece.tensor)

    def _divide(self, name: str, gradient: Tensor | None, missing: Tensor | None) -> None:
        """Split a tensor, with its state, into clients with a gradient and clients without."""
        pieces = self.divided.get(name, [Piece(torch.arange(len(self.here)), self.tensors[name])])
        done = []
        for piece in pieces:
            mask = torch.zeros_like(piece.rows, dtype=torch.bool) if missing is None else missing[piece.rows]
            parts = [piece] if bool((mask == mask[0]).all()) else split(self.optimizer, piece, mask)
            for part in parts:
                without = gradient is None or (missing is not None and bool(missing[part.rows[0]]))
                part.tensor.grad = (
                    None if without or gradient is None else gradient[part.rows.to(self.device)].contiguous()
                )
            done.extend(parts)
        if len(done) > len(pieces):
            self.direct = DirectSteps(self.optimizer)
        if len(done) > 1:
            self.divided[name] = done

    def _finish(self, rows: Tensor) -> None:
        """Store the tensors and states of clients `(M,)` bool that have taken their last step."""
        now = {**self.tensors, **self.buffers}, self._kept() if self.descent.keep else {}
        if self.finished is None and bool(rows.all()):
            self.finished = now
            return
        if self.finished is None:
            count = len(self.batches.total)
            self.finished = tree.map(lambda leaf: leaf.new_zeros(count, *leaf.shape[1:]), now)
        at, places = rows.nonzero()[:, 0], self.here[rows]

        def keep(old: Tensor, new: Tensor) -> Tensor:
            return old.index_copy_(0, places.to(old.device), new.index_select(0, at.to(new.device)))

        tree.map(keep, self.finished, now)

    def _kept(self) -> State:
        """Return the optimiser's state, with divided tensors joined from their pieces."""
        if self.by_client:
            return self.optimizer.state(
                {*(self.schedule.changing if self.schedule else ()), *(["lr"] * len(self.rates))}
            )
        whole = {name: tensor for name, tensor in self.tensors.items() if name not in self.divided}
        old = tree.take(self.state.optimizer, self.here)
        state = self.state_of(self.optimizer, whole, old)
        for name, pieces in self.divided.items():
            parts = [self.state_of(self.optimizer, {name: piece.tensor})[name] for piece in pieces]
            joined = {key: part[key] for part in parts for key in part}
            state[name] = dict(old.get(name, {}))
            for key, like in joined.items():
                joint = like.new_zeros(len(self.here), *like.shape[1:])
                for piece, part in zip(pieces, parts):
                    if key in part:
                        joint[piece.rows.to(joint.device)] = part[key]
                state[name][key] = joint
        return {name: state[name] for name in self.tensors}

    def _local(
        self, tensors: dict[str, Tensor], optimizer_state: State, lr_sum: Tensor, info: dict[str, Tensor]
    ) -> Local:
        descent, steps, total = self.descent, self.state.steps, self.batches.total
        return Local(
            {**{name: tensors[name] for name in descent.trained}, **descent.averaged.sent(tensors)},
            LocalState(
                optimizer_state,
                {name: tensors[name] for name in descent.buffers},
                None if steps is None else steps + total.to(steps.device),
            ),
            lr_sum.to(self.device),
            info,
        )


def _clip(gradients: dict[str, Tensor | None], names: Sequence[str], most: float) -> None:
    """Scale the gradients of each client whose norm over all `names` is above `most`."""
    held = {name: gradient for name in names if (gradient := gradients.get(name)) is not None}
    if held:
        squares = [tree.as_real(gradient).reshape(len(gradient), -1).square().sum(1) for gradient in held.values()]
        share = (most / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1)
        for name, gradient in held.items():
            gradients[name] = gradient * tree.along(share, gradient)


def _pulls(quadratic: Quadratic, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Tensor]]:
    """Return λ and h of each parameter, in its dtype."""
    precision, shift = {name: quadratic.precision_of(name) for name in tensors}, quadratic.shift
    return [(tree.along(precision[n].to(tensor), tensor), shift[n].to(tensor)) for n, tensor in tensors.items()]


class Piece(NamedTuple):
    """Rows of a stacked tensor, as a separate parameter of its optimiser.

    An optimiser skips a parameter without a gradient: it is not decayed, and its moments and step count do not change.
    In a stack this must hold for each client's rows, and also for a client that has taken all of its steps.

    Attributes:
        rows: `(M,)` their places in the stack.
        tensor: `(M, ...)`, which the optimiser steps.
    """

    rows: Tensor
    tensor: Tensor


def divide(optimizer: Optimizer, tensor: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Replace a stacked tensor in the optimiser by rows of it, with their state; return them.

    Args:
        optimizer: holds the tensor.
        tensor: `(K, ...)`.
        parts: `(M,)` places of rows, of each new tensor.
    """
    state, count = optimizer.state.pop(tensor, {}), len(tensor)
    each = [tensor.index_select(0, at.to(tensor.device)) for at in parts]
    for group in optimizer.param_groups:
        if any(held is tensor for held in group["params"]):
            group["params"] = [new for held in group["params"] for new in (each if held is tensor else [held])]
    for new, at in zip(each, parts) if state else ():
        optimizer.state[new] = {name: _rows(value, at, count) for name, value in state.items()}
    return each


def split(optimizer: Optimizer, piece: Piece, mask: Tensor) -> list[Piece]:
    """Return the rows of a piece outside and inside of a mask `(M,)` as pieces of the optimiser's own."""
    parts = [(~mask).nonzero()[:, 0], mask.nonzero()[:, 0]]
    each = divide(optimizer, piece.tensor, parts)
    return [Piece(piece.rows[at], tensor) for at, tensor in zip(parts, each)]


def _rows(value: Any, at: Tensor, count: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.index_select(0, at.to(value.device)) if value.ndim and len(value) == count else value.clone()
