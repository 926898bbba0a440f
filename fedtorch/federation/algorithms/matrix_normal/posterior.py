"""Posterior of every device's coefficients after a run of HM1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.data.formulas.design import Design
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.algorithms.matrix_normal.noise import noise_variance
from fedtorch.federation.populations.population import feature_names, row_counts
from fedtorch.federation.posterior import Coefficients, Named
from fedtorch.federation.runs.holders import at_clients
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.estimates import Estimates, over_clients, own_names
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical.penalised import observed, outcome, score_and_information
from fedtorch.models.linear import LinearHead, SufficientStatistics, raw, sufficient_statistics
from fedtorch.models.low_rank import LowRank
from fedtorch.models.matrix_normal_posterior import (
    Averaged,
    Factors,
    Sums,
    Units,
    average,
    averaged,
    factors,
    mean_of,
    posterior,
    posterior_of,
    sums,
)
from fedtorch.tree import Tree


def devices(run: Any, *, known: bool = False) -> DevicePosterior:
    """Compute the posterior of every device's coefficients given Ω: exact for linear models, by Laplace for others.

    Ω itself is estimated, each device's row of it from that device's coefficients alone;
    `fedtorch.models.matrix_normal_posterior` accounts for that. Noise variances are treated as known.

    With sites, each computes its own devices' posteriors given the common factors of Ω, after a first round of sums
    over its devices. A site receives its own devices' rows of Ω only.

    Args:
        run: of `ft.matrix_normal`, with its rows at hand or on sites whose policies have `after_fit=("effects",)`.
        known: whether Ω̂ is treated as the truth, which makes intervals too short: those of 90 % cover some 81 % if a
            hundred devices have eight coefficients each.

    Raises:
        TypeError: a run of another algorithm, or rows that are elsewhere.
        RuntimeError: some devices have not answered, or sites do not allow effects.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.matrix_normal import devices
        >>> from fedtorch.models.device_posterior import interval
        >>> x = ft.random.normal(ft.random.key(0), (6, 9, 2), torch.float64)
        >>> y = x @ torch.tensor([2.0, -2.0], dtype=torch.float64)
        >>> y = y + 0.5 * ft.random.normal(ft.random.key(1), (6, 9), torch.float64)
        >>> head = ft.LinearHead(2, intercept=False, dtype=torch.float64)
        >>> data = ft.data.from_tensors(list(zip(x, y)))
        >>> run = ft.run(ft.matrix_normal(ft.least_squares(head)), ft.InProcess(data), rounds=40)
        >>> low, high = interval(devices(run).marginals(), 0.95)
        >>> bool((low[:, 0] > 0).all()), bool((high[:, 1] < 0).all())  # of all six devices
        (True, True)
    """
    noise, covariance = _fitted(run)
    if not _at_sites(run):
        return posterior(_statistics(run), noise, covariance, known=known)
    given, sent, each = _factors(run, noise, covariance)
    return run.clients.ask(run.outbox, "devices", {**sent, **given._asdict()}, {"known": known}, each)


@dataclass(frozen=True)
class Correlated(Named):
    """Posterior of the devices' coefficients from Ω and their rows, with `estimates` over devices.

    Attributes:
        noise: given variances, see `noise_variance`.
        family: of the responses.
    """

    noise: Any = None
    family: str = "gaussian"
    questions = frozenset(("factors", "devices", "average"))

    def coefficients(self, run: Any, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of the devices."""
        names = coefficient_names(run)
        return Coefficients(
            tuple(run.population.names),
            names,
            devices(run),
            torch.eye(len(names), dtype=torch.float64),
            outcome(self.family),
            features=partial(features, run),
        )

    def columns(self, run: Any) -> tuple[tuple[str, ...], Design | None]:
        """Return names of the columns of x, and their formula."""
        return inputs(run)

    def head(self, algorithm: Any, inbox: Any, before: Tree, reply: Any, rows: Any) -> Tensor:
        """Return θ_k, which the server has."""
        coefficients: Tensor = inbox.parameters + reply.message.parameters.value
        return coefficients


