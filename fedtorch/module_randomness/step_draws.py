"""Random draws of clients' modules, step by step, with keys and numbers of many steps, calls and clients made at once.

A draw of few numbers costs as much as a call of NumPy. Element i of a draw depends on (key, i) only, so numbers drawn
together equal those drawn one after the other.

>>> import torch
>>> from fedtorch import random
>>> from fedtorch.module_randomness.step_draws import StepKeys
>>> clients, dropout = random.fold_in(random.key(0), torch.arange(3)), torch.nn.Dropout()
>>> draws = StepKeys(clients)[4]  # of step 4
>>> torch.equal(draws.keys, random.fold_in(clients, 4))
True
>>> with draws.together():
...     stacked = torch.func.vmap(dropout, randomness="different")(torch.ones(3, 5))
>>> with draws.alone(1):
...     alone = dropout(torch.ones(5))
>>> torch.equal(stacked[1], alone)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.module_randomness.interception import AHEAD, KeyedRandomness

_KEYS = 2**14  # most keys made at a time, unless a step has more
_STEPS = 5  # number of steps whose keys are made at first; it doubles each time
_NUMBERS = 2**17  # likewise, numbers in a call of clients one after the other


class StepKeys:
    """Make the draws of a step: `keys[t]` are `Draws` of the clients' keys, folded with t.

    Args:
        keys: `(K,)`, or a function that computes them on the first draw.
    """

    def __init__(self, keys: Tensor | Callable[[], Tensor]) -> None:
        self._keys, self._first = keys, 0
        self._steps = self._calls = torch.empty(0)  # number of steps from the first, none yet

    @property
    def keys(self) -> Tensor:
        """Return the clients' keys."""
        if not isinstance(self._keys, Tensor):
            self._keys = self._keys()
        return self._keys

    def __getitem__(self, step: int) -> Draws:
        if not 0 <= step - self._first < len(self._steps):
            most = max(1, _KEYS // max(1, AHEAD * len(self.keys)))
            self._first, many = step, min(most, max(_STEPS, 2 * len(self._steps)))
            numbers = torch.arange(step, step + many, device=self.keys.device)
            self._steps = random.fold_in(self.keys, numbers[:, None])
            self._calls = random.fold_in(self._steps[..., None], torch.arange(AHEAD, device=self.keys.device))
        return Draws(self._steps[step - self._first], self._calls[step - self._first])

    def some(self, clients: Tensor, step: int) -> StepKeys:
        """Return the draws of some of the clients, taken from those of all clients in a step."""
        if not isinstance(self._keys, Tensor):  # no draw so far
            return StepKeys(lambda: self.keys[clients.to(self.keys.device)])
        self[step]
        at = clients.to(self.keys.device)
        part = StepKeys(self.keys[at])
        part._first, part._steps, part._calls = self._first, self._steps[:, at], self._calls[:, at]
        return part


class _Made(NamedTuple):
    what: tuple[Any, ...]  # arguments of the draw
    first: int  # the first client
    numbers: Tensor  # a row of each client from there


class Draws:
    """Draws of one step, for clients together or one after the other.

    Args:
        keys: `(K,)`.
        calls: `(K, C)` of the first calls.
    """

    def __init__(self, keys: Tensor, calls: Tensor) -> None:
        self.keys, self.calls = keys, calls
        self._made: dict[int, _Made] = {}

    def together(self) -> KeyedRandomness:
        """Return the draws of all clients stacked."""
        return KeyedRandomness(self.keys, self.calls)

    def some(self, clients: Tensor) -> Draws:
        """Return the draws of some of the clients."""
        at = clients.to(self.keys.device)
        return Draws(self.keys[at], self.calls[at])

    def alone(self, client: int) -> KeyedRandomness:
        """Return the draws of one client; those of the next clients, probably of the same kinds, are made with them."""
        return _AmongOthers(self, client)

    def of(self, client: int, call: int, function: Callable[..., Tensor], count: int, arguments: Any) -> Tensor | None:
        """Return `count` numbers of a client's call; None if other clients have drawn another kind in this call."""
        what, made = (function, arguments), self._made.get(call)
        if call >= self.calls.shape[1] or (made is not None and made.what != what):
            return None
        width = 0 if made is None else made.numbers.shape[1]
        if made is None or width < count or not made.first <= client < made.first + len(made.numbers):
            width = count if count <= width else max(count, 2 * width)
            keys = self.calls[client : client + max(1, _NUMBERS // max(width, 1)), call]
            self._made[call] = made = _Made(what, client, function(keys, (width,), *arguments))
        return made.numbers[client - made.first, :count].clone()


class _AmongOthers(KeyedRandomness):
    def __init__(self, draws: Draws, client: int) -> None:
        super().__init__(draws.keys[client], draws.calls[client])
        self._draws, self._client = draws, client

    def draw(self, function: Callable[..., Tensor], row: tuple[int, ...], *arguments: Any) -> Tensor:
        call, key = self.calls, self.key()
        numbers = self._draws.of(self._client, call, function, math.prod(row), arguments)
        return function(key, row, *arguments) if numbers is None else numbers.reshape(row)

    def anew(self) -> KeyedRandomness:
        return _AmongOthers(self._draws, self._client)
