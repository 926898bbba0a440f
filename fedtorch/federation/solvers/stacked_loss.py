"""The training loss of many clients at once, with each client's own gradient.

Clients whose batches have the same shapes are evaluated together by one `vmap`. A batch of few clients, or of a module
that `vmap` cannot run, is evaluated client by client. Both give the result of a loop, up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fedtorch import functional, stacked_layers, tree
from fedtorch.federation.solvers.batches import Batch
from fedtorch.federation.solvers.host_state import HostGenerators, UnchangedTensors
from fedtorch.federation.solvers.objective import Objective
from fedtorch.federation.solvers.python_state import KeptSlots
from fedtorch.federation.solvers.step_check import relative_gap, tolerance
from fedtorch.federation.solvers.training_metrics import Recorded, Reduction, RoundMetrics, StepForm, joined_calls
from fedtorch.module_randomness.drawing_modules import DrawingModules, Interception
from fedtorch.module_randomness.step_draws import Draws, StepKeys
from fedtorch.module_randomness.watched_generators import each_drawn_if_random
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.federation.solvers.loaded_batches import LoadedBatch

    Step = Batch | LoadedBatch

_BACKWARD = 1  # the purpose of a key: draws of a backward pass
_DRAWS = "called random operation"  # in `vmap`'s error about an unexpected draw
Path = tuple[Any, ...]  # functions of torch that a step has called
Look = Callable[[Sequence[Tensor], Batch, int, StepKeys, Path, Tensor | None], None]
_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__  # without hooks of subclasses
_FEWEST = 3  # clients that are worth a `vmap`
_NOTHING: AbstractContextManager[None] = nullcontext()
Hook = Callable[[Tensor], Tensor | None]


class NotCaptured(RuntimeError):
    """A step violates the conditions of compile=True."""

    @classmethod
    def because(cls, module: nn.Module, error: Exception) -> NotCaptured:
        """Return the error of a module whose step cannot be captured."""
        return cls(f"Expected a step of {type(module).__name__} that can be captured, but {error}; use compile=False")


class GradientRead(TypeError):
    """A training step reads a gradient that a Trainer has left in a parameter."""

    def __init__(self) -> None:
        super().__init__(
            "Expected a training_step that does not read the .grad of its parameters, which hold the last step's "
            "gradients in a Trainer and none here, but it does; use ft.lightning_fit, or a hook of the parameters "
            "(p.register_hook) for what is to be done with a gradient"
        )


class _OfAStep(nn.Parameter):
    """A parameter of a client's step, whose gradient of the step before is not there to be read."""

    @property
    def grad(self) -> Tensor | None:
        if sys._getframe(1).f_code is nn.Module.zero_grad.__code__:
            return None
        raise GradientRead

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise GradientRead


class StepResult(NamedTuple):
    """Results of one step of stacked clients, before the optimiser.

    Attributes:
        losses: `(K,)`.
        logs: `(K,)` by name.
        buffers: the stacked buffers after the step, `(K, ...)` by name.
        gradients: `(K, ...)` in the order of the trained tensors; None of a tensor that no client's loss depends on.
        recorded: arguments of the module's metrics; None if they stay private.
        missing: `(K,)` bool by name of a trained tensor: clients whose loss does not depend on it.
        unlogged: `(K,)` bool by name of a log: clients that have not logged it.
    """

    losses: Tensor
    logs: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: Sequence[Tensor | None]
    recorded: Sequence[Recorded] | None
    missing: Mapping[str, Tensor] = {}
    unlogged: Mapping[str, Tensor] = {}


