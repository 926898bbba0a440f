"""What a client of `gradient_descent` or `lightning_fit` keeps between rounds."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from fedtorch import functional
from fedtorch.optimisers import State

__all__ = ["LocalState", "divided_buffers"]


class LocalState(NamedTuple):
    """What a client keeps between rounds; leaves `(K, ...)`."""

    optimizer: State  # empty if reset
    buffers: dict[str, Tensor]  # the client's own buffers
    steps: Tensor | None  # (K,) steps taken so far, None if reset


def divided_buffers(module: nn.Module, policy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the buffers that are averaged like parameters, those that each client keeps).

    Args:
        module: whose buffers.
        policy: "refuse" stacks none, "local" keeps all, "average" averages those of floating-point numbers.

    Raises:
        ValueError: the policy is none of these.
    """
    if policy not in ("refuse", "local", "average"):
        raise ValueError(f"Expected buffers='refuse', 'local' or 'average', but got {policy!r}")
    every = {} if policy == "refuse" else functional.buffers(module)
    averaged = {name: b for name, b in every.items() if policy == "average" and b.is_floating_point()}
    return averaged, {name: b for name, b in every.items() if name not in averaged}
