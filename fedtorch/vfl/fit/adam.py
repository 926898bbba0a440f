"""Adam for sampled bounds, with restarts of blocked coordinates, and a measure of the drift of the parameters.

The first gradients of a bound may be many orders of magnitude larger than all later ones, as those of counts are.
Adam's second moments remember them for thousands of steps, in which nothing moves and the bound looks flat. So every
hundred steps, a coordinate whose second moment is more than a hundred times the mean square of its last hundred
gradients is restarted from these, if their mean is clearly not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_WINDOW = 100  # steps over which gradients are averaged
_SMALL = 0.01  # nats for a unit step: smaller gradients count as zero, however little noise they have
_BLOCKED = 100.0  # ratio of second moments above which a coordinate counts as blocked
_CERTAIN = 4.0  # standard errors above which a mean gradient is clearly not zero
_FEWEST = 10  # steps from which a standard error is estimated


class RestartingAdam(torch.optim.Adam):
    """`torch.optim.Adam`, fused, that restarts coordinates that its moments block.

    Args:
        parameters: to step.
        lr: learning rate.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1.0) -> None:
        super().__init__(parameters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step; every hundred steps, restart the coordinates that are blocked."""
        loss = super().step(closure)
        for group in self.param_groups:
            leaves = group["params"]
            # All gradients are one vector, so that a step makes few calls however many parameters there are.
            gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in leaves])
            if "recent" not in group:
                group["recent"] = {"steps": 0, "sum": torch.zeros_like(gradient), "squares": torch.zeros_like(gradient)}
            recent = group["recent"]
            recent["steps"] += 1
            recent["sum"].add_(gradient)
            recent["squares"].addcmul_(gradient, gradient)
            if recent["steps"] == _WINDOW:
                del group["recent"]
                sizes = [leaf.numel() for leaf in leaves]
                for leaf, *sums in zip(leaves, recent["sum"].split(sizes), recent["squares"].split(sizes)):
                    if leaf in self.state:
                        _renew(self.state[leaf], group["betas"][1], *(part.reshape(leaf.shape) for part in sums))
        return loss


class Drift:
    """Mean gradients over some steps in standard errors: large where parameters still drift.

    Args:
        leaves: parameters, `(B, ...)`.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves, self.count = [leaf for leaf in leaves if leaf.numel()], 0
        self.sums, self.squares = ([torch.zeros_like(leaf) for leaf in self.leaves] for _ in range(2))

    def add(self) -> None:
        """Add the gradients of a step."""
        self.count += 1
        for leaf, total, squares in zip(self.leaves, self.sums, self.squares):
            if leaf.grad is not None:
                total.add_(leaf.grad)
                squares.addcmul_(leaf.grad, leaf.grad)

    def largest(self, size: int) -> Tensor:
        """Return the largest drift of all parameters, `(B,)`; infinite after fewer than ten steps."""
        if self.count < _FEWEST:
            return torch.full((size,), torch.inf, dtype=torch.float64)
        n = self.count
        each = [_drift(total / n, squares / n, n).flatten(1).amax(1) for total, squares in zip(self.sums, self.squares)]
        return torch.stack([part.expand(size) for part in each]).amax(0)


def _renew(state: dict[str, Tensor], beta: float, total: Tensor, squares: Tensor) -> None:
    """Restart the moments of blocked coordinates, from the sums of a window's gradients and of their squares."""
    mean, square = total / _WINDOW, squares / _WINDOW
    fresh = square * (1 - beta ** float(state["step"]))  # without Adam's correction for its start from zero
    blocked = (state["exp_avg_sq"] > _BLOCKED * fresh) & (_drift(mean, square, _WINDOW) > _CERTAIN)
    state["exp_avg_sq"].copy_(torch.where(blocked, fresh, state["exp_avg_sq"]))
    state["exp_avg"].masked_fill_(blocked, 0.0)


def _drift(mean: Tensor, square: Tensor, count: int) -> Tensor:
    """Return mean gradients in standard errors, 0 where they are small."""
    error = ((square - mean.square()).clamp(min=0) / (count - 1)).sqrt()
    return torch.where(mean.abs() > _SMALL, mean.abs() / error, 0.0)
