r"""Deep Gaussian processes of units that share a warp of their inputs.

Unit m's outputs are y = f_m(g(x)) + noise: the inner layers g are shared by the units, the outer process f_m is the
unit's own. Every layer is a sparse Gaussian process with q(u) on inducing inputs, and a layer's input is a draw of the
layer before, so that the bound

.. math:: \sum_m \Big( E_q \log p(y_m | f_m(g(x_m))) - KL(q(f_m) \| p) \Big) - KL(q(g) \| p)

is estimated without bias for any layers (doubly stochastic: draws, and rows). A unit's loss is minus its own terms per
row, with KL(q(g) ‖ p) divided by the rows of all units. So the mean of the units' losses, weighted by rows, is minus
the whole bound per row. Hyperparameters and inducing inputs of all layers are shared; the outer q(u) and the noise,
`DeepGP.own`, stay with the unit.

Source: Salimbeni and Deisenroth (2017), "Doubly stochastic variational inference for deep Gaussian processes".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, MixtureSameFamily, Normal

from fedtorch import expected
from fedtorch.models.gaussian_process._kernel_parts import extent_of, gaussian, matern
from fedtorch.models.quadrature import gauss_hermite

__all__ = ["DeepGP"]

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]  # (inputs, inputs, squared lengthscales) -> covariance
Likelihood = Callable[[Tensor], Distribution]  # values of f -> distribution of the outputs

_NODES = 64  # draws of the inner layers in predictions
_START = 0.01  # sd of the inner layers' q, in units of the prior's
_SMOOTHNESS = (0.5, 1.5, 2.5)
_OVER_F = 20  # nodes over f of a likelihood


class NormalNoise(NamedTuple):
    """Outputs with normal noise of f."""

    variance: Tensor  # ()

    def fit(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Return E_q log p(y | f) of moments of f `(S, N)`, averaged over draws and summed over rows."""
        square = (y - mean).square() + variance
        return -0.5 * ((2 * math.pi * self.variance).log() + square / self.variance).mean(0).sum()

    def outputs(self, mean: Tensor, variance: Tensor) -> MixtureSameFamily:
        """Return the distribution of outputs, of moments of f `(N, S)`."""
        parts = Normal(mean, (variance + self.variance).sqrt(), validate_args=False)
        return MixtureSameFamily(Categorical(torch.ones_like(mean), validate_args=False), parts)


