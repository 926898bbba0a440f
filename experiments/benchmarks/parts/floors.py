"""What the operations of a piece of work take by themselves: each is called once more, in order, and nothing else.

No autograd, no `vmap`, no Python of a module or of a package lies between them: no program of these operations of torch
is faster on one thread. Operations of fedtorch's own, such as a recurrent layer of all clients, are called whole.
Operations on whole numbers, such as the draws of the order of rows, are left out. Programs count by the operations
of torch in their place, so that what takes one may be faster.
"""

from __future__ import annotations

import os
import unittest.mock
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from experiments.benchmarks.parts import kernel_bounds
from fedtorch.programs import choice

Operation = tuple[Any, tuple[Any, ...], Mapping[str, Any]]  # and its arguments


class Recorded(NamedTuple):
    """Operations, to be called again."""

    operations: list[Operation]
    parts: list[Operation]  # the same, but for those of fedtorch's own the operations of torch that they consist of

    def again(self) -> None:
        """Call each."""
        with torch.no_grad():
            for function, args, kwargs in self.operations:
                function(*args, **kwargs)

    def products(self) -> Recorded:
        """Those among them that are products of matrices, or convolutions."""
        products = [each for each in self.parts if each[0].overloadpacket in flop_registry]
        return Recorded(products, products)


class _Recording(TorchDispatchMode):
    """Note operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.parts: list[Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = OPDEFS.get(function.name())
        if own is not None:
            within = _Recording()
            with within:
                result = own._init_fn(*args, **kwargs)
            self.operations.append((own._init_fn, args, kwargs))
            self.parts += within.parts
            return result
        result = function(*args, **kwargs)
        real = any(map(torch.is_floating_point, (*kernel_bounds.tensors(args), *kernel_bounds.tensors(result))))
        if real and not function.is_view and function is not torch.ops.aten._local_scalar_dense.default:
            self.operations.append((function, args, kwargs))
            self.parts.append((function, args, kwargs))
        return result


def recorded(work: Callable[[], object]) -> Recorded:
    """The operations of a call, which keep their arguments in memory."""
    with unittest.mock.patch.dict(os.environ, {choice.VARIABLE: "off"}), _Recording() as recording:
        work()
    return Recorded(recording.operations, recording.parts)
