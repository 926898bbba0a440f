"""Checks of a finished run of expectation propagation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fedtorch import tree
from fedtorch.federation.algorithms.consensus import at_node
from fedtorch.federation.algorithms.ep._server import EPServer
from fedtorch.federation.algorithms.ep.fitting import converged, unidentified
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.models import gaussian
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.empty_levels import refuse_crossed
from fedtorch.models.hierarchical.families import GAUSSIAN

_SHOWN = 5  # names of clients in a warning
_SURPRISE = 4.0  # largest distance of a posterior mean from the prior mean, in prior sds
_WIDER = 1.01  # largest posterior sd, in prior sds
_WHYS = {
    "improper": "the cavity is no density, as the prior and the others know too little of what is shared",
    "failed": "the projection found no moments, or such as rows cannot have; use more nodes, a narrower prior, or less "
    "damping=",
}


class Checked(NamedTuple):
    """The checked result of a run."""

    model: Any
    server: EPServer  # of a run without a server: a node's copy or the mean
    nodes: int | None  # number of nodes in a run without a server


def checked(run: Run, tolerance: float, node: int | None = None) -> Checked:
    """Return the model and server, on the CPU, of a run whose q can be used; raise and warn as `posterior`."""
    if not isinstance(run.server, EPServer):
        raise TypeError(f"Expected a run of ft.ep, but got one of {run.algorithm.settings.get('algorithm')}")
    copies, server = run.server.version.ndim > 0, tree.to(run.server, "cpu")  # on the model's device
    if copies:
        server = at_node(server, node)
    elif node is not None:
        raise ValueError(f"Expected a run without a server to ask node {node}, but got one with; leave node= away")
    if not bool(gaussian.is_proper(server.posterior)):
        raise RuntimeError(
            f"Expected the posterior to be a density after {run.number} rounds, but got an indefinite precision; use "
            "a proper prior, more clients, or less damping="
        )
    if float(server.moved.improper) == 1:
        raise RuntimeError(
            "Expected a client whose cavity is a density, but got none: the prior and the other clients' sites do not "
            "determine the shared parameters; use a proper prior, or more clients"
        )
    model = posterior_of(run.algorithm).model
    if isinstance(model, Model) and model.ordered is not None and model.ordered.differences:
        q, means = gaussian.moments(server.posterior), model.hierarchy.mean.to(server.posterior.shift)
        m = means.shape[1]
        refuse_crossed(model.ordered, means @ q.mean[:m], means @ q.covariance[:m, :m] @ means.mT)
    for warning in _warnings(run, server, tolerance):
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return Checked(model, server, len(run.server.version) if copies else None)


def _warnings(run: Run, server: EPServer, tolerance: float) -> Iterator[str]:
    """List warnings for the user: q still moves, or sites are no longer updated."""
    moved = server.moved
    if not converged(run, tolerance):
        yield unidentified(run, "the prior decides between them, by steps that may never settle") or (
            f"Not converged after {run.number} rounds: the last moved a mean by {float(moved.mean_change):.2g} sd and "
            f"an sd by {float(moved.sd_change):.2g} of itself; allow more rounds or less damping="
        )
    prior, q = gaussian.unpack(server.prior.precision), gaussian.moments(server.posterior)
    with_prior = prior.diagonal() > 0
    if bool(with_prior.any()):
        spread = torch.linalg.inv(prior[with_prior][:, with_prior])
        before = spread @ server.prior.shift[with_prior]
        surprise = float(((q.mean[with_prior] - before).square() / spread.diagonal()).sqrt().amax())
        if surprise > _SURPRISE:
            yield (
                f"Expected a posterior that the prior allows for, but got a mean {surprise:.1f} prior sds from the "
                "prior's: the prior is in conflict with the data, and the posterior may have several modes of which "
                "this is one; use a wider prior"
            )
        model = posterior_of(run.algorithm).model
        if isinstance(model, Model) and model.family not in (None, GAUSSIAN):  # integrals without a closed form
            ratios = (q.covariance.diagonal()[with_prior] / spread.diagonal()).sqrt().tolist()
            names = [name for name, has in zip(model.names, with_prior.tolist()) if has]
            wide = [f"{name!r} {ratio:.3g}" for name, ratio in zip(names, ratios) if ratio > _WIDER]
            if wide:
                shown = ", ".join(wide[:_SHOWN]) + (", …" if len(wide) > _SHOWN else "")
                yield (
                    f"Expected posterior sds below the prior's, but got so many times those: {shown}. Rows can widen a "
                    "posterior where variances are unknown; see whether given=corrected(run) says the same"
                )
    last = run.last  # absent after a resumption until the next round; with masks no diagnostics are sent
    for figure, why in _WHYS.items():
        flags = None if last is None else last.info.get(figure)
        which = [] if last is None or flags is None else [run.population.names[k] for k in last.ids[flags > 0].tolist()]
        if which:
            shown = ", ".join(map(repr, which[:_SHOWN])) + (", …" if len(which) > _SHOWN else "")
            expected = "Expected a new site of every client in the last round"
            yield f"{expected}, but {len(which)} kept an old one ({shown}): {why}"
