"""Factors of expectation propagation whose tilted moments are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import projections


def conjugate(levels: Tensor) -> tuple[projections.Projection, ft.data.FederatedData]:
    """A normal factor: y_k ~ N(φ, I / n_k), whose tilted moments are exact."""
    data = ft.data.from_tensors([(level[None].expand(n + 1, -1).clone(),) for n, level in enumerate(levels)])

    def project(cavity: Moments, data: Any, key: Tensor) -> projections.Projected:
        prior = gaussian.natural(cavity)
        count = data.count.to(torch.float64)
        eye = gaussian.pack(torch.eye(levels.shape[1], dtype=torch.float64)).expand(len(count), -1)
        tilted = tree.add(prior, Natural(data.batch[0].sum(1), count[:, None] * eye))
        return projections.Projected(gaussian.moments(tilted), cavity)

    return project, data
