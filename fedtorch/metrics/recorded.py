"""Values of a torchmetrics metric for many clients, from the arguments with which their training steps called it.

A metric is updated client by client and batch by batch, as it would be by a loop. Where all batches have one shape and
the states are sums, one `vmap` updates them all, if it gives the first client's states as the metric itself does.

>>> import torch, torchmetrics
>>> right = torch.tensor([[True, True, False, False], [True, False, False, False]])  # of two clients' batches of 4
>>> call = Call(*take_out(((right.double(),), {})))
>>> batch = Batch(call, call.tensors, (True,), torch.tensor([4, 2]))  # the second client has two rows only
>>> share = ClientValues(torchmetrics.MeanMetric())
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

from fedtorch.metrics._torchmetrics import computed, summed_states, wide

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
class Batch:
    """One call of a metric in one step, of `K` clients.

    Attributes:
        call: its form; tensors are those of `tensors`.
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

    @property
    def whole(self) -> bool:
        """Whether all clients take the step, and no row is padding."""
        widths = {t.shape[1] for t, cut in zip(self.tensors, self.padded) if cut}
        return bool((self.sizes > 0).all()) and all(bool((self.sizes == width).all()) for width in widths)


class ClientValues:
    """A metric's values for each of `K` clients, in float64; NaN for a client without batches.

    Args:
        metric: gives one number; it is copied.
    """

    def __init__(self, metric: torchmetrics.Metric) -> None:
        self._metric = metric.clone()
        self._metric.reset()
        self._metric.compute_with_cache = False
        self._metric.distributed_available_fn = lambda: False  # clients' metrics never meet over ranks
        self._states: list[str] = []  # names, where all are sums and `vmap` can update them
        with suppress(TypeError):
            self._states = list(summed_states(self._metric))

    def of_round(self, batches: Sequence[Batch]) -> Tensor:
        """Return the values over all of each client's batches, `(K,)`.

        Raises:
            TypeError: a value is no single number.
        """
        states = self._states_of(batches)
        if states is not None:
            return self._computed([each.sum(0, dtype=wide(each)).to(each.dtype) for each in states])
        clients = range(len(batches[0].sizes))
        return torch.stack([self._looped([b for b in batches if b.sizes[k] > 0], k) for k in clients])

    def of_batches(self, batches: Sequence[Batch]) -> Tensor:
        """Return the values of every batch, `(S, K)`.

        Raises:
            TypeError: a value is no single number.
        """
        states = self._states_of(batches)
        if states is not None:
            return torch.stack([self._computed([each[t] for each in states]) for t in range(len(batches))])
        return torch.stack([self.of_round([batch]) for batch in batches])

    def _looped(self, batches: Sequence[Batch], client: int) -> Tensor:
        """Return one client's value as a loop gives it."""
        if not batches:
            return torch.tensor(torch.nan, dtype=torch.float64)
        self._metric.reset()
        for batch in batches:
            self._update(batch.of(client))
        return computed(self._metric).cpu().double()

    def _update(self, arguments: Any) -> list[Tensor]:
        """Update the metric; return its states, where they are sums."""
        positional, named = arguments
        for tensor in take_out(arguments).tensors[:1]:
            self._metric.to(tensor.device)
        self._metric.update(*positional, **named)
        return [getattr(self._metric, state) for state in self._states]

    def _states_of(self, batches: Sequence[Batch]) -> list[Tensor] | None:
        """Return the states after each batch alone, `(S, K, ...)` each; None if they cannot be had all at once."""
        whole = all(batch.whole for batch in batches) and batches[0].tensors
        shapes = {tuple(t.shape if isinstance(t, Tensor) else None for t in batch.tensors) for batch in batches}
        if not self._states or not whole or len(shapes) > 1 or None in next(iter(shapes)):
            return None
        self._metric.reset()
        first = self._update(batches[0].of(0))
        flat = [torch.stack(each).flatten(0, 1) for each in zip(*(batch.tensors for batch in batches))]
        try:
            with warnings.catch_warnings(action="ignore"):  # of operations that `vmap` runs one by one
                states = vmap(self._states_alone(batches[0].call))(*flat)
            same = all(torch.allclose(a[0].double(), b.double(), equal_nan=True) for a, b in zip(states, first))
        except (RuntimeError, ValueError):  # not for `vmap`
            same = False
        if not same:
            self._states = []
            return None
        return [state.unflatten(0, (len(batches), -1)) for state in states]

    def _states_alone(self, call: Call) -> Callable[..., list[Tensor]]:
        """Return a function of a call's tensors that gives the states after this call alone."""

        def states(*tensors: Tensor) -> list[Tensor]:
            self._metric.reset()
            validates = getattr(self._metric, "validate_args", None)
            if validates:  # looks at values, which the first client's call has done
                self._metric.validate_args = False
            try:
                return self._update(call.arguments(tensors))
            finally:
                if validates:
                    self._metric.validate_args = validates

        return states

    def _computed(self, states: Sequence[Tensor]) -> Tensor:
        """Return the values of stacked states, `(K,)`."""
        values = []
        for k in range(len(states[0])):
            for name, state in zip(self._states, states):
                setattr(self._metric, name, state[k])
            values.append(computed(self._metric))
        self._metric.reset()
        return torch.stack(values).cpu().double()
