"""The mode in which operations of torch are replaced where they are called."""

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

# By module of this folder, which is imported when the first of these functions is called, what its REPLACED has.
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
    """Return what a module of this folder has in place of a function of torch."""
    replacement: Callable[..., Any] = importlib.import_module(f"fedtorch.stacked_layers.{home}").REPLACED[function]
    return replacement


def _replaced(home: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    return _replacement(home, function)(*args, **kwargs)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    **{function: partial(_replaced, home, function) for home, functions in HOMES.items() for function in functions},
    **_linear.REPLACED,
}
# Functions written in Python, within which replaced operations are called.
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
    """A mode around `torch.vmap` over clients in which each client gets what torch gives it alone.

    Replaced are recurrent layers and cells, attention, embeddings with padding, bags of embeddings, losses, counts and
    writes by a mask. Code may branch on truths and whole numbers that all clients agree on.

    Attributes:
        called: functions of torch, in their order.

    Raises:
        Divergence: in the mode, where clients disagree; see `by_branches`.

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
    """The same mode, but that values are not read: code that branches on them gets torch's error."""

    _replaced: ClassVar[Mapping[Any, Callable[..., Any]]] = _OPERATIONS


def _body(function: FunctionType) -> FunctionType:
    """Return a function of torch that does not ask modes whether they replace it.

    A mode is left while it is asked, so that it would not see what the function calls.
    """
    names = {**function.__globals__, **dict.fromkeys(_ASKS, lambda *_: False)}
    if function is F.multi_head_attention_forward:
        from fedtorch.stacked_layers._attention import in_projection

        names["_in_projection_packed"] = in_projection
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
