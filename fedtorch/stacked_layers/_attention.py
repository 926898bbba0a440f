"""Attention of many clients: no transposed copies, and on the CPU one call of the fused kernel for all of them.

`torch.vmap` multiplies a transposed input with a client's weights row by row, and calls the CPU's fused attention
client by client.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.autograd_function import VmapInfo

from fedtorch.stacked_layers._attention_program import FUSED, FUSED_BACKWARD, attention, plain
from fedtorch.stacked_layers._linear import linear
from fedtorch.stacked_layers._rules import in_front, register


class StackedAttention(nn.MultiheadAttention):
    """Multi-head attention that keeps the batch in front throughout, where nobody asks for the weights."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (outputs, weights or None), as `torch.nn.MultiheadAttention` does."""
        plain = self.batch_first and query.ndim == 3 and query is key is value and self.in_proj_weight is not None
        extended = self.bias_k is not None or self.add_zero_attn
        if need_weights or extended or not plain or (attn_mask is not None and attn_mask.ndim != 2):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        heads = (3, self.num_heads, self.head_dim)
        each = linear(query, self.in_proj_weight, self.in_proj_bias).unflatten(-1, heads).unbind(-3)
        masks = [_added(attn_mask, query), _added(key_padding_mask, query)]
        if masks[1] is not None:
            masks[1] = masks[1][:, None, None]
        mask = masks[0] if masks[1] is None else masks[1] if masks[0] is None else masks[0] + masks[1]
        drop = self.dropout if self.training else 0.0
        q, k, v = (part.transpose(1, 2) for part in each)
        outputs = F.scaled_dot_product_attention(q, k, v, mask, drop)
        return self.out_proj(outputs.transpose(1, 2).flatten(2)), None


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return what is added to the scores; a mask of bools is True where nobody looks."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def _folded(operation: Any, info: VmapInfo, dims: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Evaluate an operation whose tensors have a batch in front `(N, ...)` on all clients' batches as one."""
    tensors = [in_front(info, a, d) if isinstance(a, Tensor) else a for a, d in zip(arguments, dims)]
    size = tensors[0].shape[1]  # of a client's batch
    folded = [_joined(tensor, size) if isinstance(tensor, Tensor) else tensor for tensor in tensors]
    named: dict[str, Any] = {argument.name: value for argument, value in zip(operation._schema.arguments, folded)}
    mask = named.get("attn_mask")
    # Of masks that are trained, such as relative positions, the fused kernel has no gradient.
    trained = operation is FUSED and mask is not None and mask.requires_grad and torch.is_grad_enabled()
    results = plain(**named) if trained else None
    if results is None and operation is FUSED:
        results = attention(**named)
    if results is None:
        results = operation(**named)
    return tuple(result.unflatten(0, (info.batch_size, size)) for result in results)


def _joined(tensor: Tensor, size: int) -> Tensor:
    """Return `(K, N, ...)` as `(KN, ...)`; masks without a batch `(K, L, S)` or of one `(K, 1, ...)` are expanded."""
    if tensor.ndim == 3:
        tensor = tensor[:, None, None]
    return tensor.expand(-1, size, *tensor.shape[2:]).flatten(0, 1)


for _operation in (FUSED, FUSED_BACKWARD):
    register(_operation, partial(_folded, _operation))
