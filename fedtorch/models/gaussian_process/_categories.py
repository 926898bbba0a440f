"""Categorical inputs beside continuous ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class EmbedCategories(nn.Module):
    """Make each level of categorical inputs a learnt point, and let continuous columns pass.

    The kernel of the embedded inputs is a kernel of the categories, positive definite whatever the points; levels that
    behave alike come to lie close together. It is a feature extractor, shared by all units. Only differences of
    embedded points matter, so the kernel's lengthscales of the new columns are redundant but harmless.

    Args:
        dims: columns of the inputs.
        levels: by column, the number of its levels, whose codes are 0, 1, ….
        size: dimensions of the points of one column.

    Shapes: inputs `(..., N, dims)`; outputs `(..., N, dims − categorical columns + size · categorical columns)`.

    Raises:
        ValueError: a column that is not there, or fewer than two levels; or codes that are not levels.

    Source: Zhang, Tao, Chen and Apley (2020), "A latent variable approach to Gaussian process modeling with
    qualitative and quantitative factors"; the source of this package's model names such kernels as future work.

    Example:
        >>> import torch
        >>> from fedtorch.models.gaussian_process import ConvolvedGP, EmbedCategories
        >>> x = torch.tensor([[0.1, 0.0], [0.5, 2.0]])  # a number, and the code of one of three levels
        >>> EmbedCategories(2, {1: 3})(x).shape  # the number, and two coordinates of the level's point
        torch.Size([2, 3])
        >>> model = ConvolvedGP(x.double(), features=EmbedCategories(2, {1: 3}))
    """

    def __init__(self, dims: int, levels: dict[int, int], size: int = 2) -> None:
        super().__init__()
        for column, count in levels.items():
            if not 0 <= column < dims or count < 2:
                raise ValueError(
                    f"Expected columns of 0…{dims - 1} with at least 2 levels, but got {count} levels for column "
                    f"{column}"
                )
        self.levels = dict(levels)
        self.continuous = [column for column in range(dims) if column not in levels]
        self.out_dims = len(self.continuous) + size * len(levels)
        # On a circle, so that all levels start with the same distance to their neighbours.
        self.points = nn.ParameterList([nn.Parameter(_circle(count, size)) for count in levels.values()])

    def forward(self, x: Tensor) -> Tensor:
        """Return the continuous columns and each level's point."""
        parts = [x[..., self.continuous]]
        for (_column, count), points in zip(self.levels.items(), self.points):
            code = x[..., _column].long()
            one_hot = (code[..., None] == torch.arange(count, device=x.device)).to(x.dtype)
            parts.append(one_hot @ points)
        return torch.cat(parts, -1)

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless all codes of x `(..., N, dims)` are levels."""
        for column, count in self.levels.items():
            code = x[..., column]
            wrong = (code != code.round()) | (code < 0) | (code >= count)
            if bool(wrong.any()):
                raise ValueError(
                    f"Expected codes 0…{count - 1} in column {column}, but got {code[wrong].flatten()[0].item():g}, "
                    "which has no point; count it among the levels and train again"
                )


def _circle(count: int, size: int) -> Tensor:
    angle = 2 * math.pi * torch.arange(count) / count
    points = torch.zeros(count, size)
    points[:, 0] = angle.cos()
    if size > 1:
        points[:, 1] = angle.sin()
    return 0.5 * points if size > 1 else torch.linspace(-0.5, 0.5, count)[:, None]
