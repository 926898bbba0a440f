"""Posterior of a sampling run, from the draws recorded by its sampler."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.data import ClientData
from fedtorch.federation.populations.population import feature_names, row_counts
from fedtorch.federation.posterior import Coefficients, Draws, Pooling, Posterior, wide
from fedtorch.federation.runs.holders import local_holder, rows_at_hand
from fedtorch.federation.runs.posterior_draws import Drawn, by_client
from fedtorch.federation.runs.sampler import SITES, Sampler, arviz_of, diagnostics, load_arviz
from fedtorch.models import hierarchical
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.estimates import Diagnostics, Estimates, own_names
from fedtorch.models.gibbs.kernels import LocalKernel
from fedtorch.models.hierarchical.families import Family
from fedtorch.models.rows import observations

SHARED = "theta"  # the global parameter of the package's models
_DRAWS = 1000  # draws mixed in predictions
_MEASURED = 100  # coefficients whose effective sizes are computed


def sampler_of(run: Any) -> Sampler:
    """Return the sampler that has recorded a run and keeps its draws.

    Raises:
        TypeError: the run has no sampler.
    """
    samplers = [each for each in run.recorders if isinstance(each, Sampler)]
    if not samplers:
        raise TypeError(
            f"Expected a run of {run.algorithm.settings.get('algorithm')} with draws, but got one without a sampler; "
            "pass record=ft.Sampler(burn_in=100) to ft.run"
        )
    return samplers[0]


def component_names(name: str, leaf: Tensor, columns: tuple[str, ...]) -> list[str]:
    """Return names of the components of draws `(C, T, ...)`; those of the global parameter are the columns' names.

    >>> component_names("theta", torch.zeros(2, 5, 2), ("age", "sex")), component_names("tau", torch.zeros(2, 5, 1), ())
    (['age', 'sex'], ['tau[0]'])
    """
    shape = leaf.shape[2:]
    if not len(shape):
        return [name]
    known = columns if len(columns) == shape[-1] else tuple(map(str, range(shape[-1])))
    places = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
    if name == SHARED and known == columns and len(shape) == 1:
        return list(columns)
    return [f"{name}[{', '.join([*map(str, place[:-1]), known[place[-1]]])}]" for place in places]


def drawn_coefficients(run: Any) -> tuple[Tensor, Tensor]:
    """Return draws of the sites' coefficients `(C, T, K, d)`, with own intercepts first, and of their shared parts.

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
        intercept = draws[f"{SITES}intercept"][..., None]
        total, shared = torch.cat([intercept, total], -1), torch.cat([torch.zeros_like(intercept), shared], -1)
    return total, shared


def drawn_names(run: Any, size: int, intercept: bool) -> tuple[str, ...]:
    """Return the names of a number of site coefficients, with or without an own intercept first."""
    columns = feature_names(run.population)
    columns = columns if len(columns) == size - intercept else tuple(map(str, range(size - intercept)))
    return (*own_names(["Intercept"], columns), *columns) if intercept else columns


