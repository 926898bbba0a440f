"""How much of a device's memory the clients that run at once may take."""

from __future__ import annotations

import torch

_BYTES = 512 * 2**20  # on the CPU, where more than caches hold gains nothing
_SHARE = 4  # of a CUDA device's free memory, a quarter: activations and what an optimiser keeps want the rest


def block_bytes(device: torch.device) -> int:
    """What a block of clients may take: 512 MiB, or a quarter of what is free on a CUDA device."""
    if device.type != "cuda":
        return _BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return free // _SHARE
