r"""The coefficients of every site given all rows, and of a site without rows, as mixtures of normal densities.

Of expectation propagation what a site's coefficients are is known of `ep.devices`, a mixture over scales. Deviations
θ_k − Aμ are mixed over nodes of all of φ, those of q(φ), the same for all sites, or those that `corrected` has weighed:
at a node φ_r the posterior of θ_k − Aμ_r is known. At site k node r of q weighs f_k(φ_r) / q_k(φ_r), the factor in
place of the site that stands for it in q, so that the mixture is that of cavity times factor. Of a sampler, draws are
the nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.data.formulas.design import Design
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.algorithms.ep.estimates import coefficient_names, design_of, spread_nodes, units
from fedtorch.federation.algorithms.matrix_normal import posterior as matrix_normal
from fedtorch.federation.populations.population import feature_names
from fedtorch.federation.runs.drawn import SHARED, sampler_of
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import SITES
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.families import Family
from fedtorch.models.hierarchical.penalised import outcome

_POINTS, _FOR_OTHERS = 256, 1024  # nodes of φ, at least: for deviations of sites, and for a site without rows
_NUMBERS = 2**23  # of covariances, of some sites at a time
_DRAWS = 1000  # of a sampler, that predictions are mixed of


class Coefficients(NamedTuple):
    """Hold the posterior of the coefficients of `K` sites, in the units of rows; `back` takes them to the frame's."""

    sites: tuple[str, ...]
    names: tuple[str, ...]
    posterior: DevicePosterior
    back: Tensor  # (d, d)
    family: Family | None
    design: Design | None = None
    intercept: bool = False  # whether the first one is an intercept that rows have no column for

    def __repr__(self) -> str:
        sites = ", ".join(self.sites[:3]) + (", …" if len(self.sites) > 3 else "")
        return f"Coefficients({len(self.sites)} sites: {sites}; {', '.join(self.names)})"

    def totals(self) -> DevicePosterior:
        """Return the coefficients in the units of the frame."""
        return _moved(self.posterior, self.back)


