r"""Posterior of a fit by expectation propagation, in particular of the sites' coefficients, as normal mixtures.

A site's coefficients come from `ep.devices`, as a mixture over scales. Deviations θ_k − Aμ are mixed over nodes of all
of φ, those of q(φ), the same for all sites, or the weighted nodes of `corrected`: at a node φ_r the posterior of θ_k −
Aμ_r is known. At site k, node r of q has the weight f_k(φ_r) / q_k(φ_r), the factor over its site, so that the mixture
is that of cavity times factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import ClientData
from fedtorch.data.formulas.design import Design
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.algorithms.ep.estimates import (
    coefficient_names,
    design_of,
    quantities,
    shown_coefficients,
    spread_nodes,
    units,
)
from fedtorch.federation.algorithms.ep.posterior import posterior as shared_posterior
from fedtorch.federation.posterior import Coefficients, Draws, Named, Pooling, moved, posterior_of, wide
from fedtorch.federation.runs.holders import Form, Holder, Kind, ask, local_holder
from fedtorch.federation.runs.posterior_draws import given_shared, site_draws
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import arviz_of
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import Model, linear_devices
from fedtorch.models.hierarchical.families import Family
from fedtorch.tree import Tree

_POINTS, _FOR_OTHERS = 256, 1024  # nodes of φ, at least: for deviations of sites, and for a site without rows
_NUMBERS = 2**23  # most numbers in covariances of sites that are processed together
_SPARE = 8  # factor of draws from a restricted density
_SEED = 0  # seed of the draws for ArviZ
_CHECKS = ("calibration", "powers", "histogram", "means")


@dataclass(frozen=True)
class Shared(Named):
    """The posterior of the shared parameters, from `ep.estimates`.

    Attributes:
        model: a `hierarchical.Model`, or `Factors`.
    """

    model: Any = None
    title = "What all clients share, by expectation propagation"

    def head(self, algorithm: Any, inbox: Tree, before: Tree, reply: Any, rows: Any) -> Tensor:
        """Return the posterior mean of θ_k given the client's rows and its cavity."""
        cavity = gaussian.moments(Natural(**algorithm.model(inbox, before)))
        posterior = self.model.devices(cavity, rows)
        return (posterior.weights[..., None] * posterior.means).sum(1)


class Sites(Named):
    """Post-fit queries of a hierarchical model with named coefficients, from φ and the clients' posteriors given φ."""

    def shared(self, run: Run, tolerance: float) -> Moments:
        """Return the moments of φ; warn about or refuse results that cannot be used."""
        raise NotImplementedError

    def clients(self, run: Run, q: Moments) -> DevicePosterior:
        """Return the posterior of the coefficients of each client, in the units of rows, where φ has these moments."""
        raise NotImplementedError

    def pooling(self, run: Run, level: float, tolerance: float = 0.01) -> Pooling:
        """Return each client's estimates from its own rows under a flat prior, and its partially pooled ones."""
        model, hierarchy, family = self.model, self.model.hierarchy, self._family()
        if not hierarchy.random or len(hierarchy.coefficients) != len(hierarchy.mean):
            raise ValueError(
                f"Expected a model with coefficients that differ by site, but got {list(model.names)}; name them by "
                "hierarchical.normal(..., random=)"
            )
        back, q = units(run), self.shared(run, tolerance)
        size, m = len(back), hierarchy.mean.shape[1]
        centre = back @ q.mean[:size]
        sd = (back @ q.covariance[:size, :size] @ back.mT).diagonal().sqrt()
        half = torch.special.ndtri(torch.tensor((1 + level) / 2)).to(sd) * sd
        covariance = hierarchy.covariance(q.mean[m : len(hierarchy.names)])
        alone = wide(model, q.mean, covariance.diagonal().sqrt())
        return Pooling(
            coefficient_names(run),
            list(hierarchy.random),
            moved(self.clients(run, q), back),
            moved(ask(run, COEFFICIENTS, {"phi": alone[None], "weights": torch.ones_like(alone[:1])}), back),
            centre,
            centre - half,
            centre + half,
            (back @ covariance @ back.mT).diagonal().sqrt(),
            family,
        )

    def received(self, sent: Mapping[str, Tensor]) -> Draws:
        """Return the draws of φ that a holder of rows was sent."""
        return given_shared(self.model, sent["phi"], sent["key"])

    def columns(self, run: Run) -> tuple[tuple[str, ...], Design | None]:
        """Return names of the columns of x, without thresholds, and their formula."""
        names, ordered = coefficient_names(run), self.model.ordered
        return names[: len(names) - ordered.differences] if ordered else names, design_of(run)

    def _sites(self, run: Run, sites: tuple[str, ...], posterior: DevicePosterior) -> Coefficients:
        (names, back), model = shown_coefficients(run), self.model
        return Coefficients(sites, names, posterior, back, model.family, design_of(run), ordered=model.ordered)

    def _of_others(self, run: Run, nodes: Tensor, weights: Tensor, more: Tensor | float = 0.0) -> Coefficients:
        """Return the coefficients of a client without rows, at weighted nodes of φ with `more` covariance `(d, d)`."""
        model, hierarchy = self.model, self.model.hierarchy
        m, scales = hierarchy.mean.shape[1], len(hierarchy.names)
        means = nodes[:, :m] @ hierarchy.mean.to(nodes).mT
        learnt = len(model.names) > scales
        log_noise = nodes[:, -1] if learnt else torch.full_like(weights, _known_noise(run, model))
        covariances = hierarchy.covariance(nodes[:, m:scales]) + more
        return self._sites(
            run, ("new",), DevicePosterior(weights[None], means[None], covariances[None], log_noise[None])
        )

    def _varying(self, run: Run, posterior: DevicePosterior) -> Coefficients:
        """Return the coefficients that differ between clients, of deviations of all, in the units of the frame."""
        names, place = coefficient_names(run), torch.tensor(self.model.hierarchy.random, dtype=torch.int64)
        whole = moved(posterior, units(run))
        means, covariances = whole.means[..., place], whole.covariances[..., place[:, None], place]
        sites = self._sites(run, tuple(run.population.names), whole._replace(means=means, covariances=covariances))
        back = torch.eye(len(place), dtype=torch.float64)
        return sites._replace(names=tuple(names[j] for j in self.model.hierarchy.random), back=back)

    def _family(self) -> Family:
        """Return the distribution of one response; raise TypeError if the model does not define it."""
        family: Family | None = self.model.family
        if family is None:
            raise TypeError(
                "Expected a run with a hierarchical model of known family (linear, logistic, poisson), but got one of "
                "a likelihood of your own without one; pass DeviceLikelihood(..., family=)"
            )
        return family


