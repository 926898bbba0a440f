"""Central training, and a new unit that joins."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fedtorch.models.gaussian_process.algebra import GaussianSite, evidence, posterior
from fedtorch.models.gaussian_process.checks import check_rows
from fedtorch.models.gaussian_process.model import ConvolvedGP
from fedtorch.progress import Progress


def fit(
    model: ConvolvedGP,
    x: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    exact_units: bool = False,
    iterations: int = 200,
    start: bool = True,
) -> Tensor:
    """Maximise the bound plus the priors centrally by L-BFGS, for Gaussian noise, and set the posterior.

    Args:
        model: changed in place; its batch shape is that of y.
        x: inputs `(*b, N, d)`.
        y: outputs `(*b, N)`.
        mask: `(*b, N)`, which rows are there.
        exact_units: see `ConvolvedGP.bound`.
        iterations: of L-BFGS at most.
        start: whether units begin from `ConvolvedGP.initial_units`.

    Returns:
        the bound, `()`.

    Raises:
        ValueError: rows that do not fit the model.
        TypeError: a likelihood that is not Gaussian.
    """
    check_rows(model, x, y)
    if start:
        model.start(y, mask)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe", history_size=20)

    def loss() -> float:
        optimizer.zero_grad()
        value = -model.bound(x, y, mask, exact_units) - model.log_prior(True).sum() - model.log_prior(False)
        value.backward()
        shown.update()
        return value  # type: ignore[return-value]

    with Progress("Gaussian process", unit="evaluation") as shown:
        optimizer.step(loss)
    model.condition(x, y, mask, exact_units)
    with torch.no_grad():
        return model.bound(x, y, mask, exact_units)


def join(model: ConvolvedGP, x: Tensor, y: Tensor, iterations: int = 100, *, exact_units: bool = False) -> ConvolvedGP:
    """Add a new unit with a few points: fit its own parameters with q(g) as the prior, then condition q on them.

    Args:
        model: of one unit, no batch dimensions, with a posterior: for example any unit's of a federation.
        x: the new unit's inputs `(N, d)`.
        y: its outputs `(N,)`.
        iterations: of L-BFGS at most.
        exact_units: see `ConvolvedGP.bound`.

    Returns:
        a copy of the model for the new unit, whose posterior knows its points too.

    Raises:
        ValueError: rows that do not fit the model.
        TypeError: a likelihood that is not Gaussian.

    >>> x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    >>> wave, model = (6 * x[:, 0]).sin(), ConvolvedGP(x[::2])
    >>> model.start(wave)
    >>> model.kernel.spread(torch.tensor([4.0]))  # lengthscale 0.4
    >>> model.condition(x, wave)  # a unit that has seen the whole wave
    >>> new = join(model, x[:3], -wave[:3], iterations=6)  # one that mirrors it, with three points
    >>> bool((new(x).mean + wave).abs().mean() < 0.2)  # it knows the rest, too
    True
    """
    check_rows(model, x, y)
    new = copy.deepcopy(model)
    new.start(y)
    named = dict(new.named_parameters())
    parameters = [named[name] for name in new.unit_names if name in named and named[name].requires_grad]
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")
    mask = torch.ones_like(y)

    def told() -> GaussianSite:
        """Return the unit's site about z, t = posterior mean + posterior root · z."""
        seen = new.see(x, mask)
        mean, root = new.whitened_posterior(seen.change)
        known = y - (seen.basis @ mean[..., None])[..., 0]
        return new.gaussian_site(x, known, mask, seen, seen.basis @ root, exact_units)

    def loss() -> float:
        optimizer.zero_grad()
        value = -evidence(told()) - new.log_prior(True).sum()
        value.backward()
        shown.update()
        return value  # type: ignore[return-value]

    with Progress("Gaussian process", unit="evaluation") as shown:
        optimizer.step(loss)
    with torch.no_grad():
        site = told()
        mean, root, _ = posterior(torch.eye(new.points).to(site.precision), *site)
        new.posterior_mean = new.posterior_mean + new.posterior_root @ mean
        new.posterior_root = new.posterior_root @ root
    new.observe(x, y, mask, exact_units)
    return new
