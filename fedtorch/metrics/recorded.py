"""Values of a torchmetrics metric for many clients, from the arguments with which their training steps called it.

A metric is updated client by client and batch by batch, as in a loop. If its states are sums, one `vmap` updates them
for all batches of one size, provided that it gives the metric's own states for one client.

>>> import torch, torchmetrics
>>> right = torch.tensor([[True, True, False, False], [True, False, False, False]])  # of two clients' batches of 4
>>> call = Call(*take_out(((right.double(),), {})))
>>> batch = BatchCall(call, call.tensors, (True,), torch.tensor([4, 2]))  # the second client has two rows only
>>> share = ClientMetric(torchmetrics.MeanMetric())
>>> share.of_round([batch, batch])
tensor([0.5000, 0.5000], dtype=torch.float64)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedtorch import stacked_layers
from fedtorch.metrics._torchmetrics import number_computed, summed_states, wide

if TYPE_CHECKING:
    import torchmetrics


class _Place(NamedTuple):
    """Where a tensor of the arguments is in a list."""

    at: int


class Call(NamedTuple):
    """The arguments of a call, `(positional, named)`, with places for the tensors, which are apart.

    Example:
        >>> call = take_out(((torch.ones(2), None), {"weight": 3}))
        >>> call.arguments([torch.zeros(1)])
        ((tensor([0.]), None), {'weight': 3})
    """

    form: Any
    tensors: list[Tensor]

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Return the arguments with these tensors in place of its own."""
        return _put_in(self.form, tensors)

    def alike(self, other: Call) -> bool:
        """Return whether another call is known to differ in its tensors only.

        Example:
            >>> take_out(((torch.ones(2), 3), {})).alike(take_out(((torch.zeros(2), 4), {})))
            False
        """
        try:
            return bool(self.form == other.form)
        except (RuntimeError, TypeError, ValueError):  # arguments that cannot be compared, such as arrays
            return False


def take_out(arguments: Any) -> Call:
    """Return the arguments of a call with their tensors apart, detached."""
    tensors: list[Tensor] = []

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach())
            return _Place(len(tensors) - 1)
        if isinstance(value, dict):
            return {name: form(each) for name, each in value.items()}
        return type(value)(form(each) for each in value) if isinstance(value, (list, tuple)) else value

    return Call(form(arguments), tensors)