def estimates(run: Any, *, known: bool = False) -> Estimates:
    """Return means of the coefficients over devices, their SDs over devices and the noise's SD, by name.

    Means have intervals if all devices have answered and their rows are at hand, or at sites that allow effects; each
    device's are in `devices` and `ft.inference.ranef`.
    """
    fit, server, rows = run.algorithm.posterior, tree.to(run.server, "cpu"), int(row_counts(run.population).sum())
    variance = noise_variance(server.summary, fit.noise)
    summaries = over_clients(server.parameters[server.heard], variance[server.heard], coefficient_names(run), rows)
    if fit.family != "gaussian":  # other families have no sigma
        summaries = summaries._replace(names=summaries.names[:-1], nodes=summaries.nodes[:, :-1], n=summaries.n[:-1])
    asked = _at_sites(run)
    if (
        not bool(server.heard.all())
        or run.algorithm.budget is not None
        or not (asked or hasattr(run.population, "data"))
    ):
        return summaries
    try:
        normal = _average(run, known=known)._replace(mean=summaries.nodes[0, : summaries.coefficients])
    except RuntimeError as error:
        if not asked:
            raise
        return summaries._replace(about=f"point estimates: {error}")
    return summaries._replace(normal=normal, about="")


def _average(run: Any, *, known: bool) -> Moments:
    """Return the posterior of the mean of all devices' coefficients."""
    noise, covariance = _fitted(run)
    if not _at_sites(run):
        return average(_statistics(run), noise, covariance, known=known)
    given, sent, each = _factors(run, noise, covariance)
    cross = run.clients.ask(run.outbox, "average", {**sent, **given._asdict()}, {"known": known}, each)
    return mean_of(cross, given, len(noise))


# -- between sites ---------------------------------------------------------------------------------------------------


def _at_sites(run: Any) -> bool:
    return hasattr(run.clients, "ask")


def _factors(run: Any, noise: Tensor, covariance: LowRank) -> tuple[Factors, dict[str, Tensor], dict[str, Tensor]]:
    """Return the factors from the sites' sums; the common inputs of all sites; and each site's own inputs, `(K, …)`."""
    a, vectors, values = covariance.trimmed()
    sent, each = {"multiple": a.reshape(1)}, {"noise": noise, "factor": vectors * values.sqrt()}
    return factors(run.clients.ask(run.outbox, "factors", sent, {}, each), covariance), sent, each


def _units(holder: Any, sent: Mapping[str, Tensor]) -> Units:
    """Return each holder's devices."""
    known = partial(device_statistics, holder.algorithm)
    return Units(holder.evaluate(holder.data, known), sent["noise"], sent["factor"], sent["multiple"])


def _given(sent: Mapping[str, Tensor]) -> Factors:
    return Factors(sent["inner"], sent["shared"], sent["precision"])


