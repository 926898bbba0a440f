"""A unit whose own parameters are integrated over: a new one that joins, or one of the run by its own rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import random
from fedtorch.functional import Swap
from fedtorch.linalg import symmetric
from fedtorch.models.gaussian_process import _tempering
from fedtorch.models.gaussian_process._geometry import Features
from fedtorch.models.gaussian_process._units import Observed, full
from fedtorch.models.gaussian_process.algebra import GaussianSite, evidence, posterior
from fedtorch.models.gaussian_process.checks import check_gaussian, check_inputs, check_rows
from fedtorch.models.gaussian_process.model import ConvolvedGP, MultivariateNormal
from fedtorch.models.gaussian_process.quiet_gpytorch import linear_operator
from fedtorch.models.gaussian_process.unit_prior import UnitPrior, learnt

_DRAWS = 128  # draws of a unit's parameters
_MOST_NUMBERS = 2**20  # most numbers of matrices in memory


class UnitMixture(nn.Module):
    """A unit, or units `*k`, as a mixture of equally weighted `ConvolvedGP` over draws of the unit's own parameters.

    Calling it with x `(*k, N, d)` gives the mean and the covariance of f, by the law of total covariance, as a
    `MultivariateNormal`; `predict` adds the noise.

    Args:
        components: its units' tensors are `(K · S, ...)`, the S draws of each of K units one after another.
        batch_shape: *k, of K elements.

    >>> x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    >>> model = ConvolvedGP(x[::2])
    >>> model.condition(x, (6 * x[:, 0]).sin())
    >>> units = join(model, x[:3], torch.ones(2, 3, dtype=torch.float64))  # two units, alike
    >>> isinstance(units, UnitMixture), units.marginals(x)[0].shape
    (True, torch.Size([2, 12]))
    """

    def __init__(self, components: ConvolvedGP, batch_shape: torch.Size) -> None:
        super().__init__()
        self.components, self.batch_shape = components, batch_shape

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of f at x `(*k, N, d)`, `(*k, N)` each."""
        mean, variance = self._each(x)
        whole = variance.mean(1) + mean.var(1, correction=0)
        return self._shaped(mean.mean(1)), self._shaped(whole)

    def forward(self, x: Tensor) -> Any:
        """Return mean and covariance of f at x `(*k, N, d)`."""
        normal = self.components(self._rows(x))
        mean, covariance = self._apart(normal.mean), self._apart(normal.covariance_matrix)
        gap = mean - mean.mean(1, keepdim=True)
        whole = covariance.mean(1) + gap.mT @ gap / gap.shape[1]
        return MultivariateNormal(
            self._shaped(mean.mean(1)), linear_operator.to_linear_operator(self._shaped(symmetric(whole)))
        )

    def predict(self, x: Tensor) -> Any:
        """Return mean and covariance of outputs at x `(*k, N, d)`."""
        normal = self(x)
        noise = self._shaped(self._noise().mean(1)).expand(normal.mean.shape)
        return MultivariateNormal(normal.mean, normal.lazy_covariance_matrix.add_diagonal(noise))

    def interval(self, x: Tensor, level: float = 0.99) -> tuple[Tensor, Tensor]:
        """Return lower and upper limits of central predictive intervals of each output, quantiles of the mixture.

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, but got {level}")
        mean, variance = self._each(x)
        sd = (variance + self._noise()).sqrt()
        low, high = (self._shaped(_quantile(mean, sd, part)) for part in (0.5 - level / 2, 0.5 + level / 2))
        return low, high

    def _rows(self, x: Tensor) -> Tensor:
        """Return inputs `(*k, N, d)` once for every component, `(K · S, N, d)`."""
        check_inputs(self.components, x)
        units = self.batch_shape.numel()
        rows = x.expand(*self.batch_shape, *x.shape[-2:]).reshape(units, 1, *x.shape[-2:])
        return rows.expand(-1, len(self.components.kernel.scale) // units, -1, -1).flatten(0, 1)

    def _apart(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self.batch_shape.numel(), -1))

    def _shaped(self, values: Tensor) -> Tensor:
        return values.reshape(*self.batch_shape, *values.shape[1:])

    def _each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the components' means and variances of f, `(K, S, N)` each."""
        with torch.no_grad():
            mean, variance = self.components.marginals(self._rows(x))
        return self._apart(mean), self._apart(variance)

    def _noise(self) -> Tensor:
        """Return the components' noise variances, `(K, S, 1)`."""
        return self._apart(self.components.likelihood.noise.detach())


