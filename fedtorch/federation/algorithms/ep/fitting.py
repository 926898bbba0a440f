"""When a run of expectation propagation has settled."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fedtorch.federation.runs.run import Run

_LARGEST = 10  # change of a last round, in tolerances
_READ = "mean_change", "sd_change", "damping", "remaining"


def settled(tolerance: float = 0.01, patience: int = 1) -> Callable[[Any], bool]:
    """Return a function of a run's history, for `until=`: whether q stands still.

    Args:
        tolerance: on what the coming rounds would still add up to, in sd, if the changes of means (in sd) and sds
            (relative) went on to shrink as they last did; the last changes must be below ten times as much.
        patience: how many rounds in a row must be below the tolerance; with a cohort of M clients, some K / M.
    """
    if patience < 1:
        raise ValueError(f"Expected patience of at least 1, but got {patience}")
    return partial(_settled, tolerance=tolerance, patience=patience)


def _settled(history: Any, *, tolerance: float, patience: int) -> bool:
    heard = np.flatnonzero(history["answered"])[-patience:]  # the other rounds repeat what the last one has moved
    return len(heard) == patience and all(_still(history, row, tolerance) for row in heard)


def _still(history: Any, row: int, tolerance: float) -> bool:
    mean, sd, damping, remaining = (float(np.asarray(history[name])[row]) for name in _READ)
    change = max(mean, sd) / damping
    near = remaining <= tolerance and change <= _LARGEST * tolerance
    return near or (change <= tolerance / _LARGEST and remaining < math.inf)


def converged(run: Run, tolerance: float = 0.01, patience: int = 1) -> bool:
    """Return whether a run's last rounds have `settled`."""
    return run.number > 0 and settled(tolerance, patience)(run.log)
