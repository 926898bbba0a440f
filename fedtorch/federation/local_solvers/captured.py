"""Steps that are captured as graphs of tensor operations and replayed without the Python code that made them.

A step is a function `step(index, *tensors)` of its number and of tensors. A graph holds for any tensors of the same
shapes, so whatever changes from step to step has to be among them, and a step that depends on its number is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Step = Callable[..., Any]  # (index, *tensors) -> a dict or tuple of tensors and None


class IndexUsed(TypeError):
    """A step's result depends on its number."""

    def __init__(self) -> None:
        super().__init__("Expected steps that do not depend on batch_idx, but got one that does; use compile=False")


class CapturedStep:
    """Replays steps, which are captured when tensors of their shapes come for the first time.

    Args:
        most: shapes whose graphs are kept; the oldest goes first.
    """

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self.graphs: dict[Any, Step] = {}

    def __call__(self, step: Step, *tensors: Tensor) -> Any:
        """What `step` gives for any index, without gradients.

        Args:
            step: the same function in every call, but for what it finds in tensors of other shapes.
            tensors: that it is called with.

        Raises:
            IndexUsed: it depends on the index.
        """
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        if shapes not in self.graphs:
            graph = capture(step, *tensors)
            if len(self.graphs) == self.most:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[shapes] = graph
        with torch.no_grad():
            return self.graphs[shapes](*[tensor.detach() for tensor in tensors])


def capture(step: Step, *tensors: Tensor) -> Step:
    """`step` at any index as a graph: a function of tensors of these shapes.

    Raises:
        IndexUsed: it depends on the index.
    """
    plain = [tensor.detach() for tensor in tensors]
    index = torch.zeros((), dtype=torch.int64)
    try:
        graph = make_fx(step)(index, *plain)
    except Exception as error:  # a branch on the index, if all is well with a number
        make_fx(lambda *plain: step(0, *plain))(*plain)
        raise IndexUsed() from error
    if next(iter(graph.graph.nodes)).users:
        raise IndexUsed()
    return lambda *plain: graph(index, *plain)