def join(
    model: ConvolvedGP,
    x: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    exact_units: bool = False,
    known: bool = False,
    seed: int = 0,
) -> UnitMixture:
    """Add a new unit with a few points, or new units one by one: integrate over its own parameters and condition q.

    The unit's own parameters have the prior learnt from the units of the run (`unit_prior`) times the model's declared
    priors. Draws from their posterior given q(g) come from tempered sequential Monte Carlo.

    Args:
        model: of one unit, no batch dimensions, with a posterior: for example any unit's of a federation.
        x: the new units' inputs `(*k, N, d)`.
        y: their outputs `(*k, N)`.
        mask: `(*k, N)`, which rows are there.
        exact_units: see `ConvolvedGP.bound`.
        known: whether these are the rows of the model's own unit, which is in the run; q is then first computed without
            them. For one unit only.
        seed: of the draws.

    Returns:
        the mixture of models of the new units, with posteriors given their rows too.

    Raises:
        ValueError: rows that do not fit the model, or `known` rows that say more than q does. Rows of
            another unit may pass.
        TypeError: a likelihood that is not Gaussian.

    >>> x = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    >>> wave, model = (6 * x[:, 0]).sin(), ConvolvedGP(x[::2])
    >>> model.start(wave)
    >>> model.kernel.spread(torch.tensor([4.0]))  # lengthscale 0.4
    >>> model.condition(x, wave)  # a unit that has seen the whole wave
    >>> new = join(model, x[:3], -wave[:3])  # one that mirrors it, with three points
    >>> bool((new(x).mean + wave).abs().mean() < 0.2)  # it knows the rest, too
    True
    """
    check_gaussian(model.likelihood, "a new unit in closed form", "train it with the others")
    if model.batch_shape:
        raise ValueError(
            f"Expected a model of one unit, but got batch_shape={tuple(model.batch_shape)}; take that of a "
            "federation's unit"
        )
    check_rows(model, x, y, y.shape[:-1])
    batch, key = y.shape[:-1], random.key(seed).to(y.device)
    count, exact = batch.numel(), model.keeps_whole(exact_units)
    if known and batch:
        raise ValueError(f"Expected known rows of one unit, the model's own, but got those of {count}")
    x = x.expand(*batch, *x.shape[-2:])
    rows = Observed(x.reshape(count, *x.shape[-2:]), *(part.reshape(count, -1) for part in (y, full(y, mask))))
    new = copy.deepcopy(model)
    with torch.no_grad():
        if known:
            _leave_out(new, rows, exact)
        new.observed, prior = None, learnt(model, model.unit_moments)
        size = y.shape[-1] if exact else min(y.shape[-1], model.points)
        some = max(1, _MOST_NUMBERS // (_DRAWS * size * (size + model.points)))
        parts = [
            _draws(new, Observed(*(part[i : i + some] for part in rows)), exact, prior, key)
            for i in range(0, count, some)
        ]
        vectors = prior.vectors(torch.cat(parts).flatten(0, 1))
        return UnitMixture(_conditioned(new, vectors, _repeated(rows, _DRAWS), exact), batch)


def _draws(model: ConvolvedGP, rows: Observed, exact: bool, prior: UnitPrior, key: Tensor) -> Tensor:
    """Return draws of w from the posterior of units of these rows, `(K, S, D)`."""
    start_key, key = random.split(key, 2)
    every, swap = _repeated(rows, _DRAWS), Swap(model, ["kernel.scale", *model.unit_trained])

    def gain(w: Tensor) -> Tensor:
        tensors = model.unit_tensors(prior.vectors(w.flatten(0, 1)))
        with swap([*tensors.values()]):
            value = _evidence(model, every, exact) + model.log_prior(True)
        return value.unflatten(0, w.shape[:2])

    return _tempering.draws(prior.log_density, gain, prior.draw(start_key, _DRAWS), len(rows.y), key)


def _conditioned(model: ConvolvedGP, vectors: Tensor, rows: Observed, exact: bool) -> ConvolvedGP:
    """Return a copy for units with these parameters, `(S, D)`, whose q includes their rows `(S, N, ·)`."""
    new = copy.deepcopy(model)
    tensors = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    with torch.no_grad():
        for name, value in new.unit_tensors(vectors).items():
            tensors[name].data = value
        new.batch_shape = vectors.shape[:-1]
        site = _site(new, rows, exact)
        mean, root, _ = posterior(torch.eye(new.points).to(site.precision), *site)
        new.posterior_mean = new.posterior_mean + (new.posterior_root @ mean[..., None])[..., 0]
        new.posterior_root = new.posterior_root @ root
        new.observe(*rows, exact)
    return new


def _evidence(model: ConvolvedGP, rows: Observed, exact: bool) -> Tensor:
    """Return units' log-evidence under q, in the smaller of two forms."""
    if exact or rows.y.shape[-1] <= model.points:
        return model.gaussian_evidence(*_about_q(model, rows), exact)
    return evidence(_site(model, rows, exact))


def _site(model: ConvolvedGP, rows: Observed, exact: bool) -> GaussianSite:
    """Return units' likelihood of z, t = posterior mean + posterior root · z."""
    return model.gaussian_site(*_about_q(model, rows), exact)


def _about_q(model: ConvolvedGP, rows: Observed) -> tuple[Tensor, Tensor, Tensor, Features, Tensor]:
    """Return (x, y − the mean of q, mask, features, basis of z)."""
    x, y, mask = rows
    seen = model.see(x, mask)
    mean, root = model.whitened_posterior(seen.change)
    return x, y - (seen.basis @ mean[..., None])[..., 0], mask, seen, seen.basis @ root


def _leave_out(model: ConvolvedGP, rows: Observed, exact: bool) -> None:
    """Remove the site of the model's own unit, from its rows `(1, N, ·)`, from its q.

    Raises:
        ValueError: rows that are not in q.
    """
    x, y, mask = (part[0] for part in rows)
    site = _site(model, Observed(x, y, mask), exact)
    # About z, q is N(0, 1) and the site in it a'z − ½ z'B z: without it the precision is 1 − B and the shift −a.
    size, vectors = torch.linalg.eigh(symmetric(site.precision))
    left = 1 - size
    if not bool((left > 0).all()):
        raise ValueError("Expected rows that q was fitted to, but got others; leave out known=True")
    shift = -(vectors.mT @ site.shift[:, None])
    mean = vectors @ (shift / left[:, None])
    root = torch.linalg.qr((vectors * left.rsqrt()).mT, mode="r")[1].mT
    model.posterior_mean = model.posterior_mean + (model.posterior_root @ mean)[:, 0]
    model.posterior_root = model.posterior_root @ root


def _repeated(rows: Observed, times: int) -> Observed:
    """Repeat every unit's rows, `(K · times, N, ·)`."""
    return Observed(*(part[:, None].expand(-1, times, *part.shape[1:]).flatten(0, 1) for part in rows))


def _quantile(mean: Tensor, sd: Tensor, part: float) -> Tensor:
    """Return quantiles `(K, N)` of mixtures of S normal distributions `(K, S, N)`, by bisection."""
    alone = mean + sd * torch.special.ndtri(torch.tensor(part, dtype=mean.dtype, device=mean.device))
    low, high = alone.amin(1, keepdim=True), alone.amax(1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle - mean) / sd).mean(1, keepdim=True) < part
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return ((low + high) / 2)[:, 0]
