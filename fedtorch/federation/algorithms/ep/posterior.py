"""The posterior of the shared parameters from a run of expectation propagation."""

from __future__ import annotations

from torch.distributions import MultivariateNormal

from fedtorch.federation.algorithms.ep._checked import checked
from fedtorch.federation.runs.run import Run
from fedtorch.models import gaussian


def posterior(run: Run, *, tolerance: float = 0.01, node: int | None = None) -> MultivariateNormal:
    """Return q(φ), which a run has found.

    A `RuntimeWarning` says so where the run has not converged, where clients keep old sites, and where q is
    more than four sds of the prior from its mean.

    Args:
        run: of `ep`.
        tolerance: as that of `settled`; `math.inf` does not ask for convergence.
        node: of a run `ft.without_server`, whose q it is: every node has one, and they differ by what the tolerance of
            the consensus leaves; default: the mean of their natural parameters.

    Raises:
        TypeError: a run of another algorithm.
        ValueError: a node that is not there, or in a run that has a server.
        RuntimeError: q is no density, or no cavity is, as with an improper prior and one client.
    """
    return MultivariateNormal(*gaussian.moments(checked(run, tolerance, node).server.posterior))
