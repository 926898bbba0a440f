"""Functions that are expected not to draw from torch's global generators, with a check before and after.

Interception of every operation costs more than a small operation. Draws are detected by the generators' states; a
function that has drawn is called again, with interception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedtorch._devices import generators
from fedtorch.module_randomness.interception import KeyedRandomness

T = TypeVar("T")


def drawn(function: Callable[[], T], key: Tensor) -> T:
    """Return `function()`, its random operations drawn from one client's key."""
    with KeyedRandomness(key):
        return function()


def drawn_if_random(function: Callable[[], T], key: Tensor) -> T:
    """Return `drawn(function, key)` of a function that is not expected to draw, and check this by calling it.

    It is called without interception, and once more with it if torch's global generators have advanced, which are then
    restored. Generators of the module's own are not checked.

    Args:
        function: deterministic when called twice.
        key: of one client, `()`.

    Example:
        >>> from fedtorch import random
        >>> before, dropout = torch.get_rng_state(), torch.nn.Dropout()
        >>> some = drawn_if_random(lambda: dropout(torch.ones(8)), random.key(0))
        >>> torch.equal(some, drawn(lambda: dropout(torch.ones(8)), random.key(0)))
        True
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """

    return each_drawn_if_random(lambda _: function(), 1, lambda: key[None], key.device)[0]


def each_drawn_if_random(
    function: Callable[[int], T], count: int, keys: Callable[[], Tensor], device: torch.device
) -> list[T]:
    """Return `drawn_if_random` of `function(0)`, `function(1)`, … for all clients, with one check.

    Args:
        function: of a client's position.
        count: number of clients.
        keys: computes their keys, `(count,)`, if there was a draw.
        device: of the tensors.

    Example:
        >>> from fedtorch import random
        >>> keys, dropout = random.fold_in(random.key(0), torch.arange(2)), torch.nn.Dropout()
        >>> several = each_drawn_if_random(lambda client: dropout(torch.ones(8)), 2, lambda: keys, keys.device)
        >>> torch.equal(several[1], drawn(lambda: dropout(torch.ones(8)), keys[1]))
        True
    """

    def again() -> tuple[list[T], bool]:
        calls, results = 0, []
        for client, key in enumerate(keys()):
            with KeyedRandomness(key) as intercepted:
                results.append(function(client))
            calls += intercepted.calls
        return results, calls > 0

    return unless_drawn(lambda: [function(client) for client in range(count)], again, device)


def unless_drawn(function: Callable[[], T], again: Callable[[], tuple[T, bool]], device: torch.device) -> T:
    """Return `function()`, or the result of `again` if torch's global generators have advanced meanwhile.

    Args:
        function: deterministic when called twice.
        again: repeats the computation with other draws, and returns whether there were any, in which case the
            generators are restored; otherwise another thread has advanced them. It is called at once if a device's
            generators cannot be read.
        device: of the tensors.

    Example:
        >>> from fedtorch import random
        >>> before = torch.get_rng_state()
        >>> unless_drawn(lambda: torch.rand(()), lambda: (random.uniform(random.key(0)), True), torch.device("cpu"))
        tensor(0.3990)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    drawing = generators(device)
    if device.type != "cpu" and len(drawing) == 1:
        return again()[0]
    before = [generator.get_state() for generator in drawing]
    moved = lambda: not all(torch.equal(_words(g.get_state()), _words(state)) for g, state in zip(drawing, before))
    back = True  # even if one of both fails
    try:
        result = function()
        back = moved()
        if back:
            result, back = again()
        return result
    finally:
        if back and moved():
            for generator, state in zip(drawing, before):
                generator.set_state(state)


def _words(state: Tensor) -> Tensor:
    return state.view(torch.int64)  # compared eight times as fast as bytes
