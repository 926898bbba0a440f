"""Whether a batch's loss is the mean of its examples' losses, without which clipping bounds nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fedtorch import random, tree
from fedtorch.module_randomness import Drawn
from fedtorch.tree import Tree
from fedtorch.trust.privacy._layers import Layer
from fedtorch.trust.privacy._per_example import PrivateLoss


def refuse_batch_norm(module: nn.Module) -> None:
    """Raises ValueError if the module normalises over the examples of a batch."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise _mixing(type(part).__name__)


def check_separable(loss: PrivateLoss, tensors: Mapping[str, Tensor], rows: Tree) -> None:
    """Checks that the loss of a batch `(1, B, ...)` is the mean of its examples', by gradients.

    Layers are given up where they do not clip as the examples' own gradients do.

    Raises:
        ValueError: it is not.
    """
    values = [tensors[name].detach()[None] for name in loss.tensors]
    taken = torch.ones(1, tree.leaves(rows)[0].shape[1], dtype=torch.bool, device=values[0].device)
    key = random.key(0)[None].to(values[0].device) if loss.random else None
    layers, loss.layers = loss.layers, None
    clip, loss.clip = loss.clip, 1e300
    whole = _batch_gradient(loss, values, rows, key)
    apart = [leaf / taken.shape[1] for leaf in loss.clipped(values, rows, taken, 0, key)[0]]
    loss.clip = clip
    if not all(map(_close, whole, apart)):
        raise _mixing("the loss of a batch")
    if layers is not None:
        loss.layers = layers if _agrees(loss, layers, values, rows, taken, key) else None


def _mixing(what: str) -> ValueError:
    return ValueError(
        f"Expected a loss that is the mean of its examples' losses, but {what} mixes them: one example then changes "
        "the gradients of others, which clipping does not bound; use LayerNorm or GroupNorm instead of BatchNorm"
    )


def _agrees(
    loss: PrivateLoss, layers: list[Layer], values: list[Tensor], rows: Tree, taken: Tensor, key: Tensor | None
) -> bool:
    """Whether ghost norms clip as the examples' own gradients do."""
    ways = []
    for way in (None, layers):
        loss.layers = way
        try:
            ways.append(loss.clipped(values, rows, taken, 0, key)[0])
        except (RuntimeError, IndexError):  # a layer that is called twice, or not on rows
            return False
    return all(map(_close, *ways))


def _batch_gradient(loss: PrivateLoss, values: list[Tensor], rows: Tree, key: Tensor | None) -> Sequence[Tensor]:
    own = [value.clone().requires_grad_() for value in values]
    with torch.enable_grad(), nullcontext() if key is None else Drawn(key):
        randomness = "error" if key is None else "different"
        losses, *_ = loss.stacked([*own, *tree.leaves(rows)], rows, 0, randomness)
        found = torch.autograd.grad(losses.sum(), own, allow_unused=True)
    return [torch.zeros_like(value) if gradient is None else gradient for gradient, value in zip(found, own)]


def _close(first: Tensor, second: Tensor) -> bool:
    """Equal up to the rounding of another order, as far as the numbers are finite."""
    both = first.isfinite() & second.isfinite()
    first, second = first[both], second[both]
    tolerance = 1e-9 if second.dtype == torch.float64 else 1e-4
    size = max(1e-6, float(second.abs().max()) if second.numel() else 0.0)
    return float((first - second).abs().max() if second.numel() else 0.0) <= tolerance * size
