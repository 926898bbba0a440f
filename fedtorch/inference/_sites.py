r"""The coefficients of every site given all rows, and of a site without rows, as mixtures of normal densities.

Of expectation propagation what a site's coefficients are is known of `ep.devices`, a mixture over scales. Deviations
θ_k − Aμ are mixed over nodes of all of φ, those of q(φ), the same for all sites, or those that `corrected` has weighed:
at a node φ_r the posterior of θ_k − Aμ_r is known. At site k node r of q weighs f_k(φ_r) / q_k(φ_r), the factor in
place of the site that stands for it in q, so that the mixture is that of cavity times factor. Of a sampler, draws are
the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import ClientData
from fedtorch.data.formulas.design import Design
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.algorithms.ep.estimates import design_of, shown_coefficients, spread_nodes, units
from fedtorch.federation.algorithms.matrix_normal import posterior as matrix_normal
from fedtorch.federation.populations.population import feature_names
from fedtorch.federation.runs.drawn import SHARED, sampler_of
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import SITES
from fedtorch.inference.holders import Form, Holder, Kind, ask
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.estimates import own_names
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.families import Family, Ordered
from fedtorch.models.hierarchical.penalised import outcome

_POINTS, _FOR_OTHERS = 256, 1024  # nodes of φ, at least: for deviations of sites, and for a site without rows
_NUMBERS = 2**23  # of covariances, of some sites at a time
_DRAWS = 1000  # of a sampler, that predictions are mixed of


class Coefficients(NamedTuple):
    """Hold the posterior of the coefficients of `K` sites, in the units of rows; `back` takes them to what is named."""

    sites: tuple[str, ...]
    names: tuple[str, ...]
    posterior: DevicePosterior
    back: Tensor  # (q, d)
    family: Family | None
    design: Design | None = None
    intercept: bool = False  # whether the first one is an intercept that rows have no column for
    features: Callable[[Tensor], Tensor] | None = None  # rows x `(N, q)` -> `(N, d)`, where coefficients are of these
    ordered: Ordered | None = None  # the levels of an ordered response

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
            "Expected a run of ft.ep with a hierarchical model, of ft.gibbs or of ft.matrix_normal, but got "
            f"{settings.get('algorithm', 'another')}, which has no posterior of sites' coefficients; its models are in "
            "run.client_module(client)"
        )


def newcomers(run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> Coefficients:
    """Return the posterior of the coefficients of a site of which there are no rows, as those of all sites vary."""
    if run.algorithm.settings.get("algorithm") == "gibbs":
        return _drawn_newcomers(run)
    return propagated_newcomers(run, given, tolerance)


def propagated_newcomers(run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> Coefficients:
    """Return what `newcomers` does of a run of `ft.ep`; raise TypeError of others."""
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
    model, (names, back) = run.algorithm.settings["model"], shown_coefficients(run)
    return Coefficients(sites, names, posterior, back, model.family, design_of(run), ordered=model.ordered)


def site_deviations(run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> DevicePosterior:
    """Return what the random coefficients of sites deviate from those that all share, in the units of the frame."""
    _check_model(run)
    model = run.algorithm.settings["model"]
    nodes, weights = _shared_nodes(run, given, tolerance, _POINTS)
    sent = {"phi": nodes, "weights": weights}
    if given is None:
        q = ep.posterior(run, tolerance=torch.inf)
        sent |= gaussian.natural(Moments(q.mean, q.covariance_matrix))._asdict()
    posterior = ask(run, DEVIATIONS, sent)
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
    values: Tensor = ask(run, NOISE)
    return float(values[0]) if bool((values == values[0]).all()) else float("nan")


def _propagated(run: Run, given: Corrected | None, tolerance: float) -> Coefficients:
    ep.posterior(run, tolerance=tolerance)
    sent = {} if given is None else {"phi": given.nodes, "weights": given.weights}
    return other_sites(run, tuple(run.population.names), ask(run, COEFFICIENTS, sent))


# -- what holders of rows compute ------------------------------------------------------------------------------------


def _coefficients(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> DevicePosterior:
    """Return the posterior of each client's coefficients, from its cavity, or from nodes of what is shared."""
    model = holder.algorithm.settings["model"]
    known = getattr(model.family, "scale", None)

    def own(cavity: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        rows = model.prepare(block)
        if "phi" in sent:
            posterior = model.given(*tree.expand((sent["phi"], sent["weights"]), len(block.count)), rows)
        else:
            posterior = model.devices(gaussian.moments(Natural(**cavity)), rows)
        if known is None or not bool(posterior.log_noise.isnan().all()):
            return posterior
        return posterior._replace(log_noise=known(rows).log()[:, None].expand_as(posterior.weights))

    return holder.evaluate(holder.data, own)


def _deviations(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> DevicePosterior:
    """Return the posterior of each client's coefficients over nodes of what is shared, which are weighed by its rows.

    Without natural parameters of q(φ) the weights are taken as they are.
    """
    model, nodes, weights = holder.algorithm.settings["model"], sent["phi"], sent["weights"]

    def own(cavity: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        every = (Natural(**cavity), model.prepare(block))
        size = max(1, _NUMBERS // (len(nodes) * len(model.hierarchy.mean) ** 2))
        parts = [slice(i, i + size) for i in range(0, max(1, len(block.count)), size)]
        return tree.concatenate([of_some(tree.take(every, part), len(block.count[part])) for part in parts])

    def of_some(some: tuple[Natural, Any], count: int) -> DevicePosterior:
        cavity, rows = some
        phi, each = tree.expand((nodes, weights), count)
        if "precision" in sent:
            site = tree.subtract(Natural(sent["shift"], sent["precision"]), cavity)
            precision, centre = gaussian.unpack(site.precision), phi.mean(1, keepdim=True)
            away = phi - centre  # from a point among them: far from zero, squares would have no digits left
            slope = site.shift - (centre @ precision)[:, 0]
            instead = (away @ slope[..., None])[..., 0] - ((away @ precision) * away).sum(-1) / 2
            ratio = model.log_factor(phi, rows) - instead
            each = torch.softmax(each.log() + torch.where(ratio.isfinite(), ratio, -torch.inf), 1)
        posterior: DevicePosterior = model.given(phi, each, rows)
        return posterior

    return holder.evaluate(holder.data, own)


def _noise(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> Tensor:
    """Return the logarithms of the noise variances that are known of clients, `(K,)`."""
    model = holder.algorithm.settings["model"]
    return holder.evaluate(holder.data, lambda cavity, block: model.family.scale(model.prepare(block)).log())


def _posteriors(form: Form) -> DevicePosterior:
    """Return room for the posteriors of clients' coefficients."""
    size = len(form.algorithm.settings["model"].hierarchy.mean)
    mixed = torch.empty(form.clients, form.nodes, dtype=torch.float64)
    means = mixed[..., None].expand(-1, -1, size)
    return DevicePosterior(mixed, means, means[..., None].expand(-1, -1, -1, size), mixed)


COEFFICIENTS = Kind("coefficients", "effects", _coefficients, _posteriors, by_client=True)
DEVIATIONS = Kind("deviations", "effects", _deviations, _posteriors, by_client=True)
NOISE = Kind("noise", "effects", _noise, lambda form: torch.empty(form.clients, dtype=torch.float64), by_client=True)


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
        tuple(run.population.names),
        names,
        posterior,
        torch.eye(len(names), dtype=torch.float64),
        family,
        features=partial(matrix_normal.features, run),
    )


def _drawn_newcomers(run: Run) -> Coefficients:
    """Return what a sampler's draws of what sites share say of a site without rows."""
    local, draws = run.algorithm.settings["local"], sampler_of(run).draws()
    if local.newcomer is None or SHARED not in draws:
        raise TypeError(
            "Expected a kernel that knows what clients without rows are like, and a sampler with its global variables, "
            "but got none; a site's intercept that is integrated out has no distribution, and a deviation of your own "
            "needs its prior=; rows can be predicted of the run's own sites"
        )
    shared = {name: leaf for name, leaf in draws.items() if not name.startswith(SITES)}
    every = max(1, -(-draws[SHARED].shape[0] * draws[SHARED].shape[1] // _DRAWS))
    some = {name: leaf[:, ::every].flatten(0, 1) for name, leaf in shared.items()}
    known = local.newcomer(some, random.key(0))
    count, size = known.mean.shape
    posterior = DevicePosterior(
        known.mean.new_full((1, count), 1 / count), known.mean[None], torch.diag_embed(known.variance)[None],
        known.noise.log()[None],
    )  # fmt: skip
    intercept = size > draws[SHARED].shape[-1]
    names, columns = feature_names(run.population), size - intercept
    names = names if len(names) == columns else tuple(map(str, range(columns)))
    names = (*own_names(["Intercept"], names), *names) if intercept else names
    return Coefficients(("new",), names, posterior, torch.eye(size).double(), local.family, intercept=intercept)


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
    return (*own_names(["Intercept"], columns), *columns) if intercept else columns


def _moved(posterior: DevicePosterior, back: Tensor) -> DevicePosterior:
    if bool((back == torch.eye(len(back)).to(back)).all()):
        return posterior
    covariances = back @ posterior.covariances @ back.mT
    return posterior._replace(means=posterior.means @ back.mT, covariances=covariances)
