"""Checks that a batch's loss is the mean of its examples' losses, and that layers' gradients are those of the loss.

DP-SGD evaluates each example by itself, so that a loss that mixes examples leaks nothing; but it would train something
else than the module means. Gradients are compared away from the initial values, where they may be zero, and in float64.
Gradients that are zero are computed as differences of larger numbers, so that rounding is measured by the size of the
examples' whole gradients: what is equal differs by less than √ε of that, ε the rounding of the coarsest numbers that
are computed with (1.5e-8 in float64, 3e-4 in float32, 0.09 in bfloat16), and a loss that mixes by more.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedtorch import random, tree
from fedtorch.federation.solvers.objective import Loss, Objective
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.tree import Tree
from fedtorch.trust.privacy.clipping import SLACK
from fedtorch.trust.privacy.examples._per_example import PrivateLoss

_LOG = logging.getLogger(__name__)
_AWAY = 0.1  # relative size of the random steps away from the initial values


def refuse_batch_norm(module: nn.Module) -> None:
    """Raise ValueError if the module normalises over the examples of a batch."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise _mixing(type(part).__name__)


def in_double(loss: PrivateLoss, module: nn.Module, criterion: Loss | None) -> PrivateLoss:
    """Return the same loss of a module in float64, which is changed to it, on the device of the loss's own."""
    device = next(loss.objective.parameters()).device
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).to(device, torch.float64)
    objective = Objective(module.to(device, torch.float64), criterion)
    objective.trainer.answers = loss.objective.trainer.answers
    double = PrivateLoss(objective, loss.tensors, loss.clip, loss.sampling_rate, loss.spending, loss.layers is not None)
    double.random = loss.random
    return double


def check_separable(loss: PrivateLoss, double: PrivateLoss, tensors: Mapping[str, Tensor], rows: Tree) -> None:
    """Check that the loss of a batch `(1, B, ...)` is the mean of its examples', by gradients.

    Layers are given up where they do not clip as the examples' own gradients do.

    Args:
        loss: whose `checked` is set, unless no gradient is finite.
        double: the same in float64, which is compared if it runs.
        tensors: initial values of one client.
        rows: of one client.

    Raises:
        ValueError: it is not.
    """
    try:
        point = _some_point(double, tensors, rows)
    except Exception:  # a module that computes in one dtype only
        point = _some_point(loss, tensors, rows)
    if point is None:
        return
    size = _norms(point.examples).mean()
    if not all(_close(w, e.mean(1), point.bound * size) for w, e in zip(point.whole, point.examples)):
        raise _mixing("the loss of a batch")
    if loss.layers is not None and not _layers_agree(point, float(size)):
        loss.layers = None
    loss.separable = loss.checked = True


class _Point(NamedTuple):
    """Hold gradients at some values of the parameters."""

    loss: PrivateLoss
    values: list[Tensor]  # (1, ...)
    rows: Tree  # (1, B, ...), of finite gradients
    key: Tensor | None
    whole: list[Tensor]  # (1, ...) float64, of the batch's loss
    examples: list[Tensor]  # (1, B, ...) float64, of the examples' own losses
    bound: float  # on relative rounding


def _some_point(loss: PrivateLoss, tensors: Mapping[str, Tensor], rows: Tree) -> _Point | None:
    """Return gradients away from the initial values, or at them; None where none is finite."""
    like = next(loss.objective.parameters())
    rows = tree.map(lambda leaf: leaf.to(like.dtype) if leaf.is_floating_point() else leaf, rows)
    values = [tensors[name].detach().to(like)[None] for name in loss.tensors]
    key = random.key(0).to(like.device)
    away = [_perturbed(value, random.fold_in(key, number)) for number, value in enumerate(values)]
    draws = key[None] if loss.random else None
    return _point(loss, away, rows, draws) or _point(loss, values, rows, draws)


