r"""Covariances of outputs that share latent processes: convolution processes and linear coregionalisation.

Unit m's output is made from latent Gaussian processes g_1, …, g_I that all units share. A kernel here defines the
covariances of the latent processes, of outputs with them, and of a unit's output with itself. Shapes distinguish shared
parameters from a unit's own: shared parameters have none of the units' batch dimensions.

Source: Chung and Al Kontar (2024), "Federated multi-output Gaussian processes", equations (17) and (18); Álvarez and
Lawrence (2011), "Computationally efficient convolved multiple output Gaussian processes".
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedtorch.models.gaussian_process._gpytorch_kernels import of_latents, spread_lengthscales
from fedtorch.models.gaussian_process._kernel_parts import gaussian, positive
from fedtorch.models.gaussian_process._stacked_kernel import diagonal, matrix, parameter_dims
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch


class OutputKernel(Protocol):
    """The interface of a multi-output Gaussian process's kernel; `*b` are the units' batch dimensions.

    Attributes:
        latents: the number I of latent processes.
        dims: the number d of input dimensions.
        units: names of the parameters and buffers that belong to a unit.
    """

    latents: int
    dims: int
    units: tuple[str, ...]

    def latent(self, w: Tensor) -> Tensor:
        """Return cov(g_i(w), g_i(w')) for w `(*b, J, d)`: `(*b, I, J, J)`."""
        ...

    def cross(self, x: Tensor, w: Tensor) -> Tensor:
        """Return cov(f(x), g_i(w)) for x `(*b, N, d)`: `(*b, I, N, J)`."""
        ...

    def variance(self, x: Tensor) -> Tensor:
        """Return var(f(x)), `(*b, N)`."""
        ...

    def covariance(self, x: Tensor, z: Tensor) -> Tensor:
        """Return cov(f(x), f(z)), `(*b, N, Z)`."""
        ...

    def spread(self, extent: Tensor) -> None:
        """Set lengthscales that suit inputs of an extent `(d,)`, a different one for each latent process."""
        ...

    def rescale(self, scale: Tensor) -> None:
        """Set the units' scales `(*b,)`, the standard deviations of their outputs."""
        ...


class _Mixture(gpytorch.Module):
    """The amplitudes v_mi = scale_m · weight_mi of each unit, whose sign counts, which both kernels have."""

    scale: Tensor

    def __init__(self, dims: int, latents: int, batch_shape: torch.Size, weight_prior: Any = None) -> None:
        super().__init__()
        if dims < 1 or latents < 1:
            raise ValueError(f"Expected at least one dimension and one latent, but got {dims} and {latents}")
        self.dims, self.latents = dims, latents
        self.weight = nn.Parameter(torch.full((*batch_shape, latents), latents**-0.5))
        self.register_buffer("scale", torch.ones(batch_shape))
        if weight_prior is not None:
            self.register_prior("weight_prior", weight_prior, lambda kernel: kernel.weight)

    @property
    def amplitude(self) -> Tensor:
        """Return the units' amplitudes v, `(*b, I)`."""
        return self.scale[..., None] * self.weight

    def rescale(self, scale: Tensor) -> None:
        """Set the units' scales `(*b,)`."""
        self.scale = scale.to(self.scale)


class ConvolutionProcess(_Mixture):
    r"""Outputs that are latent processes smoothed by a Gaussian of each unit's own width.

    With s_i² = variance_i, S_i = diag(lengthscale_i²), R_mi = diag(smoothing_mi²) and Δ the difference of the inputs,

    .. math::
        c_{g_i g_i} &= s_i^2 \exp(-\tfrac12 \Delta' S_i^{-1} \Delta), \\
        c_{f_m g_i} &= v_{mi} s_i^2 \sqrt{|S_i| / |R_{mi} + S_i|}\,
            \exp(-\tfrac12 \Delta' (R_{mi} + S_i)^{-1} \Delta), \\
        c_{f_m f_m} &= \textstyle\sum_i v_{mi}^2 s_i^2 \sqrt{|S_i| / |2 R_{mi} + S_i|}\,
            \exp(-\tfrac12 \Delta' (2 R_{mi} + S_i)^{-1} \Delta).

    All three share one normalisation, that of f_m = Σ_i v_mi (N(0, R_mi) * g_i) with g_i of variance s_i²; the source
    has white noise, and its (18) is v times that of a latent process of unit variance. The sign of v matters. Only v s
    matters, but given the latent processes all units' v are tied, and the shared s moves at once.

    Args:
        dims: input dimensions d, each with its own lengthscale.
        latents: latent processes I.
        batch_shape: of the units.
        lengthscale_prior: on the lengthscales `(I, d)`.
        smoothing_prior: on the units' smoothing widths `(*b, I, d)`; for a unit with little data it keeps them from
            shrinking to zero.
        weight_prior: on the units' weights `(*b, I)`, amplitudes in units of their scales. A unit with rows in a part
            of the inputs only is then shrunk to typical weights; the common `scale` of `ConvolvedGP` makes weights of
            different units comparable.

    >>> kernel = ConvolutionProcess(dims=1).double()
    >>> kernel.raw_smoothing.data -= 20  # hardly any; S = 1
    >>> x = torch.tensor([[0.0], [2**0.5]]).double()
    >>> kernel.covariance(x, x).log().detach().round(decimals=4) + 0.0  # −½ Δ² / S
    tensor([[ 0., -1.],
            [-1.,  0.]], dtype=torch.float64)
    """

    units = ("raw_smoothing", "weight", "scale")

    def __init__(
        self,
        dims: int,
        latents: int = 1,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 (immutable)
        lengthscale_prior: Any = None,
        smoothing_prior: Any = None,
        weight_prior: Any = None,
    ) -> None:
        super().__init__(dims, latents, batch_shape, weight_prior)
        self.raw_variance = nn.Parameter(torch.zeros(latents))
        self.raw_lengthscale = nn.Parameter(torch.zeros(latents, dims))
        self.raw_smoothing = nn.Parameter(torch.zeros(*batch_shape, latents, dims))
        self.register_constraint("raw_variance", positive())
        self.register_constraint("raw_lengthscale", positive())
        self.register_constraint("raw_smoothing", positive())
        if lengthscale_prior is not None:
            self.register_prior("lengthscale_prior", lengthscale_prior, lambda kernel: kernel.lengthscale)
        if smoothing_prior is not None:
            self.register_prior("smoothing_prior", smoothing_prior, lambda kernel: kernel.smoothing)

    @property
    def latent_variance(self) -> Tensor:
        """Return variances s² of the latent processes, `(I,)`."""
        return self.raw_variance_constraint.transform(self.raw_variance)

    @property
    def lengthscale(self) -> Tensor:
        """Return the lengthscales of the latent processes, `(I, d)`."""
        return self.raw_lengthscale_constraint.transform(self.raw_lengthscale)

    @property
    def smoothing(self) -> Tensor:
        """Return standard deviations of the units' smoothing kernels, `(*b, I, d)`."""
        return self.raw_smoothing_constraint.transform(self.raw_smoothing)

    def latent(self, w: Tensor) -> Tensor:
        """See `OutputKernel.latent`."""
        return self.latent_variance[..., None, None] * gaussian(w, w, self.lengthscale.square())

    def cross(self, x: Tensor, w: Tensor) -> Tensor:
        """See `OutputKernel.cross`."""
        latent = self.lengthscale.square()
        both = latent + self.smoothing.square()
        return self._height(latent, both)[..., None, None] * gaussian(x, w, both)

    def variance(self, x: Tensor) -> Tensor:
        """See `OutputKernel.variance`."""
        latent = self.lengthscale.square()
        heights = self.amplitude * self._height(latent, latent + 2 * self.smoothing.square())
        return heights.sum(-1)[..., None].expand(x.shape[:-1])

    def covariance(self, x: Tensor, z: Tensor) -> Tensor:
        """See `OutputKernel.covariance`."""
        latent = self.lengthscale.square()
        both = latent + 2 * self.smoothing.square()
        heights = self.amplitude * self._height(latent, both)
        return (heights[..., None, None] * gaussian(x, z, both)).sum(-3)

    def spread(self, extent: Tensor) -> None:
        """See `OutputKernel.spread`: the finest is a tenth of the extent, the next twice that, and so on."""
        finest = extent.to(self.raw_lengthscale) * self.dims**0.5 / 10
        coarser = 2.0 ** torch.arange(self.latents, device=finest.device, dtype=finest.dtype)
        self.initialize(raw_lengthscale=(finest * coarser[:, None]).log())
        self.initialize(raw_smoothing=(0.25 * self.lengthscale).log().expand_as(self.raw_smoothing).clone())

    def _height(self, latent: Tensor, both: Tensor) -> Tensor:
        """Return v s² √(|S| / |both|), `(*b, I)`."""
        return self.amplitude * self.latent_variance * (0.5 * (latent.log() - both.log()).sum(-1)).exp()


def output_kernel(kernel: OutputKernel | Any, dims: int, latents: int, batch_shape: torch.Size) -> OutputKernel:
    """Return a kernel of outputs: the one given, a `ConvolutionProcess` for None, or else a `Coregionalisation`.

    >>> import gpytorch
    >>> type(output_kernel(gpytorch.kernels.RBFKernel(), dims=1, latents=1, batch_shape=torch.Size())).__name__
    'Coregionalisation'
    """
    if kernel is None:
        return ConvolutionProcess(dims, latents, batch_shape)
    return kernel if hasattr(kernel, "cross") else Coregionalisation(kernel, dims, batch_shape)


class Coregionalisation(_Mixture):
    r"""The linear model of coregionalisation, f_m = Σ_i v_mi g_i, with any GPyTorch kernels for the latent processes.

    .. math:: c_{f_m g_i} = v_{mi} c_{g_i g_i}, \qquad c_{f_m f_{m'}} = \textstyle\sum_i v_{mi} v_{m'i} c_{g_i g_i}.

    Kernels may be compositions, with constraints and priors, of some columns (`active_dims`), or user-defined classes.
    Their hyperparameters are shared by all units. Unset lengthscales start from the extent of the inducing inputs, a
    different one for each latent process; all other values are the kernel's. Latent processes of the same kernel that
    start from the same hyperparameters stay the same: start them differently.

    Args:
        kernel: of the latent processes, with `batch_shape=(latents,)`; or a list of kernels without batch shape, one
            for each latent process; or one such kernel, of one process.
        dims: input dimensions d.
        batch_shape: of the units.
        weight_prior: see `ConvolutionProcess`.

    Raises:
        TypeError: not a kernel, or one with several outputs for an input or an approximation of its own.
        ValueError: batch shapes of several dimensions, or in a list.
    """

    units = ("weight", "scale")

    def __init__(
        self,
        kernel: Any,
        dims: int,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 (immutable)
        weight_prior: Any = None,
    ) -> None:
        kernel = of_latents(kernel)
        super().__init__(dims, kernel.batch_shape[0], batch_shape, weight_prior)
        self.kernel = kernel
        self._dims = parameter_dims(kernel)

    def latent(self, w: Tensor) -> Tensor:
        """See `OutputKernel.latent`."""
        return self._evaluate(w, w)

    def cross(self, x: Tensor, w: Tensor) -> Tensor:
        """See `OutputKernel.cross`."""
        return self.amplitude[..., None, None] * self._evaluate(x, w)

    def smoothed(self) -> None:
        """See `OutputKernel.smoothed`."""
        return None

    def variance(self, x: Tensor) -> Tensor:
        """See `OutputKernel.variance`."""
        return (self.amplitude.square()[..., None] * diagonal(self.kernel, self._dims, x[..., None, :, :])).sum(-2)

    def covariance(self, x: Tensor, z: Tensor) -> Tensor:
        """See `OutputKernel.covariance`."""
        return (self.amplitude.square()[..., None, None] * self._evaluate(x, z)).sum(-3)

    def spread(self, extent: Tensor) -> None:
        """See `OutputKernel.spread`; lengthscales that have been set, or are frozen, do not change."""
        spread_lengthscales(self.kernel, extent, self.latents)

    def _evaluate(self, x: Tensor, z: Tensor) -> Tensor:
        return matrix(self.kernel, self._dims, x[..., None, :, :], z[..., None, :, :])


class EmbedCategories(nn.Module):
    """Map each level of categorical inputs to a learnt point, and pass continuous columns unchanged.

    The kernel of the embedded inputs is a kernel of the categories, positive definite for any points; levels with
    similar behaviour get near each other. It is a feature extractor, shared by all units. Only differences of embedded
    points matter, so the kernel's lengthscales of the new columns are redundant but harmless.

    Args:
        dims: columns of the inputs.
        levels: by column, the number of its levels, whose codes are 0, 1, ….
        size: dimensions of the points of one column.

    Shapes: inputs `(..., N, dims)`; outputs `(..., N, dims − categorical columns + size · categorical columns)`.

    Raises:
        ValueError: a column that is not there, or fewer than two levels; or codes that are not levels.

    Source: Zhang, Tao, Chen and Apley (2020), "A latent variable approach to Gaussian process modeling with
    qualitative and quantitative factors"; the source of this package's model names such kernels as future work.

    Example:
        >>> import torch
        >>> from fedtorch.models.gaussian_process import ConvolvedGP, EmbedCategories
        >>> x = torch.tensor([[0.1, 0.0], [0.5, 2.0]])  # a number, and the code of one of three levels
        >>> EmbedCategories(2, {1: 3})(x).shape  # the number, and two coordinates of the level's point
        torch.Size([2, 3])
        >>> model = ConvolvedGP(x.double(), features=EmbedCategories(2, {1: 3}))
    """

    def __init__(self, dims: int, levels: dict[int, int], size: int = 2) -> None:
        super().__init__()
        for column, count in levels.items():
            if not 0 <= column < dims or count < 2:
                raise ValueError(
                    f"Expected columns of 0…{dims - 1} with at least 2 levels, but got {count} levels for column "
                    f"{column}"
                )
        self.levels = dict(levels)
        self.continuous = [column for column in range(dims) if column not in levels]
        self.out_dims = len(self.continuous) + size * len(levels)
        # On a circle, so that all levels start with the same distance to their neighbours.
        self.points = nn.ParameterList([nn.Parameter(_circle(count, size)) for count in levels.values()])

    def forward(self, x: Tensor) -> Tensor:
        """Return the continuous columns and each level's point."""
        parts = [x[..., self.continuous]]
        for (_column, count), points in zip(self.levels.items(), self.points):
            code = x[..., _column].long()
            one_hot = (code[..., None] == torch.arange(count, device=x.device)).to(x.dtype)
            parts.append(one_hot @ points)
        return torch.cat(parts, -1)

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless all codes of x `(..., N, dims)` are levels."""
        for column, count in self.levels.items():
            code = x[..., column]
            wrong = (code != code.round()) | (code < 0) | (code >= count)
            if bool(wrong.any()):
                raise ValueError(
                    f"Expected codes 0…{count - 1} in column {column}, but got {code[wrong].flatten()[0].item():g}, "
                    "which has no point; count it among the levels and train again"
                )


def _circle(count: int, size: int) -> Tensor:
    angle = 2 * math.pi * torch.arange(count) / count
    points = torch.zeros(count, size)
    points[:, 0] = angle.cos()
    if size > 1:
        points[:, 1] = angle.sin()
    return 0.5 * points if size > 1 else torch.linspace(-0.5, 0.5, count)[:, None]
