r"""Clients' coefficients given the maximum likelihood estimates of the variances.

Given ζ = ζ̂ and a flat prior, the shared μ is normal about its estimate, μ ~ N(μ̂, C) with C the inverse of the
likelihood's curvature in μ. A client's coefficients are those given its rows and φ = (μ, ζ̂), mixed over μ:

.. math:: E[\theta_k] = m_k(\hat\mu), \qquad \mathrm{Cov}[\theta_k] = V_k(\hat\mu) + J_k C J_k', \qquad
    J_k = \partial m_k / \partial \mu',

with m_k and V_k the moments of p(θ_k | μ, ζ̂, y_k). For the linear model, whose m_k is linear in μ, this is exact: best
linear unbiased prediction and the variance of its error. For others it is first order, with J_k from differences over a
standard error. The uncertainty of the variances is ignored, so intervals are shorter than those of `ft.ep`.

Source: Henderson (1975), "Best linear unbiased estimation and prediction under a selection model", Biometrics 31.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedtorch import random
from fedtorch.federation.algorithms.ep.estimates import spread_nodes
from fedtorch.federation.algorithms.ep.hierarchical import COEFFICIENTS, Sites
from fedtorch.federation.algorithms.maximum_likelihood.estimates import checked
from fedtorch.federation.posterior import Coefficients, Draws
from fedtorch.federation.runs.holders import ask
from fedtorch.federation.runs.posterior_draws import given_shared
from fedtorch.federation.runs.run import Run
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments


@dataclass(frozen=True)
class Maximised(Sites):
    """The posterior by maximum (restricted) likelihood; shared parameters come from `named`.

    A `tolerance` is on the distance to the maximum in standard errors, as that of `ft.ep` is in sds.

    Attributes:
        model: a `hierarchical.Model`.
        restricted: whether means are integrated out.
    """

    model: Any = None
    restricted: bool = False
    questions = frozenset({"coefficients", "variables", "effects"})

    def shared(self, run: Run, tolerance: float) -> Moments:
        """Return φ̂, and the covariance of the means given the variances."""
        problem, phi, best = checked(run, 0.5 * tolerance**2)  # gain of a step of this many standard errors
        m = problem.means
        factor, failed = torch.linalg.cholesky_ex(best.curvature[:m, :m])
        if bool(failed):
            raise RuntimeError(
                "Expected a likelihood that is curved in all means, but got one that is not, as where columns are "
                "linearly dependent: run.summary() names them; leave some out, or use ft.ep, with a prior"
            )
        covariance = torch.zeros_like(best.curvature)
        covariance[:m, :m] = torch.cholesky_inverse(factor)
        return Moments(phi, covariance)

    def clients(self, run: Run, q: Moments) -> DevicePosterior:
        """Return the posterior of the coefficients of each client given the estimated variances."""
        return self._mixed(run, q)

    def coefficients(self, run: Run, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of the run's clients."""
        _refuse(given)
        return self._sites(run, tuple(run.population.names), self.clients(run, self.shared(run, tolerance)))

    def deviations(self, run: Run, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the deviations of clients' random coefficients from the shared ones."""
        _refuse(given)
        return self._varying(run, self._mixed(run, self.shared(run, tolerance), deviations=True))

    def newcomers(self, run: Run, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of a client without rows, which vary as those of all clients do."""
        _refuse(given)
        q, means = self.shared(run, tolerance), self.model.hierarchy.mean
        m = means.shape[1]
        return self._of_others(
            run,
            q.mean[None],
            torch.ones_like(q.mean[:1]),
            means.to(q.mean) @ q.covariance[:m, :m] @ means.to(q.mean).mT,
        )

    def draws(self, run: Run, draws: int, given: Any, tolerance: float, seed: int, *, even: bool = False) -> Draws:
        """Return draws of μ given the variances, for means; predictions that leave rows out need another ζ̂."""
        if not even:
            return super().draws(run, draws, given, tolerance, seed)
        _refuse(given)
        self._family()
        q, m = self.shared(run, tolerance), self.model.hierarchy.mean.shape[1]
        nodes, _ = spread_nodes(Moments(q.mean[:m], q.covariance[:m, :m]), draws)
        return given_shared(self.model, torch.cat([nodes, q.mean[m:].expand(len(nodes), -1)], 1), random.key(seed))

    def _mixed(self, run: Run, q: Moments, deviations: bool = False) -> DevicePosterior:
        """Return the posterior of θ_k, or of θ_k - Aμ, from the clients' at μ̂ and at points a standard error beside
        it.
        """
        m = self.model.hierarchy.mean.shape[1]
        root = torch.linalg.cholesky(q.covariance[:m, :m]).mT
        at = q.mean + torch.nn.functional.pad(
            torch.cat([torch.zeros_like(root[:1]), root, -root]), (0, len(q.mean) - m)
        )
        weights = torch.full_like(at[:, 0], 1 / len(at))
        posterior: DevicePosterior = ask(
            run, COEFFICIENTS, {"phi": at, "weights": weights}, linear=True, deviations=deviations
        )
        return posterior


def _refuse(given: Any) -> None:
    """Refuse nodes of the posterior of φ, which belong to another method."""
    if given is not None:
        raise TypeError(
            "Expected no given=, by which ft.inference corrects fits of ft.ep, but got one for a fit by maximum "
            "likelihood, whose intervals are conditional on its estimated variances; leave it out"
        )
