"""Convergence of a run of expectation propagation, and rows for which there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtorch.federation.populations.population import row_counts
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.models.hierarchical import Model

_LARGEST = 10  # largest change in the last round, in tolerances
_READ = "mean_change", "sd_change", "damping", "remaining"


@dataclass(frozen=True)
class Settled:
    """Stopping rule for a run's history: whether q has converged, and how many rounds remain.

    >>> history = {"answered": [3] * 4, "damping": [1.0] * 4, "mean_change": [9.0, 0.8, 0.4, 0.2],
    ...            "sd_change": [9.0, 0.1, 0.1, 0.1], "remaining": [9.0, 9.0, 0.4, 0.2]}
    >>> settled = Settled(tolerance=0.05, patience=1)
    >>> settled(history), settled.left(history)  # what remains is halved each round, and is a quarter of it in two
    (False, 2.0)
    """

    tolerance: float
    patience: int

    def __call__(self, history: Any) -> bool:
        return _settled(history, tolerance=self.tolerance, patience=self.patience)

    def left(self, history: Any) -> float | None:
        """Return the remaining rounds if changes shrink at the last rate; None if they do not shrink."""
        rows = np.flatnonzero(history["answered"])[-2:]
        mean, sd, damping, remaining = (np.asarray(history[name], float)[rows] for name in _READ)
        change = np.maximum(mean, sd) / damping
        if len(rows) < 2 or not 0 < change[1] < change[0] < math.inf or not math.isfinite(remaining[1]):
            return None
        far = max(float(remaining[1]), float(change[1]) / _LARGEST) / self.tolerance
        shrinks = math.log(float(change[0] / change[1]))
        return max(0.0, round(math.log(far) / shrinks, 6)) + self.patience - 1


def settled(tolerance: float = 0.01, patience: int = 1) -> Settled:
    """Build a stopping rule for `until=`: whether q has converged.

    Args:
        tolerance: on the sum of future changes, in sd, if changes of means (in sd) and sds (relative) continue to
            shrink at the last rate; the last changes must also be below ten times this.
        patience: consecutive rounds that must be below the tolerance; with a cohort of M clients, about K / M.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1).double()
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)])
        >>> model = hierarchical.linear(hierarchical.normal(1), noise=0.1)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=ft.settled())
        >>> 1 < run.number < 50
        True
    """
    if patience < 1:
        raise ValueError(f"Expected patience of at least 1, but got {patience}")
    return Settled(tolerance, patience)


def _settled(history: Any, *, tolerance: float, patience: int) -> bool:
    rounds_answered = np.flatnonzero(history["answered"])[
        -patience:
    ]  # the other rounds repeat the changes of the last one
    return len(rounds_answered) == patience and all(_still(history, row, tolerance) for row in rounds_answered)


def _still(history: Any, row: int, tolerance: float) -> bool:
    mean, sd, damping, remaining = (float(np.asarray(history[name])[row]) for name in _READ)
    change = max(mean, sd) / damping
    near = remaining <= tolerance and change <= _LARGEST * tolerance
    return near or (change <= tolerance / _LARGEST and remaining < math.inf)


def converged(run: Run, tolerance: float = 0.01, patience: int = 1) -> bool:
    """Return whether a run's last rounds have `settled`."""
    return run.number > 0 and settled(tolerance, patience)(run.log)


def unidentified(run: Run, shown: str = "what is shown is where the steps have ended") -> str:
    """Describe variances that the rows cannot identify separately; "" if there are none.

    Args:
        run: of a hierarchical model.
        shown: what the estimates are then.
    """
    model = posterior_of(run.algorithm).model
    if not isinstance(model, Model) or not model.hierarchy.random:
        return ""
    names, learnt = model.hierarchy.coefficients, len(model.names) > len(model.hierarchy.names)
    sds = ", ".join(f"sd({names[j]})" for j in model.hierarchy.random) if names else "the variances between clients"
    if len(run.population.names) < 2:
        return (
            f"Expected several clients for {sds}, but got one, of which rows say nothing of how clients differ: "
            f"{shown}; leave the random terms out"
        )
    if learnt and int(row_counts(run.population).max()) < 2:
        return (
            f"Expected several rows of some clients, but got one of each, so that {sds} and sigma are not told apart "
            f"(only the variance of a row is known), and {shown}: leave the random terms out"
        )
    return ""
