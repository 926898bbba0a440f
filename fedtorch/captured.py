"""Steps that are captured as graphs of tensor operations and replayed without the Python code that made them.

On a CUDA device the operations are also recorded as a CUDA graph, and launched by one call; if that fails, they are
replayed one by one and the reason is stored.

A step is a function `step(index, *tensors)` of its number and of tensors. A graph is valid for any tensors of the same
shapes, so everything that changes from step to step has to be among them, and a step that depends on its number is
refused.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from fedtorch._devices import is_cuda

aten = torch.ops.aten
_VIEWS = tuple(getattr(aten, name).default for name in ("detach", "expand", "view", "_unsafe_view", "alias", "permute"))

Step = Callable[..., Any]  # (index, *tensors) -> a dict or tuple of tensors and None
_WARM = 3  # runs before a CUDA graph is recorded, in which libraries allocate memory
_PAYS = 200  # steps of a shape after which a capture pays
_MANY = 1024  # most shapes whose calls are counted
_LOCK = threading.Lock()  # tracing has flags that all threads share


class IndexUsed(TypeError):
    """A step's result depends on its number.

    Example:
        >>> import torch
        >>> try:
        ...     capture(lambda index, x: x / (index + 1), torch.ones(2))
        ... except IndexUsed as error:
        ...     print(error)
        Expected steps that do not depend on batch_idx, but got one that does; use compile=False
    """

    def __init__(self) -> None:
        super().__init__("Expected steps that do not depend on batch_idx, but got one that does; use compile=False")


class CapturedStep:
    """Replays steps, which are captured on their shapes' first use.

    Args:
        most: most shapes with stored graphs; the oldest is dropped first.
        exact: whether replayed steps give the bits of `step`; if not, products may be computed in another order.

    Attributes:
        one_by_one: why the last captured step is not a CUDA graph; None if it is one.

    Example:
        >>> import torch
        >>> calls, captured = [], CapturedStep()
        >>> def step(index, x):
        ...     calls.append(index)
        ...     return 2 * x
        >>> [captured(step, torch.tensor([value])).item() for value in (1.0, 2.0, 3.0)]
        [2.0, 4.0, 6.0]
        >>> len(calls), captured.one_by_one  # Python ran once; why there is no CUDA graph
        (1, 'the tensors are on cpu')
    """

    def __init__(self, most: int = 64, exact: bool = False) -> None:
        self.most, self.exact = most, exact
        self._seen: dict[Any, int] = {}  # calls of shapes without a graph
        self.graphs: dict[Any, Step] = {}
        self.one_by_one: str | None = "nothing has been captured"

    def __call__(self, step: Step, *tensors: Tensor) -> Any:
        """Return the result of `step` for any index, without gradients.

        Args:
            step: the same function in every call, except for differences by shapes.
            tensors: its arguments.

        Raises:
            IndexUsed: it depends on the index.
        """
        shapes = _shapes(tensors)
        if shapes not in self.graphs:
            with _LOCK:
                graph = capture(step, *tensors, exact=self.exact)
            if len(self.graphs) == self.most:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[shapes], self.one_by_one = recorded(graph, *tensors)
        with torch.no_grad():
            return self.graphs[shapes](*[tensor.detach() for tensor in tensors])

    def pays(self, *tensors: Tensor) -> bool:
        """Return whether tensors of these shapes have been used often enough for a capture to pay; count the call.

        Example:
            >>> import torch
            >>> captured = CapturedStep()
            >>> [captured.pays(torch.ones(2)) for _ in range(202)].index(True)
            200
        """
        shapes = _shapes(tensors)
        if shapes in self.graphs:
            return True
        if len(self._seen) == _MANY:
            self._seen.clear()
        self._seen[shapes] = seen = self._seen.get(shapes, 0) + 1
        return seen > _PAYS


def _shapes(tensors: Sequence[Tensor]) -> Any:
    """Return the properties of tensors on which a graph depends."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)


