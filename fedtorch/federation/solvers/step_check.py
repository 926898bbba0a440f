"""Compares stacked steps with the user's own module, client by client, on real rows.

The check runs once in a run for every shape of a batch, before the stacked step, and for every sequence of torch's
functions that a step has called, before its gradients are used; where the user has promised that
padding can be weighted out, in all steps of the first round. It takes the last clients of the stack, for some faults of
`vmap` spare the first, at parameters that are moved off the start, where other gradients than those of an optimum are
seen. It runs on a copy of the module in float64 where the step takes it.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import tree
from fedtorch.federation.solvers._state import perturbed
from fedtorch.federation.solvers.batches import Batch
from fedtorch.federation.solvers.host_state import SetGenerators, equal_or_nan
from fedtorch.functional import copied
from fedtorch.module_randomness.interception import Seeded
from fedtorch.module_randomness.step_draws import StepKeys

_LOG = logging.getLogger(__name__)
_CLIENTS = 2  # clients of a stack that are compared
_DOUBLE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_DOUBLE[torch.complex64] = torch.complex128
_LOSSES = 64  # ulps of rounding in a loss of a narrower dtype than its tensors: √4096, for sums of 4096 rows
_TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-3, torch.complex64: 1e-3}


class StepsDiffer(RuntimeError):
    """A stacked step differs from its clients' own steps.

    Attributes:
        difference: what differs, without the remedy.
        padded: whether rows of padding were weighted out.
    """

    def __init__(self, difference: str, padded: bool, advice: str = "") -> None:
        super().__init__(difference + advice)
        self.difference, self.padded = difference, padded


class StateKept(TypeError):
    """A step, or a fit, gives another result when repeated with the same tensors, rows and draws.

    Args:
        module: the user's.
        gap: the relative difference.
        what: "step" or "fit".
    """

    def __init__(self, module: nn.Module, gap: float, what: str = "step") -> None:
        super().__init__(
            f"Expected a {what} of {type(module).__name__} that follows from its tensors, rows and draws, but taken "
            f"twice from the same it differs by {gap:.2g} of its size: module, loss or hooks keep something from call "
            "to call (a buffer of the loss, a closure, a default argument, a global, a file) or draw from a generator "
            "of their own; keep it in a buffer of the module with buffers='local', or use self.global_step"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative gap of gradients that counts as rounding in a dtype.

    >>> tolerance(torch.float64), tolerance(torch.bfloat16)
    (1e-07, 0.0625)
    """
    return _TOLERANCES[dtype] if dtype in _TOLERANCES else 8 * torch.finfo(dtype).eps


