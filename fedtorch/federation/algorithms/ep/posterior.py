"""What a run of expectation propagation has found."""

from __future__ import annotations

from torch.distributions import MultivariateNormal

from fedtorch.federation.algorithms.ep._checked import checked
from fedtorch.federation.run import Run
from fedtorch.models import gaussian


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
