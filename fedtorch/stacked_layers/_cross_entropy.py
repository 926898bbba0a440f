"""The cross-entropy of clients on the CPU and its derivative, in one pass.

By its parts `torch.vmap` evaluates it in thirty operations on few numbers, which take as long as a small layer.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from fedtorch.dispatch import compiled
from fedtorch.stacked_layers._rules import in_front, register

aten = torch.ops.aten
_SOURCE = Path(__file__).with_suffix(".c")
_REAL = {torch.float64: "double", torch.float32: "float"}
_OPERATIONS = torch.library.Library("fedtorch", "FRAGMENT")
_OPERATIONS.define("cross_entropy(Tensor logits, Tensor labels, int ignored, str reduction) -> (Tensor, Tensor)")
_OPERATION = torch.ops.fedtorch.cross_entropy
_REDUCTIONS = {1: "mean", 2: "sum"}


def _rule(info: VmapInfo, dims: Any, arguments: tuple[Any, ...]) -> Any:
    """Return `torch.nn.functional.cross_entropy` of clients with logits `(N, C)` and classes `(N,)`."""
    logits, labels = (in_front(info, arguments[i], dims[i]) for i in range(2))
    weight, reduction, ignored, smoothing = arguments[2:]
    plain = weight is None and smoothing == 0 and reduction in _REDUCTIONS
    shapes = logits.ndim == 3 and labels.shape == logits.shape[:2] and logits.shape[2] > 0
    dtypes = logits.dtype in _REAL and labels.dtype == torch.int64
    if not plain or not shapes or not dtypes or any(each.device.type != "cpu" for each in (logits, labels)):
        return NotImplemented
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (logits, labels))) or _library(logits) is None:
        return NotImplemented
    if not torch.is_grad_enabled() or not logits.requires_grad:
        return _OPERATION.default(logits, labels, ignored, _REDUCTIONS[reduction])[:1]
    with enable_single_level_autograd_function():  # outside of this vmap, of which `Function` would ask for a rule
        return (_Loss.apply(logits, labels, ignored, _REDUCTIONS[reduction]),)  # type: ignore[attr-defined]


class _Loss(_SingleLevelFunction):
    """Losses `(K,)`, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, *settings: Any) -> Tensor:
        losses, derivatives = _OPERATION.default(logits, labels, *settings)
        ctx.settings = settings
        ctx.save_for_backward(logits, labels, derivatives)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, derivatives = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient of a gradient is asked for
            derivatives = _by_parts(logits, labels, *ctx.settings)[1]
        return derivatives * gradients[0][:, None, None], None, None, None


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int, reduction: str) -> tuple[Tensor, Tensor]:
    """Return (losses `(K,)`, their derivatives by the logits `(K, N, C)`)."""
    program, logits, labels = _library(logits), logits.contiguous(), labels.contiguous()
    if program is None:
        return _by_parts(logits, labels, ignored, reduction)
    losses, derivatives = logits.new_empty(len(logits)), torch.empty_like(logits)
    rows, classes = logits.shape[1:]
    sizes = [rows * classes, rows, 1, rows * classes]
    tensors = (logits, labels, losses, derivatives)

    def call(begin: int, end: int) -> int:
        at = (
            ctypes.c_void_p(tensor.data_ptr() + begin * size * tensor.element_size())
            for tensor, size in zip(tensors, sizes)
        )
        settings = (end - begin, rows, classes, ignored, reduction == "mean")
        return program.cross_entropy(*map(ctypes.c_int64, settings), *at)

    failed = compiled.in_threads(call, len(logits), max(sizes) * logits.element_size())
    return _by_parts(logits, labels, ignored, reduction) if any(failed) else (losses, derivatives)


def _by_parts(logits: Tensor, labels: Tensor, ignored: int, reduction: str) -> tuple[Tensor, Tensor]:
    """Return the same by torch's operations, or raise its error."""
    each = F.cross_entropy(logits.mT, labels, ignore_index=ignored, reduction="none")
    counts = labels != ignored
    derivatives = logits.softmax(2) - F.one_hot(labels.where(counts, 0), logits.shape[2]).to(logits.dtype)
    losses, derivatives = each.sum(1), torch.where(counts[..., None], derivatives, 0)
    if reduction == "sum":
        return losses, derivatives
    return losses / counts.sum(1), derivatives / counts.sum(1).clamp(min=1)[:, None, None]


def _library(logits: Tensor) -> ctypes.CDLL | None:
    return compiled.library(_SOURCE, REAL=_REAL[logits.dtype])


_OPERATIONS.impl("cross_entropy", _cross_entropy, "CPU")
register(aten.cross_entropy_loss.default, _rule, composite=True)
