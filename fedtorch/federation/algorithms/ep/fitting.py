"""Runs of expectation propagation until q stands still, and what they report."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.algorithms.ep.state import Server
from fedtorch.federation.coordinator import Round, run
from fedtorch.federation.population import Population
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Natural
from fedtorch.models.hierarchical import Model

__all__ = ["Fit", "RoundReport", "devices", "fit", "posterior"]

_SHOWN = 5  # names of clients in a warning
_LARGEST = 10  # change of a last round, in tolerances


@dataclass(frozen=True)
class RoundReport:
    """What a round has moved."""

    round: int
    mean_change: float  # the greatest change of a mean of q, in its sd; NaN where q was no density
    sd_change: float  # the greatest relative change of an sd of q
    damping: float  # of the round's steps
    remaining: float  # what the changes, going on to shrink as they last did, still add up to, in sd
    improper: float  # the share of clients whose cavity was no density
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Fit:
    """A finished run.

    Attributes:
        posterior: q(φ).
        converged: whether the last changes were below the tolerance.
        rounds: one report each.
        last: the last `Round`, with the clients' sites.
    """

    posterior: MultivariateNormal
    converged: bool
    rounds: tuple[RoundReport, ...]
    last: Round


def fit(
    algorithm: Algorithm,
    population: Population,
    *,
    tolerance: float = 0.01,
    rounds: int = 50,
    patience: int = 1,
    **arguments: Any,
) -> Fit:
    """Runs `ep` until q stands still.

    Args:
        algorithm: made by `ep`.
        population: who computes.
        tolerance: on what the coming rounds would still add up to, in sd, if the changes of means (in sd) and sds
            (relative) went on to shrink as they last did; the last changes must be below ten times as much.
        rounds: at most so many, the summed round included; without convergence a `RuntimeWarning` says so.
        patience: how many rounds in a row must be below the tolerance; with a cohort of M clients, some K / M.
        **arguments: of `ft.run`: seed, cohort, faults, parameters, start.

    Raises:
        RuntimeError: after the last round q is no density, or no cavity is, as with an improper prior and one client.
    """
    reports: list[RoundReport] = []
    still, last = 0, None
    for last in run(algorithm, population, rounds=rounds, **arguments):
        mean, sd, damping, remaining, improper = (float(part) for part in last.server.moved)
        change = max(mean, sd) / damping
        reports.append(RoundReport(last.number, mean, sd, damping, remaining, improper, last.bytes_up, last.bytes_down))
        near = remaining <= tolerance and change <= _LARGEST * tolerance
        still = still + 1 if near or (change <= tolerance / _LARGEST and remaining < math.inf) else 0
        if still == patience:
            break
    if last is None:
        raise ValueError(f"Expected at least one round, but got rounds={rounds}")
    if not bool(gaussian.is_proper(last.server.posterior)):
        raise RuntimeError(
            f"Expected the posterior to be a density after {last.number} rounds, but got an indefinite precision; use "
            "a proper prior, more clients, or less damping="
        )
    if float(last.server.moved.improper) == 1:
        raise RuntimeError(
            "Expected a client whose cavity is a density, but got none: what the prior and the others know of what "
            "is shared is not enough; use a proper prior, or more clients"
        )
    if still < patience:
        warnings.warn(
            f"Not converged after {last.number} rounds: the last moved a mean by {reports[-1].mean_change:.2g} sd and "
            f"an sd by {reports[-1].sd_change:.2g} of itself; allow more rounds or less damping=",
            RuntimeWarning,
            stacklevel=2,
        )
    _warn_of_clients(last, population.data.names)
    return Fit(posterior(last.server), still >= patience, tuple(reports), last)


def _warn_of_clients(last: Round, names: Sequence[str]) -> None:
    """Says whose sites are not renewed any more."""
    whys = {
        "improper": "the cavity is no density, as the prior and the others know too little of what is shared",
        "failed": "the projection found no moments; use more nodes, a narrower prior, or less damping=",
    }
    for figure, why in whys.items():
        which = [names[k] for k in last.ids[last.info[figure] > 0].tolist()]
        if which:
            shown = ", ".join(map(repr, which[:_SHOWN])) + (", …" if len(which) > _SHOWN else "")
            warnings.warn(
                f"Expected a new site of every client in the last round, but {len(which)} kept an old one ({shown}): "
                f"{why}",
                RuntimeWarning,
                stacklevel=3,
            )


def posterior(server: Server) -> MultivariateNormal:
    """q(φ) of a server's state.

    Raises:
        ValueError: it is no density yet.
    """
    return gaussian.distribution(server.posterior)


def devices(
    round: Round,
    algorithm: Algorithm,
    model: Model,
    data: FederatedData,
    *,
    given: Corrected | None = None,
) -> DevicePosterior:
    """Each device's own posterior given all devices' rows (section 4.2.1), made where its rows are.

    From its cavity, in which what the others know of φ is normal: with five devices that is good to one per cent of an
    sd. Or from the posterior of φ as `corrected` has found it, p(θ_k | all) = ∫ p(θ_k | φ, y_k) p(φ | all) dφ being a
    mixture over its nodes.

    Args:
        round: the last one.
        algorithm: made by `ep` from `model`.
        model: a hierarchical model.
        data: the rows that it was run on.
        given: the corrected posterior of φ, whose nodes every device hears; memory goes with devices × nodes ×
            coefficients², so ask `corrected` for fewer `points` where that is much.
    """

    def own(cavity: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        rows = model.prepare(block)
        if given is None:
            return model.devices(gaussian.moments(Natural(**cavity)), rows)
        nodes, weights = tree.expand((given.nodes, given.weights), len(block.count))
        return model.given(nodes, weights, rows)

    return round.clients.evaluate(algorithm.outbox(round.server), data, own)
