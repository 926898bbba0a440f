"""Modules and losses with known behaviour by type: chains of `torch.nn` layers that treat every row separately.

A batch's loss is then the mean of its rows' losses, so clients of unequal size can share padded, weighted steps. The
lists are closed. A subclass, a hook, a replaced `forward` or a setting that mixes rows makes a module unknown; that is
not an error, and `rowwise=True` of `ft.gradient_descent` can declare the property instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules import module as torch_module

from fedtorch import tree
from fedtorch.models.linear import LinearHead, raw

Rank = Callable[[Any, int], int | None]  # (layer, dimensions of a row) -> dimensions of a row of its output, or None


def _same(layer: Any, rank: int) -> int | None:
    return rank


def _of_rank(wanted: int) -> Rank:
    return lambda layer, rank: wanted if rank == wanted else None


def _at_least_one(layer: Any, rank: int) -> int | None:
    return rank if rank >= 1 else None


def _normalised(layer: Any, rank: int) -> int | None:
    return rank if len(layer.normalized_shape) <= rank else None


def _softmax(layer: Any, rank: int) -> int | None:
    within = layer.dim is not None and (0 < layer.dim <= rank or -rank <= layer.dim < 0)
    return rank if within else None


def _pooled(dimensions: int) -> Rank:
    def of(layer: Any, rank: int) -> int | None:
        return rank if rank == dimensions + 1 and not getattr(layer, "return_indices", False) else None

    return of


def _flattened(layer: Any, rank: int) -> int | None:
    return 1 if (layer.start_dim, layer.end_dim) == (1, -1) and rank >= 1 else None


def _unflattened(layer: Any, rank: int) -> int | None:
    within = isinstance(layer.dim, int) and (0 < layer.dim <= rank or -rank <= layer.dim < 0)
    return rank + len(layer.unflattened_size) - 1 if within else None


def _embedded(layer: Any, rank: int) -> int | None:
    return None if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse else rank + 1


def _instance(dimensions: int) -> Rank:
    def of(layer: Any, rank: int) -> int | None:
        return rank if rank == dimensions + 1 and not layer.track_running_stats else None

    return of


def _head(layer: Any, rank: int) -> int | None:
    return 0 if rank == 1 and layer.feature_map is raw else None


_LAYERS: dict[Any, Rank] = {
    nn.Linear: _at_least_one,
    LinearHead: _head,
    nn.Identity: _same,
    nn.Flatten: _flattened,
    nn.Unflatten: _unflattened,
    nn.Embedding: _embedded,
    nn.LayerNorm: _normalised,
    nn.RMSNorm: _normalised,
    nn.GroupNorm: _at_least_one,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.AlphaDropout: _same,
    nn.Dropout: _same,
    nn.PReLU: _at_least_one,
}
for _activation in (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh,
    nn.Tanhshrink, nn.Threshold,
):  # fmt: skip
    _LAYERS[_activation] = _same
for _dimensions, _kinds in enumerate(
    (
        (nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.InstanceNorm1d),
        (nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.InstanceNorm2d),
        (nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.InstanceNorm3d),
    ),
    start=1,
):
    _LAYERS.update(dict.fromkeys(_kinds[:2], _of_rank(_dimensions + 1)))
    _LAYERS.update(dict.fromkeys(_kinds[2:5], _pooled(_dimensions)))
    _LAYERS[_kinds[5]] = _instance(_dimensions)
_FORWARDS: dict[type, Any] = {layer: vars(layer).get("forward") for layer in (*_LAYERS, nn.Sequential)}

_REGRESSION = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
}
_BINARY = {nn.BCELoss: F.binary_cross_entropy, nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits}
_CLASSES = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
_FUNCTIONS: dict[type, Any] = {**_REGRESSION, **_BINARY, **_CLASSES}
for _loss in _FUNCTIONS:
    _FORWARDS[_loss] = vars(_loss).get("forward")
# settings of loss modules; loss functions have their defaults
_SETTINGS = ("beta", "delta", "ignore_index", "label_smoothing")
_IGNORED = -100  # the default of torch's losses of classes


class RowwiseLoss(NamedTuple):
    """A batch's loss that is the mean of its rows' losses, of a module known by type.

    Attributes:
        module: a chain of layers.
        loss: one of torch's, also known by type, or one with the user's promise.
    """

    module: nn.Module
    loss: Any

    def holds(self, rows: Any, count: Tensor) -> bool:
        """Return whether the loss is rowwise for rows `(x, y)`, leaves `(K, N, ...)`, of clients with `count` `(K,)`
        rows.
        """
        if not (isinstance(rows, tuple) and len(rows) == 2 and all(isinstance(part, Tensor) for part in rows)):
            return False
        x, y = rows
        rank = works_by_rows(self.module, x.ndim - 2)
        kind = _kind_of(self.loss)
        if rank is None or kind is None:
            return False
        if kind not in _CLASSES or y.is_floating_point():
            return y.ndim - 2 == rank and y.is_floating_point()
        if rank < 1 or y.ndim - 2 != rank - 1:
            return False
        ignored = getattr(self.loss, "ignore_index", _IGNORED)
        inside = _inside(y.shape[1], count)
        return not bool(((y == ignored) & tree.along(inside, y)).any())

    def has_rows(self, rows: Any) -> bool:
        """Return whether the module treats every row of `(x, y)`, leaves `(K, N, ...)`, separately."""
        pair = isinstance(rows, tuple) and len(rows) == 2 and isinstance(rows[0], Tensor)
        return pair and works_by_rows(self.module, rows[0].ndim - 2) is not None

    def of_rows(self, output: Tensor, target: Any) -> Tensor:
        """Return the loss of every row of a batch, `(B,)`."""
        kind = _kind_of(self.loss)
        if kind is None:
            alone = lambda *row: self.loss(*tree.map(lambda leaf: leaf[None], row)).reshape(())
            return vmap(alone, randomness="different")(output, target)
        settings = {name: getattr(self.loss, name) for name in _SETTINGS if hasattr(self.loss, name)}
        losses = _FUNCTIONS[kind](output, target, reduction="none", **settings)
        return losses if losses.ndim == 1 else losses.flatten(1).mean(1)


def _inside(width: int, count: Tensor) -> Tensor:
    """Return which of `width` rows are a client's, `(K, width)`."""
    return count.new_ones(width).cumsum(0)[None] <= count[:, None]


