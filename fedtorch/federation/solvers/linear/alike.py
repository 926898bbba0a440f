"""Recognise modules whose training step does the same operations in every step, from their code alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedtorch.federation.solvers.linear.straight_line import StraightLine, straight_line
from fedtorch.federation.solvers.objective import Objective
from fedtorch.models.linear import LinearHead, raw

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_POOLING = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh)
_SOFTMAX = (nn.Softmax, nn.LogSoftmax)
_SHAPES = (nn.Sequential, nn.Flatten, nn.Unflatten, nn.Identity)
_LOSSES = (nn.MSELoss, nn.L1Loss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.SmoothL1Loss)
_OTHERS = (nn.Linear, LinearHead, nn.LayerNorm, nn.Embedding)
_KNOWN = {*_CONVOLUTIONS, *_POOLING, *_ACTIVATIONS, *_SOFTMAX, *_SHAPES, *_LOSSES, *_OTHERS}
_OF_LOSSES = (F.mse_loss, F.l1_loss, F.cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss)
_MORE = (F.nll_loss, F.smooth_l1_loss, F.log_softmax, F.softmax, F.softplus, F.gelu, F.silu, F.elu, F.leaky_relu)
_SIMPLE = (F.relu, F.max_pool2d, F.avg_pool2d, torch.relu, torch.tanh, torch.sigmoid, torch.flatten, torch.exp)
# Methods of tensors by the same names do the same.
_CALLS = dict.fromkeys((*_OF_LOSSES, *_MORE, *_SIMPLE))


def same_in_every_step(objective: Objective) -> StraightLine | None:
    """Return the code of a module whose steps do the same operations, None unless its code shows that they do.

    Example:
        >>> import torch
        >>> module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
        >>> same_in_every_step(Objective(module, F.mse_loss)) is not None
        True
        >>> same_in_every_step(Objective(module, lambda output, target: F.mse_loss(output, target))) is None
        True
    """
    module, loss = objective.module, objective.loss
    if objective.metrics.recorders or any(True for _ in module.buffers()):
        return None
    if objective.supervised and not (any(loss is each for each in _CALLS) or type(loss) in _LOSSES):
        return None
    if any(isinstance(part, LinearHead) and part.feature_map is not raw for part in module.modules()):
        return None
    return straight_line(module, _KNOWN, _CALLS)
