"""What nodes say to each other to find the point from which all go on; of `resuming`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Entered(NamedTuple):
    """Down: which run it is, and how nodes speak about it."""

    run: Tensor  # (16,) uint8
    protocol: Tensor  # () int64


class Held(NamedTuple):
    """Up: the points of the run that a party can go on from."""

    points: Tensor  # (m,) int64


class From(NamedTuple):
    """Down: the point from which all go on."""

    point: Tensor  # () int64


class Done(NamedTuple):
    """Up and down: that everything is kept."""

    point: Tensor  # () int64


_NUMBER = torch.zeros((), dtype=torch.int64)
ENTERED, HELD = Entered(torch.zeros(16, dtype=torch.uint8), _NUMBER), Held(torch.zeros(0, dtype=torch.int64))
FROM, DONE = From(_NUMBER), Done(_NUMBER)
