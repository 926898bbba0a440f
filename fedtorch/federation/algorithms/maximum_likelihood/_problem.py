"""The maximised function, the server's state, and the stopping rule of maximum likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtorch.federation.algorithms.maximum_likelihood import _newton as newton
from fedtorch.federation.algorithms.maximum_likelihood._newton import Expansion, Point
from fedtorch.models.gaussian import Natural
from fedtorch.models.hierarchical import Model


class MaximumServer(NamedTuple):
    """State of the server.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([y, y + 1.0])) for y in (0.0, 4.0, 5.0)])
        >>> model = hierarchical.linear(hierarchical.normal(1))
        >>> run = ft.run(ft.maximum_likelihood(model), ft.InProcess(data), rounds=12)
        >>> run.server.best.at[0].round(decimals=6)  # the mean of three means
        tensor(3.5000, dtype=torch.float64)
    """

    prior: Natural  # natural parameters of the first estimate
    at: Tensor  # (p,) point of the next round's evaluation, in the coordinates of `Problem`
    steps: Tensor  # (p,) distances between its nodes
    best: Point  # the most likely one so far
    reached: Tensor  # () best value of the maximised function
    gain: Tensor  # () log likelihood that an undamped step from there would add
    damping: Tensor  # ()
    version: Tensor  # rounds that have been aggregated
    population: Tensor  # number of clients


class Problem(NamedTuple):
    """The maximised function, in coordinates with boundaries at infinity: φ with correlations as Fisher's z.

    If a correlation is estimated as ±1, one of ζ's variances goes to zero while a dependence grows without bound, along
    a curve; in these coordinates it is a direction.
    """

    model: Model
    means: int
    restricted: bool
    units: float = (
        0.0  # log |det| of the map from means to the units of a formula's columns, for means that are integrated out
    )

    @staticmethod
    def of(model: Model, restricted: bool) -> Problem:
        """Return the problem of a model."""
        means, units = model.hierarchy.mean.shape[1], 0.0
        if restricted and model.design is not None:
            units = float(torch.linalg.slogdet(model.design.back()).logabsdet)
        return Problem(model, means, restricted, units)

    def coordinates(self, phi: Tensor) -> Tensor:
        """Return the coordinates of φ in which steps are taken, `(..., p)`."""
        return self._with_scales(phi, back=False)

    def phi(self, coordinates: Tensor) -> Tensor:
        """Return φ of these coordinates, `(..., p)`."""
        return self._with_scales(coordinates, back=True)

    def _with_scales(self, at: Tensor, *, back: bool) -> Tensor:
        turned, scales = self.model.hierarchy.coordinates, len(self.model.hierarchy.names)
        if turned is None:
            return at
        between = (turned.back if back else turned.of)(at[..., self.means : scales])
        return torch.cat([at[..., : self.means], between, at[..., scales:]], -1)

    @property
    def nodes(self) -> Tensor:
        """Return the nodes of a round in steps, `(R, p)`."""
        return newton.nodes(self.means, len(self.model.names) - self.means, self.restricted)

    def around(self, point: Point) -> Expansion:
        """Return the likelihood that is maximised, around a point."""
        expansion = newton.expansion(point, self.means, self.restricted)
        return expansion._replace(value=expansion.value + self.units)


def maximised(tolerance: float = 1e-10) -> Callable[[Any], bool]:
    """Build a stopping rule for `until=`: whether another step would gain less than the tolerance.

    Args:
        tolerance: gain in log likelihood by another step; with 1e-10, estimates are within 1e-5 standard errors of the
            maximum if the likelihood is near quadratic.

    Example:
        >>> maximised()({"gain": [3.0, 1e-4]}), maximised()({"gain": [1e-4, 1e-12]})
        (False, True)
    """
    return lambda history: bool(np.asarray(history["gain"])[-1] <= tolerance)
