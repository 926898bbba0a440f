"""Tests that tell two neighbouring data sets apart: what a claim leaves of them, and the best against a Gaussian."""

from __future__ import annotations

import math

import torch
from scipy.special import ndtr, ndtri
from torch import Tensor


def most_detections(false_alarms: Tensor, epsilon: float, delta: float) -> Tensor:
    """Return the largest rate of detections that (9.5) leaves at these rates of false alarms, if a claim holds."""
    other = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return torch.minimum(delta + math.exp(epsilon) * false_alarms, other).clamp(0, 1)


def gaussian_detections(false_alarms: Tensor, noise: float) -> Tensor:
    """Return the ROC of the best test against one release of Gaussian noise: Φ(Φ⁻¹(α) + 1/z)."""
    return torch.from_numpy(ndtr(ndtri(false_alarms.to(torch.float64).numpy()) + 1 / noise))
