"""The training loss of many clients at once, and what has to be known about a module before that is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedtorch import functional, random, tree
from fedtorch.federation.local_solvers.batches import Batch
from fedtorch.federation.local_solvers.objective import BatchIndex, Objective
from fedtorch.federation.local_solvers.operations import Operations
from fedtorch.module_randomness import Drawn
from fedtorch.tree import Tree

__all__ = ["StackedLoss", "is_ragged"]

_PROBE_ROWS = 16
_MOST_TRACES = 64


class StackedLoss:
    """`(losses (K,), logs, new buffers)` of stacked tensors on a stacked batch.

    Args:
        objective: one client's loss.
        tensors: names of what is trained, in the order in which values come.
        buffers: names of buffers that are stacked too and may change.
        batched: False evaluates client by client.
        compile: whether steps are traced once and replayed; see `gradient_descent`.

    Attributes (after `probe`):
        random: whether the module draws random numbers; they come from the clients' keys.
        separable: whether a batch's loss and logs are the means of its examples', so that padding can be weighted
            out; None as long as no ragged block has been seen.
    """

    def __init__(
        self, objective: Objective, tensors: Sequence[str], buffers: Sequence[str], batched: bool, compile: bool = False
    ) -> None:
        self.objective, self.batched, self.compile = objective, batched, compile
        self.tensors, self.buffers = list(tensors), list(buffers)
        self.random = self.probed = False
        self.separable: bool | None = None
        self._swap = functional.Swap(objective.module, [*tensors, *buffers])
        self._traces: dict[Any, tuple[Callable[..., Any], list[int], list[str]]] = {}
        self._told: list[str] = []  # names of what the module logged last

    @property
    def traced(self) -> bool:
        """Whether steps are traced once and replayed."""
        return self.compile and self.batched and not self.random and not self.buffers

    def gradients(
        self, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Batch, index: int, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Sequence[Tensor | None]]:
        """(losses `(K,)`, logs `(K,)` each, new buffers, each client's gradient) of one step.

        Args:
            tensors: what is trained, `(K, ...)`, requiring gradients.
            buffers: the stacked buffers.
            batch: the clients' minibatches.
            index: of the step.
            key: `(K,)` the clients' keys for the module's draws.
        """
        trained = [tensors[n] for n in self.tensors]
        values = trained + [buffers[n] for n in self.buffers]
        if not self.batched:
            return self._one_by_one(values, batch, index, key)
        flat = [*values, *batch.leaves]
        if batch.weights is not None:
            flat.append(batch.weights)
        if self.traced:
            losses, others, found = self._replay(flat, batch, index)
        else:
            losses, others, found = self._step(flat, batch.rows, index, key if self.random else None)
        told = len(self._told)
        new = {name: leaf.detach() for name, leaf in zip(self.buffers, others[told:])}
        return losses, dict(zip(self._told, others)), new, found

    def _step(
        self, flat: list[Tensor], rows: Tree, index: int, key: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
        """(losses, logs and new buffers, gradients)."""
        with torch.enable_grad():
            if key is None:
                losses, *others = self.stacked(flat, rows, index, "error")
            else:
                with Drawn(random.fold_in(key, index)):
                    losses, *others = self.stacked(flat, rows, index, "different")
            return losses, others, _gradients(losses, flat[: len(self.tensors)])

    def stacked(self, flat: list[Tensor], rows: Tree, index: int, randomness: str) -> tuple[Tensor, ...]:
        """(losses, logs, new buffers) of tensors, buffers, rows and, if there are any, weights in one flat list."""
        first = len(self.tensors) + len(self.buffers)
        last = first + len(tree.leaves(rows))

        def one(*flat: Tensor) -> tuple[Tensor, ...]:
            own = tree.refill(rows, flat[first:last])
            loss, logs, new = self.single(flat[:first], own, flat[last] if len(flat) > last else None, index)
            self._told = list(logs)
            return loss, *logs.values(), *new

        # Flat tensors in and out: vmap's walk through nested containers would cost more than a small step itself.
        return vmap(one, randomness=randomness)(*flat)

    def _replay(
        self, flat: list[Tensor], batch: Batch, index: int
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
        """`_step` as a graph of tensor operations, traced once per shape."""
        shapes = tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in flat)
        trained = len(self.tensors)
        unused: list[int] = []
        if shapes not in self._traces:

            def step(*flat: Tensor) -> tuple[Tensor, ...]:
                own = [leaf.detach().requires_grad_(i < trained) for i, leaf in enumerate(flat)]
                losses, others, found = self._step(own, batch.rows, index, None)
                unused[:] = [i for i, g in enumerate(found) if g is None]
                return losses.detach(), *others, *[g for g in found if g is not None]

            graph: Callable[..., Any] = make_fx(step)(*[leaf.detach() for leaf in flat])
            if len(self._traces) == _MOST_TRACES:
                del self._traces[next(iter(self._traces))]
            self._traces[shapes] = (graph, list(unused), list(self._told))
        graph, unused, self._told = self._traces[shapes]
        with torch.no_grad():
            losses, *others = graph(*[leaf.detach() for leaf in flat])
        told = len(self._told)
        found: list[Tensor | None] = others[told:]
        for i in unused:
            found.insert(i, None)
        return losses, others[:told], found

    def _one_by_one(
        self, values: Sequence[Tensor], batch: Batch, index: int, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], Sequence[Tensor | None]]:
        """`gradients` of the clients that still train, one after the other; zeros for the others."""
        keys, replies, found = random.fold_in(key, index), [], []
        trained = len(self.tensors)
        active = batch.active.nonzero()[:, 0].tolist()
        for k in active:
            size = int(batch.size[k])
            rows = tree.map(lambda leaf, k=k, size=size: leaf[k, :size], batch.rows)
            own = [v[k].detach().requires_grad_() if i < trained else v[k].clone() for i, v in enumerate(values)]
            with torch.enable_grad(), Drawn(keys[k]):
                loss, logs, new = self.single(own, rows, None, index)
                found.append(_gradients(loss, own[:trained]))
            replies.append((loss.detach(), logs, new))
        losses, logs, new = tree.map(lambda *each: _spread(each, active, len(keys)), *replies)
        gradients = [_spread(each, active, len(keys)) for each in zip(*found)]
        return losses, logs, {n: leaf.detach() for n, leaf in zip(self.buffers, new)}, gradients

    def single(
        self, values: Sequence[Tensor], rows: Tree, weights: Tensor | None, index: int
    ) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        """One client's (loss, logs, new buffers)."""
        with self._swap(values):
            loss, logs = self.objective(rows, weights, index)
            new = tuple(self._swap.current(i) for i in range(len(self.tensors), len(values)))
        return loss, logs, new

    def probe(self, data: Any, values: Mapping[str, Tensor]) -> None:
        """Runs the module on a few rows of a block: does it draw, change buffers, run stacked, split by example?

        Args:
            data: a block `ClientData`.
            values: one client's tensors and stacked buffers by name.

        Raises:
            TypeError: it returns no loss, or compiled steps would freeze what changes from step to step.
            ValueError: it changes buffers that are not stacked.
            RuntimeError: `torch.vmap` cannot run it, or gives another loss.
        """
        rows = _some_rows(data, _PROBE_ROWS)
        device = tree.leaves(rows)[0].device
        trained = len(self.tensors)
        own = [_perturbed(values[n].to(device)) for n in self.tensors]
        own += [values[n].to(device, copy=True) for n in self.buffers]
        key = random.key(0).to(device)
        with torch.no_grad():
            if not self.probed:
                alone, moved = self._probe_alone(own, rows, key)
                if self.batched:
                    self._probe_stacked(own, rows, alone, key)
                if any(not torch.equal(a, b) for a, b in zip(own[trained:], moved)):
                    self.separable = False
            if self.batched and self.separable is not False and is_ragged(data.count):
                self.separable = self._splits(own, rows, key)
        self.probed = True

    def work(self, data: Any, values: Mapping[str, Tensor]) -> str | None:
        """What one client's loss and gradient do, comparable with another module's: a digest of their operations.

        Call it after `probe`. It does not depend on the numbers in `values`, only on their shapes.

        Returns:
            None where the operations of one step do not say what the next one does: the module reads numbers out of
            tensors, or counts steps or epochs.
        """
        rows = _some_rows(data, _PROBE_ROWS)
        first, *_ = tree.leaves(rows)
        size, trained = len(first), len(self.tensors)
        own = [_perturbed(torch.zeros_like(values[n], device=first.device)) + 0.5 for n in self.tensors]
        own += [values[n].to(first.device, copy=True) for n in self.buffers]
        weights = torch.full((size,), 1.0 / size, device=first.device, dtype=torch.float64)
        index, asked = BatchIndex(0), set(self.objective.trainer.asked)
        self.objective.trainer.asked.clear()
        self.objective.trainer.answers.update(global_step=0, current_epoch=0)
        told = []
        with Drawn(random.key(0).to(first.device)), Operations() as operations, torch.enable_grad():
            for some in (None, weights) if self.separable else (None,):
                leaves = [v.detach().requires_grad_() if i < trained else v.clone() for i, v in enumerate(own)]
                loss, logs, _ = self.single(leaves, rows, some, index)
                _gradients(loss, leaves[:trained])
                told.append(sorted(logs))
        changing = self.objective.trainer.asked - {"max_epochs", "training"}
        self.objective.trainer.asked |= asked
        return None if changing or index.used or operations.reads else f"{told} {operations.digest()}"

    def _probe_alone(self, own: list[Tensor], rows: Tree, key: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """One client's loss and new buffers, evaluated without `vmap`."""
        name, trainer = type(self.objective.module).__name__, self.objective.trainer
        before, asked = functional.buffers(self.objective.module), set(trainer.asked)
        trainer.asked.clear()
        trainer.answers.update(global_step=0, current_epoch=0)
        index = BatchIndex(0)
        with Drawn(key) as drawn:
            loss, _, new = self.single([v.clone() for v in own], rows, None, index)
        self.random = drawn.calls > 0
        changing = [f"trainer.{question}" for question in sorted(trainer.asked - {"max_epochs", "training"})]
        trainer.asked |= asked
        if self.traced:
            with Drawn(key):
                later = self.single([v.clone() for v in own], rows, None, 1)[0]
            if index.used or not _close(later, loss, equal_nan=True):
                changing.append("batch_idx")
            if changing:
                raise TypeError(
                    f"The training_step of {name} depends on {', '.join(changing)}, which a compiled step would "
                    "freeze; use compile=False"
                )
        after = functional.buffers(self.objective.module)
        changed = [n for n, b in after.items() if not torch.equal(b, before[n])]
        if changed:
            raise ValueError(
                f"Training changes the buffers {', '.join(changed)} of {name}, and averaging them silently would be "
                "wrong; choose buffers='local' (each client keeps its own) or buffers='average'"
            )
        return loss, new

    def _probe_stacked(self, own: list[Tensor], rows: Tree, alone: Tensor, key: Tensor) -> None:
        name = type(self.objective.module).__name__
        try:
            together = self._twice(own, rows, False, key)[0]
        except Exception as error:
            raise RuntimeError(
                f"{name} cannot run on stacked clients under torch.vmap: {error}\n"
                "Use batched=False, which calls the loss client by client, or ft.lightning_fit"
            ) from error
        if not _close(together, alone.expand(2), equal_nan=True):
            raise RuntimeError(
                f"{name} gives the losses {together.tolist()} on two stacked copies of a client, but {float(alone)} on "
                "one alone; use batched=False, which calls the loss client by client"
            )

    def _twice(self, own: list[Tensor], rows: Tree, weighted: bool, key: Tensor) -> tuple[Tensor, ...]:
        """Losses and logs of two stacked copies of one client."""
        values, some = tree.map(lambda leaf: leaf.expand(2, *leaf.shape).clone(), (tuple(own), rows))
        size = len(tree.leaves(rows)[0])
        weights = torch.full((2, size), 1.0 / size, device=key.device, dtype=torch.float64)
        flat = [*values, *tree.leaves(some), *([weights] if weighted else [])]
        with Drawn(torch.stack([key, key])):
            found = self.stacked(flat, some, 0, "different")
        return found[: 1 + len(self._told)]

    def _splits(self, own: list[Tensor], rows: Tree, key: Tensor) -> bool:
        """Whether loss and logs are the means of the examples' on batches of several sizes."""
        size = len(tree.leaves(rows)[0])
        for part in sorted({size, (size + 1) // 2, 2}):
            some = tree.map(lambda leaf, part=part: leaf[:part], rows)
            try:
                whole, summed = self._twice(own, some, False, key), self._twice(own, some, True, key)
            except Exception:  # whatever a module objects to in batches of one: clients are then grouped by size
                return False
            if len(whole) != len(summed) or not all(_close(a, b) for a, b in zip(whole, summed)):
                return False
        return True


def is_ragged(count: Tensor) -> bool:
    """Whether clients of these numbers of rows `(K,)` ever have batches of different sizes."""
    return len(count) > 0 and bool((count != count[0]).any())


def _gradients(losses: Tensor, trained: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Each client's gradient of its own loss, stacked; None for what no loss depends on."""
    return torch.autograd.grad(losses, trained, torch.ones_like(losses), allow_unused=True)


def _spread(each: Sequence[Tensor | None], at: list[int], count: int) -> Any:
    """The values of clients `at` as rows of a stack `(count, ...)`; None if there are none."""
    some = next((value for value in each if value is not None), None)
    if some is None:
        return None
    whole = some.new_zeros(count, *some.shape)
    for k, value in zip(at, each):
        if value is not None:
            whole[k] = value.detach()
    return whole


def _close(first: Tensor, second: Tensor, equal_nan: bool = False) -> bool:
    first, second = first.detach(), second.detach()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(second.dtype, 1e-2)
    return torch.allclose(first.double(), second.double(), rtol=tolerance, atol=tolerance, equal_nan=equal_nan)


def _perturbed(tensor: Tensor) -> Tensor:
    """A little away from the start, where a loss may be the same for all examples; signs are kept."""
    wave = 0.1 * torch.sin(torch.arange(1, tensor.numel() + 1, device=tensor.device)).reshape(tensor.shape)
    return torch.where(tensor == 0, wave, tensor * (1 + wave)).to(tensor.dtype)


def _some_rows(data: Any, most: int) -> Tree:
    """Valid rows spread over the clients of a block, with some for each of the first values of integer fields."""
    client, row = data.mask.nonzero().T
    chosen = [torch.linspace(0, len(client) - 1, min(most, len(client)), device=client.device).long()]
    for leaf in tree.leaves(data.batch):
        if leaf.ndim == 2 and not (leaf.is_floating_point() or leaf.is_complex()):
            values, which = leaf[client, row].unique(return_inverse=True)
            first = which.new_full((len(values),), len(which))
            first.scatter_reduce_(0, which, torch.arange(len(which), device=which.device), "amin")
            chosen.append(first[:most])
    at = torch.cat(chosen).unique()
    return tree.map(lambda leaf: leaf[client[at], row[at]], data.batch)
