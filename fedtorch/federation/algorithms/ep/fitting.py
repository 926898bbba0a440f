"""When a run of expectation propagation has settled, and what it has found."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributions import MultivariateNormal

from fedtorch.federation.run import Run
from fedtorch.models import gaussian

_SHOWN = 5  # names of clients in a warning
_LARGEST = 10  # change of a last round, in tolerances
_SURPRISE = 4.0  # sds of what a prior says of a posterior mean
_READ = "mean_change", "sd_change", "damping", "remaining"
_WHYS = {
    "improper": "the cavity is no density, as the prior and the others know too little of what is shared",
    "failed": "the projection found no moments; use more nodes, a narrower prior, or less damping=",
}


def settled(tolerance: float = 0.01, patience: int = 1) -> Callable[[Any], bool]:
    """A function of a run's history, for `until=`: whether q stands still.

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
    """Whether a run's last rounds have `settled`."""
    return run.number > 0 and settled(tolerance, patience)(run.log)


def posterior(run: Run, *, tolerance: float = 0.01) -> MultivariateNormal:
    """q(φ), which a run has found.

    A `RuntimeWarning` says so where the run has not converged, where clients keep old sites, and where q is
    more than four sds of the prior from its mean.

    Args:
        run: of `ep`.
        tolerance: as that of `settled`; `math.inf` does not ask for convergence.

    Raises:
        TypeError: a run of another algorithm.
        RuntimeError: q is no density, or no cavity is, as with an improper prior and one client.
    """
    checked(run, tolerance)
    return MultivariateNormal(*gaussian.moments(run.server.posterior))


def checked(run: Run, tolerance: float) -> Any:
    """The model of a run whose q can be used; raises and warns like `posterior`, on behalf of its caller's caller."""
    if run.algorithm.settings.get("algorithm") != "ep":
        raise TypeError(f"Expected a run of ft.ep, but got one of {run.algorithm.settings.get('algorithm')}")
    if not bool(gaussian.is_proper(run.server.posterior)):
        raise RuntimeError(
            f"Expected the posterior to be a density after {run.number} rounds, but got an indefinite precision; use "
            "a proper prior, more clients, or less damping="
        )
    if float(run.server.moved.improper) == 1:
        raise RuntimeError(
            "Expected a client whose cavity is a density, but got none: what the prior and the others know of what "
            "is shared is not enough; use a proper prior, or more clients"
        )
    for warning in _warnings(run, tolerance):
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return run.algorithm.settings["model"]


def _warnings(run: Run, tolerance: float) -> Iterator[str]:
    """What a user must know: that q still moves, and whose sites are not renewed any more."""
    moved = run.server.moved
    if not converged(run, tolerance):
        yield (
            f"Not converged after {run.number} rounds: the last moved a mean by {float(moved.mean_change):.2g} sd and "
            f"an sd by {float(moved.sd_change):.2g} of itself; allow more rounds or less damping="
        )
    prior, q = gaussian.unpack(run.server.prior.precision), gaussian.moments(run.server.posterior)
    own = prior.diagonal() > 0
    if bool(own.any()):
        spread = torch.linalg.inv(prior[own][:, own])
        before = spread @ run.server.prior.shift[own]
        surprise = float(((q.mean[own] - before).square() / spread.diagonal()).sqrt().amax())
        if surprise > _SURPRISE:
            yield (
                f"Expected a posterior that the prior allows for, but got a mean {surprise:.1f} prior sds from the "
                "prior's: the prior is in conflict with the data, and the posterior may have several modes of which "
                "this is one; use a wider prior"
            )
    last = run.last  # unknown after a resumption, until there is another round
    for figure, why in _WHYS.items():
        which = [] if last is None else [run.population.names[k] for k in last.ids[last.info[figure] > 0].tolist()]
        if which:
            shown = ", ".join(map(repr, which[:_SHOWN])) + (", …" if len(which) > _SHOWN else "")
            expected = "Expected a new site of every client in the last round"
            yield f"{expected}, but {len(which)} kept an old one ({shown}): {why}"