def site_coefficients(run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> Coefficients:
    """Return the posterior of the coefficients of a run's sites.

    Raises:
        TypeError: an algorithm without such a posterior, or a sampler that did not record the sites.
        ValueError: rows that are not in this process.
    """
    if run.algorithm.settings.get("algorithm") == "gibbs":
        return _drawn(run)
    if run.algorithm.settings.get("algorithm") == "matrix_normal":
        return _correlated(run)
    _check_model(run)
    return _propagated(run, given, tolerance)


def _check_model(run: Run) -> None:
    settings = run.algorithm.settings
    if not isinstance(settings.get("model"), Model) or not settings["model"].hierarchy.coefficients:
        raise TypeError(
            "Expected a run of ft.ep with a hierarchical model or of ft.gibbs, but got "
            f"{settings.get('algorithm', 'another')}, which has no posterior of sites' coefficients; its models are in "
            "run.client_module(client)"
        )


def newcomers(run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> Coefficients:
    """Return the posterior of the coefficients of a site of which there are no rows, as those of all sites vary."""
    model = run.algorithm.settings.get("model")
    if not isinstance(model, Model) or not model.hierarchy.coefficients:
        raise TypeError(
            "Expected a run of ft.ep with a hierarchical model, by which coefficients of another site are known, "
            f"but got {run.algorithm.settings.get('algorithm', 'another')}; rows can be predicted of its own sites only"
        )
    hierarchy, (nodes, weights) = model.hierarchy, _shared_nodes(run, given, tolerance, _FOR_OTHERS)
    m, scales = hierarchy.mean.shape[1], len(hierarchy.names)
    means = nodes[:, :m] @ hierarchy.mean.to(nodes).mT
    learnt = len(model.names) > scales
    log_noise = nodes[:, -1] if learnt else torch.full_like(weights, _known_noise(run, model))
    posterior = DevicePosterior(
        weights[None], means[None], hierarchy.covariance(nodes[:, m:scales])[None], log_noise[None]
    )
    return other_sites(run, ("new",), posterior)


def other_sites(run: Run, sites: tuple[str, ...], posterior: DevicePosterior) -> Coefficients:
    """Return coefficients of sites, of a run of `ft.ep`."""
    family = run.algorithm.settings["model"].family
    return Coefficients(sites, coefficient_names(run), posterior, units(run), family, design_of(run))


def site_deviations(run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> DevicePosterior:
    """Return what the random coefficients of sites deviate from those that all share, in the units of the frame."""
    _check_model(run)
    model, data = run.algorithm.settings["model"], rows_at_hand(run)
    nodes, weights = _shared_nodes(run, given, tolerance, _POINTS)
    q = ep.posterior(run, tolerance=torch.inf)
    whole = gaussian.natural(Moments(q.mean, q.covariance_matrix))

    def own(cavity: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        every = (tree.subtract(whole, Natural(**cavity)), model.prepare(block))
        size = max(1, _NUMBERS // (len(nodes) * len(model.hierarchy.mean) ** 2))
        parts = [slice(i, i + size) for i in range(0, max(1, len(block.count)), size)]
        return tree.concatenate([of_some(tree.take(every, part), len(block.count[part])) for part in parts])

    def of_some(some: tuple[Natural, Any], count: int) -> DevicePosterior:
        site, rows = some
        phi, each = tree.expand((nodes, weights), count)
        if given is None:
            quadratic = ((phi @ gaussian.unpack(site.precision)) * phi).sum(-1)
            instead = (phi @ site.shift[..., None])[..., 0] - quadratic / 2
            ratio = model.log_factor(phi, rows) - instead
            each = torch.softmax(each.log() + torch.where(ratio.isfinite(), ratio, -torch.inf), 1)
        posterior: DevicePosterior = model.given(phi, each, rows)
        return posterior

    posterior = run.clients.evaluate(run.outbox, data, own)
    shared = nodes[:, : model.hierarchy.mean.shape[1]] @ model.hierarchy.mean.to(nodes).mT
    moved = _moved(posterior._replace(means=posterior.means - shared), units(run))
    place = torch.tensor(model.hierarchy.random, dtype=torch.int64)
    return moved._replace(means=moved.means[..., place], covariances=moved.covariances[..., place[:, None], place])


def _shared_nodes(run: Run, given: Corrected | None, tolerance: float, points: int) -> tuple[Tensor, Tensor]:
    """Return nodes of what the sites of a run of `ft.ep` share, and their weights."""
    if given is not None:
        kept = given.weights > 0
        return given.nodes[kept], given.weights[kept]
    q = ep.posterior(run, tolerance=tolerance)
    return spread_nodes(Moments(q.mean, q.covariance_matrix), points)


def _known_noise(run: Run, model: Model) -> float:
    """Return the logarithm of a noise variance that is the same at every site, NaN where there is none."""
    known = getattr(model.family, "scale", None)
    if known is None or hasattr(run.population, "counts"):
        return float("nan")
    values = _noise(run, model)
    return float(values[0]) if bool((values == values[0]).all()) else float("nan")


def _noise(run: Run, model: Model) -> Tensor:
    """Return the logarithms of the noise variances that are known of sites, `(K,)`."""
    known = getattr(model.family, "scale", None)
    assert known is not None
    noise: Tensor = run.clients.evaluate(
        run.outbox, rows_at_hand(run), lambda cavity, block: known(model.prepare(block)).log()
    )
    return noise


def _propagated(run: Run, given: Corrected | None, tolerance: float) -> Coefficients:
    rows_at_hand(run)
    model = run.algorithm.settings["model"]
    posterior = ep.devices(run, given=given, tolerance=tolerance)
    if getattr(model.family, "scale", None) is not None and bool(posterior.log_noise.isnan().all()):
        posterior = posterior._replace(log_noise=_noise(run, model)[:, None].expand_as(posterior.weights))
    return other_sites(run, tuple(run.population.names), posterior)


def _drawn(run: Run) -> Coefficients:
    """Return the draws of a sampler that has recorded the sites, thinned evenly where there are many."""
    total, _ = drawn_coefficients(run)
    draws, local = sampler_of(run).draws(), run.algorithm.settings["local"]
    every = max(1, -(-total.shape[1] * total.shape[0] // _DRAWS))
    means = total[:, ::every].flatten(0, 1).transpose(0, 1)  # (K, R, d)
    clients, count, size = means.shape
    log_noise = means.new_full((clients, count), torch.nan)
    if f"{SITES}noise" in draws and getattr(local.family, "precise", False):
        log_noise = -draws[f"{SITES}noise"][:, ::every].flatten(0, 1).mT.log()
    posterior = DevicePosterior(
        means.new_full((clients, count), 1 / count),
        means,
        means.new_zeros(1, 1, 1, 1).expand(clients, count, size, size),
        log_noise,
    )
    return Coefficients(
        sites=tuple(run.population.names),
        names=drawn_names(run, size),
        posterior=posterior,
        back=torch.eye(size, dtype=torch.float64),
        family=local.family,
        intercept=f"{SITES}intercept" in draws,
    )


def _correlated(run: Run) -> Coefficients:
    """Return the posterior of the devices of HM1."""
    posterior, names = matrix_normal.devices(run), matrix_normal.coefficient_names(run)
    family = outcome(run.algorithm.settings.get("local.family", "gaussian"))
    return Coefficients(
        tuple(run.population.names), names, posterior, torch.eye(len(names), dtype=torch.float64), family
    )


def drawn_coefficients(run: Run) -> tuple[Tensor, Tensor]:
    """Return draws of the sites' coefficients, intercepts of their own first, `(C, T, K, d)`, and of what they share.

    Raises:
        TypeError: the sampler has not recorded the sites.
    """
    draws = sampler_of(run).draws()
    if f"{SITES}{SHARED}" not in draws:
        raise TypeError(
            "Expected a sampler that has recorded the coefficients of the sites, but got one without; pass "
            "record=ft.Sampler(burn_in=…, sites=True) to ft.run, on a population whose clients are at hand"
        )
    total = draws[f"{SITES}{SHARED}"]
    shared = draws[SHARED] if SHARED in draws else torch.full_like(total[:, :, 0], torch.nan)
    shared = shared[:, :, None].expand_as(total)
    if f"{SITES}intercept" in draws:
        own = draws[f"{SITES}intercept"][..., None]
        total, shared = torch.cat([own, total], -1), torch.cat([torch.zeros_like(own), shared], -1)
    return total, shared


def drawn_names(run: Run, size: int) -> tuple[str, ...]:
    """Return the names of the coefficients of a sampler's sites."""
    columns = feature_names(run.population)
    intercept = f"{SITES}intercept" in sampler_of(run).moments
    columns = columns if len(columns) == size - intercept else tuple(map(str, range(size - intercept)))
    return ("Intercept", *columns) if intercept else columns


def rows_at_hand(run: Run) -> FederatedData:
    """Return a run's rows.

    Raises:
        ValueError: they are elsewhere.
    """
    if hasattr(run.population, "counts"):
        raise ValueError(
            "Expected rows in this process, but they are at the sites, and what is known of one site stays there; "
            "run.summary() and predictions of new sites need no rows"
        )
    return run.population.data


def _moved(posterior: DevicePosterior, back: Tensor) -> DevicePosterior:
    if bool((back == torch.eye(len(back)).to(back)).all()):
        return posterior
    covariances = back @ posterior.covariances @ back.mT
    return posterior._replace(means=posterior.means @ back.mT, covariances=covariances)
