"""The training loss of many clients at once, with each client's gradient of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedtorch import functional, stacked_layers, tree
from fedtorch.captured import CapturedStep
from fedtorch.federation.solvers.batches import Batch
from fedtorch.federation.solvers.linear.alike import same_in_every_step
from fedtorch.federation.solvers.loaders.batches import LoadedBatch
from fedtorch.federation.solvers.loaders.parts import gradients_in_parts
from fedtorch.federation.solvers.objective import Objective, Reduction
from fedtorch.federation.solvers.training_metrics import RoundMetrics
from fedtorch.module_randomness.drawing_modules import DrawingModules, Interception
from fedtorch.module_randomness.step_draws import Draws, StepKeys
from fedtorch.module_randomness.watched_generators import each_drawn_if_random
from fedtorch.tree import Tree

# Losses `(K,)`, logs, new buffers, gradients, and the arguments of the module's metrics; None if they are private.
Gradients = tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Sequence[Tensor | None], Sequence[Any] | None]


Step = Batch | LoadedBatch
_BACKWARD = 1  # the purpose of a key: draws of a backward pass


class StackedLoss:
    """`(losses (K,), logs, new buffers, gradients, recorded)` of stacked tensors on a stacked batch.

    Args:
        objective: one client's loss.
        tensors: names of what is trained, in the order in which values come.
        buffers: names of buffers that are stacked too and may change.
        batched: False evaluates client by client; "auto" does so if `probe` finds that the module cannot run stacked.
        compile: whether steps are captured once per shape and replayed; "auto": those of a module whose code shows that
            they are alike, where that pays; see `gradient_descent`.
        precision: of the products in the losses of steps, see `gradient_descent`; what `probe` looks at has "32".

    Attributes:
        batched: whether clients are evaluated together.
        random: found out by `probe`, as the others are: whether the module draws random numbers, which come from the
            clients' keys.
        separable: whether a batch's loss and logs are the means of its examples', so that padding can be weighted
            out; None as long as no ragged block has been seen.
        probed: whether the module has been looked at.
        swap: puts one client's tensors and buffers into the module.
        reads: whether it branches on values, so that clients which take different branches have steps of their own.
    """

    divides = True  # whether clients that take different branches can have steps of their own

    def __init__(
        self,
        objective: Objective,
        tensors: Sequence[str],
        buffers: Sequence[str],
        batched: bool | Literal["auto"],
        compile: bool | Literal["auto"] = False,
        precision: str = "32",
    ) -> None:
        self.objective, self.compile, self.precision = objective, compile is True, precision
        self.batched, self.automatic = bool(batched), batched == "auto"
        self.tensors, self.buffers = list(tensors), list(buffers)
        self.random = self.probed = self.reads = False
        self.separable: bool | None = None
        self.told: list[str] = []  # names of what the module logged last
        self.drawing = DrawingModules(objective.module)
        self.swap = functional.Swap(objective.module, [*tensors, *buffers])
        alike = compile == "auto" and precision == "32" and batched and not buffers
        self._line = same_in_every_step(objective) if alike else None
        self._captured = CapturedStep(exact=alike)

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
    ) -> Gradients:
        """Return losses `(K,)`, logs `(K,)` each, new buffers, gradients, and metrics' arguments of one step.

        Args:
            tensors: what is trained, `(K, ...)`.
            buffers: the stacked buffers.
            batch: the clients' minibatches.
            index: of the step.
            keys: the clients' for the module's draws.
        """
        values = [*(tensors[n] for n in self.tensors), *(buffers[n] for n in self.buffers)]
        with _short_products() if self.precision == "tf32" else nullcontext():
            if not self.batched:
                return self._one_by_one(values, batch, index, keys[index])
            if isinstance(batch, LoadedBatch):
                return gradients_in_parts(self, tensors, buffers, batch, index, keys)
            if batch.few and self._alone_alike:
                return self._of_few(tensors, batch, index, keys)
            flat = [*values, *batch.leaves]
            if batch.weights is not None:
                flat.append(batch.weights)
            step = partial(self.step, batch.rows, keys[index] if self.random else None)
            if self._line is not None and not self.random and flat[0].device.type == "cpu":
                return self._replayed(step, index, flat)
            return step(index, *flat) if self.eager else self._captured(step, *flat)

    def _replayed(self, step: Any, index: int, flat: Sequence[Tensor]) -> Gradients:
        """Return a step of a module whose steps are alike, replayed where its shape comes often."""
        line = self._line
        if line is None or not line.holds() or self.reads or not self._captured.pays(*flat):
            return step(index, *flat)
        try:
            return self._captured(step, *flat)
        except Exception:  # what cannot be traced, which its code does not show
            self._line = None
            return step(index, *flat)

    @property
    def _alone_alike(self) -> bool:
        """Return whether clients can be left out of a step, as far as its other results go."""
        return not (self.random or self.reads or self.buffers or self.objective.metrics.recorders)

    def _of_few(self, tensors: Mapping[str, Tensor], batch: Batch, index: int, keys: StepKeys) -> Gradients:
        """Return `gradients` of a step in which few clients train, evaluated without the others, whose are zero."""
        places = batch.active.nonzero()[:, 0]
        at, count = places.to(batch.leaves[0].device), len(batch.active)
        some = {name: leaf.index_select(0, at) for name, leaf in tensors.items()}
        losses, logs, new, gradients, recorded = self.gradients(some, {}, batch.of(places), index, keys)
        whole = lambda leaf: leaf.new_zeros(count, *leaf.shape[1:]).index_copy_(0, at, leaf)
        with torch.no_grad():
            spread = [None if each is None else whole(each) for each in gradients]
            return whole(losses), {name: whole(log.detach()) for name, log in logs.items()}, new, spread, recorded

    def step(self, rows: Tree, draws: Draws | None, index: int, *flat: Tensor) -> Gradients:
        """Return `gradients` of tensors, buffers, rows and, if there are any, weights in one flat list.

        Args:
            rows: their structure.
            draws: the module's; None if it draws nothing.
            index: of the step.
            flat: `(K, ...)` each.
        """

        def evaluate(at: Tensor | None) -> Gradients:
            if at is None:
                return self._together(rows, draws, index, *flat)
            return self._together(rows, draws and draws.some(at), index, *tree.take(flat, at.to(flat[0].device)))

        return stacked_layers.by_branches(evaluate, _joined) if self.reads else evaluate(None)

    def _together(self, rows: Tree, draws: Draws | None, index: int, *flat: Tensor) -> Gradients:
        """Return `step` of clients that take the same branches."""
        step = partial(self._step, rows, index, flat, "error" if draws is None else "different")
        if draws is None:
            return step(nullcontext())
        return self.drawing.drawn(lambda _, interception: step(interception), [draws.together()])[0]

    def _step(
        self, rows: Tree, index: int, flat: Sequence[Tensor], randomness: str, interception: Interception
    ) -> Gradients:
        trained = len(self.tensors)
        with torch.enable_grad():
            trainable = [leaf.detach().requires_grad_() for leaf in flat[:trained]]
            whole = [*trainable, *flat[trained:]]
            with self._cast(flat[0].device), interception:
                losses, *others = self.stacked(whole, rows, index, randomness)
            gradients = _gradients(losses, trainable)
        logs, last = dict(zip(self.told, others)), len(others) - len(self.buffers)
        new = {name: leaf.detach() for name, leaf in zip(self.buffers, others[last:])}
        return losses.detach(), logs, new, gradients, others[len(logs) : last]

    def stacked(self, flat: Sequence[Tensor], rows: Tree, index: int, randomness: str) -> tuple[Tensor, ...]:
        """Return losses, logs, metrics' arguments and new buffers of a flat list as that of `step`."""
        first = len(self.tensors) + len(self.buffers)
        last = first + len(tree.leaves(rows))

        def one(*flat: Tensor) -> tuple[Tensor, ...]:
            client_rows = tree.refill(rows, flat[first:last])
            loss, logs, new = self.single(flat[:first], client_rows, flat[last] if len(flat) > last else None, index)
            self.told = list(logs)
            return loss, *logs.values(), *self.objective.recorded, *new

        with stacked_layers.StackedOperations() if self.reads else stacked_layers.WithoutReading():
            return tuple(functional.mapped(one, flat, randomness))

    def single(
        self, values: Sequence[Tensor], rows: Tree, weights: Tensor | None, index: int
    ) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        """Return one client's (loss, logs, new buffers)."""
        with self.swap(values):
            loss, logs = self.objective(rows, weights, index)
            new = tuple(self.swap.current(i) for i in range(len(self.tensors), len(values)))
        return loss, logs, new

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """Compute the products inside as `precision` says."""
        with _short_products() if self.precision == "tf32" else nullcontext(), self._cast(device):
            yield

    def _cast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def _one_by_one(self, values: Sequence[Tensor], batch: Step, index: int, draws: Draws) -> Gradients:
        """Return `gradients` of the clients that still train, one after the other; zeros for the others."""
        each = list(zip(*(value.detach().unbind() for value in values)))
        active = batch.active.nonzero()[:, 0].tolist()

        def one(i: int, interception: Interception) -> tuple[Any, ...]:
            return self._alone(each[active[i]], batch.alone(active[i]), index, interception)

        if self.random:
            backward = draws.calls[:, _BACKWARD].unbind()
            results = self.drawing.drawn(one, [draws.alone(k) for k in active], [backward[k] for k in active])
        else:
            keys = draws.keys.unbind()
            results = each_drawn_if_random(lambda i: one(i, nullcontext()), [keys[k] for k in active])
        every, recorded, replies = zip(*((gradients, said, reply) for gradients, said, *reply in results))
        spread = partial(_spread, at=active, count=len(each))
        with torch.no_grad():
            losses, logs, new = tree.map(lambda *each: spread(each), *map(tuple, replies))
            stacked = [spread(each) for each in zip(*every)]
        arguments = [dict(zip(active, each)) for each in zip(*recorded)]
        return losses, logs, dict(zip(self.buffers, new)), stacked, arguments

    def _alone(
        self, values: Sequence[Tensor], rows: Tree, index: int, interception: Interception
    ) -> tuple[Sequence[Tensor | None], Sequence[Any], Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        """Return one client's (gradients, metrics' arguments, loss, logs, new buffers); its tensors stay as is."""
        count = len(self.tensors)
        trained = [value.detach().requires_grad_() for value in values[:count]]
        with torch.enable_grad():
            with self._cast(values[0].device), interception:
                loss, logs, new = self.single([*trained, *(v.clone() for v in values[count:])], rows, None, index)
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return gradients, self.objective.recorded, loss.detach(), logs, new


class RoundLogs:
    """Collects what the steps of a round log, and reduces it to a number of each client.

    Args:
        loss: of the steps.
        total: `(K,)` steps of each client.
        everywhere: the number of steps, if it is known to be that of all clients.
    """

    def __init__(self, loss: StackedLoss, total: Tensor, everywhere: int | None = None) -> None:
        self._loss, self._total, self._everywhere = loss, total, everywhere
        self._numbers: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        calls = loss.objective.metrics
        self._metrics = RoundMetrics(calls, total) if calls.recorders else None

    def add(self, step: int, values: Mapping[str, Tensor], recorded: Sequence[Any] | None, batch: Step) -> None:
        """Take in one step: numbers `(K,)` by name, and the arguments of metrics, None where they stay private."""
        for name, value in values.items():
            self._numbers.setdefault(name, []).append((step, value.detach(), batch.size))
        if self._metrics is not None and recorded is not None:
            self._metrics.add(step, recorded, batch.size, self._loss.batched and batch.weights is not None)

    def reduced(self) -> dict[str, Tensor]:
        """Return what the clients have logged, `(K,)` each; NaN for a client that has not logged it."""
        numbers = {name: self._number(name) for name in self._numbers}
        if self._metrics is None:
            return numbers
        device = next(iter(numbers.values())).device
        return {**numbers, **{name: value.to(device) for name, value in self._metrics.values().items()}}

    def _number(self, name: str) -> Tensor:
        steps, logged, sizes = zip(*self._numbers[name])
        values, reduction = torch.stack(logged), self._loss.objective.reductions.get(name)
        if reduction in (None, Reduction()) and len(steps) == self._everywhere:
            return values.sum(0) / len(steps)
        rows = torch.where(torch.tensor(steps)[:, None] < self._total, torch.stack(sizes), 0)
        return (reduction or Reduction()).of(values, rows.to(values.device))


@contextmanager
def _short_products() -> Iterator[None]:
    """Let products and convolutions of float32 on a CUDA device have 10 bits of their factors (TF32) inside."""
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
    """Return each client's gradient of its own loss, stacked; None for what no loss depends on."""
    return torch.autograd.grad(losses, trained, torch.ones_like(losses), allow_unused=True)


def _joined(parts: Sequence[Gradients], places: Tensor) -> Gradients:
    """Return the gradients of groups of clients as those of all; zeros for what only others' losses depend on."""
    losses, logs, buffers, gradients, recorded = zip(*parts)
    each = [
        [value if value is not None else like.new_zeros(len(loss), *like.shape[1:]) for value, loss in zip(row, losses)]
        if (like := next((value for value in row if value is not None), None)) is not None
        else [None] * len(losses)
        for row in zip(*gradients)
    ]
    whole = zip(losses, logs, buffers, zip(*each), map(tuple, recorded))
    return tree.take(tree.concatenate(list(whole)), places.to(losses[0].device))


def _spread(each: Sequence[Tensor | None], at: list[int], count: int) -> Any:
    """Return the values of clients `at` as rows of a stack `(count, ...)`; None if there are none."""
    some = next((value for value in each if value is not None), None)
    if some is None:
        return None
    if len(at) == count and all(value is not None for value in each):
        return torch.stack(each)  # type: ignore[arg-type]
    whole = some.new_zeros(count, *some.shape)
    for k, value in zip(at, each):
        if value is not None:
            whole[k] = value
    return whole