def tell_sums(holder: Any, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> Sums:
    """Return a site's sums over its devices, which determine the factors."""
    return sums(_units(holder, sent))


def tell_devices(holder: Any, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> DevicePosterior:
    """Return the posterior of each of a site's devices."""
    return posterior_of(_units(holder, sent), _given(sent), known=bool(about["known"]))


def tell_average(holder: Any, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> Averaged:
    """Return a site's part of the mean of all devices' coefficients."""
    return averaged(_units(holder, sent), _given(sent), known=bool(about["known"]))


def room_for(form: Any) -> tuple[Sums, DevicePosterior, Averaged]:
    """Return the shapes of a site's answers to a question of this form."""
    size, rank = form.algorithm.module.coefficients.numel(), form.sent["factor"].shape[1]
    new = partial(torch.empty, dtype=torch.float64)
    one, means = new(form.clients, 1), new(form.clients, 1, size)
    return (
        Sums(new(rank * size, rank * size), new(rank * size)),
        DevicePosterior(one, means, new(form.clients, 1, size, size), one),
        Averaged(new(size), new(size, size), new(size, rank * size)),
    )


# -- where rows are ----------------------------------------------------------------------------------------------------


def _fitted(run: Any) -> tuple[Tensor, LowRank]:
    """Return noise variances and Ω."""
    algorithm, known = run.algorithm, run.algorithm.posterior
    at_hand = _at_sites(run) or getattr(run.population, "data", None) is not None
    if not isinstance(known, Correlated) or not at_hand:
        raise TypeError(
            f"Expected a run of ft.matrix_normal on data at hand or on sites, but got one of "
            f"{algorithm.settings.get('algorithm', 'another')} on {run.population!r}"
        )
    if algorithm.budget is not None:
        raise TypeError(
            "Expected a run without a budget, but got one of noised sums: intervals ask the rows for more than those "
            "sums; use run.server.parameters, which have none"
        )
    server = tree.to(run.server, "cpu")
    if not bool(server.heard.all()):
        raise RuntimeError(
            f"Expected answers of all {len(server.heard)} devices, but {int((~server.heard).sum())} have not answered "
            "yet; allow more rounds"
        )
    return noise_variance(server.summary, known.noise), server.covariance


def _statistics(run: Any) -> SufficientStatistics:
    return at_clients(run)(run.population.data, partial(device_statistics, run.algorithm))


def device_statistics(algorithm: Algorithm, tensors: dict[str, Tensor], block: ClientData) -> SufficientStatistics:
    """Return statistics of devices, in generalised linear models of working responses."""
    head, known = algorithm.module, algorithm.posterior
    assert isinstance(head, LinearHead)
    assert isinstance(known, Correlated)
    family = known.family
    x, y = block.batch
    with torch.no_grad():
        x = head.block_design(x).to(torch.float64)
    if family == "gaussian":
        return sufficient_statistics(x, y.reshape(block.mask.shape), block.mask)
    theta = tensors["coefficients"].to(torch.float64)
    rows = observed(family, block._replace(batch=(x, y)), x.shape[-1])
    score, information = score_and_information(family, rows, theta)
    working = (information @ theta[..., None])[..., 0] + score
    count = block.count.to(working)
    return SufficientStatistics(information, working, torch.zeros_like(count), count)


def coefficient_names(run: Any) -> tuple[str, ...]:
    """Return the names of a device's coefficients: the columns' if known, else numbers."""
    head, size = run.algorithm.module, run.server.parameters.shape[1]
    columns = feature_names(run.population)
    if len(columns) + head.intercept != size:
        columns = tuple(map(str, range(size - head.intercept)))
    return (*columns, *own_names(["Intercept"], columns)) if head.intercept else columns


def inputs(run: Any) -> tuple[tuple[str, ...], Design | None]:
    """Return the names of the columns of x, and their formula, if known.

    Raises:
        TypeError: a feature map of inputs at sites, whose columns are unknown here.
    """
    head, population = run.algorithm.module, run.population
    design = None if _at_sites(run) else getattr(population.data, "design", None)
    if head.feature_map is raw:
        names = coefficient_names(run)[: head.features]
    elif _at_sites(run):
        raise TypeError(
            "Expected a LinearHead on the columns of x, but got a feature map and rows at sites, whose columns are not "
            "known here; let sites keep features in place of inputs"
        )
    else:
        rows = population.data.rows
        width = (rows[0] if isinstance(rows, tuple) else rows).shape[-1]
        names = feature_names(population) or tuple(map(str, range(width)))
    return names, design if design is not None and len(design.columns) == len(names) else None


def features(run: Any, x: Tensor) -> Tensor:
    """Return the design matrix of rows x, `(N, q)` -> `(N, d)` float64."""
    head = run.algorithm.module
    with torch.no_grad():
        return head.block_design(x[None].to(head.coefficients.dtype))[0].to(torch.float64)
