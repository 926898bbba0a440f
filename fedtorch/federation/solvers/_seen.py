"""What clients have told of their steps."""

from __future__ import annotations

import torch
from torch import Tensor


class Seen:
    """Values of all clients in each step, of which each client's own steps count; added up at the end."""

    def __init__(self, total: Tensor) -> None:
        self.total = total
        self.values: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, step: int, values: dict[str, Tensor]) -> None:
        """Takes in one step."""
        for name, value in values.items():
            self.values.setdefault(name, []).append((step, value.detach()))

    def means(self) -> dict[str, Tensor]:
        """`(K,)` each; NaN for what a client has not told."""
        means = {}
        for name, seen in self.values.items():
            values = torch.stack([value for _, value in seen])
            active = torch.tensor([step for step, _ in seen])[:, None] < self.total
            active = active.to(values.device)
            means[name] = torch.where(active, values, 0.0).sum(0) / active.sum(0)
        return means