class StackedLoss:
    """`StepResult` of stacked tensors on a stacked batch.

    Args:
        objective: one client's loss.
        tensors: names of the trained tensors, in the order of the values.
        buffers: names of buffers that are stacked too and may change.
        batched: False evaluates client by client; "auto" does so where the module cannot run stacked.
        compile: whether steps are captured once per shape and replayed; see `gradient_descent`.
        precision: of the products in the losses of steps, see `gradient_descent`; trials beforehand have "32".

    Attributes:
        batched: whether clients are evaluated together.
        random: whether the module has drawn random numbers, which then come from the clients' keys.
        host: whether it has drawn from Python's or NumPy's generator, which are seeded from the clients' keys then.
        reads: whether it has branched on values.
        observed: whether the module has been tried.
        apart: whether clients took so many branches in this round that they go one by one in the rest of it.
        kept: paths that its first steps change in Python; see `python_state`.
        rewritten: paths that every step changes.
        slots: those of them that steps must not read.
        look: called with every sequence of torch's functions in clients' steps.
        swap: puts one client's tensors and buffers into the module.
        hooks: of the trained parameters, applied to each client's gradient.
    """

    def __init__(
        self,
        objective: Objective,
        tensors: Sequence[str],
        buffers: Sequence[str],
        batched: bool | Literal["auto"],
        compile: bool = False,
        precision: str = "32",
    ) -> None:
        self.objective, self.compile, self.precision = objective, compile, precision
        self.batched, self.automatic = bool(batched), batched == "auto"
        self.tensors, self.buffers = list(tensors), list(buffers)
        self.random = self.observed = False
        self.kept = self.rewritten = frozenset[str]()
        self.slots: KeptSlots | None = None
        self.look: Look | None = None
        self._called: Path = ()
        self._paths: list[tuple[Path, Tensor | None]] = []  # of the last step, with their clients
        self.logged: list[str] = []  # names of the module's last logs
        self.drawing = DrawingModules(objective.module)
        self.swap = functional.Swap(objective.module, [*tensors, *buffers])
        held = dict(objective.module.named_parameters())
        self._attributes = {i: vars(held[name]) for i, name in enumerate(tensors) if name in held}
        self.hooks = ParameterHooks(objective.module, self.tensors)
        self.unchanged = UnchangedTensors(objective.module, [*self.tensors, *self.buffers])
        self.host = self.reads = False
        self.apart = False
        self._captured: Callable[..., Any] | None = None
        self._replays: dict[Any, int] = {}
        self._forms: dict[Any, StepForm] = {}  # of the metrics' calls, by shapes: captured steps run no Python
        self._of: Sequence[Tensor] = ()
        self._rows: tuple[list[list[nn.Parameter]], list[list[int]]] = [], []

    @property
    def eager(self) -> str | None:
        """Return why steps are not captured; None if they are."""
        if not self.compile:
            return "compile=False"
        if not self.batched:
            return "clients are evaluated one by one"
        if self.random:
            return "the module draws random numbers"
        if self.reads:
            return "the module branches on values"
        return "there are stacked buffers" if self.buffers else None

    def gradients(
        self, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Step, index: int, keys: StepKeys
    ) -> StepResult:
        """Return one step of the clients that still train.

        Args:
            tensors: trained tensors, `(K, ...)`.
            buffers: the stacked buffers.
            batch: the clients' minibatches.
            index: number of the step.
            keys: the clients' for the module's draws.
        """
        values = (*(tensors[n] for n in self.tensors), *(buffers[n] for n in self.buffers))
        with _short_products() if self.precision == "tf32" else _NOTHING:
            if not self.batched:
                return self.one_by_one(values, batch, index, keys)
            done, places, count = list[StepResult](), list[Sequence[int]](), len(batch.size)
            for at, part in self.shared(batch):
                if at is None:
                    return self.together(values, part, index, keys)
                some = tree.take(values, at)
                done.append(self.together(some, part, index, keys.some(at, index)))
                for whole, rows in zip(values, some):
                    if rows._version:  # written in place, as an embedding does with max_norm
                        whole.detach().index_copy_(0, at.to(whole.device), rows.detach())
                places.append(at.tolist())
            among = {place for each in places for place in each}
            alone = [place for place in range(count) if place not in among]
            if alone:  # in the stack's own memory, in which a module may write
                done.extend(self.each(values, batch.as_rows, index, keys, alone))
                places.extend([place] for place in alone)
            return joined(done, places, count, self.tensors)

    def shared(self, batch: Step) -> Sequence[tuple[Tensor | None, Batch]]:
        """Return the batches of clients that share an evaluation, with their places `(M,)`; None for all.

        Their rows have the same shapes. A few clients are faster one by one, unless the step is captured.
        """
        if self.compile and self.eager is None:
            return batch.parts(1)
        return () if self.apart and batch.weights is None else batch.parts(_FEWEST)

    def together(self, values: Sequence[Tensor], batch: Batch, index: int, keys: StepKeys) -> StepResult:
        """Return the step of clients whose batches have the same shapes, by one `vmap`.

        Args:
            values: tensors and buffers, `(K, ...)` each.
            batch, index, keys: as of `gradients`.

        Raises:
            RuntimeError: `vmap` cannot run the module.
        """
        flat = [*values, *batch.leaves, *([] if batch.weights is None else [batch.weights])]
        self._paths.clear()
        step = self._replayed if self.compile else self._drawn
        result = step(batch.rows, keys, index, flat)
        if self.look is not None:
            for called, at in self._paths:
                self.look(values, batch, index, keys, called, at)
        return result

    def _drawn(self, rows: Tree, keys: StepKeys, index: int, flat: Sequence[Tensor]) -> StepResult:
        """Return the step with the module's draws from the clients' keys, once it is known to draw."""
        try:
            return self._by_branches(rows, keys, index, flat)
        except RuntimeError as error:
            if self.random or _DRAWS not in str(error):
                raise
        self.random = True  # from now on; `vmap` ran without draws
        return self._by_branches(rows, keys, index, flat)

    def _replayed(self, rows: Tree, keys: StepKeys, index: int, flat: Sequence[Tensor]) -> StepResult:
        """Return the step, captured from the second of its shape on; the third is compared with the module's code."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in flat)
        times = self._replays.get(shapes, 0)
        if times == 0 or self.eager is not None:
            self._replays[shapes] = 1
            return self._drawn(rows, keys, index, flat)

        def step(number: int, *flat: Tensor) -> tuple[Any, ...]:
            found = self._mapped(rows, None, number, flat)
            self._forms[shapes] = self.objective.metrics.form
            return *found[:4], [tensor for each in found.recorded or () for tensor in each.tensors]

        if self._captured is None:
            from fedtorch.captured import CapturedStep

            self._captured = CapturedStep()
        name = type(self.objective.module).__name__
        try:
            losses, logs, buffers, gradients, tensors = self._captured(step, *flat)
        except Exception as error:
            raise NotCaptured.because(self.objective.module, error) from error
        recorded = self._called_with(tensors, self._forms.get(shapes))
        result = StepResult(losses, logs, buffers, self.hooks.stacked(gradients), recorded)
        self._replays[shapes] = times + 1
        if times == 2:
            direct = self._drawn(rows, keys, index, flat)
            for tensor, one, other in zip(self.tensors, result.gradients, direct.gradients):
                if one is None and other is None:
                    continue
                if one is None or other is None or relative_gap(one, other) > tolerance(one.dtype):
                    raise NotCaptured(
                        f"Expected steps of {name} that do the same operations, but the gradient of {tensor!r} at step "
                        f"{index} is not that of the step that compile=True captured; use compile=False"
                    )
        return result

    def _by_branches(self, rows: Tree, keys: StepKeys, index: int, flat: Sequence[Tensor]) -> StepResult:
        """Return the step; clients that take different branches of the code have separate steps.

        If the branches are so many that clients one by one would be no more work, `apart` is set.
        """
        first, last = len(self.tensors) + len(self.buffers), len(tree.leaves(rows))
        weighted, work = len(flat) > first + last, 0

        def evaluate(at: Tensor | None) -> StepResult:
            nonlocal work
            some, some_keys = (flat, keys) if at is None else (tree.take(tuple(flat), at), keys.some(at, index))
            if at is None or weighted or len(at) >= _FEWEST:
                work += _FEWEST  # clients alone that a `vmap` is worth
                result = self._mapped(rows, some_keys[index] if self.random else None, index, some)
                self._paths.append((self._called, at))
                return result._replace(gradients=self.hooks.stacked(result.gradients))
            work += len(at)
            each = list(zip(*(leaf.unbind() for leaf in some[first:])))
            parts = self.each(some[:first], lambda k: tree.refill(rows, each[k]), index, some_keys, range(len(at)))
            return joined(parts, [[k] for k in range(len(at))], len(at), self.tensors)

        def join(parts: list[StepResult], places: Tensor) -> StepResult:
            at = places.argsort().split([len(part.losses) for part in parts])
            return joined(parts, [each.tolist() for each in at], len(places), self.tensors)

        result = stacked_layers.by_branches(evaluate, join)
        self.apart = work > _FEWEST and work >= len(result.losses)
        return result

    def _called_with(self, tensors: Sequence[Tensor], form: StepForm | None = None) -> list[Recorded]:
        """Return the arguments of metrics in the last step, or in one of another form; () without metrics."""
        metrics = self.objective.metrics
        return [Recorded(form or metrics.form, tensors)] if metrics.recorders else []

    def _mapped(self, rows: Tree, draws: Draws | None, index: int, flat: Sequence[Tensor]) -> StepResult:
        step = partial(self._step, rows, index, flat, "error" if draws is None else "different")
        if draws is None:
            return step(_NOTHING)
        return self.drawing.drawn(lambda _, interception: step(interception), [draws.together()])[0]

    def _step(
        self, rows: Tree, index: int, flat: Sequence[Tensor], randomness: str, interception: Interception
    ) -> StepResult:
        trained = len(self.tensors)
        with torch.enable_grad():
            trainable = [leaf.detach().requires_grad_() for leaf in flat[:trained]]
            whole = [*trainable, *flat[trained:]]
            with self._cast(flat[0].device), interception:
                losses, *others = self.stacked(whole, rows, index, randomness)
            gradients = _gradients(losses, trainable)
        logs, last = dict(zip(self.logged, others)), len(others) - len(self.buffers)
        new = {name: leaf.detach() for name, leaf in zip(self.buffers, others[last:])}
        recorded = self._called_with(others[len(logs) : last])
        return StepResult(losses.detach(), logs, new, gradients, recorded)

    def stacked(self, flat: Sequence[Tensor], rows: Tree, index: int, randomness: str) -> tuple[Tensor, ...]:
        """Return losses, logs, metrics' arguments and new buffers of tensors, buffers, rows and, if any, weights."""
        first = len(self.tensors) + len(self.buffers)
        last = first + len(tree.leaves(rows))

        def one(*flat: Tensor) -> tuple[Tensor, ...]:
            client_rows = tree.refill(rows, flat[first:last])
            loss, logs, new = self.single(flat[:first], client_rows, flat[last] if len(flat) > last else None, index)
            self.logged = list(logs)
            return loss, *logs.values(), *self.objective.recorded, *new

        # A captured step would keep the branch that it took.
        captures = self.compile and self.eager is None
        mode = stacked_layers.WithoutReading() if captures else stacked_layers.StackedOperations()
        with mode, self.unchanged():
            outputs = tuple(functional.mapped(one, flat, randomness))
        self._called = tuple(mode.called)
        return outputs

    def single(
        self, values: Sequence[Tensor], rows: Tree, weights: Tensor | None, index: int
    ) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        """Return one client's (loss, logs, new buffers)."""
        if self.slots is not None:
            self.slots.hide()
        for i, attributes in self._attributes.items():
            if attributes:
                vars(values[i]).update(attributes)
        with self.swap(values):
            loss, logs = self.objective.forward(rows, weights, index)
            now, count = self.swap.current(), len(self.tensors)
            for name, tensor, value in zip(self.tensors, now, values):
                if tensor is not value:
                    raise TypeError(
                        f"Expected a step that trains {name!r} of {type(self.objective.module).__name__}, but it puts "
                        "another parameter in its place, which no optimiser would train; write into it under "
                        "torch.no_grad() instead"
                    )
            new = tuple(now[count:])
        for i, attributes in self._attributes.items():
            if vars(values[i]):  # for the next step, as of a module's attribute
                attributes.update(vars(values[i]))
        return loss, logs, new

    def check_trained(self, values: Sequence[Tensor]) -> None:
        """Raise TypeError for changes of one client's trained tensors that later steps would lose."""
        name = type(self.objective.module).__name__
        frozen = [each for each, value in zip(self.tensors, values) if not value.requires_grad]
        if frozen:
            raise TypeError(
                f"Expected a step that leaves requires_grad of the parameters of {name} as it is, but it freezes "
                f"{', '.join(frozen)}; use ft.lightning_fit"
            )
        passed = [each for each, value in zip(self.tensors, values) if _GRADIENT(value) is not None]
        if passed:
            raise TypeError(
                f"Expected a step of {name} that returns its loss, but it calls backward() itself, and leaves "
                f"gradients of {', '.join(passed)} for an optimiser of its own; use ft.lightning_fit"
            )

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """Compute the products inside with `precision`."""
        with _short_products() if self.precision == "tf32" else _NOTHING, self._cast(device):
            yield

    def _cast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else _NOTHING

    def one_by_one(self, values: Sequence[Tensor], batch: Step, index: int, keys: StepKeys) -> StepResult:
        """Return the step of clients one after the other; see `each`."""
        everybody = range(len(batch.size))
        parts = self.each(values, batch.alone, index, keys, everybody)
        return joined(parts, [[place] for place in everybody], len(everybody), self.tensors)

    def each(
        self, values: Sequence[Tensor], rows: Callable[[int], Any], index: int, keys: StepKeys, places: Sequence[int]
    ) -> list[StepResult]:
        """Return the steps of clients at some places of a stack, one after the other, `(1, ...)` each.

        Their modules' draws come from the clients' keys, those by Python's and NumPy's generators too.

        Args:
            values: tensors and buffers of the stack, `(K, ...)` each.
            rows: client's position -> its rows.
            index, keys: as of `gradients`.
            places: positions of these clients.
        """
        trained, pointers = self._own(values[: len(self.tensors)])
        buffers = list(zip(*(value.detach().unbind() for value in values[len(self.tensors) :]))) or None

        def one(k: int, interception: Interception) -> StepResult:
            place = places[k]
            with HostGenerators.seeded(int(keys[index].keys[place]) % 2**63) if self.host else _NOTHING:
                tensors = trained[place] if buffers is None else (*trained[place], *buffers[place])
                result = self.alone(tensors, rows(place), index, interception)
            if [parameter.data_ptr() for parameter in trained[place]] != pointers[place]:
                # The module has replaced their memory, `.data = …`.
                for whole, parameter in zip(values, trained[place]):
                    whole.detach()[place].copy_(parameter.detach())
                self._of = ()
            return result

        with torch.enable_grad():
            if self.random:
                draws = keys[index]
                backward = draws.calls[:, _BACKWARD].unbind()
                alone = [draws.alone(place) for place in places]
                return self.drawing.drawn(one, alone, [backward[place] for place in places])
            keys_of = lambda: keys[index].keys[list(places)]
            return each_drawn_if_random(lambda k: one(k, _NOTHING), len(places), keys_of, values[0].device)

    def _own(self, tensors: Sequence[Tensor]) -> tuple[list[list[nn.Parameter]], list[list[int]]]:
        """Return each client's parameters as views of stacked tensors, made anew for other tensors, and their
        addresses.
        """
        if len(self._of) != len(tensors) or any(one is not other for one, other in zip(self._of, tensors)):
            rows = zip(*(tensor.detach().unbind() for tensor in tensors))
            each = [[self.parameter(value) for value in parameters] for parameters in rows]
            self._of, self._rows = (
                tensors,
                (each, [[parameter.data_ptr() for parameter in parameters] for parameters in each]),
            )
        return self._rows

    def parameter(self, value: Tensor) -> nn.Parameter:
        """Return one client's parameter for `alone`, in the memory of a tensor."""
        return nn.Parameter(value) if self.objective.supervised else _OfAStep(value)

    def release(self) -> None:
        """Forget the tensors of the last steps, and which branches they took."""
        self._of, self._rows, self.apart = (), ([], []), False

    def alone(
        self, values: Sequence[Tensor], rows: Tree, index: int, interception: Interception = _NOTHING
    ) -> StepResult:
        """Return one client's step, `(1, ...)`, of its parameters and buffers, which do not change.

        Gradients have to be enabled.
        """
        count = len(self.tensors)
        trained = values[:count]
        with self.unchanged():
            with self._cast(values[0].device), interception:
                loss, logs, new = self.single([*trained, *(v.clone() for v in values[count:])], rows, None, index)
            self.check_trained(trained)
            each = torch.autograd.grad(loss, trained, allow_unused=True)
        gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in each]
        return StepResult(
            loss.detach()[None],
            {name: log.detach()[None] for name, log in logs.items()},
            {name: leaf.detach()[None] for name, leaf in zip(self.buffers, new)},
            [None if gradient is None else gradient[None] for gradient in self.hooks.alone(gradients)],
            self._called_with([argument[None] for argument in self.objective.recorded]),
        )


