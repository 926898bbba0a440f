"""A Pyro model as a density of its latent variables in unconstrained coordinates, alone or under `torch.vmap`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree

_SPARE = 3  # rows of padding in the test whether a mask removes them
_SAME = 1e-9  # relative: densities that differ by less are the same


class Sites(NamedTuple):
    """A model's latent variables: name, map to the support, shape in unconstrained coordinates."""

    each: tuple[tuple[str, Any, torch.Size], ...]

    @property
    def size(self) -> int:
        """Return the number of coordinates."""
        return sum(math.prod(shape) for _, _, shape in self.each)


def filled_up(leaf: Tensor, mask: Tensor) -> Tensor:
    """Return rows `(K, N, ...)` with the client's first row at positions outside of `mask`."""
    return torch.where(tree.along(mask, leaf), leaf, leaf[:, :1])


def may_be_filled(model: Callable[..., Any], sites: Sites, phi: Tensor, rows: list[Tensor]) -> bool:
    """Return whether a mask removes additional rows from a model's density."""
    more = [torch.cat([leaf, leaf[:1].expand(_SPARE, *leaf.shape[1:])]) for leaf in rows]
    real = torch.arange(len(more[0]), device=phi.device) < len(rows[0])
    theta = 0.1 * torch.arange(1, sites.size + 1, dtype=phi.dtype, device=phi.device)
    try:
        if sites_of(model, phi, more).size != sites.size:
            return False
        one, other = (log_joint_of(model, sites, theta, phi, *each) for each in ((rows, None), (more, real)))
    except (RuntimeError, ValueError, IndexError):
        return False
    return bool((one - other).abs() <= _SAME * one.abs().clamp(min=1))


def sites_of(model: Callable[..., Any], phi: Tensor, rows: Sequence[Tensor]) -> Sites:
    """Return the latent variables that a model samples."""
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
    return Sites(tuple(sites))


def log_joint_of(
    model: Callable[..., Any], sites: Sites, theta: Tensor, phi: Tensor, rows: Sequence[Tensor], real: Tensor | None
) -> Tensor:
    """Return log p(y, θ | φ) with θ `(d,)` in unconstrained coordinates, over the observed rows in `real`."""
    from pyro import poutine

    values, jacobian = _latent(sites, theta)
    trace = poutine.trace(poutine.condition(model, data=values)).get_trace(phi, *rows)
    if real is None:
        return trace.log_prob_sum() + jacobian
    trace.compute_log_prob()
    for site in trace.nodes.values():
        if site["type"] == "sample" and "log_prob" in site:
            jacobian = jacobian + _log_of_real(site, real).sum()
    return jacobian


def _latent(sites: Sites, theta: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the values of latent variables, and the log determinant of the map to them."""
    values, jacobian, start = {}, theta.new_zeros(()), 0
    for name, transform, shape in sites.each:
        stop = start + math.prod(shape)
        free = theta[start:stop].reshape(shape)
        values[name] = transform(free)
        jacobian = jacobian + transform.log_abs_det_jacobian(free, values[name]).sum()
        start = stop
    return values, jacobian


def refusal(model: Callable[..., Any], phi: Tensor, rows: Sequence[Tensor]) -> str:
    """Return why a client's rows cannot be observed, at one φ and a θ inside its support; None if they can.

    >>> import pyro
    >>> def model(phi, y):
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", pyro.distributions.Poisson(phi[0].exp()), obs=y)
    >>> refusal(model, torch.zeros(1), [torch.tensor([2.0, -1.0])])
    "Expected observations that Poisson can take at 'y', but got -1; mend or leave out such rows"
    """
    from pyro import poutine

    try:
        sites = sites_of(model, phi, rows)
        values, _ = _latent(sites, phi.new_zeros(sites.size))
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(phi, *rows)
        for name, site in trace.nodes.items():
            wrong = _not_in_support(site)
            if len(wrong):
                kind = type(getattr(site["fn"], "base_dist", site["fn"])).__name__
                return (
                    f"Expected observations that {kind} can take at {name!r}, but got {wrong[0].item():g}; mend or "
                    "leave out such rows"
                )
        log = torch.as_tensor(trace.log_prob_sum())
    except (IndexError, RuntimeError) as error:
        return (
            f"Expected rows that the model takes, but it raises {type(error).__name__}: {error}; look for codes of "
            "categories that it has no parameter for"
        )
    return "" if not bool(log.isnan()) else "Expected a log density of the rows, but got NaN; look for NaN in them"


def _not_in_support(site: Any) -> Tensor:
    """Return observed values outside a discrete distribution's support, without masked ones."""
    if site["type"] != "sample" or not site["is_observed"] or site.get("mask") is not None:
        return torch.zeros(0)
    support: Any = getattr(site["fn"], "support", None)
    if support is None or not support.is_discrete or hasattr(site["fn"], "_mask"):
        return torch.zeros(0)
    value = torch.as_tensor(site["value"])
    fine = torch.as_tensor(support.check(value))
    return value[~fine.reshape(*fine.shape, *[1] * (value.ndim - fine.ndim)).expand_as(value)]


def _log_of_real(site: Any, real: Tensor) -> Tensor:
    """Return the log densities of a site, zero for masked rows, along the plate of that size."""
    log = site["log_prob"]
    for frame in site["cond_indep_stack"] if site["is_observed"] else ():
        if frame.vectorized and frame.size == len(real) and log.ndim >= -frame.dim:
            log = torch.where(real.reshape(-1, *[1] * (-frame.dim - 1)), log, 0.0)
    return log