@dataclass(frozen=True)
class Sampled(Posterior):
    """Posterior from the draws recorded by a run's `ft.Sampler`.

    Attributes:
        local: the sampler's client part, which has the response family and the model of clients without rows.
    """

    local: LocalKernel

    def estimates(self, run: Any) -> Estimates:
        """Return the posterior of the global parameter; of a model without one, that of all that was watched.

        Coefficients have the names of the rows' columns, if the numbers match.
        """
        draws = {name: leaf for name, leaf in sampler_of(run).draws().items() if not name.startswith(SITES)}
        draws = {SHARED: draws[SHARED]} if SHARED in draws else draws
        columns, rows = feature_names(run.population), int(row_counts(run.population).sum())
        names, parts = [], []
        for name, leaf in draws.items():
            flat = leaf.flatten(2)
            names += component_names(name, leaf, columns)
            parts.append(flat if leaf.ndim > 2 else leaf[..., None])
        stack = torch.cat(parts, 2)  # (C, T, q)
        r_hat, ess = (torch.tensor(each, dtype=torch.float64) for each in diagnostics(stack.numpy()))
        return Estimates(
            names=tuple(names),
            nodes=stack.flatten(0, 1),
            coefficients=len(names),
            n=(rows,) * len(names),
            diagnostics=Diagnostics(r_hat, ess),
            chains=len(stack),
            about=f"{stack.shape[1]:,} draws of each of {len(stack)} chains",
        )

    def coefficients(self, run: Any, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the coefficients of the run's clients, evenly thinned if there are many draws."""
        return self._mixture(run, drawn_coefficients(run)[0])

    def deviations(self, run: Any, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return the deviations from the global parameter."""
        total, shared = drawn_coefficients(run)
        return self._mixture(run, total - shared)

    def newcomers(self, run: Any, given: Any = None, tolerance: float = 0.01) -> Coefficients:
        """Return draws for a client without rows, given the draws of the shared parameters."""
        local, draws = self.local, sampler_of(run).draws()
        if local.newcomer is None or SHARED not in draws:
            raise TypeError(
                "Expected a kernel with the distribution of new clients, and a sampler with its global variables, but "
                "got one without: a site's intercept that is integrated out has no distribution, and a deviation of "
                "your own needs its prior=; rows of the run's own sites can be predicted"
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
        names = drawn_names(run, size, intercept)
        return Coefficients(("new",), names, posterior, torch.eye(size).double(), local.family, intercept=intercept)

    def pooling(self, run: Any, level: float, tolerance: float = 0.01) -> Pooling:
        """Return partially pooled estimates by draws; a client's own estimate uses the sampled noise."""
        sites, (total, shared) = self.coefficients(run), drawn_coefficients(run)
        family = self._family()
        total, shared = total.flatten(0, 1), shared[..., 0, :].flatten(0, 1)  # (S, K, d), (S, d)
        known = ~shared.isnan() & bool((shared != 0).any())
        known[:, : int(sites.intercept)] = False  # intercepts share only their mean
        middle = shared.where(known, total.mean(1))
        spread = (total - middle[:, None]).square().mean(1).sqrt().log().mean(0).exp()
        low, high = (middle.quantile((1 + sign * level) / 2, 0) for sign in (-1, 1))
        size, centre = len(spread), middle.mean(0)
        hierarchy = hierarchical.normal(size)
        model = (hierarchical.linear if family.precise else hierarchical.generalised.logistic)(hierarchy)
        phi = wide(model, torch.cat([centre, torch.zeros(len(model.names) - size).to(centre)]), spread)
        every = phi.expand(len(sites.sites), -1).clone()
        if family.precise:
            every[:, -1] = sites.posterior.log_noise.mean(1)

        def own(block: ClientData, clients: Tensor, names: Tensor) -> DevicePosterior:
            x, y = (part.to(torch.float64) for part in block.batch)
            x = torch.cat([torch.ones_like(x[..., :1]), x], -1) if sites.intercept else x
            phi, prepared = every[clients][:, None].to(x), model.prepare(ClientData((x, y), block.count))
            return model.given(phi, torch.ones_like(phi[..., 0]), prepared)

        alone = by_client(local_holder(run), [rows_at_hand(run)], [own], lambda found: found[0])
        place = list(range(size))
        return Pooling(sites.names, place, sites.totals(), alone, centre, low, high, spread, sites.family)

    def draws(self, run: Any, draws: int, given: Any, tolerance: float, seed: int, *, even: bool = False) -> Draws:
        """Return at most this many draws, spread over the chains; clients have them where their rows are."""
        family, (total, _) = self._family(), drawn_coefficients(run)  # (C, T, K, d)
        step = -(-total.shape[0] * total.shape[1] // draws)
        joined = lambda leaf: leaf[:, ::step].flatten(0, 1).transpose(0, 1)
        theta, scale = joined(total), torch.ones_like(joined(total)[..., 0])
        if family.precise:
            scale = 1 / joined(sampler_of(run).draws()[f"{SITES}noise"])
        key, efficiency = random.fold_in(random.key(seed), 0), _efficiency(total, theta.shape[1])

        def at(block: ClientData, clients: Tensor, names: Tensor) -> Drawn:
            rows = observations(block, extras=())
            if theta.shape[-1] == rows.x.shape[-1] + 1:
                rows = rows._replace(x=torch.cat([torch.ones_like(rows.x[..., :1]), rows.x], -1))
            keys = random.fold_in(key, names)
            return Drawn(family, rows, block.mask, theta[clients], scale[clients], keys, efficiency)

        return Draws(family, at)

    def columns(self, run: Any) -> tuple[tuple[str, ...], None]:
        """Return names of the columns of x."""
        size = drawn_coefficients(run)[0].shape[-1] - (f"{SITES}intercept" in sampler_of(run).moments)
        return drawn_names(run, size, intercept=False), None

    def inferencedata(self, run: Any, *, draws: int, chains: int, given: Any, tolerance: float) -> Any:
        """Return the sampler's draws."""
        made: dict[str, Tensor] = sampler_of(run).draws()
        columns = feature_names(run.population) or tuple(
            map(str, range(made[SHARED].shape[-1] if SHARED in made else 0))
        )
        coords: dict[str, Sequence[str]] = {"coefficient": columns, "site": run.population.names}
        dims: dict[str, list[str]] = {}
        for name, leaf in made.items():
            site = ["site"] if name.startswith(SITES) else []
            if leaf.ndim > 2 + len(site) and leaf.shape[-1] == len(columns) and leaf.ndim == 3 + len(site):
                dims[name] = [*site, "coefficient"]
            elif site:
                dims[name] = site
        used = {axis for axes in dims.values() for axis in axes}
        return arviz_of(made, {axis: names for axis, names in coords.items() if axis in used}, dims)

    def _mixture(self, run: Any, total: Tensor) -> Coefficients:
        """Return the coefficients of draws `(C, T, K, d)`."""
        draws = sampler_of(run).draws()
        every = max(1, -(-total.shape[1] * total.shape[0] // _DRAWS))
        means = total[:, ::every].flatten(0, 1).transpose(0, 1)  # (K, R, d)
        clients, count, size = means.shape
        log_noise = means.new_full((clients, count), torch.nan)
        if f"{SITES}noise" in draws and getattr(self.local.family, "precise", False):
            log_noise = -draws[f"{SITES}noise"][:, ::every].flatten(0, 1).mT.log()
        posterior = DevicePosterior(
            means.new_full((clients, count), 1 / count),
            means,
            means.new_zeros(1, 1, 1, 1).expand(clients, count, size, size),
            log_noise,
        )
        return Coefficients(
            sites=tuple(run.population.names),
            names=drawn_names(run, size, f"{SITES}intercept" in draws),
            posterior=posterior,
            back=torch.eye(size, dtype=torch.float64),
            family=self.local.family,
            intercept=f"{SITES}intercept" in draws,
            draws=total,
        )

    def _family(self) -> Family:
        """Return the family of a response; raise TypeError if the kernel does not define it."""
        if self.local.family is None:
            raise TypeError(
                "Expected a sampler of regressions with all their coefficients, such as sparse.regression() or "
                "logistic_regression(), but got another; add a column of ones to x in place of intercept=True"
            )
        return self.local.family


def _efficiency(total: Tensor, draws: int) -> float:
    """Return the ratio of effective draws to draws, for the mean of a coefficient."""
    stack = total.flatten(2)[..., :_MEASURED].numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant quantity has no effective size
        sizes = torch.tensor([float(load_arviz().ess(stack[..., i], method="mean")) for i in range(stack.shape[-1])])
    known = sizes[sizes.isfinite()]
    return min(1.0, float(known.mean()) / draws) if len(known) else 1.0
