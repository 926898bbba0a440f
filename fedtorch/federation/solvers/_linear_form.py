"""Linear heads of any kind as one matrix of coefficients on features, the intercept at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedtorch.models.linear import LinearHead
from fedtorch.tree import Tree


class LinearForm(NamedTuple):
    """Coefficients θ on features, of any of the modules."""

    outputs: int  # o
    design: Callable[[Tensor], Tensor]  # inputs (K, N, ...) -> features (K, N, p)
    join: Callable[[Tree], Tensor]  # parameters -> θ (K, p, o)
    split: Callable[[Tensor], dict[str, Tensor]]  # its inverse


def linear_form(module: nn.Module) -> LinearForm:
    """The form of an `nn.Linear` or a `LinearHead`; raises TypeError for another module."""
    if isinstance(module, LinearHead):
        return LinearForm(
            1,
            module.block_design,
            lambda tensors: tensors["coefficients"][..., None],
            lambda θ: {"coefficients": θ[..., 0]},
        )
    if not isinstance(module, nn.Linear):
        raise TypeError(
            f"Expected an nn.Linear or a LinearHead, but got {type(module).__name__}; use ft.gradient_descent"
        )
    features, bias = module.in_features, module.bias is not None

    def design(x: Tensor) -> Tensor:
        if x.shape[2:] != (features,):
            raise ValueError(f"Expected inputs of shape ({features},), but got {tuple(x.shape[2:])}")
        x = x.to(torch.float64)
        return torch.cat([x, torch.ones_like(x[..., :1])], -1) if bias else x

    def join(tensors: Tree) -> Tensor:
        weight = tensors["weight"].mT
        return torch.cat([weight, tensors["bias"][:, None, :]], 1) if bias else weight

    def split(joined: Tensor) -> dict[str, Tensor]:
        weight = {"weight": joined[:, :features].mT}
        return {**weight, "bias": joined[:, -1]} if bias else weight

    return LinearForm(module.out_features, design, join, split)
