"""Interception of random operations in those parts of a module that draw only.

An operation under `KeyedRandomness` costs some microseconds of Python, more than a small operation takes. Most modules
draw in a dropout or two: these are found once, and only they run inside the interception from then on. Draws elsewhere
are detected by torch's global generator, which they advance.

>>> import torch
>>> from fedtorch import random
>>> from fedtorch.module_randomness.drawing_modules import DrawingModules
>>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout())
>>> drawing, x = DrawingModules(net), torch.ones(2, 3)
>>> with drawing.observed(random.key(0)):
...     first = net(x)
>>> drawing.parts
[Dropout(p=0.5, inplace=False)]
>>> def forward(_, interception):
...     with interception:
...         return net(x)
>>> torch.equal(drawing.drawn(forward, [KeyedRandomness(random.key(0))])[0], first)
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedtorch.module_randomness.interception import KeyedRandomness, dropout_noise
from fedtorch.module_randomness.watched_generators import drawn_if_random, unless_drawn

T = TypeVar("T")
Interception = AbstractContextManager[Any]


class DrawingModules:
    """Which parts of a module draw.

    Args:
        module: the whole.

    Attributes:
        parts: the parts of the module in whose `forward` all of its draws are made; None as long as that is not known,
            or if some are made elsewhere.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parts: list[nn.Module] | None = None

    @contextmanager
    def observed(self, key: Tensor) -> Iterator[KeyedRandomness]:
        """Intercept everything inside, and record which parts draw."""
        running: list[nn.Module] = []
        drawing: dict[nn.Module | None, None] = {}

        def around(part: nn.Module, forward: Callable[..., T], *args: Any, **kwargs: Any) -> T:
            running.append(part)
            try:
                return forward(*args, **kwargs)
            finally:
                running.pop()

        note = lambda: drawing.setdefault(running[-1] if running else None)
        with _wrapped(list(self.module.modules()), around), KeyedRandomness(key, note=note) as intercepted:
            yield intercepted
        self.parts = None if None in drawing else [part for part in drawing if part is not None]

    def drawn(
        self,
        each: Callable[[int, Interception], T],
        interceptions: Sequence[KeyedRandomness],
        backward: Sequence[Tensor] | None = None,
    ) -> list[T]:
        """Return `each(i, interception)` of each interception, which is entered around the module's forward pass.

        Args:
            each: deterministic when called twice.
            interceptions: draw for the forward passes.
            backward: keys of other draws, one to each; None intercepts none.
        """
        if self.parts is None:
            alone = [partial(each, i, interception) for i, interception in enumerate(interceptions)]
            return (
                [drawn_if_random(one, key) for one, key in zip(alone, backward)] if backward else [f() for f in alone]
            )
        parts = self.parts

        def again() -> tuple[list[T], bool]:
            whole = [interception.anew() for interception in interceptions]
            others = [KeyedRandomness(key) for key in backward or ()]
            results = []
            for i, interception in enumerate(whole):
                with others[i] if others else nullcontext():
                    results.append(each(i, interception))
            if any(new.calls > old.calls for new, old in zip(whole, interceptions)):
                self.parts = None
            return results, self.parts is None or any(other.calls for other in others)

        some = [_wrapped(parts, partial(_inside, interception)) for interception in interceptions]
        every = lambda: [each(i, context) for i, context in enumerate(some)]
        return unless_drawn(every, again, interceptions[0].keys.device)


def _inside(
    interception: KeyedRandomness, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if type(part) is nn.Dropout and part.training and not part.inplace and len(args) == 1:
        return _dropout(interception, *args, part.p)
    with interception:
        return forward(*args, **kwargs)


def _dropout(interception: KeyedRandomness, inputs: Tensor, probability: float) -> Tensor:
    """Return the same numbers as by torch's dropout; entering the interception takes longer than drawing them."""
    functorch, clients = torch._C._functorch, tuple(interception.keys.shape)
    transforms = functorch.get_interpreter_stack() or []
    if all(transform.key() == functorch.TransformType.Vmap for transform in transforms):
        maps = [functorch.CVmapInterpreterPtr(transform) for transform in transforms]
        sizes = tuple(each.batchSize() for each in maps)
        different = all(each.randomness() == functorch.RandomnessType.Different for each in maps)
        if different and sizes[: len(clients)] == clients:
            row = (*sizes[len(clients) :], *inputs.shape)
            noise, _ = dropout_noise(interception, row, probability, inputs)
            for each in maps:
                noise = functorch._add_batch_dim(noise, 0, each.level())
            return inputs * noise
    with interception:
        return torch.native_dropout(inputs, probability, True)[0]


@contextmanager
def _wrapped(parts: Sequence[nn.Module], around: Callable[..., Any]) -> Iterator[None]:
    """Call `around(part, forward, ...)` in place of each part's `forward`, whose signature it keeps."""
    before = [vars(part).get("forward") for part in parts]
    for part in parts:
        vars(part)["forward"] = update_wrapper(partial(around, part, part.forward), part.forward)
    try:
        yield
    finally:
        for part, forward in zip(parts, before):
            if forward is None:
                del vars(part)["forward"]
            else:
                vars(part)["forward"] = forward
