"""Attention over short sequences by the program in C, with derivatives, in place of the CPU's fused kernel.

That one takes microseconds a head, however short its sequences are. Sequences and heads are those of all clients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from fedtorch.dispatch import compiled

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
FUSED_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SOURCE = Path(__file__).with_name("_attention.c")
_REAL = {torch.float64: "double", torch.float32: "float"}
_MOST = 16  # rows, columns and numbers of a head, beyond which the fused kernel is as fast
_OPERATIONS = torch.library.Library("fedtorch", "FRAGMENT")
_READ, _SAID = "Tensor q, Tensor k, Tensor v", "Tensor? mask, bool causal, float scale"
_OPERATIONS.define(f"attention({_READ}, {_SAID}) -> (Tensor, Tensor)")
_OPERATIONS.define(
    f"attention_backward(Tensor d_out, {_READ}, Tensor out, Tensor sums, {_SAID}) -> (Tensor, Tensor, Tensor)"
)


class _Attention(ctypes.Structure):
    """`Attention` of the C file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "rows", "columns", "size", "causal")),
        ("scale", ctypes.c_double),
        ("strides", ctypes.c_int64 * 15),
        ("mask_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "out", "sums", "d_out", "d_q", "d_k", "d_v")),
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return what the CPU's fused kernel does, outputs and logarithms of sums; None where it is to do that.

    Shapes: query `(N, H, L, D)`, key and value `(N, H, S, D)`, `attn_mask` broadcasts with `(N, H, L, S)`.
    """
    tensors = [query, key, value, *(() if attn_mask is None else (attn_mask,))]
    sizes = query.shape[2:] + key.shape[2:3]
    fit = key.shape == value.shape and (*query.shape[:2], sizes[1]) == (*key.shape[:2], key.shape[3])
    if dropout_p or query.dtype not in _REAL or not fit or not all(0 < n <= _MOST for n in sizes):
        return None
    if any(tensor.device.type != "cpu" or tensor.dtype != query.dtype for tensor in tensors):
        return None
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)) or _library(query) is None:
        return None
    rest = attn_mask, is_causal, sizes[1] ** -0.5 if scale is None else scale
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors[:3]):
        return torch.ops.fedtorch.attention.default(query, key, value, *rest)
    with enable_single_level_autograd_function():  # outside of a vmap, of which `Function` would ask for a rule
        return _Heads.apply(query, key, value, *rest)  # type: ignore[attr-defined]


class _Heads(_SingleLevelFunction):
    """Outputs and logarithms of sums, of which the outputs are differentiable, as often as one likes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        outputs, sums = torch.ops.fedtorch.attention.default(*args)
        ctx.rest = args[4:]
        ctx.save_for_backward(*args[:4], outputs, sums)
        ctx.mark_non_differentiable(sums)
        return outputs, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, outputs, sums = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient of a gradient is asked for
            inputs = [tensor for tensor in (q, k, v) if tensor.requires_grad]
            again = plain(q, k, v, attn_mask=mask, is_causal=ctx.rest[0], scale=ctx.rest[1])[0]
            found = iter(torch.autograd.grad(again, inputs, gradients[0], create_graph=True))
            return *(next(found) if tensor.requires_grad else None for tensor in (q, k, v)), None, None, None
        back = torch.ops.fedtorch.attention_backward.default
        return *back(gradients[0], q, k, v, outputs, sums, mask, *ctx.rest), None, None, None


def plain(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs, and zeros for the sums that only the fused kernel's backward pass reads."""
    outputs = aten._scaled_dot_product_attention_math(query, key, value, **options)[0]
    return outputs, query.new_zeros(query.shape[:-1])


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return outputs `(N, H, L, D)` and logarithms of sums `(N, H, L)`."""
    program = _library(q)
    if program is None:
        return FUSED(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    batch, heads, rows, size = q.shape
    out, sums = q.new_empty(batch, rows, heads, size).transpose(1, 2), q.new_empty(batch, heads, rows)
    _run(program.attend, (q, k, v, out, out), mask, causal, scale, {"out": out, "sums": sums})
    return out, sums


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    program = _library(q)
    if program is None:
        back = FUSED_BACKWARD(d_out, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale)
        return tuple(back)
    gradients = tuple(each.new_empty(each.transpose(1, 2).shape) for each in (q, k, v))
    named = dict(zip(("d_q", "d_k", "d_v"), gradients))
    _run(program.attend_back, (q, k, v, out, d_out), mask, causal, scale, {"sums": sums.contiguous(), **named})
    return tuple(each.transpose(1, 2) for each in gradients)


def _run(
    function: Any,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float,
    named: dict[str, Tensor],
) -> None:
    """Call the program on q, k, v, outputs and their gradients, whose numbers it wants one after the other.

    Raises:
        MemoryError: there is not enough.
    """
    q, k, v, out, d_out = kept = [each if each.stride(-1) == 1 else each.contiguous() for each in tensors]
    batch, heads, rows, size = q.shape
    places = {"q": q, "k": k, "v": v, "out": out, "d_out": d_out, **named}
    if mask is not None:
        places["mask"] = mask = mask.expand(batch, heads, rows, k.shape[2])
    about = _Attention(heads, rows, k.shape[2], size, causal, scale)
    about.strides = (ctypes.c_int64 * 15)(*(stride for each in kept for stride in each.stride()[:3]))
    about.mask_strides = (ctypes.c_int64 * 4)(*(mask.stride() if mask is not None else (0,) * 4))
    for name, tensor in places.items():
        setattr(about, name, tensor.data_ptr())
    number = ctypes.c_int64
    call = lambda begin, end: function(ctypes.byref(about), number(begin), number(end))
    if any(compiled.in_threads(call, batch, 8 * heads * rows * (size + k.shape[2]) * q.element_size())):
        raise MemoryError(f"no memory for {rows} × {k.shape[2]} scores of a head")


def _library(q: Tensor) -> ctypes.CDLL | None:
    return compiled.library(_SOURCE, REAL=_REAL[q.dtype])


_OPERATIONS.impl("attention", _forward, "CPU")
_OPERATIONS.impl("attention_backward", _backward, "CPU")
