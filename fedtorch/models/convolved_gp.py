r"""Gaussian processes of many units that are made from latent processes which all units share.

Unit m observes y_m at inputs x_m, and f_m depends on the latent processes at J inducing inputs, g = g(w), by

.. math::
    p(f_m | g) = N(V_m g, \Omega_m), \qquad V_m = C_{f_m g} C_{gg}^{-1}, \qquad
    \Omega_m = C_{f_m f_m} - V_m C_{g f_m}.

Whatever a unit knows about g enters the posterior q(g) = N(μ, M) as one Gaussian factor, its *site*, and factors
multiply. For Gaussian noise the best q and the bound of the marginal likelihood are in closed form: with
B_m = V_m'V_m/σ_m² and a_m = V_m'y_m/σ_m²,

.. math::
    q(g) = N(\Lambda^{-1} \textstyle\sum_m a_m, \Lambda^{-1}), \qquad \Lambda = C_{gg}^{-1} + \textstyle\sum_m B_m,
    \qquad \log p(y) \ge \log N(y; 0, V C_{gf} + \Sigma) - \tfrac12 \textstyle\sum_m \operatorname{tr}(\Omega_m) /
    \sigma_m^2 .

q is joint over the latent processes; the source factorises it, which gives a looser bound. With `exact_units` a unit's
own residual Ω_m is kept whole, B_m = V_m'(Ω_m + σ_m² I)⁻¹V_m, which costs O(N_m³) and gives the sharper
log N(y; 0, bdiag Ω_m + V C_gf + Σ) of (10).

All numbers of q are those of whitened values t, g = basis · t, with a fixed `basis`: the Cholesky factor of C_gg at
some hyperparameters. Centrally those are the current ones; in a federation they are where training began, so that what
a unit has told stays a statement about g when the shared hyperparameters move.

Source: Chung and Al Kontar (2024), "Federated multi-output Gaussian processes", equations (7) to (18); Titsias (2009)
for the closed form.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedtorch.models.multi_output_kernels import ConvolutionProcess, OutputKernel, extent_of, positive
from fedtorch.models.quiet_gpytorch import gpytorch, linear_operator

MultivariateNormal = gpytorch.distributions.MultivariateNormal
DiagLinearOperator = linear_operator.operators.DiagLinearOperator
GaussianLikelihood = gpytorch.likelihoods.GaussianLikelihood

__all__ = ["ConvolvedGP", "Site", "fit", "join", "posterior", "stable_cholesky"]

_LEAST_NOISE = 1e-8
_ATTEMPTS = 7  # jitters that are tried, each ten times the last
_START_NOISE = 0.3  # standard deviation of the noise before training, in standard deviations of the outputs


class Site(NamedTuple):
    r"""What units know of t: the log-likelihood is, or is replaced by, c + a't − ½ t'B t."""

    precision: Tensor  # (*b, P, P) B, P = latents · inducing inputs
    shift: Tensor  # (*b, P) a
    constant: Tensor  # (*b,) c


class Features(NamedTuple):
    """Units' inputs, as the latent processes at the inducing inputs see them."""

    basis: Tensor  # (*b, N, P) V_m L, L the Cholesky factor of C_gg
    residual: Tensor  # (*b, N) diagonal of Ω_m
    change: Tensor  # (*b, P, P) L⁻¹ basis of t


