"""Attention of all clients in one call of the CPU's fused kernel; `torch.vmap` would call it client by client.

On other devices, and with dropout, grouped queries or a trained mask, attention is computed by matrix products and a
softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch.stacked_layers._transforms import belongs_to_clients, differentiated, inside

aten = torch.ops.aten
_FUSED = (torch.float32, torch.float64)
_VECTOR = 16  # float32 numbers in a vector register


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`."""
    if not any(map(belongs_to_clients, (query, key, value, attn_mask))):
        attend = F.scaled_dot_product_attention
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    if dropout_p and not enable_gqa:
        return _with_dropout(query, key, value, mask, dropout_p, is_causal, scale)
    if dropout_p or enable_gqa or (is_causal and mask is not None) or not _fits(query, key, value, mask):
        by_parts = aten._scaled_dot_product_attention_math.default
        return by_parts(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    if mask is not None and mask.ndim == 2:
        mask = mask[None, None]
    return _attention(query, key, value, mask, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)[0]


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None
) -> Tensor:
    """Compute attention with dropout, drawn in a way that nested `torch.vmap` supports."""
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    shares = scores.softmax(-1) if mask is None else torch._safe_softmax(scores, -1)
    return torch.dropout(shares, p, True) @ value


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the fused kernel supports these tensors."""
    if differentiated() or query.ndim != 4 or query.device.type != "cpu" or query.dtype not in _FUSED:
        return False
    if key.shape != value.shape or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        return False
    if query.dtype != key.dtype or query.dtype != value.dtype or 0 in query.shape or 0 in key.shape:
        return False
    return mask is None or (mask.ndim in (2, 4) and mask.dtype == query.dtype and not _trained(mask))


def _trained(mask: Tensor) -> bool:
    """Return whether the mask needs a gradient, which the fused kernel does not compute."""
    return mask.requires_grad or inside(mask).requires_grad


@torch.library.custom_op("fedtorch::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return outputs `(N, H, L, D)` for a mask that broadcasts with `(N, H, L, S)`, and the saved tensor for backward.

    The saved tensor is the attention weights `(N, H, L, S)` of short sequences, else the log-sum-exp `(N, H, L)`.
    """
    if not _short(q, k):
        fused = aten._scaled_dot_product_flash_attention_for_cpu
        outputs, saved = fused(q, k, v, 0.0, causal, attn_mask=_whole(mask, q, k), scale=scale)
        return outputs, saved
    scores = _heads(q) @ _heads(k).mT
    scores = scores.mul_(scale).unflatten(0, q.shape[:2])
    if mask is not None:
        scores.add_(mask)
    if causal:
        scores.masked_fill_(scores.new_ones(scores.shape[2:], dtype=torch.bool).triu_(1), -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)  # of a fully masked row
    shares = scores.sub_(largest).exp_()
    shares.div_(shares.sum(-1, keepdim=True).clamp_(min=1))
    return (shares.flatten(0, 1) @ _heads(v)).unflatten(0, q.shape[:2]), shares


@torch.library.custom_op("fedtorch::attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if not _short(q, k):
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_q, d_k, d_v = back(d_out, q, k, v, out, saved, 0.0, causal, attn_mask=_whole(mask, q, k), scale=scale)
        return d_q, d_k, d_v
    given, shares = _heads(d_out), saved.flatten(0, 1)
    d_scores = (given @ _heads(v).mT).sub_((given * _heads(out)).sum(-1, keepdim=True)).mul_(shares).mul_(scale)
    gradients = d_scores @ _heads(k), d_scores.mT @ _heads(q), shares.mT @ given
    d_q, d_k, d_v = (each.unflatten(0, q.shape[:2]) for each in gradients)
    return d_q, d_k, d_v


def _short(q: Tensor, k: Tensor) -> bool:
    """Return whether sequences are shorter than the fused kernel's block size."""
    return max(q.shape[2], k.shape[2]) < _VECTOR


def _heads(tensor: Tensor) -> Tensor:
    """Reshape `(N, H, L, D)` to `(N · H, L, D)`."""
    return tensor.flatten(0, 1).contiguous()  # expanded gradients would be multiplied element by element


def _whole(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:3], k.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.settings = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *output)


def _gradients(ctx: Any, d_out: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, mask, out, saved = ctx.saved_tensors
    if d_out is None:
        return (None,) * 6
    if torch.is_grad_enabled():  # the kernel has no double backward
        causal, scale = ctx.settings
        by_parts = lambda *each: aten._scaled_dot_product_attention_math(*each, mask, 0.0, causal, scale=scale)[0]
        return *torch.func.vjp(by_parts, q, k, v)[1](d_out), None, None, None
    return *_attention_backward(d_out, q, k, v, out, saved, mask, *ctx.settings), None, None, None


def _mapped(operation: Any, info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    """Apply an operation under `torch.vmap`, with clients and batch flattened into one batch."""
    size, batch = info.batch_size, arguments[0].shape[0 if dims[0] else 1] if dims[0] is not None else len(arguments[0])

    def joined(value: Any, dim: int | None) -> Any:
        if not isinstance(value, Tensor) or (dim is None and len(value) == 1 != batch):
            return value
        whole = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        return whole.expand(-1, batch, *whole.shape[2:]).flatten(0, 1)

    results = operation(*map(joined, arguments, dims))
    return tuple(each.unflatten(0, (size, batch)) for each in results), (0,) * len(results)


_attention.register_autograd(_gradients, setup_context=_keep)
for _operation in (_attention, _attention_backward):
    _operation.register_vmap(partial(_mapped, _operation))


def in_projection(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
    """Compute the projections of `torch.nn.functional.multi_head_attention_forward`, each by its own product.

    For equal inputs torch makes one product, and then copies its parts there and back.
    """
    functions: Any = F
    if not (q is k is v):
        return functions._in_projection_packed(q, k, v, w, b)
    q = q.contiguous()
    return functions._in_projection_packed(q, q, q.view_as(q), w, b)


REPLACED: dict[Any, Callable[..., Any]] = {F.scaled_dot_product_attention: _attend}
