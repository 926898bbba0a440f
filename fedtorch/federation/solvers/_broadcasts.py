"""A loss that compares every output with every target, because it is given `(n, 1)` and `(n,)`.

torch broadcasts the two to `(n, n)`, and the mean of that is a loss which trains something else. It is found where it
happens, in a loss function as well as inside a `training_step`: an operation on floating-point numbers of these two
shapes, of which one depends on the parameters and the other does not. Whether that matters is tried out: the module has
lost nothing if the loss is the same with the spare dimension dropped, or does not exist without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIZES = (5, 7)  # of batches on which it is confirmed: what has one of them by chance has not the other
_SAME = 1e-4  # relative: losses that differ by less are the same


class Broadcasts(TorchFunctionMode):
    """Look for operations on `(n, 1, ...)` and `(n, ...)`.

    Args:
        rows: n.
        mends: whether they are given `(n, ...)` twice instead.

    Attributes:
        met: (shape of what depends on the parameters, shape of the other) of the first one; None for none.
    """

    def __init__(self, rows: int, mends: bool = False) -> None:
        super().__init__()
        self._rows, self._mends = rows, mends
        self.met: tuple[list[int], list[int]] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given: tuple[Any, ...] = (*args, *kwargs.values(), None, None)
        first, second = given[:2]
        if not self._crosses(first, second):
            return func(*args, **kwargs)
        output, target = (first, second) if first.requires_grad else (second, first)
        self.met = self.met or (list(output.shape), list(target.shape))
        if self._mends:
            shape = max(first.shape, second.shape, key=len)
            narrow = lambda value: value[:, 0] if isinstance(value, Tensor) and value.shape == shape else value
            args, kwargs = tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _crosses(self, first: Any, second: Any) -> bool:
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or self._rows < 2:
            return False
        less, more = sorted((first, second), key=Tensor.dim)
        return (
            more.shape == (self._rows, 1, *less.shape[1:])
            and less.shape[:1] == (self._rows,)
            and first.requires_grad != second.requires_grad
            and first.is_floating_point()
            and second.is_floating_point()
        )


def refuse_broadcast(loss: Callable[[int], Tensor], name: str, met: tuple[list[int], list[int]]) -> None:
    """Raise ValueError if the loss of batches of some rows is another one when no such operation broadcasts.

    Args:
        loss: number of rows -> the loss of so many.
        name: of the module.
        met: see `Broadcasts`.
    """
    for size in SIZES:
        try:
            given, mends = loss(size), Broadcasts(size, mends=True)
            with mends:
                mended = loss(size)
        except Exception:  # it means the shapes as they are
            return
        if mends.met is None or torch.allclose(given, mended, rtol=_SAME, atol=0.0, equal_nan=True):
            return
    output, target = met
    same = "output[:, 0] with target, or output with target[:, None]"
    other = "output with target[:, 0], or output[:, None] with target"
    raise ValueError(
        f"Expected a loss of outputs and targets of one shape, but {name} has outputs {tuple(output)} and targets "
        f"{tuple(target)}, which torch broadcasts: every output would be compared with every target; compare "
        f"{same if len(output) > len(target) else other}"
    )
