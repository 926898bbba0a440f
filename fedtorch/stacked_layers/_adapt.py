"""Layers of a module that run otherwise under `torch.vmap` than alone, with the same results."""

from __future__ import annotations

from torch import Tensor, nn

from fedtorch.stacked_layers._alone import CellGRU
from fedtorch.stacked_layers._attention import StackedAttention
from fedtorch.stacked_layers._linear import StackedLinear


class StackedGroupNorm(nn.GroupNorm):
    """Group normalisation of inputs in any order in memory, of which `vmap` cannot ask below PyTorch 2.14."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what `torch.nn.GroupNorm` does."""
        return super().forward(input.contiguous())


_STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.GroupNorm: StackedGroupNorm,
    nn.Linear: StackedLinear,
    nn.MultiheadAttention: StackedAttention,
    nn.GRU: CellGRU,
}
_ALONE: dict[type[nn.Module], type[nn.Module]] = {nn.GRU: CellGRU}

for _usual, _stacked in _STACKED.items():
    _stacked.__name__ = _usual.__name__  # by which errors name a user's layer


def adapt(module: nn.Module) -> None:
    """Let the layers of a module, which is changed, take the ways that `torch.vmap` can, or that are fast under it.

    Example:
        >>> import torch
        >>> layer = nn.TransformerEncoderLayer(4, 2, dropout=0.0, batch_first=True)
        >>> x = torch.ones(2, 5, 4)
        >>> before = layer(x)
        >>> adapt(layer)
        >>> torch.allclose(layer(x), before, atol=1e-6)
        True
    """
    for part in module.modules():
        part.__class__ = _STACKED.get(type(part), type(part))


def adapt_alone(module: nn.Module) -> None:
    """Let the layers of a module, which is changed, take the ways that are fast for one client.

    Example:
        >>> import torch
        >>> layer = nn.GRU(3, 4)
        >>> x = torch.ones(5, 2, 3)
        >>> before = layer(x)[0]
        >>> adapt_alone(layer)
        >>> torch.allclose(layer(x)[0], before, atol=1e-6)
        True
    """
    for part in module.modules():
        part.__class__ = _ALONE.get(type(part), type(part))
