"""Covariances of the shared latent processes at the inducing inputs with units' inputs, and units' covariances."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedtorch.models.gaussian_process._stacked_kernel import diagonal, matrix
from fedtorch.models.gaussian_process._units import UnitModel
from fedtorch.models.gaussian_process.algebra import block_diagonal, solve, stable_cholesky
from fedtorch.stacked_layers import WithoutReading


class Features(NamedTuple):
    """Units' inputs in terms of the latent processes at the inducing inputs."""

    basis: Tensor  # (*b, N, P) V_m L, L the Cholesky factor of C_gg
    residual: Tensor  # (*b, N) diagonal of Ω_m, and of the covariance of the unit's own process
    change: Tensor  # (*b, P, P) L⁻¹ basis of t


class Geometry(UnitModel):
    """A `UnitModel` with inducing inputs, and values t of the latent processes there, g = basis · t.

    Attributes:
        inducing: inputs w `(J, d)`.
        features: None, or a map applied to all inputs and inducing inputs.
        jitter: relative to the variances.
        points: the number P of inducing values, latents · J.
        basis: Cholesky factors of covariances of the latent processes `(I, J, J)`.
        posterior_mean: of t, `(P,)`.
        posterior_root: lower root of the covariance of t, `(P, P)`.
    """

    inducing: Tensor
    features: nn.Module | None
    jitter: float
    points: int
    basis: Tensor
    posterior_mean: Tensor
    posterior_root: Tensor
    _feature_dims: dict[str, int]
    _own_dims: dict[str, int]

    def embed(self, x: Tensor) -> Tensor:
        """Return x, or the features of x, `(*b, N, ·)`."""
        if self.features is None:
            return x
        # A federation stacks the parameters that it trains: one copy for all units, or one for each.
        module, dims = self.features, self._feature_dims
        stacked = {name: value for name, value in module.named_parameters() if value.ndim > dims[name]}
        if not stacked:
            return module(x)
        units = len(next(iter(stacked.values())))
        if units == 1:
            return functional_call(module, {name: value[0] for name, value in stacked.items()}, (x,))
        rows = x.expand(units, *x.shape[-2:])
        with WithoutReading():
            return vmap(lambda values, inputs: functional_call(module, values, (inputs,)))(stacked, rows)

    def root(self) -> Tensor:
        """Return the Cholesky factor L of the latent processes' covariance at the inducing inputs, `(*s, I, J, J)`."""
        return stable_cholesky(self.kernel.latent(self.embed(self.inducing)), self.jitter)

    def rebase(self) -> None:
        """Make the current covariance the basis of t and the prior the posterior."""
        with torch.no_grad():
            self.basis = self.root().detach()
            self.posterior_mean = torch.zeros_like(self.posterior_mean)
            self.posterior_root = torch.eye(self.points).to(self.posterior_root)

    def change(self, root: Tensor | None = None) -> Tensor:
        """Return Z = L⁻¹ basis, `(*s, P, P)`: t has the prior precision Z'Z."""
        root = self.root() if root is None else root
        return block_diagonal(torch.linalg.solve_triangular(root, self.basis, upper=False))

    def see(self, x: Tensor, mask: Tensor | None = None) -> Features:
        """Project inputs x `(*b, N, d)` on the latent processes at the inducing inputs; zeros for masked inputs."""
        root = self.root()
        inverse, inputs = _inverse(root), self.embed(x)
        cross = self.kernel.cross(inputs, self.embed(self.inducing))
        if inverse.shape[:-3].numel() == 1:  # the same for all units: one product, and not one for each
            basis = torch.einsum("...inj,ilj->...nil", cross, inverse.reshape(inverse.shape[-3:])).flatten(-2)
        else:
            basis = (cross @ inverse.mT).movedim(-3, -2).flatten(-2)
        prior = self.kernel.variance(inputs)
        rounding = torch.finfo(prior.dtype).eps * prior.detach()  # below which a difference is no variance
        residual = torch.maximum(prior - basis.square().sum(-1), rounding)
        if self.own_kernel is not None:
            residual = residual + self._own_size() * diagonal(self.own_kernel, self._own_dims, inputs)
        if mask is not None:
            basis, residual = basis * mask[..., None], residual * mask
        return Features(basis, residual, self.change(root))

    def covariance(self, x: Tensor, z: Tensor) -> Tensor:
        """Return cov(f(x), f(z)) under the prior, the unit's own process included, `(*b, N, Z)`."""
        one, two = self.embed(x), self.embed(z)
        shared = self.kernel.covariance(one, two)
        if self.own_kernel is None:
            return shared
        return shared + self._own_size()[..., None] * matrix(self.own_kernel, self._own_dims, one, two)

    def own_values(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the own kernel's diagonal and matrix at embedded inputs, `(*b, N)` and `(*b, N, N)`."""
        kernel, dims = self.own_kernel, self._own_dims
        return diagonal(kernel, dims, inputs), matrix(kernel, dims, inputs, inputs)

    def _own_size(self) -> Tensor:
        """Return the factor of the own kernel, `(*b, 1)`."""
        return self.kernel.scale.square()[..., None]


def _inverse(root: Tensor) -> Tensor:
    """Return the inverses of lower triangular roots."""
    eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    return solve(root, eye.expand_as(root))
