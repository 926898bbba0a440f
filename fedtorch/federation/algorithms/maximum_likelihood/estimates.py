"""Estimates of a run of maximum marginal likelihood."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.federation.algorithms.ep.estimates import (
    check_dependence,
    check_separation,
    coefficient_names,
    model_of,
    prior_of_means,
    shown_coefficients,
    units,
)
from fedtorch.federation.algorithms.ep.fitting import unidentified
from fedtorch.federation.algorithms.maximum_likelihood import _newton as newton
from fedtorch.federation.algorithms.maximum_likelihood._newton import Expansion
from fedtorch.federation.algorithms.maximum_likelihood._problem import MaximumServer, Problem, maximised
from fedtorch.federation.populations.population import row_counts
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.holders import at_clients
from fedtorch.federation.runs.run import Run
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.estimates import Estimates, own_names
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.dependence import taking_part
from fedtorch.models.hierarchical.empty_levels import refuse_without_maximum

_FLAT = 1e-4  # curvature of a log variance with a standard error of a hundred


class Maximum(NamedTuple):
    """Estimates of the shared parameters, in the units of the columns of x, which a formula scales: see
    `run.summary()`.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.maximum_likelihood import estimates, maximised
        >>> from fedtorch.models import hierarchical
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([y, y + 1.0])) for y in (0.0, 4.0, 5.0)])
        >>> algorithm = ft.maximum_likelihood(hierarchical.linear(hierarchical.normal(1)), restricted=True)
        >>> found = estimates(ft.run(algorithm, ft.InProcess(data), rounds=30, until=maximised()))
        >>> found.names, round(found.log_likelihood, 3)
        (('mean 0', 'log variance 0', 'log noise'), -9.59)
        >>> found.sds.round(decimals=3), found.noise  # of the coefficients over clients, and of rows
        (tensor([2.5980], dtype=torch.float64), 0.7071...)
    """

    names: tuple[str, ...]  # names of the coordinates of φ
    mean: Tensor  # (p,) φ where the (restricted) likelihood is largest
    covariance: Tensor  # (p, p) inverse of minus its second derivatives; if restricted, in blocks of means and others
    log_likelihood: float  # the restricted likelihood of a formula is in the units of the frame's columns
    spread: Tensor  # (d, d) covariance of the coefficients over clients
    noise: float | None  # residual sd, if it is estimated

    @property
    def errors(self) -> Tensor:
        """Return standard errors of all coordinates, `(p,)`."""
        return self.covariance.diagonal().sqrt()

    @property
    def sds(self) -> Tensor:
        """Return the coefficients' standard deviations over clients, `(d,)`, 0 for fixed ones."""
        return self.spread.diagonal().sqrt()

    @property
    def correlation(self) -> Tensor:
        """Return the coefficients' correlations over clients, `(d, d)`, NaN for fixed ones."""
        return self.spread / torch.outer(self.sds, self.sds)


def estimates(run: Run, *, tolerance: float = 1e-8) -> Maximum:
    """Return a run's estimates, with standard errors.

    A `RuntimeWarning` is given if the likelihood can still grow, if columns are linearly dependent, and if the
    likelihood has no curvature in another direction, as at a variance of zero; standard errors are NaN or large then.
    They come from the curvature in all parameters together, so without `restricted` those of fixed effects are 0 to 3 %
    wider than lme4's, which treats variances as known; with restricted likelihood they are lme4's.

    Args:
        run: of `maximum_likelihood`.
        tolerance: as for `maximised`; `math.inf` accepts runs that have not converged.

    Raises:
        TypeError: a run of another algorithm.
        RuntimeError: the likelihood has not been evaluated yet.
    """
    problem, phi, best = checked(run, tolerance)
    model, means = problem.model, problem.means
    scales = len(model.hierarchy.names) - means
    learnt = len(model.names) > len(model.hierarchy.names)
    zeta, rows = phi[means:], best.curvature[:means, :means]
    certain = torch.linalg.inv_ex(rows).inverse
    dependent: bool | tuple[str, ...] = model.hierarchy.coefficients
    if dependent:
        after = torch.linalg.inv(prior_of_means(run).to(rows).inverse() + rows)
        dependent = check_separation(run, phi[:means], certain, after=after) or check_dependence(
            run, after, "where Newton's steps have ended"
        )
    return Maximum(
        model.names,
        phi,
        _covariance(run, problem, best, tolerance, warns=not dependent),
        float(best.value),
        model.hierarchy.covariance(zeta[:scales]),
        float((zeta[-1] / 2).exp()) if learnt else None,
    )