class Hierarchical(Sites, Shared):
    """The posterior of a model with named coefficients: the shared ones, and each client's own."""

    questions = frozenset({"coefficients", "deviations", "densities", "evidence", "variables", "effects", *_CHECKS})

    def shared(self, run: Run, tolerance: float) -> Moments:
        """Return the moments of q(φ)."""
        q = shared_posterior(run, tolerance=tolerance)
        return Moments(q.mean, q.covariance_matrix)

    def clients(self, run: Run, q: Moments) -> DevicePosterior:
        """Return the posterior of the coefficients of each client, from its cavity."""
        posterior: DevicePosterior = ask(run, COEFFICIENTS)
        return posterior

    def coefficients(self, run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of the run's clients."""
        q = self.shared(run, tolerance)
        sent = {} if given is None else {"phi": given.nodes, "weights": given.weights}
        coefficients = ask(run, COEFFICIENTS, sent) if sent else self.clients(run, q)
        return self._sites(run, tuple(run.population.names), coefficients)

    def deviations(self, run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> Coefficients:
        """Return the deviations of clients' random coefficients from the shared ones."""
        nodes, weights = self._nodes(run, given, tolerance, _POINTS)
        sent = {"phi": nodes, "weights": weights}
        if given is None:
            sent |= gaussian.natural(self.shared(run, torch.inf))._asdict()
        return self._varying(run, ask(run, DEVIATIONS, sent))

    def newcomers(self, run: Run, given: Corrected | None = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of a client without rows, which vary as those of all clients do."""
        return self._of_others(run, *self._nodes(run, given, tolerance, _FOR_OTHERS))

    def adapted(self, run: Run, data: Any, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of clients that took no part, from their rows and the shared posterior."""
        block, q = data.stack(torch.arange(len(data))), shared_posterior(run, tolerance=tolerance)
        posterior = linear_devices.adapted(self.model, q, block)
        return self._sites(run, tuple(data.names), _with_known_noise(self.model, posterior, self.model.prepare(block)))

    def draws(
        self, run: Run, draws: int, given: Corrected | None, tolerance: float, seed: int, *, even: bool = False
    ) -> Draws:
        """Return draws of φ, of q(φ) or of the corrected posterior; `even` ones of q(φ) are spread evenly over it."""
        model, key = self.model, random.fold_in(random.key(seed), 0)
        self._family()
        if given is not None:
            places = (torch.arange(draws).to(given.weights) + 0.5) / draws
            return given_shared(model, given.nodes[torch.searchsorted(given.weights.cumsum(0), places)], key)
        q = shared_posterior(run, tolerance=tolerance)
        if even:
            nodes, _ = spread_nodes(Moments(q.mean, q.covariance_matrix), draws)
            return given_shared(model, nodes, random.key(seed))
        count = draws if model.ordered is None else _SPARE * draws
        white = random.normal(random.fold_in(random.key(seed), 1), (count, len(q.mean)), torch.float64).to(q.mean)
        return given_shared(model, _possible(model, q.mean + white @ q.scale_tril.mT, draws), key)

    def evidence(self, run: Run, *, each: bool = False, tolerance: float = 0.01) -> Tree:
        """Return log p(a client's rows | the others'), by its cavity; sums of it and of its squares, or `each`."""
        self._family()
        if self.model.log_evidence is None:
            raise TypeError("Expected a model with the evidence of a client's rows; make it by hierarchical.of")
        shared_posterior(run, tolerance=tolerance)
        return _evidences(local_holder(run)) if each else ask(run, EVIDENCE)

    def inferencedata(self, run: Run, *, draws: int, chains: int, given: Corrected | None, tolerance: float) -> Any:
        """Return independent draws of `beta`, `sd`, `cor`, `sigma` and, if rows are at hand, `theta`."""
        at_hand, count = not hasattr(run.population, "counts"), draws * chains
        drawn = self.draws(run, count, given, tolerance, _SEED)
        shown, size = quantities(run, drawn.sent["phi"]), len(shown_coefficients(run)[0])
        random = self.model.hierarchy.random
        names, values = shown.names, torch.stack(shown.values, 1).unflatten(0, (chains, draws))
        coords: dict[str, Sequence[str]] = {"coefficient": names[:size]}
        dims, made = {"beta": ["coefficient"]}, {"beta": values[..., :size]}
        last = len(names) - (len(self.model.names) > len(self.model.hierarchy.names))
        for name, axis, start, stop in (
            ("sd", "random", size, size + len(random)),
            ("cor", "pair", size + len(random), last),
        ):
            if stop > start:
                coords[axis] = [each.removeprefix(f"{name}(").removesuffix(")") for each in names[start:stop]]
                dims[name], made[name] = [axis], values[..., start:stop]
        if last < len(names):
            made["sigma"] = values[..., -1]
        if at_hand:
            theta = (site_draws(run, drawn) @ shown_coefficients(run)[1].mT).transpose(0, 1)
            coords["site"], dims["theta"] = run.population.names, ["site", "coefficient"]
            made["theta"] = theta.unflatten(0, (chains, draws))
        return arviz_of(made, coords, dims)

    def _nodes(self, run: Run, given: Corrected | None, tolerance: float, points: int) -> tuple[Tensor, Tensor]:
        """Return nodes of the parameters shared by a run's sites, and their weights."""
        if given is not None:
            positive = given.weights > 0
            return given.nodes[positive], given.weights[positive]
        return spread_nodes(self.shared(run, tolerance), points)


def _with_known_noise(model: Model, posterior: DevicePosterior, rows: Any) -> DevicePosterior:
    """Return posteriors with the noise of prepared rows, if it is known instead of learnt."""
    known = getattr(model.family, "scale", None)
    if known is None or not bool(posterior.log_noise.isnan().all()):
        return posterior
    return posterior._replace(log_noise=known(rows).log()[:, None].expand_as(posterior.weights))


def _possible(model: Model, phi: Tensor, draws: int) -> Tensor:
    """Return valid draws of the coefficients: for ordered responses, those with ascending thresholds."""
    if model.ordered is not None and (cuts := model.ordered.differences):
        means = model.hierarchy.mean[-cuts:].to(phi)
        phi = torch.cat([phi[model.ordered.ascend(phi[:, : means.shape[1]] @ means.mT)], phi])
    return phi[:draws]


def _known_noise(run: Run, model: Model) -> float:
    """Return the logarithm of a noise variance that is the same at every site, or NaN."""
    known = getattr(model.family, "scale", None)
    if known is None or hasattr(run.population, "counts"):
        return float("nan")
    values: Tensor = ask(run, NOISE)
    return float(values[0]) if bool((values == values[0]).all()) else float("nan")


# -- computed by the holders of rows -----------------------------------------------------------------------------


def _model_of(asked: Holder | Form) -> Any:
    return posterior_of(asked.algorithm).model


def _coefficients(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> DevicePosterior:
    """Return the posterior of each client's coefficients, from its cavity, or from nodes of the shared parameters.

    With `linear`, the nodes are one node and displaced ones, see `_linear`; with `deviations`, the shared part is
    subtracted.
    """
    model = _model_of(holder)

    def own(cavity: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        rows = model.prepare(block)
        if "phi" in sent:
            nodes = tree.expand((sent["phi"], sent["weights"]), len(block.count))
            posterior = model.given(*nodes, rows)
            posterior = _less_shared(model, posterior, nodes[0]) if about.get("deviations") else posterior
            posterior = _linear(posterior) if about.get("linear") else posterior
        else:
            posterior = model.devices(gaussian.moments(Natural(**cavity)), rows)
        return _with_known_noise(model, posterior, rows)

    return holder.evaluate(holder.data, own)


def _less_shared(model: Any, posterior: DevicePosterior, phi: Tensor) -> DevicePosterior:
    """Return the posterior of θ_k − Aμ at nodes of φ `(K, R, p)`."""
    means = model.hierarchy.mean.to(phi)
    return posterior._replace(means=posterior.means - phi[..., : means.shape[1]] @ means.mT)


def _linear(posterior: DevicePosterior) -> DevicePosterior:
    """Return posteriors linear in μ, from those at its mean and a standard error above and below, m of each."""
    m = posterior.means.shape[1] // 2
    slopes = (posterior.means[:, 1 : 1 + m] - posterior.means[:, 1 + m :]) / 2  # (K, m, d)
    covariance = posterior.covariances[:, 0] + slopes.mT @ slopes
    return DevicePosterior(
        torch.ones_like(posterior.weights[:, :1]),
        posterior.means[:, :1],
        covariance[:, None],
        posterior.log_noise[:, :1],
    )


def _deviations(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> DevicePosterior:
    """Return the deviations of each client's coefficients, over nodes of the shared parameters weighted by its rows.

    Without natural parameters of q(φ) the weights are used as given.
    """
    model, nodes, weights = _model_of(holder), sent["phi"], sent["weights"]

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
            away = phi - centre  # about a central point: far from zero, squares would lose all digits
            slope = site.shift - (centre @ precision)[:, 0]
            instead = (away @ slope[..., None])[..., 0] - ((away @ precision) * away).sum(-1) / 2
            ratio = model.log_factor(phi, rows) - instead
            each = torch.softmax(each.log() + torch.where(ratio.isfinite(), ratio, -torch.inf), 1)
        posterior: DevicePosterior = model.given(phi, each, rows)
        return _less_shared(model, posterior, phi)

    return holder.evaluate(holder.data, own)


def _noise(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> Tensor:
    """Return the logarithms of the clients' known noise variances, `(K,)`."""
    model = _model_of(holder)
    return holder.evaluate(holder.data, lambda cavity, block: model.family.scale(model.prepare(block)).log())


def _posteriors(form: Form) -> DevicePosterior:
    """Return zeros in the form of the posteriors of clients' coefficients."""
    size = len(_model_of(form).hierarchy.mean)
    mixed = torch.empty(form.clients, form.nodes, dtype=torch.float64)
    means = mixed[..., None].expand(-1, -1, size)
    return DevicePosterior(mixed, means, means[..., None].expand(-1, -1, -1, size), mixed)


_NODES = ("phi", "weights")
COEFFICIENTS = Kind(
    "coefficients", "effects", _coefficients, _posteriors, _NODES, ("deviations", "linear"), by_client=True
)
DEVIATIONS = Kind("deviations", "effects", _deviations, _posteriors, (*_NODES, *Natural._fields), by_client=True)
NOISE = Kind("noise", "effects", _noise, lambda form: torch.empty(form.clients, dtype=torch.float64), by_client=True)


def _evidences(holder: Holder) -> Tensor:
    """Return log p(y_k | the others) of each client, `(K,)`, from its cavity."""
    model = _model_of(holder)

    def own(cavity: dict[str, Tensor], block: ClientData) -> Tensor:
        evidence: Tensor = model.log_evidence(gaussian.moments(Natural(**cavity)), model.prepare(block))
        return evidence

    return holder.evaluate(holder.data, own)


def _evidence(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    values = _evidences(holder)
    return {"elpd": values.sum(), "squares": values.square().sum()}


EVIDENCE = Kind(
    "evidence",
    "densities",
    _evidence,
    lambda form: dict.fromkeys(("elpd", "squares"), torch.zeros(()).double()),
    alone=True,  # of two clients a sum and a sum of squares are both numbers
)