def joined(
    parts: Sequence[StepResult], places: Sequence[Sequence[int]], count: int, tensors: Sequence[str]
) -> StepResult:
    """Join the steps of groups, which contain all clients, into that of a stack of `count`.

    Args:
        parts: of the groups, `(M, ...)` each.
        places: positions of a group's M clients in the stack.
        count: K.
        tensors: names of the trained tensors, in the order of the gradients.
    """
    if len(parts) == 1 and len(places[0]) == count:
        return parts[0]
    everybody = [place for each in places for place in each]
    order = None if everybody == list(range(count)) else torch.tensor(everybody).argsort()

    def spread(each: Sequence[Tensor | None]) -> Any:
        like = next((part for part in each if part is not None), None)
        if like is None:
            return None
        pairs = zip(each, places)
        whole = torch.cat([like.new_zeros(len(at), *like.shape[1:]) if part is None else part for part, at in pairs])
        return whole if order is None else whole.index_select(0, order.to(whole.device))

    def without(named: Mapping[str, Sequence[Any]], known: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return which clients lack a value that others have."""
        masks: dict[str, Tensor] = {}
        for name, each in named.items():
            for part, at, before in zip(each, places, known):
                if part is None or name in before:
                    mask = masks.setdefault(name, torch.zeros(count, dtype=torch.bool))
                    mask[at] = True if part is None else before[name]
        return {name: mask for name, mask in masks.items() if any(part is not None for part in named[name])}

    gradients = dict(zip(tensors, zip(*(part.gradients for part in parts))))
    logs = {name: [part.logs.get(name) for part in parts] for name in dict.fromkeys(n for p in parts for n in p.logs)}
    with torch.no_grad():
        return StepResult(
            spread([part.losses for part in parts]),
            {name: spread(each) for name, each in logs.items()},
            {name: spread([part.buffers[name] for part in parts]) for name in parts[0].buffers},
            [spread(each) for each in gradients.values()],
            _recorded(parts, places),
            without(gradients, [part.missing for part in parts]),
            without(logs, [part.unlogged for part in parts]),
        )


def _recorded(parts: Sequence[StepResult], places: Sequence[Sequence[int]]) -> Sequence[Recorded] | None:
    """Return the arguments of metrics, by client."""
    if any(part.recorded is None for part in parts):
        return None
    return joined_calls([each.at(at) for part, at in zip(parts, places) for each in part.recorded or ()])


class RoundLogs:
    """Collects the logs of a round's steps, and reduces them to a number for each client.

    Args:
        loss: of the steps.
        clients: K.
        everywhere: the number of steps, if it is known to be that of all clients.
    """

    def __init__(self, loss: StackedLoss, clients: int, everywhere: int | None = None) -> None:
        self._loss, self._clients, self._everywhere = loss, clients, everywhere
        self._numbers: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        self._metrics = RoundMetrics(clients) if loss.objective.metrics.recorders else None
        self._sizes: list[Tensor] = []  # (K,) rows of each step

    def add(self, step: int, result: StepResult, batch: Step, here: Tensor) -> None:
        """Add the numbers of one step, and the arguments of metrics, of clients at positions `here` `(M,)`."""
        everybody = len(here) == self._clients
        whole = lambda part: (
            part if everybody else part.new_zeros(self._clients).index_copy_(0, here.to(part.device), part)
        )
        rows = whole(batch.size)
        self._sizes.append(rows)
        for name, value in {**result.logs, "loss": result.losses}.items():
            sizes = rows
            if name in result.unlogged:
                self._everywhere = None
                sizes = torch.where(whole(result.unlogged[name]), 0, rows)
            self._numbers.setdefault(name, []).append((step, whole(value.detach()), sizes))
        if self._metrics is not None and result.recorded is not None:
            recorded = result.recorded if everybody else [each.at(here.tolist()) for each in result.recorded]
            self._metrics.add(step, recorded, rows)

    def reduced(self) -> dict[str, Tensor]:
        """Return the clients' logs, `(K,)` each; NaN for a client without the entry."""
        numbers = {name: self._number(name) for name in self._numbers}
        if self._metrics is None:
            return numbers
        device = next(iter(numbers.values())).device
        return {**numbers, **{name: value.to(device) for name, value in self._metrics.values().items()}}

    def of_batches(self) -> dict[str, Tensor]:
        """Return the rows of each client's smallest batch `(K,)`, by names of values that may depend on a single batch.

        These are values reduced to the last batch, the minimum or the maximum, and values that are not logged in every
        step.
        """
        numbers = {name for name, logged in self._numbers.items() if self._is_of_batch(name, logged)}
        names = numbers | (set() if self._metrics is None else self._metrics.of_batches(len(self._sizes)))
        if not names:
            return {}
        sizes = torch.stack(self._sizes)
        largest = torch.iinfo(sizes.dtype).max
        least = torch.where(sizes > 0, sizes, largest).amin(0).cpu()
        return dict.fromkeys(sorted(names), torch.where(least == largest, 0, least))

    def _is_of_batch(self, name: str, logged: Sequence[tuple[int, Tensor, Tensor]]) -> bool:
        reduction = self._loss.objective.reductions.get(name)
        apart = len(logged) < len(self._sizes) or any(
            sizes is not rows for (*_, sizes), rows in zip(logged, self._sizes)
        )
        return apart or (reduction is not None and not reduction.of_all)

    def _number(self, name: str) -> Tensor:
        steps, logged, sizes = zip(*self._numbers[name])
        values, reduction = torch.stack(logged), self._loss.objective.reductions.get(name)
        if reduction in (None, Reduction()) and len(steps) == self._everywhere:
            return values.sum(0) / len(steps)
        return (reduction or Reduction()).of(values, torch.stack(sizes).to(values.device))


@contextmanager
def _short_products() -> Iterator[None]:
    """Compute float32 products and convolutions on a CUDA device with factors of 10 bits (TF32) inside."""
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32"
        yield
    finally:
        for place, value in zip(places, before):
            place.fp32_precision = value


def _gradients(losses: Tensor, trained: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return each client's gradient of its own loss, stacked; None for tensors on which no loss depends."""
    return torch.autograd.grad(losses, trained, torch.ones_like(losses), allow_unused=True)


class ParameterHooks:
    """The hooks of `Tensor.register_hook` on trained parameters, called with each client's gradient.

    Args:
        module: has the hooks.
        names: of the trained parameters, in the order of their gradients.

    Raises:
        TypeError: a parameter has a hook that runs after its gradient is accumulated, which no client's step does.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(module.named_parameters())
        after = [name for name, p in parameters.items() if getattr(p, "_post_accumulate_grad_hooks", None)]
        if after:
            raise TypeError(
                f"Expected parameters without register_post_accumulate_grad_hook, but {', '.join(after)} of "
                f"{type(module).__name__} have one, which would step before the algorithm's quadratic term is added; "
                "use register_hook, or ft.lightning_fit"
            )
        each = [parameters[name]._backward_hooks if name in parameters else None for name in names]
        self._hooks: dict[int, list[Hook]] = {i: list(hooks.values()) for i, hooks in enumerate(each) if hooks}

    def alone(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return one client's gradients after the hooks."""
        if not self._hooks:
            return gradients
        done: list[Any] = list(gradients)
        for i, hooks in self._hooks.items():
            for hook in hooks if done[i] is not None else ():
                changed = hook(done[i])
                done[i] = done[i] if changed is None else changed
        return done

    def stacked(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients `(K, ...)` after the hooks, which see one client's after another."""
        if not self._hooks:
            return gradients
        done = list(gradients)
        for i in self._hooks:
            whole = done[i]
            if whole is not None:
                rows = (self.alone([None] * i + [row])[i] for row in whole.unbind())
                done[i] = torch.stack([row for row in rows if row is not None])
        return done


def backward_hooks(module: nn.Module) -> list[str]:
    """Return the names of the parts of a module with hooks on their backward passes, which `vmap` does not call right.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
        >>> handle = net[0].register_full_backward_hook(lambda part, inputs, outputs: None)
        >>> backward_hooks(net)
        ['0 (Linear)']
    """
    everywhere = bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
    return [
        f"{name or 'itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if everywhere or part._backward_hooks or part._backward_pre_hooks
    ]