def relative_gap(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference over the larger norm; 0 for two zeros and for equal NaNs.

    It is infinite if one is finite and the other is not.

    >>> relative_gap(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
    0.2
    """
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0.0
    same = equal_or_nan(one, other)
    first, second = (torch.where(same & ~one.isfinite(), 0.0, each).detach() for each in (one, other))
    if not bool((first.isfinite() & second.isfinite()).all()):  # one is finite where the other is not
        return math.inf
    scale = max(float(torch.linalg.vector_norm(each)) for each in (first, second))
    return float(torch.linalg.vector_norm(first - second)) / scale if scale else 0.0


class _Copied:
    """A batch that gives a copy of every client's rows."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def alone(self, client: int) -> Any:
        return copy.deepcopy(self._batch.alone(client))


class StepCheck:
    """Compares stacked steps with steps of single clients.

    Args:
        module: the user's.
        make: (copy of the module, cast for its tensors) -> its `StackedLoss`.
    """

    def __init__(self, module: nn.Module, make: Callable[[nn.Module, Callable[[Tensor], Tensor] | None], Any]) -> None:
        self._module, self._make = module, make
        self._seen: set[Any] = set()
        self._paths: set[Any] = set()
        self._repeated = False
        self._twins: dict[bool, Any] = {}  # by whether it is in float64

    def forget(self) -> None:
        """Forget which shapes have been checked, as at the start of a run."""
        self._seen.clear()
        self._paths.clear()
        self._repeated = False

    def repeats(self, loss: Any, values: Sequence[Tensor], batch: Any, index: int, keys: StepKeys) -> None:
        """Raise StateKept if the first client's step changes when repeated; checked once a run.

        Args:
            loss, values, batch, index, keys: as of `__call__`, for stacked clients or a single one.
        """
        if self._repeated:
            return
        twin, first_values = self._twin(False), [value[:1] for value in values]
        twin.objective.to(values[0].device)
        self._like(twin, loss)
        rows = _Copied(batch)  # a copy, because the module may change rows in place
        alone = lambda: twin.each(
            [value.detach().clone() for value in first_values],
            rows.alone,
            index,
            keys.some(torch.tensor([0]), index),
            [0],
        )[0]
        with _unseeded(twin):
            first = alone()
        second = alone()
        most = max(tolerance(value.dtype) for value in first_values if value.is_floating_point() or value.is_complex())
        pairs = [(first.losses, second.losses), *zip(first.gradients, second.gradients)]
        gaps = [relative_gap(_flat(one), _flat(other)) for one, other in pairs if one is not None and other is not None]
        if any((one is None) != (other is None) for one, other in pairs) or max(gaps) > most:
            raise StateKept(self._module, max(gaps))
        self._repeated = True

    @staticmethod
    def _like(twin: Any, loss: Any) -> None:
        """Copy random draws and trainer attributes of a loss to a twin."""
        twin.random, twin.host, twin.objective.rows = loss.random, loss.host, loss.objective.rows
        trainer = loss.objective.trainer
        twin.objective.trainer.answers, twin.objective.trainer.asked = dict(trainer.answers), trainer.asked

    def clients(self, batch: Batch, round: int, first: bool) -> Tensor:
        """Return the positions of the clients to check; `first` for the first check of the round.

        Of padded batches these are the 64 most uneven clients, and one client in every later round.
        """
        count = len(batch.size)
        if batch.weights is None:
            return torch.arange(max(0, count - _CLIENTS), count)
        if not first:
            return torch.tensor([round % count])
        return batch.size.argsort(stable=True)[:64].sort().values

    def __call__(
        self,
        loss: Any,
        values: Sequence[Tensor],
        batch: Batch,
        index: int,
        keys: StepKeys,
        round: int,
        promised: bool,
        fresh: set[Any],
    ) -> None:
        """Raise StepsDiffer if a stacked step differs from single clients' steps; see the module's docstring.

        Args:
            loss: of the stack.
            values: the stack's tensors and buffers, `(K, ...)` each.
            batch: of the whole stack.
            index: number of the step.
            keys: the clients' random keys.
            round: number of the federation's round.
            promised: whether the user has promised that padding can be weighted out. Then every step with a shape in
                `fresh` is checked, and one client in every later round.
            fresh: shapes first seen in these steps; new ones are added.
        """
        shape = tuple((leaf.shape[1:], leaf.dtype) for leaf in batch.leaves), batch.weights is None
        if shape not in self._seen:
            fresh.add(shape)
        of_promise = promised and batch.weights is not None
        first = shape not in self._seen or (of_promise and shape in fresh)
        if not first and (not of_promise or index > 0):
            return
        self._at(self.clients(batch, round, first), loss, values, batch, index, keys, of_promise, first)
        self._seen.add(shape)

    def path(
        self,
        loss: Any,
        values: Sequence[Tensor],
        batch: Batch,
        index: int,
        keys: StepKeys,
        called: tuple[Any, ...],
        clients: Tensor | None,
    ) -> None:
        """Raise StepsDiffer if a step by an unchecked sequence of torch functions differs from single clients' steps.

        Args:
            loss, values, batch, index, keys: as of a call.
            called: the sequence of torch functions that some clients' step has called.
            clients: `(M,)` positions of these clients; None for all.
        """
        if called not in self._paths:
            at = torch.arange(len(batch.size)) if clients is None else clients
            self._at(at[-_CLIENTS:], loss, values, batch, index, keys, of_promise=False, first=True)
            self._paths.add(called)

    def _at(
        self,
        at: Tensor,
        loss: Any,
        values: Sequence[Tensor],
        batch: Batch,
        index: int,
        keys: StepKeys,
        of_promise: bool,
        first: bool,
    ) -> None:
        """Raise StepsDiffer unless the clients at positions `(M,)` have the same step stacked and alone."""
        clone = lambda leaf: leaf.detach().index_select(0, at.to(leaf.device)).clone()
        rows, some = tree.map(clone, batch.rows), [clone(value) for value in values]
        trained = len(loss.tensors)
        moved = [*(_moved(value) for value in some[:trained]), *some[trained:]]
        part = Batch(rows, batch.size[at], batch.weights is None, padded=True)
        step_keys = keys.some(at, index)
        differences = ""
        if not of_promise:
            looked_at = [moved]
        elif first:  # the promise covers the clients' present parameters too
            looked_at = [moved, some]
        else:
            looked_at = [some]
        for values in looked_at:
            difference = self._compared(loss, values, part, index, step_keys, double=True)
            if difference is None:
                difference = self._compared(loss, values, part, index, step_keys, double=False)
                _LOG.info(
                    "the stacked steps of %s are checked coarsely, in its own dtype, because it cannot run in float64",
                    type(self._module).__name__,
                )
            differences = differences or difference or ""
        if differences:
            how = (
                "in padded steps from that of each client's own rows"
                if batch.weights is not None
                else "stacked from that of each client alone"
            )
            advice = (
                ""
                if batch.weights is not None
                else "; use batched='auto' or batched=False, which call the loss client by client"
            )
            raise StepsDiffer(f"{differences} {how}", batch.weights is not None, advice)

    def _compared(
        self, loss: Any, values: list[Tensor], batch: Batch, index: int, keys: StepKeys, double: bool
    ) -> str | None:
        """Return the difference of the step, "" for none; None if the module does not run in float64."""
        dtypes = {value.dtype for value in values if value.dtype in _TOLERANCES or value.is_floating_point()}
        if double:
            values = [_widened(value) for value in values]
            batch = Batch(tree.map(_widened, batch.rows), batch.size, batch.weights is None, padded=True)
            dtypes = {torch.float64}
        else:
            dtypes |= {leaf.dtype for leaf in batch.leaves if leaf.is_floating_point()}
        twin = self._twin(double)
        twin.objective.to(batch.leaves[0].device)
        self._like(twin, loss)
        fresh_keys = lambda: StepKeys(keys.keys)
        try:
            written, others = (tuple(value.clone() for value in values) for _ in range(2))
            with _unseeded(twin):
                alone = twin.one_by_one(written, batch, index, fresh_keys())
            together = twin.together(others, batch, index, fresh_keys())
        except Seeded:
            raise
        except Exception:
            if double:
                return None
            raise
        most = max(map(tolerance, dtypes))
        for name, one, other in zip(loss.tensors, written, others):
            if relative_gap(_flat(one), _flat(other)) > most:
                return f"what {type(self._module).__name__} writes into {name!r} itself differs"
        return self._difference(loss.tensors, together, alone, batch, most)

    def _twin(self, double: bool) -> Any:
        """Return the loss of a copy of the module, in float64 or in its own dtype."""
        if double not in self._twins:
            twin = self._twins[double] = self._make(copied(self._module), _widened if double else None)
            twin.look = lambda values, batch, index, keys, called, at: self._paths.add(called)
        return self._twins[double]

    def _difference(self, names: Sequence[str], together: Any, alone: Any, batch: Batch, most: float) -> str:
        """Return a sentence on the first difference of two steps, "" if there is none."""
        name, dtype = type(self._module).__name__, together.losses.dtype
        if dtype.is_floating_point:  # gradients have passed through losses of a narrower dtype than the tensors
            most = max(most, min(tolerance(dtype), _LOSSES * torch.finfo(dtype).eps))
        for k in range(len(batch.size)):
            pairs = {
                tensor: (_of(one, together.missing, tensor, k), _of(other, alone.missing, tensor, k))
                for tensor, one, other in zip(names, together.gradients, alone.gradients)
            }
            for tensor, (one, other) in pairs.items():
                if (one is None) != (other is None):
                    which = "stacked" if other is None else "alone"
                    return f"the gradient of {tensor!r} of {name} is there only {which}, and so differs"
            both = [pair for pair in pairs.values() if pair[0] is not None]
            parts = [(together.losses[k], alone.losses[k])]
            if both:
                parts.append(tuple(torch.cat([_flat(part) for part in side]) for side in zip(*both)))  # type: ignore[arg-type]
            gaps = [relative_gap(one, other) for one, other in parts]
            if max(gaps) > most:
                what = "loss" if gaps[0] > most else "gradient"
                return f"the {what} of {name} differs by {max(gaps):.2g} of its size"
            kinds = {"log": (together.logs, alone.logs), "buffer": (together.buffers, alone.buffers)}
            for kind, (ours, theirs) in kinds.items():
                for tensor in ours:
                    there = tensor in theirs
                    if not there or relative_gap(_flat(ours[tensor][k]), _flat(theirs[tensor][k])) > most:
                        return f"the {kind} {tensor!r} of {name} differs"
        return ""


@contextmanager
def _unseeded(twin: Any) -> Iterator[None]:
    """Raise Seeded if steps that draw also set torch's generator."""
    if not twin.random:
        yield
        return
    with SetGenerators() as setting:
        yield
    if setting.met:
        raise Seeded


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_DOUBLE.get(tensor.dtype, tensor.dtype))


def _of(gradient: Tensor | None, missing: Mapping[str, Tensor], name: str, k: int) -> Tensor | None:
    absent = gradient is None or (name in missing and bool(missing[name][k]))
    return None if absent or gradient is None else gradient[k]


def _flat(tensor: Tensor) -> Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    flat = tensor.detach().flatten().to(wide)
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


def _moved(values: Tensor) -> Tensor:
    """Perturb clients' tensors `(M, ...)`, each client's differently."""
    return torch.stack([perturbed(value, client) for client, value in enumerate(values)])