def works_by_rows(module: nn.Module, rank: int) -> int | None:
    """Return the dimensions of an output row of a chain that treats every row separately; None for other modules.

    Args:
        module: a layer, or an `nn.Sequential` of layers.
        rank: dimensions of a row of the inputs.

    Example:
        >>> works_by_rows(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), 1)
        1
        >>> works_by_rows(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 1), works_by_rows(nn.Softmax(0), 1)
        (None, None)
    """
    if not unchanged(module):
        return None
    if type(module) is nn.Sequential:
        for layer in module:
            after = works_by_rows(layer, rank)
            if after is None:
                return None
            rank = after
        return rank
    known = _LAYERS.get(type(module))
    return None if known is None else known(module, rank)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or a head of raw features, and nothing else.

    >>> is_linear(nn.Linear(3, 1)), is_linear(nn.Sequential(nn.Linear(3, 1)))
    (True, False)
    """
    if type(module) is LinearHead:
        return module.feature_map is raw and unchanged(module)
    return type(module) is nn.Linear and unchanged(module)


def predicts_by_rows(module: nn.Module) -> bool:
    """Return whether a chain treats every row separately for inputs of any number of dimensions, from one on.

    >>> predicts_by_rows(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), predicts_by_rows(nn.Conv1d(1, 1, 3))
    (True, False)
    """
    return all(works_by_rows(module, rank) is not None for rank in range(1, 6))


def unchanged(module: nn.Module) -> bool:
    """Return whether a layer or loss of torch has its class's original behaviour: no hooks, no other forward."""
    if torch_module._has_any_global_hook() or "forward" in vars(module):
        return False
    kind = type(module)
    if kind in _FORWARDS and vars(kind).get("forward") is not _FORWARDS[kind]:
        return False
    hooks = (value for name, value in vars(module).items() if name.endswith("_hooks"))
    return not any(hooks) and not any(map(hooked, module.parameters(recurse=False)))


def hooked(parameter: Tensor) -> bool:
    """Return whether hooks are registered on the gradient of a parameter."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _kind_of(loss: Any) -> type | None:
    """Return the class of a loss that averages over all elements, without weights; None of any other."""
    if not isinstance(loss, nn.Module):
        return next((kind for kind, function in _FUNCTIONS.items() if loss is function), None)
    kind = type(loss)
    if kind not in _FUNCTIONS or not unchanged(loss) or getattr(F, _FUNCTIONS[kind].__name__) is not _FUNCTIONS[kind]:
        return None
    weighted = any(getattr(loss, name, None) is not None for name in ("weight", "pos_weight"))
    return kind if loss.reduction == "mean" and not weighted else None
