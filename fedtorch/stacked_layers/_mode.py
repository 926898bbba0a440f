"""A torch function mode that replaces operations by versions for stacked clients."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedtorch.stacked_layers import _branches, _linear

# By module of this folder: its REPLACED functions. A module is imported on the first call of one of them.
HOMES: dict[str, tuple[Any, ...]] = {
    "_attention": (F.scaled_dot_product_attention,),
    "_embeddings": (torch.embedding, torch.embedding_bag),
    "_losses": (
        F.cross_entropy,
        F.nll_loss,
        torch._C._nn.multi_margin_loss,
        torch._C._nn.multilabel_margin_loss,
        torch._C._nn.soft_margin_loss,
        torch.cosine_embedding_loss,
        torch.hinge_embedding_loss,
        torch.kl_div,
        torch.margin_ranking_loss,
        torch.poisson_nll_loss,
        torch.triplet_margin_loss,
    ),
    "_parts": (
        F.bilinear,
        F.group_norm,
        F.rrelu,
        Tensor.prelu,
        Tensor.__setitem__,
        Tensor.bincount,
        Tensor.clamp_,
        Tensor.contiguous,
        torch._C._nn.max_unpool2d,
        torch._C._nn.max_unpool3d,
        torch._weight_norm,
        torch.affine_grid_generator,
        torch.bincount,
        torch.pdist,
        torch.prelu,
    ),
    "_pooling": (F.max_pool2d,),
    "recurrent": (
        torch.gru,
        torch.gru_cell,
        torch.lstm,
        torch.lstm_cell,
        torch.rnn_relu,
        torch.rnn_relu_cell,
        torch.rnn_tanh,
        torch.rnn_tanh_cell,
    ),
}


@functools.cache
def _replacement(home: str, function: Any) -> Callable[..., Any]:
    """Return the replacement of a torch function from a module of this folder."""
    replacement: Callable[..., Any] = importlib.import_module(f"fedtorch.stacked_layers.{home}").REPLACED[function]
    return replacement


def _replaced(home: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    return _replacement(home, function)(*args, **kwargs)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    **{function: partial(_replaced, home, function) for home, functions in HOMES.items() for function in functions},
    **_linear.REPLACED,
}
# Functions written in Python that call replaced operations.
_OPENED = {
    F.affine_grid,
    F.cosine_embedding_loss,
    F.embedding,
    F.embedding_bag,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.kl_div,
    F.margin_ranking_loss,
    F.max_unpool1d,
    F.max_unpool2d,
    F.max_unpool3d,
    F.multi_head_attention_forward,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.triplet_margin_loss,
}


class StackedOperations(TorchFunctionMode):
    """Mode around `torch.vmap` over clients, in which each client gets torch's result for it alone.

    Replaced are recurrent layers and cells, attention, embeddings with padding, bags of embeddings, losses, counts and
    writes by a mask. Code may branch on booleans and integers that are equal for all clients.

    Attributes:
        called: the called torch functions, in order.

    Raises:
        Divergence: inside the mode, if clients' values differ in a branch; see `by_branches`.

    Example:
        >>> import torch
        >>> def loss(x, mask):
        ...     return x.sum() if mask.all() else (x * mask).sum()
        >>> x, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
        >>> with StackedOperations():
        ...     torch.vmap(loss)(x, mask)
        tensor([3., 3.])
    """

    _replaced: ClassVar[Mapping[Any, Callable[..., Any]]] = {**_OPERATIONS, **_branches.REPLACED}

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.called.append(func)
        if func in _OPENED:
            with self:
                return _body(func)(*args, **(kwargs or {}))
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


class WithoutReading(StackedOperations):
    """The same mode without reading values: code that branches on tensors gets torch's error."""

    _replaced: ClassVar[Mapping[Any, Callable[..., Any]]] = _OPERATIONS


def _body(function: FunctionType) -> FunctionType:
    """Return the Python body of a torch function, without its dispatch to modes.

    Torch disables a mode while it handles a call, so the mode would miss the calls inside the function.
    """
    names = {**function.__globals__, **dict.fromkeys(_ASKS, lambda *_: False)}
    if function is F.multi_head_attention_forward:
        from fedtorch.stacked_layers._attention import in_projection

        names["_in_projection_packed"] = in_projection
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
