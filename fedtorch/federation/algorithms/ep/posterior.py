"""The posterior of the shared parameters from a run of expectation propagation."""

from __future__ import annotations

from torch.distributions import MultivariateNormal

from fedtorch.federation.algorithms.ep._checked import checked
from fedtorch.federation.runs.run import Run
from fedtorch.models import gaussian


def posterior(run: Run, *, tolerance: float = 0.01, node: int | None = None) -> MultivariateNormal:
    """Return q(φ) of a run.

    A `RuntimeWarning` is given if the run has not converged, if clients keep old sites, or if q is more than four sds
    of the prior from the prior mean.

    Args:
        run: a run of `ep`.
        tolerance: as for `settled`; `math.inf` accepts runs that have not converged.
        node: in a run `ft.without_server`, the node whose q is returned; the nodes' q differ within the tolerance of
            the consensus. Default: the mean of their natural parameters.

    Raises:
        TypeError: a run of another algorithm.
        ValueError: a node that is not there, or in a run that has a server.
        RuntimeError: q is no density, or no cavity is, as with an improper prior and one client.
    """
    return MultivariateNormal(*gaussian.moments(checked(run, tolerance, node).server.posterior))