def _put_in(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.at]
    if isinstance(value, dict):
        return {name: _put_in(each, tensors) for name, each in value.items()}
    return type(value)(_put_in(each, tensors) for each in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class BatchCall:
    """One call of a metric in one step, of `K` clients.

    Attributes:
        call: its form; its tensors are replaced by `tensors`.
        tensors: `(K, ...)` each; or, where clients' shapes differ, one of each client by its number.
        padded: whether each has a row for each row of a padded batch, `(K, B, ...)`.
        sizes: `(K,)` rows of each client's batch, on the CPU; 0 for a client that takes no step.
    """

    call: Call
    tensors: Sequence[Tensor]
    padded: Sequence[bool]
    sizes: Tensor

    def of(self, client: int) -> Any:
        """Return (positional, named) arguments of one client, without padding."""
        size = int(self.sizes[client])
        return self.call.arguments(
            [t[client, :size] if cut else t[client] for t, cut in zip(self.tensors, self.padded)]
        )


class ClientMetric:
    """A metric's values for each of `K` clients, in float64; NaN for a client without batches.

    Args:
        metric: gives one number; it is copied.
    """

    def __init__(self, metric: torchmetrics.Metric) -> None:
        self._metric = metric.clone()
        self._metric.reset()
        self._metric.compute_with_cache = False
        self._metric.distributed_available_fn = lambda: False  # clients' metrics are not synchronised over ranks
        self._states: list[str] = []  # names, where all are sums and `vmap` can update them
        with suppress(TypeError):
            self._states = list(summed_states(self._metric))

    def of_round(self, batches: Sequence[BatchCall]) -> Tensor:
        """Return the values over all of each client's batches, `(K,)`.

        Raises:
            TypeError: a value is no single number.
        """
        states = self._states_after(batches)
        if states is not None:
            sums = [each.sum(0, dtype=wide(each)).to(each.dtype) for each in states]
            return self._computed(sums, torch.stack([batch.sizes for batch in batches]).sum(0))
        clients = range(len(batches[0].sizes))
        return torch.stack([self._looped([b for b in batches if b.sizes[k] > 0], k) for k in clients])

    def of_batches(self, batches: Sequence[BatchCall]) -> Tensor:
        """Return the values of every batch, `(S, K)`.

        Raises:
            TypeError: a value is no single number.
        """
        states = self._states_after(batches)
        if states is not None:
            sizes = torch.stack([batch.sizes for batch in batches])
            return self._computed([each.flatten(0, 1) for each in states], sizes.flatten()).reshape(sizes.shape)
        return torch.stack([self.of_round([batch]) for batch in batches])

    def _looped(self, batches: Sequence[BatchCall], client: int) -> Tensor:
        """Return one client's value as a loop gives it."""
        if not batches:
            return torch.tensor(torch.nan, dtype=torch.float64)
        self._metric.reset()
        for batch in batches:
            self._update(batch.of(client))
        return number_computed(self._metric).cpu().double()

    def _update(self, arguments: Any) -> list[Tensor]:
        """Update the metric; return its states, where they are sums."""
        positional, named = arguments
        for tensor in take_out(arguments).tensors[:1]:
            self._metric.to(tensor.device)
        self._metric.update(*positional, **named)
        return [getattr(self._metric, state) for state in self._states]

    def _states_after(self, batches: Sequence[BatchCall]) -> list[Tensor] | None:
        """Return the states after each batch alone, `(S, K, ...)` each; None if they cannot be had all at once."""
        alike: dict[Any, list[int]] = {}
        calls: list[Call] = []  # one of each form
        for number, batch in enumerate(batches):
            shapes = tuple(t.shape if isinstance(t, Tensor) else None for t in batch.tensors)
            form = next((i for i, call in enumerate(calls) if call.alike(batch.call)), len(calls))
            if form == len(calls):
                calls.append(batch.call)
            alike.setdefault((form, shapes, tuple(batch.padded)), []).append(number)
        parts = []
        for numbers in alike.values():
            states = self._states_of([batches[number] for number in numbers])
            if states is None:
                return None
            parts.append(states)
        back = torch.tensor([number for numbers in alike.values() for number in numbers]).argsort()
        return [torch.cat(each)[back.to(each[0].device)] for each in zip(*parts)]

    def _states_of(self, batches: Sequence[BatchCall]) -> list[Tensor] | None:
        """Return the states after each batch alone, of one shape and form; None if they cannot be had all at once."""
        one_shape = [isinstance(tensor, Tensor) for tensor in batches[0].tensors]  # for all clients
        sizes = torch.stack([batch.sizes for batch in batches])
        if not self._states or not one_shape or not all(one_shape) or not bool((sizes > 0).any()):
            return None
        step, client = divmod(int(sizes.argmax()), sizes.shape[1])
        self._metric.reset()
        one = self._update(batches[step].of(client))
        try:
            with warnings.catch_warnings(), stacked_layers.StackedOperations():
                warnings.filterwarnings("error", "There is a performance drop")  # an operation would run row by row
                states = self._stacked(batches, sizes)
            pairs = zip((state[step, client] for state in states), one)
            same = all(torch.allclose(a.double(), b.double(), equal_nan=True) for a, b in pairs)
        except (RuntimeError, UserWarning, ValueError):  # `vmap` does not support it
            same = False
        if not same:
            self._states = []
        return states if same else None

    def _stacked(self, batches: Sequence[BatchCall], sizes: Tensor) -> list[Tensor]:
        """Return the states after each batch, `(S, K, ...)`, zero without rows; batches of one size are together."""
        alone, padded = self._states_alone(batches[0].call), batches[0].padded
        flat = [torch.stack(each).flatten(0, 1) for each in zip(*(batch.tensors for batch in batches))]
        every = sizes.flatten()
        states: list[Tensor] = []
        for size in every[every > 0].unique().tolist():
            at = (every == size).nonzero()[:, 0].to(flat[0].device)
            after_batch = vmap(alone)(*(leaf[at, :size] if cut else leaf[at] for leaf, cut in zip(flat, padded)))
            states = states or [leaf.new_zeros(len(every), *leaf.shape[1:]) for leaf in after_batch]
            for leaf, value in zip(states, after_batch):
                leaf[at] = value
        return [leaf.unflatten(0, sizes.shape) for leaf in states]

    def _states_alone(self, call: Call) -> Callable[..., list[Tensor]]:
        """Return a function of a call's tensors that gives the states after this call alone."""

        def states(*tensors: Tensor) -> list[Tensor]:
            self._metric.reset()
            nothing = torch.zeros_like(tensors[0]).sum()  # of each client: `vmap` adds in place to batched tensors only
            for name in self._states:
                state = getattr(self._metric, name)
                setattr(self._metric, name, state + nothing.to(state))
            validates = getattr(self._metric, "validate_args", None)
            if validates:  # reads values, which a client's own call has done
                self._metric.validate_args = False
            try:
                return self._update(call.arguments(tensors))
            finally:
                if validates:
                    self._metric.validate_args = validates

        return states

    def _computed(self, states: Sequence[Tensor], sizes: Tensor) -> Tensor:
        """Return the values of stacked states, `(N,)`; NaN for those without rows."""

        def value(*one: Tensor) -> Tensor:
            for name, state in zip(self._states, one):
                setattr(self._metric, name, state)
            return number_computed(self._metric)

        some = sizes.nonzero()[:, 0].to(states[0].device)
        there = [state[some] for state in states]
        try:
            with stacked_layers.StackedOperations():
                known = vmap(value)(*there)
            same = torch.allclose(known[0].double(), value(*(s[0] for s in there)).double(), equal_nan=True)
        except RuntimeError:  # `vmap` does not support it
            same = False
        if not same:
            known = torch.stack([value(*one) for one in zip(*there)])
        self._metric.reset()
        values = torch.full((len(sizes),), torch.nan, dtype=torch.float64)
        values[some.cpu()] = known.cpu().double()
        return values
