"""Operations that are made of others, by their parts: torch would call each client by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo

from fedtorch.stacked_layers._rules import all_in_front, has_rule, register

aten = torch.ops.aten
_BY_PARTS = (
    aten.cosine_embedding_loss,
    aten.gru_cell,
    aten.hinge_embedding_loss,
    aten.kl_div,
    aten.lstm_cell,
    aten.margin_ranking_loss,
    aten.poisson_nll_loss,
    aten.rnn_relu_cell,
    aten.rnn_tanh_cell,
    aten.triplet_margin_loss,
)
_LIBRARY = torch.library.Library("aten", "IMPL")


def _weight_norm(info: VmapInfo, dims: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
    """Return directions times their sizes over the norms of all dimensions but one, or of all."""
    directions, sizes = all_in_front(info, args[:2], dims[:2])
    over = [i for i in range(1, directions.dim()) if args[2] == -1 or i != args[2] % (directions.dim() - 1) + 1]
    norms = torch.linalg.vector_norm(directions, dim=over, keepdim=True)
    return (directions * (sizes.reshape(norms.shape) / norms),)


def _bilinear(info: VmapInfo, dims: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
    """Return x' W_j y + b_j for each j."""
    left, right, weight = all_in_front(info, args[:3], dims[:3])
    one, other = (each.reshape(len(each), -1, each.shape[-1]) for each in (left, right))
    outputs = torch.einsum("kni,koij,knj->kno", one, weight, other).reshape(*left.shape[:-1], -1)
    if args[3] is None:
        return (outputs,)
    bias = all_in_front(info, args[3:], dims[3:])[0]
    return (outputs + bias.reshape(len(bias), *[1] * (left.dim() - 2), -1),)


register(aten._weight_norm.default, _weight_norm)
register(aten.bilinear.default, _bilinear)
for _operation in _BY_PARTS:
    if not has_rule(_operation.default):
        _LIBRARY.impl(_operation._qualified_op_name, _operation.default.decompose, "FuncTorchBatched")