class GivenF(NamedTuple):
    """Outputs of any distribution given f, by quadrature over f."""

    distribution: Likelihood

    def fit(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Return E_q log p(y | f) of moments of f `(S, N)`, averaged over draws and summed over rows."""
        f, weights = _nodes_over(mean, variance)
        return (self.distribution(f).log_prob(y[:, None]) * weights).sum(-1).mean(0).sum()

    def outputs(self, mean: Tensor, variance: Tensor) -> MixtureSameFamily:
        """Return the distribution of outputs, of moments of f `(N, S)`."""
        f, weights = _nodes_over(mean, variance)
        nodes = Categorical(weights.expand_as(f).flatten(1), validate_args=False)
        return MixtureSameFamily(nodes, self.distribution(f.flatten(1)))


class DeepPosterior(NamedTuple):
    """Predictive moments of a unit's outputs under q, and the divergence of q from the prior."""

    mean: Tensor  # (S, N) of f_m, by draw of the inner layers
    variance: Tensor  # (S, N)
    own: Tensor  # () KL of the outer q
    shared: Tensor  # () KL of the inner layers' q
    rows: Tensor  # () of all units together
    likelihood: NormalNoise | GivenF

    def fit(self, y: Tensor) -> Tensor:
        """Return E_q log p(y | f), summed over rows."""
        return self.likelihood.fit(self.mean, self.variance, y)


class SparseLayer(nn.Module):
    """Independent sparse Gaussian processes of one input each or of several.

    Args:
        inducing: `(J, d)`.
        outputs: number of processes.
        identity: whether the prior's mean is the input; then as many outputs as inputs.
        variance: initial variance of the prior.
        sd: initial sd of q's whitened values.
        jitter: of the inducing values, relative to the variance.
        kernel: of variance 1.
    """

    inducing: Tensor

    def __init__(
        self,
        inducing: Tensor,
        outputs: int,
        identity: bool,
        variance: float,
        sd: float,
        jitter: float,
        kernel: Kernel,
    ) -> None:
        super().__init__()
        size, dims = inducing.shape
        self.identity, self.jitter, self.kernel = identity, jitter, kernel
        self.inducing = nn.Parameter(inducing.clone())
        self.log_lengthscale = nn.Parameter((extent_of(inducing) / 10).log().expand(outputs, dims).clone())
        self.log_variance = nn.Parameter(torch.full((outputs,), math.log(variance)).to(inducing))
        self.mean = nn.Parameter(inducing.new_zeros(outputs, size))  # mean of q(v), u = mean(Z) + L v
        self.root = nn.Parameter((sd * torch.eye(size)).repeat(outputs, 1, 1).to(inducing))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of the processes at x `(*b, N, d)`, `(*b, N, outputs)` each."""
        square = (2 * self.log_lengthscale).exp()
        prior = self.kernel(self.inducing, self.inducing, square)  # (outputs, J, J), of variance 1
        factor = self._factor(prior + self.jitter * torch.eye(len(self.inducing)).to(x))
        cross = self.kernel(self.inducing, x, square)  # (*b, outputs, J, N)
        basis = torch.linalg.solve_triangular(factor, cross, upper=False)
        gain = self.root.tril().mT @ basis
        unit = 1 - basis.square().sum(-2) + gain.square().sum(-2)
        mean = (self.mean[:, None] @ basis)[..., 0, :] * (0.5 * self.log_variance).exp()[:, None]
        variance = unit.clamp(min=1e-12) * self.log_variance.exp()[:, None]
        return mean.mT + x if self.identity else mean.mT, variance.mT

    def _factor(self, matrix: Tensor) -> Tensor:
        """Return the Cholesky factor; in training NaN if it does not exist, so that a federation names the unit."""
        if not self.training:
            return torch.linalg.cholesky(matrix)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return torch.where(failed[..., None, None] > 0, torch.nan, factor)

    def divergence(self) -> Tensor:
        """Return KL(q(u) ‖ p(u)) of all its processes."""
        root = self.root.tril()
        logs = root.diagonal(dim1=-1, dim2=-2).abs().log().sum()
        return 0.5 * (root.square().sum() + self.mean.square().sum() - self.mean.numel()) - logs


class DeepGP(nn.Module):
    """A deep Gaussian process of one unit: `layers` sparse processes one after the other, all but the outer one shared.

    In training it returns the inputs of the loss; in `eval()` the predicted mean of each output, `(N,)`. Train it by
    `ft.gradient_descent(module, loss=DeepGP.loss, …)` without `batch_size`, because the loss treats a batch as all of a
    unit's rows, in `ft.personal_layers(local, module.own)`. Kernels are the same in all layers, RBF or Matérn.

    Intervals with one layer have their nominal coverage. With two layers they are too narrow, because q treats layers
    as independent: for three simulated groups of sixteen units with twelve rows, with known kernels and noise, those of
    95 % cover 84, 90 and 94 % of new outputs, and longer training does not change that.

    Args:
        inducing: initial inducing inputs `(J, d)` of every layer; inner layers have d outputs.
        rows: number of rows of all units together.
        layers: 1 is a sparse Gaussian process.
        draws: draws of the inner layers, in a step of training.
        noise: initial standard deviation of the outputs' noise.
        smoothness: ν of Matérn kernels, 0.5, 1.5 or 2.5; by default kernels are RBF.
        likelihood: for outputs without normal noise, the distribution given f:
            `lambda f: Bernoulli(logits=f, validate_args=False)`, `lambda f: Poisson(f.exp(), validate_args=False)`, of
            `torch.distributions`.
        jitter: of inducing values, relative to their variance.

    Raises:
        ValueError: inducing inputs that are not finite or not `(J, d)`, or a number out of range.
        TypeError: a likelihood that is no function of f, or gives no distribution of each value.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gaussian_process import DeepGP
        >>> x = torch.linspace(0, 1, 10)[:, None]
        >>> step = (x[:, 0] > 0.5).float()
        >>> data = ft.data.from_tensors([(x, step), (x, -2 * step)])
        >>> module = DeepGP(torch.linspace(0, 1, 6)[:, None], rows=20)
        >>> adam = lambda parameters: torch.optim.Adam(parameters, lr=0.1)
        >>> local = ft.gradient_descent(module, steps=10, loss=DeepGP.loss, optimizer=adam, reset="never")
        >>> run = ft.run(ft.personal_layers(local, DeepGP.own), ft.InProcess(data), rounds=3)
        >>> found = [run.client_module(k).predict(x) for k in range(2)]
        >>> [bool(q.mean[-1] > 0) for q in found]  # each unit's own level after the step that both have
        [True, False]
    """

    own: ClassVar[tuple[str, ...]] = ("outer.mean", "outer.root", "log_noise")
    # every step needs all rows of a unit, because the loss divides KL(q(f) ‖ p) by their number
    all_rows: ClassVar[bool] = True
    total: Tensor
    nodes: Tensor

    def __init__(
        self,
        inducing: Tensor,
        rows: int,
        *,
        layers: int = 2,
        draws: int = 10,
        noise: float = 0.1,
        smoothness: float | None = None,
        likelihood: Likelihood | None = None,
        jitter: float = 1e-6,
    ) -> None:
        super().__init__()
        if inducing.ndim != 2 or not bool(inducing.isfinite().all()):
            raise ValueError(f"Expected finite inducing inputs (J, d), but got shape {tuple(inducing.shape)}")
        for name, value in (("rows", rows), ("layers", layers), ("draws", draws)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Expected {name} to be a whole number of at least 1, but got {value}")
        expected.positive(noise=noise, jitter=jitter)
        if smoothness not in (None, *_SMOOTHNESS):
            raise ValueError(f"Expected smoothness 0.5, 1.5 or 2.5, or None for RBF kernels, but got {smoothness}")
        kernel = gaussian if smoothness is None else partial(matern, smoothness=smoothness)
        dims = inducing.shape[1]
        self.draws = draws if layers > 1 else 1
        inner = (SparseLayer(inducing, dims, True, 0.1, _START, jitter, kernel) for _ in range(layers - 1))
        self.inner = nn.ModuleList(inner)
        self.outer = SparseLayer(inducing, 1, False, 1.0, 1.0, jitter, kernel)
        self.likelihood = None if likelihood is None else _checked(likelihood)
        if likelihood is None:
            self.log_noise = nn.Parameter(torch.tensor(math.log(noise)).to(inducing))  # of the standard deviation
        else:
            self.own = DeepGP.own[:-1]  # type: ignore[misc]
        self.register_buffer("total", torch.tensor(float(rows)).to(inducing))
        self.register_buffer("nodes", _normal_nodes(layers - 1, dims).to(inducing))

    def forward(self, x: Tensor) -> DeepPosterior | Tensor:
        """Return the outputs at x `(N, d)`: in training a `DeepPosterior` for `loss`, else means `(N,)`."""
        if not self.training:
            return self._outputs(x).mean
        noise = torch.randn(self.draws, len(x), len(self.inner), x.shape[-1], dtype=x.dtype, device=x.device)
        mean, variance = self._moments(x, noise)
        shared = self.total.new_zeros(())
        for layer in self.inner:
            shared = shared + layer.divergence()  # type: ignore[operator]
        divergence = self.outer.divergence()
        return DeepPosterior(mean, variance, divergence, shared, self.total, self._likelihood())

    @staticmethod
    def loss(posterior: DeepPosterior, y: Tensor) -> Tensor:
        """Return minus the unit's part of the bound, by row.

        Args:
            posterior: the module's output in training, for all of a unit's rows.
            y: their outputs `(N,)`.
        """
        return (posterior.own - posterior.fit(y)) / len(y) + posterior.shared / posterior.rows

    def predict(self, x: Tensor) -> MixtureSameFamily:
        """Return the distribution of outputs at x `(N, d)`, noise included: a mixture over values of inner layers."""
        with torch.no_grad():
            return self._outputs(x)

    def warp(self, x: Tensor) -> Tensor:
        """Return the inner layers' mean at x `(N, d)`, `(N, d)`: the outer process's inputs."""
        for layer in self.inner:
            x = layer(x)[0]
        return x

    def _likelihood(self) -> NormalNoise | GivenF:
        return NormalNoise((2 * self.log_noise).exp()) if self.likelihood is None else GivenF(self.likelihood)

    def _outputs(self, x: Tensor) -> MixtureSameFamily:
        mean, variance = self._moments(x, self.nodes[:, None])
        return self._likelihood().outputs(mean.T, variance.T)

    def _moments(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of f `(S, N)` by normal numbers `(S, N or 1, layers, d)` of the inner layers."""
        if x.shape[-1] != self.outer.inducing.shape[-1]:
            raise ValueError(f"Expected inputs (N, {self.outer.inducing.shape[-1]}), but got {tuple(x.shape)}")
        x = x.expand(len(noise), *x.shape)
        for number, layer in enumerate(self.inner):
            mean, variance = layer(x)
            x = mean + variance.sqrt() * noise[:, :, number]
        mean, variance = self.outer(x)
        return mean[..., 0], variance[..., 0]


def _checked(likelihood: Likelihood) -> Likelihood:
    """Raise TypeError unless it is a function from values of f to a distribution of as many outputs."""
    advice = "such as lambda f: torch.distributions.Bernoulli(logits=f, validate_args=False)"
    expected.function(likelihood, "likelihood= as a function of f", advice)
    outputs = likelihood(torch.zeros(2, 3))
    if not isinstance(outputs, Distribution) or outputs.batch_shape != (2, 3):
        raise TypeError(f"Expected a distribution for each of 2 × 3 values of f, but got {outputs}; {advice}")
    return likelihood


def _nodes_over(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return values of f `(..., Q)` and weights `(Q,)` of a quadrature of N(mean, variance)."""
    rule = gauss_hermite(1, _OVER_F)
    return mean[..., None] + variance.sqrt()[..., None] * rule.nodes[:, 0].to(mean), rule.weights.to(mean)


def _normal_nodes(layers: int, dims: int) -> Tensor:
    """Return evenly spread points of the standard normal distribution, `(_NODES, layers, dims)`; one without layers."""
    if layers == 0:
        return torch.zeros(1, 0, dims, dtype=torch.float64)
    uniform = torch.quasirandom.SobolEngine(layers * dims, scramble=True, seed=0).draw(_NODES, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)).unflatten(1, (layers, dims))
