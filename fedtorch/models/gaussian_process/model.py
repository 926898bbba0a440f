"""The multi-output Gaussian process of many units."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import random
from fedtorch.functional import Swap
from fedtorch.linalg import symmetric
from fedtorch.models.gaussian_process._geometry import Features, Geometry
from fedtorch.models.gaussian_process._kernel_parts import extent_of, positive
from fedtorch.models.gaussian_process._rows import row_fit, row_sites
from fedtorch.models.gaussian_process._stacked_kernel import parameter_dims
from fedtorch.models.gaussian_process._units import Observed, full
from fedtorch.models.gaussian_process.algebra import (
    GaussianSite,
    evidence,
    log_determinant,
    posterior,
    solve,
    stable_cholesky,
)
from fedtorch.models.gaussian_process.checks import check_gaussian, check_inputs, check_kernels, check_parts
from fedtorch.models.gaussian_process.kernels import OutputKernel, output_kernel
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch, linear_operator
from fedtorch.models.gaussian_process.unit_prior import moments

MultivariateNormal = gpytorch.distributions.MultivariateNormal
GaussianLikelihood = gpytorch.likelihoods.GaussianLikelihood


class ConvolvedGP(Geometry):
    """A multi-output Gaussian process; `*b` are the units' batch dimensions, none for one unit.

    Calling it with x `(*b, N, d)` gives the posterior of f as a `MultivariateNormal`; `predict` adds the noise.

    Args:
        inducing: inducing inputs w `(J, d)`, the same for all latent processes.
        kernel: default: a `ConvolutionProcess`. A kernel of GPyTorch, or a list of them, becomes a `Coregionalisation`.
        likelihood: any GPyTorch likelihood of one-dimensional outputs, with the units' batch shape; default: Gaussian
            noise.
        latents: latent processes of the default kernel.
        batch_shape: of the units.
        learn_inducing: whether the inducing inputs are parameters.
        features: applied to all inputs and shared by all units, a deep kernel or `EmbedCategories`; kernels get its
            outputs. Its `check`, if it has one, is called with the rows first.
        mean: whether each unit has its own constant mean; for a trend use a latent process with a LinearKernel.
        scale: of the outputs of all units, for example the root of their pooled mean square, two sums over units;
            default: each unit's own, estimated from its outputs. A unit with rows from a small part of its signal
            misestimates its own.
        own_kernel: any GPyTorch kernel k_m of embedded inputs: each unit has its own process besides the latent ones,
            f_m = Σ_i f_mi + δ_m with δ_m ~ GP(0, scale_m² k_m). Units are then exact, in O(N_m³); Gaussian noise.
        share_own_kernel: whether that kernel's hyperparameters, then without batch shape, are those of all units.
        jitter: relative to the variances; it grows tenfold, for a unit that needs it, up to 10⁶ times.

    Raises:
        ValueError: inducing inputs that are not finite or not `(J, d)`, a kernel of other dimensions, a scale that is
            not positive, or a kernel, likelihood or own kernel of another batch shape.
        TypeError: an own kernel beside a likelihood that is not Gaussian; a likelihood of several outputs, or with a
            noise of each row; a mean that is no bool.

    Example:
        >>> import torch
        >>> from fedtorch.models.gaussian_process import ConvolvedGP, fit
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)[None, :, None].expand(2, -1, -1)
        >>> wave = (6 * x[0, :, 0]).sin() + 0.01 * (190 * x[0, :, 0]).cos()
        >>> y = torch.stack([wave, -2 * wave])
        >>> model = ConvolvedGP(torch.linspace(0, 1, 8, dtype=torch.float64)[:, None], batch_shape=torch.Size([2]))
        >>> float(fit(model, x, y)) > 100
        True
        >>> bool((model(x).mean - y).abs().max() < 0.1)
        True
    """

    def __init__(
        self,
        inducing: Tensor,
        kernel: OutputKernel | Any = None,
        likelihood: Any = None,
        *,
        latents: int = 1,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 (immutable)
        learn_inducing: bool = False,
        features: nn.Module | None = None,
        mean: bool = False,
        scale: float | None = None,
        own_kernel: Any = None,
        share_own_kernel: bool = False,
        jitter: float = 1e-8,
    ) -> None:
        super().__init__()
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"Expected a positive scale of the outputs, or None for each unit's, but got {scale}")
        if inducing.ndim != 2 or not bool(inducing.isfinite().all()):
            raise ValueError(f"Expected finite inducing inputs (J, d), but got shape {tuple(inducing.shape)}")
        self.features = None if features is None else features.to(inducing)
        self._feature_dims = {} if features is None else parameter_dims(features)
        dims = self.embed(inducing).shape[-1]
        self.kernel: Any = output_kernel(kernel, dims, latents, batch_shape)
        if self.kernel.dims != dims:
            raise ValueError(f"Expected a kernel of {dims} dimensions, but got one of {self.kernel.dims}")
        if likelihood is None:
            likelihood = GaussianLikelihood(noise_constraint=positive(), batch_shape=batch_shape)
        self.likelihood, self.batch_shape, self.scale, self.jitter = likelihood, batch_shape, scale, jitter
        self.own_kernel, self.share_own_kernel = own_kernel, share_own_kernel
        self._own_dims = {} if own_kernel is None else parameter_dims(own_kernel)
        check_parts(self, mean)
        if learn_inducing:
            self.inducing = nn.Parameter(inducing.clone())
        else:
            self.register_buffer("inducing", inducing.clone())
        self.offset = nn.Parameter(torch.zeros(batch_shape)) if mean else None
        self.observed: Observed | None = None
        size = len(inducing)
        self.points = self.kernel.latents * size
        self.register_buffer("basis", torch.eye(size).repeat(self.kernel.latents, 1, 1))
        self.register_buffer("posterior_mean", torch.zeros(self.points))
        self.register_buffer("posterior_root", torch.eye(self.points))
        self.register_buffer("unit_moments", self.no_moments())
        self.to(inducing)
        self.kernel.spread(extent_of(self.embed(inducing.detach())).detach())
        check_kernels(self)
        self.rebase()

    # -- one unit's part -------------------------------------------------------------------------------------------

    def keeps_whole(self, exact_units: bool) -> bool:
        """Return whether units' residuals are not diagonalised: on request, and always with an own process."""
        return exact_units or self.own_kernel is not None

    def expected_log_likelihood(
        self, x: Tensor, y: Tensor, mask: Tensor | None = None, *extra: Any, exact_units: bool = False
    ) -> Tensor:
        """Return E_q[log p(y_m | f_m)] of each unit, `(*b,)`, and E_q[log p(y_m | g)] of exact units.

        Args:
            x: inputs `(*b, N, d)`.
            y: outputs `(*b, N)`.
            mask: `(*b, N)`, which rows are there.
            extra: further fields of the likelihood, `(*b, N)` each.
            exact_units: whether a unit's residual covariance is full; for Gaussian noise.
        """
        mask = full(y, mask)
        seen = self.see(x, mask)
        mean, root = self.whitened_posterior(seen.change)
        if self.keeps_whole(exact_units):
            factor = self._unit_factor(x, seen, mask)
            white, gap = solve(factor, seen.basis), solve(factor, self._centred(y, mask)[..., None])
            gap = gap - white @ mean[..., None]
            square = gap.square().sum((-1, -2)) + (white @ root).square().sum((-1, -2))
            return -0.5 * (mask.sum(-1) * math.log(2 * math.pi) + log_determinant(factor) + square)
        linear = (seen.basis @ mean[..., None])[..., 0]
        variance = seen.residual + (seen.basis @ root).square().sum(-1)
        return row_fit(self.likelihood, y, linear + self.level(y), variance, mask, extra).sum(-1)

    def site(
        self, x: Tensor, y: Tensor, mask: Tensor | None = None, *extra: Any, exact_units: bool = False
    ) -> GaussianSite:
        r"""Return the likelihood of t, by unit, from its outputs.

        For Gaussian noise the exact factor, for any q. Otherwise the natural gradient of E_q[log p(y_m | f_m)]: with
        m_n, v_n the moments of f_n under q, each row has precision β_n = −2 ∂/∂v_n, at least 0, and shift ∂/∂m_n + β_n
        m_n (Khan and Lin 2017, "Conjugate-computation variational inference"). Arguments as those of
        `expected_log_likelihood`.
        """
        mask = full(y, mask)
        with torch.no_grad():
            seen = self.see(x, mask)
            moved = seen.basis @ seen.change
            if self.keeps_whole(exact_units) or isinstance(self.likelihood, GaussianLikelihood):
                return self.gaussian_site(x, y, mask, seen, moved, exact_units)
            mean, root = self.whitened_posterior(seen.change)
            linear = (seen.basis @ mean[..., None])[..., 0]
            spread = (seen.basis @ root).square().sum(-1)
        variance = seen.residual + spread
        precision, shift, value = row_sites(self.likelihood, y, self.level(y), linear, variance, mask, extra)
        constant = value - shift * linear + 0.5 * precision * (spread + linear.square())
        weighted = moved * precision[..., None]
        return GaussianSite(moved.mT @ weighted, (moved.mT @ shift[..., None])[..., 0], constant.sum(-1))

    def gaussian_site(
        self, x: Tensor, y: Tensor, mask: Tensor, seen: Features, basis: Tensor, exact_units: bool
    ) -> GaussianSite:
        """Return units' likelihood of u when f = basis · u and the residual, for Gaussian noise; differentiable.

        Args:
            x: inputs `(*b, N, d)`.
            y: outputs `(*b, N)`.
            mask: `(*b, N)`.
            seen: `see(x, mask)`, which has the residual.
            basis: `(*b, N, P)`.
            exact_units: whether the residual covariance is full.

        Raises:
            TypeError: another likelihood.
        """
        y = self._centred(y, mask)
        if self.keeps_whole(exact_units):
            factor = self._unit_factor(x, seen, mask)
            white, gap = solve(factor, basis), solve(factor, y[..., None])
            square = mask.sum(-1) * math.log(2 * math.pi) + log_determinant(factor) + gap.square().sum((-1, -2))
            return GaussianSite(white.mT @ white, (white.mT @ gap)[..., 0], -0.5 * square)
        check_gaussian(self.likelihood, "a bound in closed form", "train with fedtorch.fedmgp")
        noise = self.likelihood.noise
        weighted = basis / noise[..., None]
        constant = mask * (math.log(2 * math.pi) + noise.log()) + (y.square() + seen.residual) / noise
        return GaussianSite(basis.mT @ weighted, (weighted.mT @ y[..., None])[..., 0], -0.5 * constant.sum(-1))

    def gaussian_evidence(
        self, x: Tensor, y: Tensor, mask: Tensor, seen: Features, basis: Tensor, exact_units: bool
    ) -> Tensor:
        """Return log ∫ N(u; 0, I) exp(`gaussian_site` of u) du, `(*b,)`, by matrices `(*b, N, N)`, for few rows."""
        noise = torch.where(mask > 0, self.likelihood.noise.expand_as(mask), torch.ones_like(mask))
        whole = torch.diag_embed(noise) + basis @ basis.mT
        if self.keeps_whole(exact_units):
            whole = whole + self._residual(x, seen, mask)
        factor = stable_cholesky(whole, 0.0)
        square = solve(factor, self._centred(y, mask)[..., None]).square().sum((-1, -2)) + log_determinant(factor)
        if not self.keeps_whole(exact_units):
            square = square + (seen.residual / noise).sum(-1)
        return -0.5 * (mask.sum(-1) * math.log(2 * math.pi) + square)

    def _residual(self, x: Tensor, seen: Features, mask: Tensor) -> Tensor:
        """Return Ω_m + scale_m² k_m, zeros where masked out, `(*b, N, N)`."""
        return self.covariance(x, x) * mask[..., None] * mask[..., None, :] - seen.basis @ seen.basis.mT

    def _unit_factor(self, x: Tensor, seen: Features, mask: Tensor) -> Tensor:
        """Return the Cholesky factor of Ω_m + scale_m² k_m + σ_m² I, identity rows where masked out, `(*b, N, N)`."""
        check_gaussian(self.likelihood, "exact units", "leave exact_units away")
        diagonal = torch.where(mask > 0, self.likelihood.noise.expand_as(mask), torch.ones_like(mask))
        return stable_cholesky(self._residual(x, seen, mask) + torch.diag_embed(diagonal), 0.0)

    def _centred(self, y: Tensor, mask: Tensor) -> Tensor:
        return (y - self.level(y)) * mask

    def whitened_posterior(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mean `(*b, P)`, root of the covariance `(*b, P, P)`) of q in values white under the prior."""
        return (change @ self.posterior_mean[..., None])[..., 0], change @ self.posterior_root

    @property
    def chooses_weights(self) -> bool:
        """Return whether units' weights start from `initial_weights`: not if they are frozen or have a prior."""
        return "kernel.weight" in self.unit_trained and not hasattr(self.kernel, "weight_prior")

    def initial_weights(
        self, x: Tensor, y: Tensor, mask: Tensor | None = None, *extra: Any, exact_units: bool = False
    ) -> Tensor:
        """Return units' initial weights, `(*b, I)`, estimated from their own outputs.

        Once units have sent sites, the ridge regression of the outputs on the latent processes' posterior means. Before
        that, I projections of a curve estimated from the outputs alone, on random directions that are the same for all
        units; from the units' sum of weights times curves, training then finds the span of the curves (Halko,
        Martinsson and Tropp 2011, "Finding structure with randomness"). From equal weights of all units the latent
        processes would start as parts of one curve, and training may end at a local optimum. Arguments as those of
        `expected_log_likelihood`.
        """
        with torch.no_grad(), Swap(self, ["kernel.weight"])([torch.ones_like(self.kernel.weight)]):
            site = self.site(x, y, mask, *extra, exact_units=exact_units)
        mean, latents, size = self.posterior_mean, self.kernel.latents, self.points
        which = torch.eye(latents).repeat_interleave(size // latents, 0).to(mean)
        curves = mean[..., None] * which  # (*s, P, I)
        ridge = torch.eye(latents).to(mean) + curves.mT @ site.precision @ curves
        weights = torch.linalg.solve(ridge, curves.mT @ site.shift[..., None])[..., 0]
        directions = random.normal(random.key(0), (size, latents), mean.dtype).to(mean.device) / size**0.5
        alone = torch.linalg.solve(torch.eye(size).to(mean) + site.precision, site.shift[..., None])[..., 0]
        return torch.where((mean == 0).all(-1)[..., None], alone @ directions, weights)

    # -- all units together ----------------------------------------------------------------------------------------

    def divergence(self) -> Tensor:
        """Return KL(q(g) ‖ p(g)), `(*s,)`."""
        change = self.change()
        mean, root = self.whitened_posterior(change)
        determinant = log_determinant(change) + 2 * torch.linalg.slogdet(self.posterior_root)[1]
        return 0.5 * (root.square().sum((-1, -2)) + mean.square().sum(-1) - self.points - determinant)

    def bound(self, x: Tensor, y: Tensor, mask: Tensor | None = None, exact_units: bool = False) -> Tensor:
        """Return the bound of log p(y) at the best q, for Gaussian noise, over all units `()`; differentiable.

        For exact units it is log N(y; 0, bdiag Ω_m + V C_gf + Σ), with the covariance of the unit's own process in Ω_m.
        Arguments as those of `expected_log_likelihood`.
        """
        mask = full(y, mask)
        seen = self.see(x, mask)
        return evidence(self.gaussian_site(x, y, mask, seen, seen.basis, exact_units).total())

    def condition(self, x: Tensor, y: Tensor, mask: Tensor | None = None, exact_units: bool = False) -> None:
        """Set q to the best one for Gaussian noise, the basis to the current covariance, and observes the rows."""
        check_gaussian(self.likelihood, "a posterior in closed form", "train with fedtorch.fedmgp")
        with torch.no_grad():
            self.rebase()
            self.posterior_mean, self.posterior_root, _ = posterior(
                self.change(), *self.site(x, y, mask, exact_units=exact_units).total()
            )
            each = moments(self.unit_vector(self.unit_trained))
            self.unit_moments = each.sum_to_size(each.shape[-2:])
        self.observe(x, y, mask, exact_units)

    def observe(self, x: Tensor, y: Tensor, mask: Tensor | None = None, exact_units: bool = False) -> None:
        """Condition predictions on a unit's own rows, which are in q already, besides q(g).

        Given g, the residual f_m − V_m g of an exact unit, its own process included, is a Gaussian process that depends
        only on its own rows. A federation stores no rows: `Federation.client_module(k)` conditions the module where the
        rows are. Without own process and exact units there is no such residual, and nothing is stored.

        Args:
            x: inputs `(*b, N, d)`.
            y: outputs `(*b, N)`.
            mask: `(*b, N)`, which rows are there.
            exact_units: as in the sites of these rows.
        """
        self.observed = Observed(x, y, full(y, mask)) if self.keeps_whole(exact_units) else None

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply `module.to` and similar to the observed rows too."""
        super()._apply(fn, *args, **kwargs)
        if self.observed is not None:
            self.observed = Observed(*map(fn, self.observed))
        return self

    # -- prediction ------------------------------------------------------------------------------------------------

    def _given_rows(self, x: Tensor, seen: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Return (s `(*b, N)`, Φ `(*b, N, P)`, D `(*b, ·, N)`): f = s + Φ u + e given the observed rows.

        u are whitened values of g, and e has the covariance Ω + own − D'D.
        """
        level = self.level(seen.residual)
        if self.observed is None:
            return level.expand_as(seen.residual), seen.basis, seen.basis.new_zeros(*seen.basis.shape[:-2], 0, 1)
        inputs, y, mask = self.observed
        known = self.see(inputs, mask)
        factor = self._unit_factor(inputs, known, mask)
        both = self.covariance(inputs, x) * mask[..., None] - known.basis @ seen.basis.mT
        gain = solve(factor, both)
        gap = solve(factor, self._centred(y, mask)[..., None])
        return (gain.mT @ gap)[..., 0] + level, seen.basis - gain.mT @ solve(factor, known.basis), gain

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of f at x `(*b, N, d)`, `(*b, N)` each."""
        check_inputs(self, x)
        seen = self.see(x)
        mean, root = self.whitened_posterior(seen.change)
        start, basis, gain = self._given_rows(x, seen)
        residual = (seen.residual - gain.square().sum(-2)).clamp(min=0)
        return start + (basis @ mean[..., None])[..., 0], residual + (basis @ root).square().sum(-1)

    def forward(self, x: Tensor) -> Any:
        """Return the posterior of f at x `(*b, N, d)`, (12)."""
        check_inputs(self, x)
        seen = self.see(x)
        mean, root = self.whitened_posterior(seen.change)
        start, basis, gain = self._given_rows(x, seen)
        spread = basis @ root
        covariance = self.covariance(x, x) - seen.basis @ seen.basis.mT - gain.mT @ gain + spread @ spread.mT
        location = start + (basis @ mean[..., None])[..., 0]
        return MultivariateNormal(location, linear_operator.to_linear_operator(symmetric(covariance)))

    def predict(self, x: Tensor, *extra: Any) -> Any:
        """Predict outputs at x `(*b, N, d)`, (16): a `MultivariateNormal` for Gaussian noise.

        The unit's own parameters are fixed here, so intervals of f are too short if its rows do not determine an
        amplitude: for units of a run with 24 rows they cover 0.45 in place of 0.95, and 0.95 by
        `join(module, x, y, known=True)`, which integrates over them.
        """
        return self.likelihood(self(x), *extra)

    def interval(self, x: Tensor, level: float = 0.99) -> tuple[Tensor, Tensor]:
        """Return lower and upper limits of central predictive intervals of each output, for Gaussian noise.

        Raises:
            ValueError: a level that is not between 0 and 1.
            TypeError: another likelihood.
        """
        check_gaussian(self.likelihood, "normal intervals", "take quantiles of draws from predict(x)")
        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, but got {level}")
        mean, variance = self.marginals(x)
        half = torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=mean.dtype, device=mean.device))
        half = half * (variance + self.likelihood.noise).sqrt()
        return mean - half, mean + half
