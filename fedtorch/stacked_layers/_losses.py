"""Losses that `torch.vmap` refuses or evaluates one client at a time, by basic operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch.stacked_layers._transforms import belongs_to_clients, outside, over_clients

aten = torch.ops.aten


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy`."""
    labels = _labels(target)
    settings: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    named = reduction in ("mean", "sum", "none") and size_average is None and reduce is None
    shared = weight is None or not belongs_to_clients(weight)
    rows = input.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point()
    if named and shared and rows and belongs_to_clients(input) and over_clients():
        return outside(partial(_of_clients, weight=weight, reduction=reduction, **settings), input, labels)
    if weight is None or label_smoothing == 0 or reduction != "mean" or labels.is_floating_point() or not named:
        return F.cross_entropy(input, labels, weight, size_average, reduce=reduce, reduction=reduction, **settings)
    each = F.cross_entropy(input, labels, weight, reduction="none", **settings)
    return each.sum() / _counted(labels, weight, ignore_index, each).sum()


def _of_clients(
    input: Tensor, labels: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Return the cross-entropies of clients with logits `(K, N, C)` and classes `(K, N)`."""
    each = F.cross_entropy(
        input.mT, labels, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    if reduction == "none":
        return each
    return each.sum(1) if reduction == "sum" else each.sum(1) / _counted(labels, weight, ignore_index, each).sum(1)


def _counted(labels: Tensor, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
    """Return the weight of each row in a mean; 0 for rows that are ignored."""
    counted = labels != ignore_index
    if weight is None:
        return counted.to(like.dtype)
    places = torch.where(counted, labels, 0)
    return torch.where(counted, weight.index_select(0, places.flatten()).reshape(places.shape), 0.0)


def _nll_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute `torch.nn.functional.nll_loss`."""
    return F.nll_loss(input, _labels(target), *args, **kwargs)


def _labels(target: Tensor) -> Tensor:
    """Convert classes to torch's dtypes for one client: int64 or uint8.

    Raises:
        RuntimeError: they are of another integer dtype.
    """
    if target.dtype == torch.int64 or target.is_floating_point():
        return target
    if target.dtype != torch.uint8:
        raise RuntimeError(f"Expected target dtype to be Long or Byte, but got {target.dtype}; convert with .long()")
    return target.long()


def _soft_margin_loss(input: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Compute `torch.nn.functional.soft_margin_loss`."""
    return _reduced((-target * input).exp().log1p(), reduction)


def _multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Compute `torch.nn.functional.multi_margin_loss` of scores `(N, C)` or `(C,)`."""
    wanted = input.gather(-1, target.unsqueeze(-1))
    hinges = (margin - wanted + input).clamp(min=0) ** p
    if weight is not None:
        hinges = hinges * weight[target].unsqueeze(-1)
    others = torch.arange(input.shape[-1], device=input.device) != target.unsqueeze(-1)
    return _reduced(torch.where(others, hinges, 0.0).mean(-1), reduction)


def _multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Compute `torch.nn.functional.multilabel_margin_loss`; classes end at the first -1."""
    named = (target >= 0).long().cumprod(-1)
    at = torch.where(named.bool(), target, 0)
    wanted = torch.zeros_like(target).scatter_add(-1, at, named) > 0
    hinges = (1 - input.gather(-1, at).unsqueeze(-1) + input.unsqueeze(-2)).clamp(min=0)
    counted = named.bool().unsqueeze(-1) & ~wanted.unsqueeze(-2)
    return _reduced(torch.where(counted, hinges, 0.0).sum(-2).mean(-1), reduction)


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    """Reduce losses by torch's number of a reduction."""
    return losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses


REPLACED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    torch._C._nn.multi_margin_loss: _multi_margin_loss,
    torch._C._nn.multilabel_margin_loss: _multilabel_margin_loss,
    torch._C._nn.soft_margin_loss: _soft_margin_loss,
    torch.cosine_embedding_loss: aten.cosine_embedding_loss.default.decompose,
    torch.hinge_embedding_loss: aten.hinge_embedding_loss.default.decompose,
    torch.kl_div: aten.kl_div.default.decompose,
    torch.margin_ranking_loss: aten.margin_ranking_loss.default.decompose,
    torch.poisson_nll_loss: aten.poisson_nll_loss.default.decompose,
    torch.triplet_margin_loss: aten.triplet_margin_loss.default.decompose,
}
