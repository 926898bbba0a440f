r"""A user's own Pyro model as the local factor of expectation propagation.

The model takes the shared parameters φ `(p,)` and a client's rows, samples its own latent variables θ and observes::

    def model(phi, x, y):
        slope = pyro.sample("slope", Normal(phi[0], phi[1].exp()))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", Poisson((slope * x[:, 0]).exp()), obs=y)

    algorithm = ft.ep(Factors(projections.quadrature(pyro_factor(model)), prior))

The factor f(φ) = ∫ p(y, θ | φ) dθ is integrated around the mode of θ, in unconstrained coordinates: the nodes of a
rule, moved to the mode and scaled by the curvature there, weigh what the normal approximation gets wrong. So θ must
be continuous and its support must not depend on φ.

Source: Yue, Kontar, Estrada Gómez (2022), section 4.2; Bingham et al. (2019), "Pyro".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.models.hierarchical.projections import LogFactor, minimised
from fedtorch.models.quadrature import QuadratureRule, default_rule

__all__ = ["pyro_factor"]


def pyro_factor(model: Callable[..., Any], *, rule: QuadratureRule | None = None) -> LogFactor:
    """Return log f_k(φ) of a Pyro model, for `fedtorch.models.hierarchical.projections`.

    Clients are taken one after the other, each with exactly its rows; nodes of φ are taken at once by `torch.vmap`.

    Args:
        model: (φ `(p,)`, rows …) -> anything; the rows are the leaves of the data in order, `(n_k, ...)`.
        rule: nodes over the latent variables; default: `quadrature.default_rule`.

    Raises:
        ValueError: when it is used, a latent variable is discrete.

    >>> import pyro, torch, fedtorch as ft
    >>> from pyro.distributions import Normal
    >>> def model(phi, y):
    ...     level = pyro.sample("level", Normal(phi[0], 1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", Normal(level, 1.0), obs=y)
    >>> data = ft.data.from_tensors([(torch.tensor([2.0]),)])
    >>> phi = torch.tensor([[[0.0], [2.0]]]).double()  # of one client, two nodes
    >>> log_factor = pyro_factor(model)(phi, data.stack([0]))
    >>> (log_factor[0, 0] - log_factor[0, 1]).round(decimals=3)  # of N(2; φ, 2): −2² / 4
    tensor(-1., dtype=torch.float64)
    """

    def log_factor(phi: Tensor, data: Any) -> Tensor:
        evidence = []
        for k, count in enumerate(data.count.tolist()):
            rows = [_float64(leaf[k, :count]) for leaf in tree.leaves(data.batch)]
            evidence.append(_log_evidence(model, phi[k], rows, rule))
        return torch.stack(evidence) if evidence else phi.new_zeros(phi.shape[:2])

    return log_factor


def _float64(leaf: Tensor) -> Tensor:
    return leaf.to(torch.float64) if leaf.dtype.is_floating_point else leaf


def _log_evidence(model: Callable[..., Any], phi: Tensor, rows: list[Tensor], rule: QuadratureRule | None) -> Tensor:
    """Return log f at the nodes φ `(R, p)`, `(R,)`."""
    import pyro

    with pyro.validation_enabled(False):
        log_joint, size = _log_joint(model, phi[0], rows)

        def objective(theta: Tensor) -> Tensor:
            return -torch.vmap(log_joint)(theta, phi)

        if size == 0:
            return -objective(phi.new_zeros((len(phi), 0)))
        eye = torch.eye(size, dtype=phi.dtype, device=phi.device).expand(len(phi), -1, -1)
        mode, curvature = minimised(objective, phi.new_zeros((len(phi), size)), eye)
        factor = torch.linalg.cholesky_ex(curvature).L
        half = torch.linalg.solve_triangular(factor.mT, eye, upper=True)
        chosen = default_rule(size) if rule is None else rule
        nodes, weights = chosen.nodes.to(phi), chosen.weights.to(phi)
        ratios = [-objective(mode + half @ z) + 0.5 * z @ z for z in nodes]
        log = torch.stack(ratios, 1) + weights.log()
        normal = size / 2 * math.log(2 * math.pi) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return log.logsumexp(1) + normal


def _log_joint(
    model: Callable[..., Any], phi: Tensor, rows: list[Tensor]
) -> tuple[Callable[[Tensor, Tensor], Tensor], int]:
    """Return log p(y, θ | φ) with θ in unconstrained coordinates, and how many these are."""
    from pyro import poutine
    from torch.distributions import biject_to

    with torch.random.fork_rng(devices=[]):  # the prototype's draws must not move the global generator
        trace = poutine.trace(model).get_trace(phi, *rows)
    sites: list[tuple[str, Any, torch.Size]] = []
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site["is_observed"] or poutine.util.site_is_subsample(site):
            continue
        support: Any = getattr(site["fn"], "support", None)
        if support.is_discrete:
            raise ValueError(f"Expected continuous latent variables, but got a discrete {name!r}; sum it out first")
        transform = biject_to(support)
        sites.append((name, transform, transform.inv(site["value"]).shape))

    def log_joint(theta: Tensor, phi: Tensor) -> Tensor:
        values, jacobian, start = {}, theta.new_zeros(()), 0
        for name, transform, shape in sites:
            stop = start + math.prod(shape)
            free = theta[start:stop].reshape(shape)
            values[name] = transform(free)
            jacobian = jacobian + transform.log_abs_det_jacobian(free, values[name]).sum()
            start = stop
        conditioned = poutine.trace(poutine.condition(model, data=values)).get_trace(phi, *rows)
        return conditioned.log_prob_sum() + jacobian

    return log_joint, sum(math.prod(shape) for _, _, shape in sites)