def capture(step: Step, *tensors: Tensor, exact: bool = False) -> Step:
    """Return `step` at any index as a graph: a function of tensors of these shapes.

    Args:
        step: see `CapturedStep`.
        tensors: its arguments.
        exact: whether the graph gives the bits of `step`.

    Raises:
        IndexUsed: it depends on the index.

    Example:
        >>> import torch
        >>> capture(lambda index, x: x.square().sum(), torch.zeros(2))(torch.tensor([1.0, 2.0]))
        tensor(5.)
    """
    plain = [tensor.detach() for tensor in tensors]
    index = torch.zeros((), dtype=torch.int64)
    try:
        graph = make_fx(step)(index, *plain)
    except Exception as error:  # the step branches on the index, unless it also fails for a fixed number
        make_fx(lambda *plain: step(0, *plain))(*plain)
        raise IndexUsed() from error
    if next(iter(graph.graph.nodes)).users:
        raise IndexUsed()
    _simplify(graph, exact)
    run = graph.forward
    return lambda *plain: run(index, *plain)


def _simplify(graph: GraphModule, exact: bool) -> None:
    """Remove operations without effect: views with the same shape, factors of one, repeated computations.

    A product that is returned transposed is computed in that order, so that its memory order is that of its parameter;
    not in an `exact` graph, because its last bits may change.
    """
    called = (node for node in graph.graph.nodes if node.op == "call_function")
    nodes = [node for node in called if node.target is not operator.getitem]  # one of several results
    if not all(isinstance(node.target, OpOverload) and not node.target._schema.is_mutable for node in nodes):
        return
    handed_out = set(graph.graph.output_node().all_input_nodes)
    computed: dict[Any, Node] = {}
    for node in nodes:
        if node in handed_out:  # as separate memory
            if not exact:
                _reorder(graph, node)
            continue
        source = node.args[0] if node.args else None
        again = computed.setdefault((node.target, repr((node.args, node.kwargs))), node)
        if isinstance(source, Node) and _changes_nothing(node, source):
            node.replace_all_uses_with(source)
        elif again is not node and torch.Tag.nondeterministic_seeded not in node.target.tags:
            node.replace_all_uses_with(again)
    output = graph.graph.output_node()
    for node in output.all_input_nodes:
        if _memory(node).op == "placeholder":  # the caller may change it in place
            with graph.graph.inserting_before(output):
                output.replace_input_with(node, graph.graph.call_function(aten.clone.default, (node,)))
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _memory(node: Node) -> Node:
    """Return the node that owns a node's memory."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _changes_nothing(node: Node, source: Node) -> bool:
    made, given = node.meta.get("tensor_meta"), source.meta.get("tensor_meta")
    if made is None or given is None:
        return False
    if (made.shape, made.stride, made.dtype) != (given.shape, given.stride, given.dtype):
        return False
    return node.target in _VIEWS or bool(node.target is aten.mul.Scalar and node.args[1] == 1)


def _reorder(graph: GraphModule, node: Node) -> None:
    """Compute (A B)' as B' A' in place of a transposed product."""
    product = node.args[0] if node.target is aten.transpose.int and node.args[1:] == (1, 2) else None
    if isinstance(product, Node) and product.target is aten.bmm.default:
        with graph.graph.inserting_before(node):
            turned = [graph.graph.call_function(aten.transpose.int, (part, 1, 2)) for part in reversed(product.args)]
            node.replace_all_uses_with(graph.graph.call_function(aten.bmm.default, tuple(turned)))


def recorded(graph: Step, *tensors: Tensor) -> tuple[Step, str | None]:
    """Return (`graph` of tensors of these shapes as a CUDA graph, None), or (`graph`, why it cannot be one).

    A replay copies its tensors to the recorded positions, and its results from there.

    Args:
        graph: a function of tensors, without an index.
        tensors: arguments for the recording.

    Example:
        >>> import torch
        >>> graph, reason = recorded(torch.sin, torch.zeros(2))
        >>> graph is torch.sin, reason
        (True, 'the tensors are on cpu')
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or not is_cuda(next(iter(devices))):
        return graph, f"the tensors are on {', '.join(sorted(map(str, devices))) or 'no device'}"
    held = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.cuda.device_of(held[0]), torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM):
                    graph(*held)
            torch.cuda.current_stream().wait_stream(side)
            record = torch.cuda.CUDAGraph()
            with torch.cuda.graph(record):
                results = graph(*held)
    except RuntimeError as error:  # an operation that synchronises or allocates memory cannot be recorded
        torch.cuda.synchronize()
        return graph, str(error).partition("\n")[0]

    def replay(*tensors: Tensor) -> Any:
        for target, value in zip(held, tensors):
            target.copy_(value)
        record.replay()
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, results)

    return replay, None