class ConvolvedGP(gpytorch.Module):
    """A multi-output Gaussian process; `*b` are the units' batch dimensions, none for one unit.

    Calling it with x `(*b, N, d)` gives the posterior of f as a `MultivariateNormal`; `predict` adds the noise.

    Args:
        inducing: inducing inputs w `(J, d)`, the same for all latent processes.
        kernel: default: a `ConvolutionProcess`.
        likelihood: any GPyTorch likelihood of one-dimensional outputs, with the units' batch shape; default: Gaussian
            noise with a variance above 1e-8.
        latents: latent processes of the default kernel.
        batch_shape: of the units.
        learn_inducing: whether the inducing inputs are parameters.
        features: applied to all inputs and inducing inputs and shared by all units: a deep kernel, or
            `EmbedCategories`. Kernels see its outputs.
        mean: whether each unit has a constant mean of its own.
        scale: of the outputs of all units, for example the root of their pooled mean square, two sums over units;
            default: each unit's own, as its outputs suggest. A unit that has seen only a small part of its signal
            misjudges its own.
        jitter: relative to the variances; it grows tenfold, for a unit that needs it, up to 10⁶ times.

    Raises:
        ValueError: inducing inputs that are not finite or not `(J, d)`, a kernel of other dimensions, or a scale that
            is not positive.

    Example:
        >>> import torch
        >>> from fedtorch.models.convolved_gp import ConvolvedGP, fit
        >>> x = torch.linspace(0, 1, 30, dtype=torch.float64)[None, :, None].expand(2, -1, -1)
        >>> wave = (6 * x[0, :, 0]).sin() + 0.01 * (190 * x[0, :, 0]).cos()
        >>> y = torch.stack([wave, -2 * wave])
        >>> model = ConvolvedGP(torch.linspace(0, 1, 8, dtype=torch.float64)[:, None], batch_shape=torch.Size([2]))
        >>> float(fit(model, x, y)) > 100
        True
        >>> bool((model(x).mean - y).abs().max() < 0.1)
        True
    """

    basis: Tensor
    posterior_mean: Tensor
    posterior_root: Tensor

    def __init__(
        self,
        inducing: Tensor,
        kernel: OutputKernel | None = None,
        likelihood: Any = None,
        *,
        latents: int = 1,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 (immutable)
        learn_inducing: bool = False,
        features: nn.Module | None = None,
        mean: bool = False,
        scale: float | None = None,
        jitter: float = 1e-8,
    ) -> None:
        super().__init__()
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(
                f"Expected a positive scale of the outputs, but got {scale}; leave it away for each unit's"
            )
        if inducing.ndim != 2 or not bool(inducing.isfinite().all()):
            raise ValueError(f"Expected finite inducing inputs (J, d), but got shape {tuple(inducing.shape)}")
        self.features = features
        dims = self.embed(inducing).shape[-1]
        self.kernel: Any = ConvolutionProcess(dims, latents, batch_shape) if kernel is None else kernel
        if self.kernel.dims != dims:
            raise ValueError(f"Expected a kernel of {dims} dimensions, but got one of {self.kernel.dims}")
        if likelihood is None:
            likelihood = GaussianLikelihood(noise_constraint=positive(_LEAST_NOISE), batch_shape=batch_shape)
        self.likelihood, self.batch_shape, self.scale, self.jitter = likelihood, batch_shape, scale, jitter
        if learn_inducing:
            self.inducing = nn.Parameter(inducing.clone())
        else:
            self.register_buffer("inducing", inducing.clone())
        self.offset = nn.Parameter(torch.zeros(batch_shape)) if mean else None
        size = len(inducing)
        self.points = self.kernel.latents * size
        self.register_buffer("basis", torch.eye(size).repeat(self.kernel.latents, 1, 1))
        self.register_buffer("posterior_mean", torch.zeros(self.points))
        self.register_buffer("posterior_root", torch.eye(self.points))
        self.to(inducing.dtype)
        self.kernel.spread(extent_of(self.embed(inducing.detach())).detach())
        self.rebase()

    # -- what belongs to whom --------------------------------------------------------------------------------------

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that belong to a unit; the other parameters are shared."""
        own = {f"kernel.{name}" for name in self.kernel.units} | {"offset"}
        named = [name for name, _ in [*self.named_parameters(), *self.named_buffers()]]
        constraints = {name for name in named if "constraint" in name or "_prior." in name or "quadrature" in name}
        return tuple(n for n in named if (n in own or n.startswith("likelihood.")) and n not in constraints)

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Names of the trainable parameters that all units share."""
        mine = set(self.unit_names)
        return tuple(name for name, p in self.named_parameters() if p.requires_grad and name not in mine)

    def initial_units(self, y: Tensor, mask: Tensor | None = None, *extra: Any) -> dict[str, Tensor]:
        """What units' tensors start from: scales, noise and offsets as their own outputs suggest, the rest as it is.

        Args:
            y: outputs `(*b, N)`.
            mask: `(*b, N)`, which of them are there.
            extra: what the likelihood wants besides, `(*b, N)` each.

        Returns:
            by the names of `unit_names`, `(*b, ...)`. Constant outputs and single points get their size as scale.
        """
        mask = _full(y, mask)
        values = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        batch, own = y.shape[:-1], len(self.batch_shape)
        found = {n: values[n].detach().expand((*batch, *values[n].shape[own:])).clone() for n in self.unit_names}
        if not hasattr(self.likelihood, "noise"):
            return found
        if hasattr(self.likelihood, "measured"):
            mask = mask * self.likelihood.measured(*extra)
        count = mask.sum(-1).clamp(min=1)
        mean = (y * mask).sum(-1) / count if self.offset is not None else torch.zeros_like(y[..., 0])
        scale = (((y - mean[..., None]) * mask).square().sum(-1) / count).sqrt()
        size = (y * mask).abs().amax(-1)
        scale = torch.where(scale > 1e-8 * size, scale, torch.where(size > 0, size, torch.ones_like(size)))
        if self.scale is not None:
            scale = torch.full_like(scale, self.scale)
        found["kernel.scale"] = scale.to(values["kernel.scale"])
        if self.offset is not None:
            found["offset"] = (mean / scale).to(values["offset"])
        for name in self.unit_names:
            if name.endswith("raw_noise"):
                constraint = self.constraint_for_parameter_name(name)
                noise = (_START_NOISE * scale[..., None]).square().to(values[name])
                found[name] = constraint.inverse_transform(noise).expand_as(found[name]).clone()
        return found

    def start(self, y: Tensor, mask: Tensor | None = None) -> None:
        """Sets the units' tensors to `initial_units` of y `(*b, N)`."""
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, value in self.initial_units(y, mask).items():
            own[name].data = value

    def log_prior(self, units: bool) -> Tensor:
        """Log-density of the priors of the units' parameters `(*b,)`, or of the shared ones `()`."""
        total = self.posterior_mean.new_zeros(())
        for name, module, prior, closure, _ in self.named_priors():
            parameter = name.removesuffix("_prior")
            path, _, last = parameter.rpartition(".")
            mine = any(n.startswith(path) and n.rpartition(".")[2] in (last, f"raw_{last}") for n in self.unit_names)
            if mine == units:
                value = closure(module)
                density = prior.log_prob(value)
                batch = self.kernel.weight.shape[:-1] if units else torch.Size()
                total = total + density.reshape(*batch, math.prod(density.shape[len(batch) :])).sum(-1)
        return total

    # -- geometry --------------------------------------------------------------------------------------------------

    def embed(self, x: Tensor) -> Tensor:
        """x, or the features of x, `(*b, N, ·)`."""
        if self.features is None:
            return x
        own = dict(self.features.named_parameters())
        first = next(iter(own.values()), None)
        if first is None or getattr(self, "_feature_dims", None) in (None, first.ndim):
            if first is not None and not hasattr(self, "_feature_dims"):
                object.__setattr__(self, "_feature_dims", first.ndim)
            return self.features(x)
        module = self.features
        if len(first) == 1:
            return functional_call(module, {name: value[0] for name, value in own.items()}, (x,))
        rows = x.expand(len(first), *x.shape[-2:])
        return vmap(lambda values, inputs: functional_call(module, values, (inputs,)))(own, rows)

    def root(self) -> Tensor:
        """The Cholesky factor L of the covariance of the latent processes at the inducing inputs, `(*s, I, J, J)`."""
        return stable_cholesky(self.kernel.latent(self.embed(self.inducing)), self.jitter)

    def rebase(self) -> None:
        """Makes the current covariance the basis of t and the prior the posterior."""
        with torch.no_grad():
            self.basis = self.root().detach()
            self.posterior_mean = torch.zeros_like(self.posterior_mean)
            self.posterior_root = torch.eye(self.points).to(self.posterior_root)

    def change(self, root: Tensor | None = None) -> Tensor:
        """Z = L⁻¹ basis, `(*s, P, P)`: t has the prior precision Z'Z."""
        root = self.root() if root is None else root
        return block_diagonal(torch.linalg.solve_triangular(root, self.basis.expand_as(root), upper=False))

    def see(self, x: Tensor, mask: Tensor | None = None) -> Features:
        """Inputs x `(*b, N, d)` as the latent processes at the inducing inputs see them; zeros where masked out."""
        root = self.root()
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        inverse = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)
        inputs = self.embed(x)
        cross = self.kernel.cross(inputs, self.embed(self.inducing))
        basis = (cross @ inverse.mT).movedim(-3, -2).flatten(-2)
        residual = self.kernel.variance(inputs) - basis.square().sum(-1)
        if mask is not None:
            basis, residual = basis * mask[..., None], residual * mask
        return Features(basis, residual, self.change(root))

    # -- one unit's part -------------------------------------------------------------------------------------------

    def expected_log_likelihood(
        self, x: Tensor, y: Tensor, mask: Tensor | None = None, *extra: Any, exact_units: bool = False
    ) -> Tensor:
        """E_q[log p(y_m | f_m)] of each unit, `(*b,)`, and E_q[log p(y_m | g)] with `exact_units`.

        Args:
            x: inputs `(*b, N, d)`.
            y: outputs `(*b, N)`.
            mask: `(*b, N)`, which rows are there.
            extra: what the likelihood wants besides, `(*b, N)` each.
            exact_units: whether a unit's residual is kept whole; for Gaussian noise.
        """
        mask = _full(y, mask)
        seen = self.see(x, mask)
        mean, root = self._whitened_posterior(seen.change)
        if exact_units:
            factor = self._unit_factor(x, seen, mask)
            white = torch.linalg.solve_triangular(factor, seen.basis, upper=False)
            gap = torch.linalg.solve_triangular(factor, self._centred(y, mask)[..., None], upper=False)
            gap = gap - white @ mean[..., None]
            square = gap.square().sum((-1, -2)) + (white @ root).square().sum((-1, -2))
            return -0.5 * (mask.sum(-1) * math.log(2 * math.pi) + _log_determinant(factor) + square)
        linear = (seen.basis @ mean[..., None])[..., 0]
        variance = seen.residual + (seen.basis @ root).square().sum(-1)
        return (self._row_fit(y, linear + self._level(y), variance, mask, extra)).sum(-1)

    def site(self, x: Tensor, y: Tensor, mask: Tensor | None = None, *extra: Any, exact_units: bool = False) -> Site:
        r"""What each unit's outputs say of t.

        For Gaussian noise the exact factor, whatever q is. Otherwise the natural gradient of E_q[log p(y_m | f_m)]:
        with m_n, v_n the moments of f_n under q, each row has precision β_n = −2 ∂/∂v_n, at least 0, and shift
        ∂/∂m_n + β_n m_n (Khan and Lin 2017, "Conjugate-computation variational inference"). Arguments as those of
        `expected_log_likelihood`.
        """
        mask = _full(y, mask)
        with torch.no_grad():
            seen = self.see(x, mask)
            if exact_units:
                factor = self._unit_factor(x, seen, mask)
                white = torch.linalg.solve_triangular(factor, seen.basis @ seen.change, upper=False)
                gap = torch.linalg.solve_triangular(factor, self._centred(y, mask)[..., None], upper=False)
                square = mask.sum(-1) * math.log(2 * math.pi) + _log_determinant(factor) + gap.square().sum((-1, -2))
                return Site(white.mT @ white, (white.mT @ gap)[..., 0], -0.5 * square)
            mean, root = self._whitened_posterior(seen.change)
            linear = (seen.basis @ mean[..., None])[..., 0]
            spread = (seen.basis @ root).square().sum(-1)
        precision, shift, value = self._row_sites(y, linear, seen.residual + spread, mask, extra)
        with torch.no_grad():
            constant = value - shift * linear + 0.5 * precision * (spread + linear.square())
            moved = seen.basis @ seen.change
            weighted = moved * precision[..., None]
            return Site(moved.mT @ weighted, (moved.mT @ shift[..., None])[..., 0], constant.sum(-1))

    def _row_sites(
        self, y: Tensor, linear: Tensor, variance: Tensor, mask: Tensor, extra: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(precision, shift, expected log-likelihood) of every row, `(*b, N)` each."""
        with torch.enable_grad():
            mean = linear.detach().clone().requires_grad_()
            spread = variance.detach().clone().requires_grad_()
            value = self._row_fit(y, mean + self._level(y).detach(), spread, mask, extra)
            slope, curve = torch.autograd.grad(value.sum(), [mean, spread])
        precision = (-2 * curve).clamp(min=0)
        return precision, slope + precision * linear, value.detach()

    def _row_fit(self, y: Tensor, mean: Tensor, variance: Tensor, mask: Tensor, extra: tuple[Any, ...]) -> Tensor:
        """E[log p(y_n | f_n)] for f_n ~ N(mean, variance), `(*b, N)`, 0 where masked out."""
        if isinstance(self.likelihood, GaussianLikelihood):
            noise = self.likelihood.noise
            gap = (y - mean).square() + variance
            return -0.5 * mask * (math.log(2 * math.pi) + noise.log() + gap / noise)
        there = mask > 0
        variance = torch.where(there, variance.clamp(min=1e-12), torch.ones_like(variance))
        value = self.likelihood.expected_log_prob(
            y,
            MultivariateNormal(mean, linear_operator.operators.DiagLinearOperator(variance), validate_args=False),
            *extra,
        )
        return torch.where(there, value, torch.zeros_like(value))

    def _unit_factor(self, x: Tensor, seen: Features, mask: Tensor) -> Tensor:
        """The Cholesky factor of Ω_m + σ_m² I, identity rows where masked out, `(*b, N, N)`."""
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise TypeError(
                f"Expected a GaussianLikelihood for exact units, but got {type(self.likelihood).__name__}; leave "
                "exact_units away"
            )
        inputs = self.embed(x)
        whole = self.kernel.covariance(inputs, inputs) * mask[..., None] * mask[..., None, :]
        whole = whole - seen.basis @ seen.basis.mT
        diagonal = torch.where(mask > 0, self.likelihood.noise.expand_as(mask), torch.ones_like(mask))
        return stable_cholesky(whole + torch.diag_embed(diagonal), 0.0)

    def _level(self, y: Tensor) -> Tensor:
        """The units' means in the units of y, `(*b, 1)`."""
        if self.offset is None:
            return torch.zeros_like(y[..., :1])
        return (self.kernel.scale * self.offset)[..., None]

    def _centred(self, y: Tensor, mask: Tensor) -> Tensor:
        return (y - self._level(y)) * mask

    def _whitened_posterior(self, change: Tensor) -> tuple[Tensor, Tensor]:
        return (change @ self.posterior_mean[..., None])[..., 0], change @ self.posterior_root

    # -- all units together ----------------------------------------------------------------------------------------

    def divergence(self) -> Tensor:
        """KL(q(g) ‖ p(g)), `(*s,)`."""
        change = self.change()
        mean, root = self._whitened_posterior(change)
        determinant = _log_determinant(change) + 2 * _log_determinant_of(self.posterior_root)
        return 0.5 * (root.square().sum((-1, -2)) + mean.square().sum(-1) - self.points - determinant)

    def bound(self, x: Tensor, y: Tensor, mask: Tensor | None = None, exact_units: bool = False) -> Tensor:
        """The bound of log p(y) at the best q, for Gaussian noise, over all units `()`; differentiable.

        With `exact_units` it is log N(y; 0, bdiag Ω_m + V C_gf + Σ). Arguments as those of `expected_log_likelihood`.
        """
        mask = _full(y, mask)
        seen = self.see(x, mask)
        return _evidence(*self._summed(x, y, mask, seen, exact_units))

    def condition(self, x: Tensor, y: Tensor, mask: Tensor | None = None, exact_units: bool = False) -> None:
        """Sets q to the best one for Gaussian noise, and the basis to the current covariance."""
        with torch.no_grad():
            self.rebase()
            site = self.site(x, y, mask, exact_units=exact_units)
            units = tuple(range(site.shift.ndim - 1))
            sums = _sum(site.precision, units), _sum(site.shift, units), site.constant.sum()
            self.posterior_mean, self.posterior_root, _ = posterior(self.change(), *sums)

    def _summed(
        self, x: Tensor, y: Tensor, mask: Tensor, seen: Features, exact_units: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(Σ B, Σ a, Σ c) in whitened coordinates."""
        y = self._centred(y, mask)
        units = tuple(range(y.ndim - 1))
        if exact_units:
            factor = self._unit_factor(x, seen, mask)
            white = torch.linalg.solve_triangular(factor, seen.basis, upper=False)
            gap = torch.linalg.solve_triangular(factor, y[..., None], upper=False)
            constant = mask.sum(-1) * math.log(2 * math.pi) + _log_determinant(factor) + gap.square().sum((-1, -2))
            return _sum(white.mT @ white, units), _sum((white.mT @ gap)[..., 0], units), -0.5 * constant.sum()
        noise = self.likelihood.noise
        weighted = seen.basis / noise[..., None]
        constant = mask * (math.log(2 * math.pi) + noise.log()) + (y.square() + seen.residual) / noise
        shift = (weighted.mT @ y[..., None])[..., 0]
        return _sum(seen.basis.mT @ weighted, units), _sum(shift, units), -0.5 * constant.sum()

    # -- prediction ------------------------------------------------------------------------------------------------

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances of f at x `(*b, N, d)`, `(*b, N)` each."""
        seen = self.see(x)
        mean, root = self._whitened_posterior(seen.change)
        linear = (seen.basis @ mean[..., None])[..., 0]
        return linear + self._level(linear), seen.residual.clamp(min=0) + (seen.basis @ root).square().sum(-1)

    def forward(self, x: Tensor) -> Any:
        """The posterior of f at x `(*b, N, d)`, (12)."""
        seen = self.see(x)
        mean, root = self._whitened_posterior(seen.change)
        linear = (seen.basis @ mean[..., None])[..., 0]
        inputs, told = self.embed(x), seen.basis @ root
        covariance = self.kernel.covariance(inputs, inputs) - seen.basis @ seen.basis.mT + told @ told.mT
        return MultivariateNormal(
            linear + self._level(linear), linear_operator.to_linear_operator(_symmetric(covariance))
        )

    def predict(self, x: Tensor, *extra: Any) -> Any:
        """The predictive distribution of outputs at x `(*b, N, d)`, (16): a `MultivariateNormal` for Gaussian noise."""
        return self.likelihood(self(x), *extra)

    def interval(self, x: Tensor, level: float = 0.99) -> tuple[Tensor, Tensor]:
        """Lower and upper limits of central predictive intervals of each output, for Gaussian noise.

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"Expected a level between 0 and 1, but got {level}")
        mean, variance = self.marginals(x)
        half = torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=mean.dtype, device=mean.device))
        half = half * (variance + self.likelihood.noise).sqrt()
        return mean - half, mean + half


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
    """Maximises the bound plus the priors centrally by L-BFGS, for Gaussian noise, and sets the posterior.

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
    """
    if start:
        model.start(y, mask)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe", history_size=20)

    def loss() -> float:
        optimizer.zero_grad()
        value = -model.bound(x, y, mask, exact_units) - model.log_prior(True).sum() - model.log_prior(False)
        value.backward()
        return value  # type: ignore[return-value]

    optimizer.step(loss)
    model.condition(x, y, mask, exact_units)
    with torch.no_grad():
        return model.bound(x, y, mask, exact_units)


def join(model: ConvolvedGP, x: Tensor, y: Tensor, iterations: int = 100) -> ConvolvedGP:
    """A new unit with a few points: its own parameters are fitted with q(g) as the prior, then its points join q.

    Args:
        model: of one unit, no batch dimensions, with a posterior: for example any unit's of a federation.
        x: the new unit's inputs `(N, d)`.
        y: its outputs `(N,)`.
        iterations: of L-BFGS at most.

    Returns:
        a copy of the model for the new unit, whose posterior knows its points too.
    """
    new = copy.deepcopy(model)
    new.start(y)
    own = dict(new.named_parameters())
    parameters = [own[name] for name in new.unit_names if name in own and own[name].requires_grad]
    optimizer = torch.optim.LBFGS(parameters, max_iter=iterations, line_search_fn="strong_wolfe")
    mask = torch.ones_like(y)

    def summed() -> tuple[Tensor, Tensor, Tensor]:
        """The unit's site about z, t = posterior mean + posterior root · z."""
        seen = new.see(x, mask)
        mean, root = new._whitened_posterior(seen.change)
        known = y - (seen.basis @ mean[..., None])[..., 0]
        return new._summed(x, known, mask, seen._replace(basis=seen.basis @ root), False)

    def loss() -> float:
        optimizer.zero_grad()
        value = -_evidence(*summed()) - new.log_prior(True).sum()
        value.backward()
        return value  # type: ignore[return-value]

    optimizer.step(loss)
    with torch.no_grad():
        sums = summed()
        mean, root, _ = posterior(torch.eye(new.points).to(sums[0]), *sums)
        new.posterior_mean = new.posterior_mean + new.posterior_root @ mean
        new.posterior_root = new.posterior_root @ root
    return new


def stable_cholesky(matrix: Tensor, jitter: float) -> Tensor:
    """Cholesky factors, `(*b, n, n)`; a matrix that is not positive definite gets ever more jitter, the others do not.

    Args:
        matrix: symmetric, `(*b, n, n)`.
        jitter: added to the diagonal, relative to its mean.

    Raises:
        ValueError: a matrix that 10⁶ times the jitter does not mend; the message names its place in the batch.
    """
    smallest = torch.finfo(matrix.dtype).eps
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    scale = matrix.detach().diagonal(dim1=-2, dim2=-1).mean(-1)
    amount = torch.full_like(scale, max(jitter, 10 * smallest) if jitter > 0 else 0.0)
    for _ in range(_ATTEMPTS):
        factor, wrong = torch.linalg.cholesky_ex(matrix + (amount * scale)[..., None, None] * eye)
        failed = (wrong > 0) | ~factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
        if not bool(failed.any()):
            return factor
        amount = torch.where(failed, (10 * amount).clamp(min=1e-8), amount)
    raise ValueError(
        f"Expected a positive definite covariance, but that of unit {failed.nonzero()[0].tolist()} is not, with a "
        f"jitter of {float(amount.max()):.0e}; look for outputs or hyperparameters that are not finite or enormous"
    )


def posterior(change: Tensor, precision: Tensor, shift: Tensor, constant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean `(P,)`, lower root of the covariance `(P, P)`, log-evidence) of t from the sum of the sites.

    Args:
        change: the prior's Z `(P, P)`, lower triangular; t has the prior precision Z'Z.
        precision: Σ B, `(P, P)`.
        shift: Σ a, `(P,)`.
        constant: Σ c, `()`.
    """
    # In coordinates that are white under the prior: the numbers of B span many orders of magnitude in others.
    half = torch.linalg.solve_triangular(change.mT, _symmetric(precision), upper=True)
    white = torch.linalg.solve_triangular(change.mT, half.mT, upper=True)
    moved = torch.linalg.solve_triangular(change.mT, shift[..., None], upper=True)
    eye = torch.eye(white.shape[-1], dtype=white.dtype, device=white.device)
    # The factor of the matrix in reverse order gives a lower triangular root of the inverse.
    factor = stable_cholesky(eye + _symmetric(white).flip(-1, -2), 0.0).flip(-1, -2)
    root = torch.linalg.solve_triangular(factor, eye, upper=True).mT
    solved = torch.linalg.solve_triangular(factor, moved, upper=True)
    evidence = constant + 0.5 * (solved.square().sum() - _log_determinant(factor))
    mean, root = (torch.linalg.solve_triangular(change, part, upper=False) for part in (root @ solved, root))
    return mean[..., 0], root, evidence


def block_diagonal(blocks: Tensor) -> Tensor:
    """`(*b, I, J, J)` as `(*b, IJ, IJ)`."""
    count, size = blocks.shape[-3], blocks.shape[-1]
    if count == 1:
        return blocks[..., 0, :, :]
    place = torch.eye(count, dtype=blocks.dtype, device=blocks.device)[:, None, :, None]
    whole = blocks[..., :, :, None, :] * place
    return whole.reshape(*blocks.shape[:-3], count * size, count * size)


def _evidence(precision: Tensor, shift: Tensor, constant: Tensor) -> Tensor:
    """log ∫ N(z; 0, I) exp(c + a'z − ½ z'B z) dz."""
    eye = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    factor = stable_cholesky(eye + _symmetric(precision), 0.0)
    solved = torch.linalg.solve_triangular(factor, shift[..., None], upper=False)
    return constant + 0.5 * (solved.square().sum((-1, -2)) - _log_determinant(factor))


def _log_determinant(factor: Tensor) -> Tensor:
    """log |factor factor'|."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _log_determinant_of(matrix: Tensor) -> Tensor:
    """log |det matrix|, of a lower triangular or any matrix."""
    return torch.linalg.slogdet(matrix)[1]


def _sum(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    return value.sum(dims) if dims else value


def _symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)


def _full(y: Tensor, mask: Tensor | None) -> Tensor:
    """The mask in the dtype of y, ones if there is none."""
    return torch.ones_like(y) if mask is None else mask.to(y.dtype)
