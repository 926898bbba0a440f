"""A server in the middle: messages are summed, weighted without overflow, and sums of blocks are added."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange, Mean, Sum, client_count, map_messages
from fedtorch.tree import Rows, Tree

_EXPONENT = 1023  # exponent of the largest power of two in float64


def star() -> Exchange:
    """Exchange with a central server: every client receives the outbox, and the server receives the sum over clients.

    The aggregate has the structure of the message, without the leading dimension and in float64, of complex numbers in
    complex128: `Mean(value, weight)` holds the weighted mean and the total weight, `Sum(value)` the sum.

    Example:
        >>> import torch, fedtorch as ft
        >>> ft.star().scatter(torch.tensor([1.0, 2.0]), slice(0, 3)).shape  # all three clients hear the same
        torch.Size([3, 2])
    """
    return Exchange(
        scatter=lambda outbox, ids: tree.expand(outbox, client_count(ids)),
        gather=_add_up,
        merge=_add_all,
        finish=_average,
        traffic=lambda outbox, messages, ids: (
            client_count(ids) * wire.size_of(tree.row_layout(messages)),
            client_count(ids) * wire.size_of(tree.layout(outbox)),
        ),
        additive=True,
    )


def _without_power(weight: Tensor) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return (weights `(K,)` divided by the power of two above their sum, that power, the sum), float64."""
    wide = weight.to(torch.float64)
    size = wide.sum()
    if size.device.type == "cpu":  # read without waiting for a device
        above = math.ldexp(1.0, min(math.frexp(float(size))[1], _EXPONENT))  # 1 for NaN, Inf or zero
        return wide / above, above, size
    power = (size / torch.frexp(size).mantissa).clamp(max=2.0**_EXPONENT)
    power = torch.where(power > 0, power, 1.0)  # 1 for NaN, Inf or zero
    return wide / power, power, size


def _add_up(messages: Tree, ids: Rows) -> Tree:
    return map_messages(_sum, messages)


def _average(partial: Tree) -> Tree:
    return map_messages(_divide, partial)


def _sum(message: Mean | Sum) -> Mean | Sum:
    """Return the partial aggregate of one block: Σ w v and Σ w, or Σ v."""
    if isinstance(message, Sum):
        total = tree.map(lambda v: v.sum(0, dtype=torch.float64), tree.as_real(message.value))
        return Sum(tree.from_real(total, message.value))
    share, power, size = _without_power(message.weight)
    total = tree.map(lambda value: _weighted_sum(share, power, value), tree.as_real(message.value))
    return Mean(tree.from_real(total, message.value), size)


def _weighted_sum(share: Tensor, power: Tensor | float, value: Tensor) -> Tensor:
    """Return Σ_k w_k v_k of values `(K, ...)`, float64, of weights as `_without_power` returns them.

    The product is in the dtype of the values, if that is float32, with weights divided by the power of two above their
    sum. It is therefore at most the largest value, and its bits equal those of an undivided product that does not
    overflow.
    """
    dtype = value.dtype if value.dtype in (torch.float32, torch.float64) else torch.float64
    rows = value.flatten(1) if value.ndim > 1 else value[:, None]
    total = share.to(value.device, dtype) @ rows.to(dtype)
    whole = total.to(torch.float64) * (power.to(value.device) if isinstance(power, Tensor) else power)
    return whole.reshape(value.shape[1:])


def _divide(partial: Mean | Sum) -> Mean | Sum:
    if isinstance(partial, Sum):
        return partial
    total = float(partial.weight)
    if not total > 0:
        raise ValueError(f"Expected a positive total weight of the clients that answered, but got {total}; see weight=")
    return Mean(tree.map(lambda leaf: leaf / total, partial.value), partial.weight)


def _add_all(partials: Sequence[Tree]) -> Tree:
    total = partials[0]
    for partial in partials[1:]:
        total = tree.add(total, partial)
    return total
