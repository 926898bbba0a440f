r"""LEAF's synthetic federation: 1 000 devices, five classes of 60 inputs, models about cluster centres.

Device k has min(⌊e^{N(3, 2²)}⌋ + 5, 1 000) rows. With Q ~ N(0, 1) of 61 × 5 numbers a cluster and a centre
:math:`\mu \sim N(N(0, 1), 1)`, its model is :math:`w_k = Q u_k`, :math:`u_k \sim N(\mu, 0.1^2)`; inputs are normal
about :math:`v_k \sim N(N(0, 1), 1)` with variances :math:`j^{-1.2}`, labels the largest of
:math:`(1, x) w_k + N(0, 0.1^2)`.

As LEAF's script has it by default there is one cluster, and :math:`u_k` a number: two devices whose numbers have one
sign then label alike but for the noise, as the largest logit does not depend on their size, and differ in their inputs.

Draws come in the script's order from one generator, so that rows are those of its seed.

Source: Caldas et al. (2018), "LEAF: a benchmark for federated settings"; github.com/TalwalkarLab/leaf,
`data/synthetic/README.md`, `data_generator.py` and `main.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import fedtorch as ft

DEVICES, FEATURES, CLASSES, SEED = 1000, 60, 5, 931231
TRAINED = 0.6  # of each device's rows, as its README suggests


def rows(seed: int = SEED, devices: int = DEVICES) -> list[tuple[Tensor, Tensor]]:
    """(x, y) of every device; sizes and rows are drawn from generators of the same seed, as in the script."""
    sizes = np.minimum(np.random.RandomState(seed).lognormal(3, 2, devices).astype(int) + 5, 1000)
    draws, made = np.random.RandomState(seed), []
    basis = draws.normal(0, 1, (FEATURES + 1, CLASSES, 1))
    covariance = np.diag(np.arange(1, FEATURES + 1) ** -1.2)
    centre = draws.normal(draws.normal(), 1, 1)
    for size in sizes:
        draws.choice(1, p=[1.0])  # the cluster
        x = draws.multivariate_normal(draws.normal(draws.normal(), 1, FEATURES), covariance, size)
        weight = basis @ draws.normal(centre, 0.1)
        logits = x @ weight[1:] + weight[0] + draws.normal(0, 0.1, (size, CLASSES))
        made.append((torch.from_numpy(x), torch.from_numpy(logits.argmax(1))))
    return made


def generate(seed: int = SEED, devices: int = DEVICES) -> tuple[ft.data.FederatedData, ft.data.FederatedData]:
    """(training rows, test rows) of every device."""
    return ft.data.from_tensors(rows(seed, devices)).split(TRAINED, seed=seed)