def named(run: Run, *, tolerance: float = 1e-8) -> Estimates:
    """Return the estimates by name: coefficients, normal with their standard errors; SDs, correlations and the noise.

    Coefficients of a formula are in the units of the frame's columns.

    Args:
        run, tolerance: as for `estimates`, with the same warnings and errors.
    """
    fit, hierarchy = estimates(run, tolerance=tolerance), model_of(run).hierarchy
    rows, clients = int(row_counts(run.population).sum()), len(run.population.names)
    if not hierarchy.coefficients:
        normal, size = Moments(fit.mean, fit.covariance), len(fit.names)
        return Estimates(fit.names, fit.mean[None], None, size, normal, (rows,) * size)
    names, back = coefficient_names(run), units(run).to(fit.mean)
    shown, back_shown = shown_coefficients(run)
    design, spread = (back_shown @ hierarchy.mean).to(fit.mean), back @ fit.spread @ back.mT
    sds = spread.diagonal().sqrt()
    m = design.shape[1]
    means, labels_of_scales, values = (design @ fit.mean[:m]).tolist(), list[str](), list[float]()
    sizes: list[int] = []
    for i in hierarchy.random:
        pairs = [j for j in hierarchy.random if j < i]
        labels_of_scales += [f"sd({names[i]})", *(f"cor({names[j]}, {names[i]})" for j in pairs)]
        values += [float(sds[i]), *(float(spread[i, j] / (sds[i] * sds[j])) for j in pairs)]
        sizes += [clients] * (1 + len(pairs))
    if fit.noise is not None:
        labels_of_scales, values, sizes = [*labels_of_scales, "sigma"], [*values, fit.noise], [*sizes, rows]
    normal = Moments(design @ fit.mean[:m], _of_known(design, fit.covariance[:m, :m]))
    labels, counts = (*shown, *own_names(labels_of_scales, shown)), (*(rows,) * len(shown), *sizes)
    return Estimates(labels, torch.tensor([[*means, *values]]).to(fit.mean), None, len(shown), normal, counts)


def devices(run: Run, *, tolerance: float = 1e-8) -> DevicePosterior:
    """Compute each client's coefficients given its rows and the estimates, where its rows are.

    Their means are best linear unbiased predictions in the linear model. All estimates are treated as known, fixed
    effects too, as in lme4's conditional variances; `ft.inference.ranef` and `predict` treat only variances as known.

    Args:
        run: of `maximum_likelihood`, on data at hand.
        tolerance: as for `estimates`, with the same errors.

    Raises:
        TypeError: a run of another algorithm, or of a population without its data.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.maximum_likelihood import devices, maximised
        >>> from fedtorch.models import hierarchical
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([y, y + 1.0])) for y in (0.0, 4.0, 5.0)])
        >>> algorithm = ft.maximum_likelihood(hierarchical.linear(hierarchical.normal(1)))
        >>> run = ft.run(algorithm, ft.InProcess(data), rounds=30, until=maximised())
        >>> devices(run).marginals().mean.flatten().round(decimals=2)  # of means 0.5, 4.5 and 5.5
        tensor([0.6600, 4.4500, 5.3900], dtype=torch.float64)
    """
    problem, phi, _ = checked(run, tolerance)
    model = problem.model
    data = getattr(run.population, "data", None)
    if data is None:
        raise TypeError(f"Expected a run on data at hand, but got one on {run.population!r}")

    def own(outbox: dict[str, Tensor], block: ClientData) -> DevicePosterior:
        at = phi.expand(len(block.count), 1, -1)
        return model.given(at, torch.ones_like(at[..., 0]), model.prepare(block))

    return at_clients(run)(data, own)


def checked(run: Run, tolerance: float) -> tuple[Problem, Tensor, Expansion]:
    """Return the maximised problem, φ at the maximum, and the expansion there, of a run that has reached one.

    The expansion is in the problem's coordinates.
    """
    posterior: Any = posterior_of(run.algorithm)
    server = tree.to(run.server, "cpu")
    if not isinstance(server, MaximumServer):
        name = run.algorithm.settings.get("algorithm")
        raise TypeError(f"Expected a run of ft.maximum_likelihood, but got one of {name}")
    model, restricted = posterior.model, posterior.restricted
    problem = Problem.of(model, restricted)
    best = problem.around(server.best)
    if not bool(server.best.value.isfinite()):
        raise RuntimeError(
            f"Expected the likelihood at the first estimate, but got none after {run.number} rounds; let all clients "
            "answer in two rounds at least, or begin with another prior if it is nowhere finite"
            + ("; leave levels without rows out of levels=" if model.ordered is not None else "")
            + (_of_dependence(run, model) if restricted else "")
        )
    if model.ordered is not None and model.ordered.differences:
        means = model.hierarchy.mean.to(best.at)
        m = means.shape[1]
        back = torch.linalg.pinv(means)  # fixed effects and means over clients are coefficients, one each
        refuse_without_maximum(model.ordered, means @ best.at[:m], back.mT @ best.curvature[:m, :m] @ back)
    if unknown := unidentified(run):
        warnings.warn(unknown, RuntimeWarning, stacklevel=3)
    elif not maximised(tolerance)({"gain": [float(server.gain)]}):
        warnings.warn(
            f"Not converged after {run.number} rounds: another step would add {float(server.gain):.2g} to the log "
            f"likelihood; {_of_singular(run, problem, best.at) or 'allow more rounds'}",
            RuntimeWarning,
            stacklevel=3,
        )
    return problem, problem.phi(best.at), best


