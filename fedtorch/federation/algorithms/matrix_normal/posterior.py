"""What a run of HM1 has found of every device's coefficients, and how surely."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch.data import ClientData
from fedtorch.federation.algorithms.matrix_normal.noise import noise_variance
from fedtorch.federation.populations.population import feature_names, row_counts
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.estimates import Estimates, over_clients
from fedtorch.models.hierarchical.penalised import observed, score_and_information
from fedtorch.models.linear import SufficientStatistics, sufficient_statistics
from fedtorch.models.low_rank import LowRank
from fedtorch.models.matrix_normal_posterior import average, posterior


def devices(run: Any, *, known: bool = False) -> DevicePosterior:
    """Compute the posterior of every device's coefficients: of linear models given Ω exactly, of others by Laplace.

    Ω itself is estimated, each device's row of it from that device's coefficients alone; what this adds is in
    `fedtorch.models.matrix_normal_posterior`. Noise variances are taken as known.

    Args:
        run: of `ft.matrix_normal`, with its rows at hand.
        known: whether Ω̂ is taken for the truth, with which intervals are too short: those of 90 % cover some 81 %
            where a hundred devices have eight coefficients each.

    Raises:
        TypeError: a run of another algorithm, or rows that are elsewhere.
        RuntimeError: not all devices have been heard.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.matrix_normal import devices
        >>> from fedtorch.models.device_posterior import credible_interval
        >>> x = ft.random.normal(ft.random.key(0), (6, 9, 2), torch.float64)
        >>> y = x @ torch.tensor([2.0, -2.0], dtype=torch.float64)
        >>> y = y + 0.5 * ft.random.normal(ft.random.key(1), (6, 9), torch.float64)
        >>> head = ft.LinearHead(2, intercept=False, dtype=torch.float64)
        >>> data = ft.data.from_tensors(list(zip(x, y)))
        >>> run = ft.run(ft.matrix_normal(ft.least_squares(head)), ft.InProcess(data), rounds=40)
        >>> low, high = credible_interval(devices(run).marginals(), 0.95)
        >>> bool((low[:, 0] > 0).all()), bool((high[:, 1] < 0).all())  # of all six devices
        (True, True)
    """
    return posterior(*_known(run), known=known)


def estimates(run: Any, *, known: bool = False) -> Estimates:
    """Return means of the coefficients over devices, their SDs over devices and the noise's SD, by name.

    Means have intervals where all devices have been heard and their rows are at hand; each device's are in `devices`
    and `ft.inference.ranef`.
    """
    server, rows = run.server, int(row_counts(run.population).sum())
    variance = noise_variance(server.summary, run.algorithm.settings["noise"])
    found = over_clients(server.parameters[server.heard], variance[server.heard], coefficient_names(run), rows)
    if run.algorithm.settings.get("local.family", "gaussian") != "gaussian":  # which has no sigma
        found = found._replace(names=found.names[:-1], nodes=found.nodes[:, :-1], n=found.n[:-1])
    if not bool(server.heard.all()) or run.algorithm.budget is not None or not hasattr(run.population, "data"):
        return found
    normal = average(*_known(run), known=known)._replace(mean=found.nodes[0, : found.coefficients])
    return found._replace(normal=normal, about="")


def _known(run: Any) -> tuple[SufficientStatistics, Tensor, LowRank]:
    """Return statistics, in generalised linear models of working responses, noise variances and Ω."""
    algorithm, data = run.algorithm, getattr(run.population, "data", None)
    if algorithm.settings.get("algorithm") != "matrix_normal" or data is None:
        raise TypeError(
            f"Expected a run of ft.matrix_normal on data at hand, but got one of "
            f"{algorithm.settings.get('algorithm', 'another')} on {run.population!r}"
        )
    if algorithm.budget is not None:
        raise TypeError(
            "Expected a run without a budget, but got one of noised sums: intervals ask the rows for more than those "
            "sums; use run.server.parameters, which have none"
        )
    server = run.server
    if not bool(server.heard.all()):
        raise RuntimeError(
            f"Expected a run that has heard all {len(server.heard)} devices, but {int((~server.heard).sum())} have not "
            "answered yet; allow more rounds"
        )
    variance = noise_variance(server.summary, algorithm.settings["noise"])
    head, family = algorithm.module, algorithm.settings.get("local.family", "gaussian")

    def statistics(tensors: dict[str, Tensor], block: ClientData) -> SufficientStatistics:
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

    return run.clients.evaluate(run.outbox, data, statistics), variance, server.covariance


def coefficient_names(run: Any) -> tuple[str, ...]:
    """Return the names of a device's coefficients: those of the columns where they are known, else numbers."""
    head, size = run.algorithm.module, run.server.parameters.shape[1]
    columns = feature_names(run.population)
    if len(columns) + head.intercept != size:
        columns = tuple(map(str, range(size - head.intercept)))
    return (*columns, "Intercept") if head.intercept else columns
