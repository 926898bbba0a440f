"""Matrices by colour: inclusion probabilities and the correlation between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedtorch.plots.style import MOST_BARS, literal, new_figure, square

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedtorch.models.low_rank import LowRank

_MOST_DEVICES = 500  # most devices in a drawn correlation matrix


@literal()
def inclusion_map(inclusion: Tensor, names: Sequence[str], down: str = "response", across: str = "covariate") -> Figure:
    """Draw posterior inclusion probabilities of ordered pairs of variables, darker the higher, without the diagonal.

    Args:
        inclusion: `(p, p)`, such as `graphical.square` gives; row j is the regression of variable j.
        names: of the p variables.
        down: meaning of a row.
        across: meaning of a column.

    Raises:
        ValueError: not a square matrix, or not a name for each of its rows.

    Example:
        >>> import torch, fedtorch as ft
        >>> figure = ft.plots.inclusion_map(torch.tensor([[0.0, 0.75], [0.25, 0.0]]), ["age", "pressure"])
        >>> figure.axes[0].images[0].get_array().tolist()
        [[None, 0.75], [0.25, None]]
    """
    values = square(inclusion, names)
    np.fill_diagonal(values, np.nan)
    figure = new_figure(2.6 + 0.36 * len(names), 1.8 + 0.36 * len(names))
    axes = figure.subplots()
    axes.set_facecolor("0.93")
    image = axes.imshow(values, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="none")
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    figure.colorbar(image, ax=axes, label="posterior inclusion probability", shrink=0.8)
    return figure


@literal()
def device_correlation(covariance: LowRank, names: Sequence[str] | None = None) -> Figure:
    """Draw the correlation between devices that `ft.matrix_normal` has learnt, related devices side by side.

    Devices are ordered by their angle in the plane of the two leading directions of Ω.

    Args:
        covariance: Ω, such as `round.server.covariance`; of many devices, some are drawn, evenly spaced.
        names: of all devices, of which a few are labelled.

    Raises:
        ValueError: another number of names than of devices.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import low_rank
        >>> covariance = low_rank.LowRank.from_factor(torch.tensor(1.0), torch.tensor([[1.0], [-1.0]]), rank=1)
        >>> figure = ft.plots.device_correlation(covariance)
        >>> figure.axes[0].images[0].get_array().round(3).tolist()  # of [[2, −1], [−1, 2]]
        [[1.0, -0.5], [-0.5, 1.0]]
    """
    devices = len(covariance.vectors)
    if names is not None and len(names) != devices:
        raise ValueError(f"Expected {devices} names, one per device, but got {len(names)}")
    shown = torch.linspace(0, devices - 1, min(devices, _MOST_DEVICES)).round().long()
    plane = (covariance.vectors * covariance.values.sqrt())[shown, :2]
    plane = torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
    shown = shown[torch.atan2(plane[:, 1], plane[:, 0]).argsort(stable=True).cpu()]
    figure = new_figure(5.2, 4.4)
    axes = figure.subplots()
    matrix = covariance.correlation(shown.to(covariance.vectors.device)).cpu().numpy()
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="correlation")
    axes.set_xlabel("device")
    axes.set_ylabel("device")
    step = -(-len(shown) // MOST_BARS)
    if names is not None:
        axes.set_yticks(range(0, len(shown), step), [names[k] for k in shown[::step].tolist()])
        axes.set_xticks([])
    return figure
