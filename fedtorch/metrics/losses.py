"""The losses of torch as sums over rows, so that their value over all clients' rows is torch's own.

They are known by type: a class of `torch.nn` itself, a function of `torch.nn.functional`, or a `partial` of one.

>>> import functools
>>> loss = torch_loss(functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 9.0])))
>>> logits, classes = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]), torch.tensor([[1, 0]])
>>> sums = loss.sums(logits, classes, torch.ones(1, 2).bool())
>>> loss.value(sums), F.cross_entropy(logits[0], classes[0], torch.tensor([1.0, 9.0]))
(tensor([1.9836], dtype=torch.float64), tensor(1.9836))
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtorch.tree import Tree

_OF_CLASSES: dict[Any, Callable[..., Tensor]] = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
_OTHERS: dict[Any, Callable[..., Tensor]] = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.MultiMarginLoss: F.multi_margin_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
}
_WEIGHS_ROWS = {F.mse_loss, F.l1_loss, F.huber_loss}  # their weight= has the shape of the predictions
_TAKES_OUTPUTS = {F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.multilabel_margin_loss}  # (N, C), or (C,) alone
_TAKES_OUTPUTS |= {F.multilabel_soft_margin_loss}


class TorchLoss(NamedTuple):
    """A loss of torch, by the losses of rows.

    Attributes:
        function: of `torch.nn.functional`.
        each: the loss without reduction.
        reduction: "mean", "sum", "batchmean" (of KL divergences) or "none", averaged afterwards.
        weights: its weights; those of classes `(C,)` enter the denominator of a mean over rows.
        ignored: class that is not counted, or None.
    """

    function: Callable[..., Tensor]
    each: Callable[[Tensor, Tensor], Tensor]
    reduction: str
    weights: tuple[Tensor, ...] = ()
    ignored: int | None = None

    def sums(self, prediction: Tensor, target: Tensor, mask: Tensor) -> Tree:
        """Return sums over the rows in the mask `(K, N)` of predictions and targets `(K, N, ...)`: `(K,)` each.

        Raises:
            ValueError: predictions and targets of shapes that do not go together.
        """
        for leaf in (prediction, target):
            if leaf.shape[:2] != mask.shape:
                raise ValueError(
                    f"Expected examples (K, N, ...) with a mask (K, N), but got {tuple(leaf.shape)} and "
                    f"{tuple(mask.shape)}"
                )
        if prediction.shape == (*target.shape, 1) and self.function not in _TAKES_OUTPUTS:
            prediction = prediction.squeeze(-1)
        self._check_weights(prediction)
        rows, outputs = target[mask], prediction[mask].detach()
        losses = self._losses(outputs, rows)
        if losses is None:
            raise ValueError(
                f"Expected a loss of every example, but got another shape of predictions {tuple(prediction.shape)} and "
                f"targets {tuple(target.shape)}; bring them to one shape"
            )
        counted = self._counted(losses, outputs, rows)
        of = mask.nonzero()[:, 0]
        zeros = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
        total = lambda leaf: zeros.index_add(0, of, leaf.double().reshape(len(rows), leaf[:1].numel()).sum(1))
        return {"sum": total(losses), "weight": total(counted), "rows": mask.sum(1, dtype=torch.float64)}

    def _check_weights(self, prediction: Tensor) -> None:
        if self.function not in (F.binary_cross_entropy, F.binary_cross_entropy_with_logits):
            return
        for leaf in self.weights:
            if leaf.numel() > 1 and leaf.ndim >= prediction.ndim - 1:
                raise ValueError(
                    f"Expected weights of a row's outputs, but got shape {tuple(leaf.shape)} for rows of "
                    f"{tuple(prediction.shape[2:])}; give weights of rows in the targets, to a function that reads them"
                )

    def _losses(self, outputs: Tensor, rows: Tensor) -> Tensor | None:
        """Return the losses of rows, `(rows, ...)`; None of outputs and targets that broadcast."""
        if self.function in _TAKES_OUTPUTS and outputs.ndim < 2:
            return None
        shapes = [rows.shape, rows.shape[:1]]
        if self._takes_probabilities(outputs, rows):
            shapes = [torch.Size((len(rows), *rows.shape[2:]))]
        losses = self.each(outputs, rows).detach() if len(rows) else outputs.new_zeros(shapes[0])
        return losses if losses.shape in shapes else None

    def _takes_probabilities(self, outputs: Tensor, rows: Tensor) -> bool:
        """Return whether targets are probabilities of classes, by their shape as in torch."""
        return self.function is F.cross_entropy and outputs.shape == rows.shape

    def _counted(self, losses: Tensor, outputs: Tensor, rows: Tensor) -> Tensor:
        """Return the denominator of the sum of losses, in the shape of losses or `(rows,)`."""
        if self.reduction == "batchmean":
            return torch.ones(len(rows), device=losses.device)
        by_class = self.function in _OF_CLASSES.values() and not self._takes_probabilities(outputs, rows)
        if self.reduction != "mean" or not by_class:
            return torch.ones_like(losses)
        there = torch.ne(rows, -1 if self.ignored is None else self.ignored)
        if not self.weights:
            return there
        weight = self.weights[0].to(rows.device, torch.float64)
        return torch.where(there, weight[torch.where(there, rows, 0)], 0.0)

    def value(self, sums: Tree) -> Tensor:
        """Return the values of sums of any batch shape; NaN without rows."""
        if self.reduction == "sum":
            return torch.where(sums["rows"] > 0, sums["sum"], torch.nan)
        return sums["sum"] / sums["weight"]


def torch_loss(loss: Any) -> TorchLoss | None:
    """Return a loss of torch in terms of its rows' losses; None for anything else.

    Raises:
        ValueError: a reduction that it does not have.
    """
    torch_function = _of_module(loss) if isinstance(loss, nn.Module) else _of_function(loss)
    if torch_function is None or torch_function.reduction in ("mean", "sum", "none"):
        return torch_function
    if torch_function.reduction == "batchmean" and torch_function.function is F.kl_div:
        return torch_function
    raise ValueError(f"Expected reduction='mean', 'sum' or 'none' of a loss, but got {torch_function.reduction!r}")


def _of_module(loss: nn.Module) -> TorchLoss | None:
    function = {**_OF_CLASSES, **_OTHERS}.get(type(loss))
    if function is None or "forward" in vars(loss) or loss._forward_hooks or loss._forward_pre_hooks:
        return None
    settings = {**vars(loss), **dict(loss.named_buffers())}
    if _weighs_rows(function, settings):
        return None
    each: Any = deepcopy(loss)
    each.reduction = "none"
    return _made(function, partial(_on_device, each), settings)


def _on_device(loss: nn.Module, outputs: Tensor, rows: Tensor) -> Tensor:
    return loss.to(outputs.device)(outputs, rows)


def _of_function(loss: Any) -> TorchLoss | None:
    function, settings = loss, {}
    if isinstance(loss, partial):
        if loss.args:
            return None
        function, settings = loss.func, dict(loss.keywords)
    known = {*_OF_CLASSES.values(), *_OTHERS.values()}
    if function not in known or settings.keys() & {"size_average", "reduce"} or _weighs_rows(function, settings):
        return None
    settings.setdefault("reduction", "mean")
    each = partial(function, **{**settings, "reduction": "none"})
    return _made(function, each, {"ignore_index": -100, **settings})


def _made(function: Callable[..., Tensor], each: Callable[..., Tensor], settings: dict[str, Any]) -> TorchLoss:
    weights = tuple(settings[name] for name in ("weight", "pos_weight") if settings.get(name) is not None)
    return TorchLoss(function, each, settings["reduction"], weights, settings.get("ignore_index"))


def _weighs_rows(function: Any, settings: dict[str, Any]) -> bool:
    """Return whether weights may belong to rows instead of classes or outputs, so that rows cannot be separated."""
    if function in _WEIGHS_ROWS:
        return settings.get("weight") is not None
    tensors = [settings.get(name) for name in ("weight", "pos_weight")]
    return any(isinstance(leaf, Tensor) and leaf.ndim > 1 for leaf in tensors)