def _of_singular(run: Run, problem: Problem, at: Tensor) -> str:
    """Return a sentence that names the coefficients with a singular covariance, "" for full rank."""
    hierarchy, means = problem.model.hierarchy, problem.means
    place = torch.tensor(hierarchy.random, dtype=torch.int64)
    if len(place) < 2 or not hierarchy.coefficients:
        return ""
    spread = hierarchy.covariance(problem.phi(at)[means : len(hierarchy.names)])[place[:, None], place]
    sds = spread.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(spread / torch.outer(sds, sds))
    if bool(values[0] > _FLAT):
        return ""
    involved = taking_part([coefficient_names(run)[j] for j in hierarchy.random], vectors[:, values <= _FLAT])
    return (
        f"the covariance of the random coefficients {', '.join(involved)} is singular, as if fewer of them explained "
        "all (a singular fit). There the likelihood rises slowly, and variances have no standard errors: leave out one "
        "of them, or their correlations, or use ft.ep with a prior"
    )


def _of_dependence(run: Run, model: Model) -> str:
    """Describe columns without a restricted likelihood, if rows are at hand."""
    x = getattr(getattr(run.population, "data", None), "rows", (None,))[0]
    names, listing = coefficient_names(run), "; ft.maximum_likelihood(model) without restricted=True names them"
    if isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == len(names):
        size = x.to(torch.float64).norm(dim=0)
        gram = x.double() / torch.where(size > 0, size, 1.0)
        values, vectors = torch.linalg.eigh(gram.mT @ gram)
        null = vectors[:, values <= len(names) * torch.finfo(values.dtype).eps * len(x)]
        listed = ", ".join(taking_part(names, null))
        listing = f", which [{listed}] are here" if listed else ""
    return (
        f"; there is no restricted likelihood if columns are linearly dependent{listing}. Leave such terms out; "
        "replace a product of factors that has empty cells by one factor of its other cells"
    )


def _covariance(run: Run, problem: Problem, best: Expansion, tolerance: float, warns: bool) -> Tensor:
    """Return the covariance of φ, with NaN where the likelihood has no information, after a warning."""
    means, curvature = problem.means, best.curvature
    seen = curvature.diagonal() * run.server.best.steps.square().cpu()  # for an empty column there is only rounding
    known = torch.cat([seen[:means].abs() > newton.NOISE * best.value.abs(), curvature.diagonal()[means:] > _FLAT])
    place = known.nonzero()[:, 0]
    factor, failed = torch.linalg.cholesky_ex(curvature[place[:, None], place])
    if bool(failed):
        known = torch.zeros_like(known)
    inverse = torch.zeros_like(curvature)
    if bool(known.any()):
        inverse[place[:, None], place] = torch.cholesky_inverse(factor)
    if warns and not bool(known.all()):
        flat = _scale_names(run, problem, (~known[means:]).nonzero()[:, 0].tolist())
        which = f", at {', '.join(flat)}" if flat and not bool(failed) else ""
        warnings.warn(
            "Expected a likelihood that is curved in all directions, but got one that is flat or not at a maximum in "
            f"some{which}, as where a variance is estimated as zero or a correlation as 1 or -1 (a singular fit); "
            "standard errors are NaN there: leave out such a random coefficient, or its correlations, or use ft.ep "
            "with a prior",
            RuntimeWarning,
            stacklevel=3,
        )
    slopes = torch.autograd.functional.jacobian(problem.phi, best.at)
    unknown = (slopes[:, ~known] != 0).any(1)
    if bool(known.all()) and (singular := _of_singular(run, problem, best.at)):
        unknown[means : len(problem.model.hierarchy.names)] = True
        if warns and maximised(tolerance)({"gain": [float(run.server.gain)]}):
            warnings.warn(f"Expected clients that inform every variance, but {singular}", RuntimeWarning, stacklevel=3)
    covariance = slopes @ inverse @ slopes.mT
    return covariance.masked_fill(unknown[:, None] | unknown, torch.nan)


def _of_known(design: Tensor, covariance: Tensor) -> Tensor:
    """Return the covariance of combinations `(q, m)` of coefficients, NaN if they include unknown ones."""
    unknown = (design[:, covariance.diagonal().isnan()] != 0).any(1)
    return (design @ covariance.nan_to_num() @ design.mT).masked_fill(unknown[:, None] | unknown, torch.nan)


def _scale_names(run: Run, problem: Problem, places: list[int]) -> list[str]:
    """Return `summary`'s names of coordinates of the variances; for other hierarchies their own names."""
    hierarchy, own = problem.model.hierarchy, list(problem.model.names[problem.means :])
    if hierarchy.coefficients:
        names, random = coefficient_names(run), hierarchy.random
        pairs = [(i, j) for i in range(len(random)) for j in range(i)]
        shown = [f"sd({names[j]})" for j in random] + [f"cor({names[random[j]]}, {names[random[i]]})" for i, j in pairs]
        own = [*shown[: len(hierarchy.names) - problem.means], "sigma"]
    return [own[place] for place in places]