def _point(loss: PrivateLoss, values: list[Tensor], rows: Tree, key: Tensor | None) -> _Point | None:
    """Return the gradients at `values`, of the rows where they are finite.

    Raises:
        ValueError: those of a batch are, of single examples never.
    """
    with _Precision() as precision:
        try:
            examples, _ = loss.by_example(values, rows, 0, key)
        except Exception as error:
            raise ValueError(
                f"Expected a loss that is the mean of its examples' losses, but it fails on one alone: {error}"
            ) from error
        finite = torch.stack([leaf.flatten(2).isfinite().all(2) for leaf in examples]).all(0)[0]
        some = bool(finite.any())
        rows = tree.map(lambda leaf: leaf[:, finite], rows) if some else rows
        whole = _batch_gradient(loss, values, rows, key)
    if some:
        kept = [leaf[:, finite].to(torch.float64) for leaf in examples]
        return _Point(loss, values, rows, key, [w.to(torch.float64) for w in whole], kept, math.sqrt(precision.eps))
    if all(bool(leaf.isfinite().all()) for leaf in whole):
        raise _mixing("the loss of a batch")
    return None


def _layers_agree(point: _Point, size: float) -> bool:
    """Return whether ghost norms clip as the examples' own gradients do, tensor by tensor; a warning says so if not."""
    loss, examples, bound = point.loss, point.examples, point.bound
    sizes = _norms(examples)
    taken = torch.ones_like(sizes, dtype=torch.bool)
    for clip in (1e300, float(sizes.median())):
        loss.clip = clip
        sums, _ = loss.clipped(point.values, point.rows, taken, 0, point.key)
        if loss.layers is None:
            return False
        share = (clip * SLACK / sizes).clamp(max=1)
        for name, total, leaf in zip(loss.tensors, sums, examples):
            weighted = leaf * tree.along(share, leaf)
            scale = float(weighted.flatten(2).norm(dim=2).sum()) + bound * size
            if not _close(total.to(torch.float64), weighted.sum(1), 2 * bound * scale):
                _LOG.warning("training goes on with ghost=False: layers give another gradient of %s", name)
                return False
    return True


def _mixing(what: str) -> ValueError:
    return ValueError(
        f"Expected a loss that is the mean of its examples' losses, but {what} mixes them: one example then changes "
        "the gradients of others, which clipping does not bound; use LayerNorm or GroupNorm instead of BatchNorm"
    )


def _batch_gradient(loss: PrivateLoss, values: list[Tensor], rows: Tree, key: Tensor | None) -> Sequence[Tensor]:
    tracked = [value.clone().requires_grad_() for value in values]
    with torch.enable_grad(), nullcontext() if key is None else KeyedRandomness(key):
        randomness = "error" if key is None else "different"
        losses, *_ = loss.stacked([*tracked, *tree.leaves(rows)], rows, 0, randomness)
        gradients = torch.autograd.grad(losses.sum(), tracked, allow_unused=True)
    return [torch.zeros_like(value) if gradient is None else gradient for gradient, value in zip(gradients, tracked)]


def _norms(examples: list[Tensor]) -> Tensor:
    """Return the norm of each example's whole gradient, `(1, B)`."""
    return torch.stack([leaf.flatten(2).square().sum(2) for leaf in examples]).sum(0).sqrt()


def _perturbed(value: Tensor, key: Tensor) -> Tensor:
    """Return a random step away, in which signs are kept."""
    step = _AWAY * random.normal(key, value.shape, torch.float64).to(value).clamp(-3, 3)
    return torch.where(value == 0, step, value * (1 + step))


def _close(first: Tensor, second: Tensor, bound: float | Tensor) -> bool:
    return bool(((first - second).abs() <= bound).all())


class _Precision(TorchDispatchMode):
    """Take note of the coarsest real numbers that are computed with.

    Attributes:
        eps: their rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in output if isinstance(output, tuple | list) else (output,):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return output
