"""The optimiser of FLamby's FedAdagrad, which has a momentum that PyTorch's Adagrad lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Adagrad(torch.optim.Optimizer):
    """θ ← θ − lr m / (√v + ε), with m ← β m + (1 − β) g and v ← v + g², both from 0."""

    def __init__(self, params: Iterable[Any], lr: float, beta: float = 0.9, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["sum"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - group["beta"])
                state["sum"].add_(parameter.grad.square())
                parameter.addcdiv_(state["exp_avg"], state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])
