"""Counts of integers for stacked clients, which confusion matrices and scores by class are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo

from fedtorch.stacked_layers._rules import in_front, register


def _counted(info: VmapInfo, dims: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
    """Count each row's integers in bins of its own, all rows at once."""
    values, weights, bins = args
    rows = in_front(info, values, dims[0])
    seen = _without_batches(rows)
    if seen.numel() and not 0 <= int(seen.min()) <= int(seen.max()) < bins:
        raise RuntimeError(
            f"Expected bincount under vmap to count integers from 0 to below minlength={bins}, for all rows' counts "
            f"have one length, but got {int(seen.min())} to {int(seen.max())}."
        )
    places = rows + bins * torch.arange(info.batch_size, device=rows.device).unsqueeze(1)
    weighed = None if weights is None else in_front(info, weights, dims[1]).flatten()
    return (torch.bincount(places.flatten(), weighed, info.batch_size * bins).unflatten(0, (info.batch_size, bins)),)


def _without_batches(tensor: Tensor) -> Tensor:
    """Return the tensor of all batches, that further levels of `vmap` have hidden."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


register(torch.ops.aten.bincount.default, _counted)
