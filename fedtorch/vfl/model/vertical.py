"""Vertical models: a likelihood of the sum of the parties' predictors, and noise ρ on each of them.

`augmented` and `power` make a model, which is fitted to `VerticalData`. Dimensions are the batch (folds × models ×
seeds), Monte Carlo draws, outputs and rows, in this order: predictors are `(B, M, C, n)`. Tensors that do not differ
over the batch have no leading dimension, or 1. Predictors may be networks (`NetworkPredictor`): a split network is a
vertical model, and the elements of its batch that are not `active`, without noise and priors, are plain networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from fedtorch.vfl.model.likelihoods import ResponseLikelihood
from fedtorch.vfl.model.predictors import Predictor, Prior
from fedtorch.vfl.model.split_nn import NetworkPredictor, Stacked
from fedtorch.vfl.rows.data import VerticalData


def summed(values: Sequence[Tensor]) -> Tensor:
    """Return Σ_j z_j, where every party sends as many numbers a row as the likelihood's predictor has.

    >>> import torch
    >>> summed([torch.ones(1, 1, 1, 3), 2 * torch.ones(1, 1, 1, 3)])
    tensor([[[[3., 3., 3.]]]])
    """
    return torch.stack(list(values)).sum(0) if len(values) > 2 else sum(values[1:], values[0])


def concatenated(values: Sequence[Tensor]) -> Tensor:
    """Concatenate the z_j of all parties, `(B, M, Σ_j C_j, n)`, for a top network.

    >>> import torch
    >>> concatenated([torch.zeros(1, 1, 2, 5), torch.ones(1, 1, 3, 5)]).shape  # two and three numbers a row
    torch.Size([1, 1, 5, 5])
    """
    return torch.cat(list(values), -2)


@dataclass(frozen=True)
class VerticalModel:
    """The model of a vertical fit; `augmented` and `power` make it.

    Attributes:
        likelihood: of the response.
        predictors: one per party.
        rho: standard deviation of z_j given θ_j, `(1,)` or `(B,)`.
        power: whether every party has a likelihood of its own, with its own η_j in place of z_j.
        intercept: whether the server has an intercept for each output.
        shared_prior: of the server's γ = (intercepts, the likelihood's shared parameters); None for a flat prior.
        concentration: of the Dirichlet prior of learnt weights, per row and party; None for weights 1/J.
        active: which elements of the batch have noise and priors, `(B,)`; all by default. The others are plain.
        combine: how the server combines the parties' values at the cut layer, `summed` or `concatenated`.
        top: networks at the server, from the cut layer `(n, C)` to the likelihood's predictor.

    >>> import torch, fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(), [ft.vfl.linear(2), ft.vfl.linear(3)], rho=1.0)
    >>> model.sizes  # the server has an intercept and log σ
    [2, 2, 3]
    >>> data = ft.vfl.VerticalData((torch.ones(4, 2), torch.ones(4, 3)), torch.zeros(4))
    >>> predictor, log_sd = model.predictor([torch.ones(1, 1, size) for size in model.sizes], data)
    >>> predictor
    tensor([[[[6., 6., 6., 6.]]]])
    """

    likelihood: ResponseLikelihood
    predictors: tuple[Predictor | NetworkPredictor, ...]
    rho: Tensor
    _: KW_ONLY
    power: bool = False
    intercept: bool = True
    shared_prior: Prior | None = None
    concentration: float | None = None
    active: Tensor | None = None
    combine: Callable[[Sequence[Tensor]], Tensor] = summed
    top: Stacked | None = None

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of coordinates of γ, θ_1, …, θ_J."""
        outputs = self.likelihood.outputs if self.intercept else 0
        return [outputs + len(self.likelihood.shared), *(p.size for p in self.predictors)]

    @property
    def outputs(self) -> list[int]:
        """Return how many numbers a row the likelihood's predictor has, and how many each party sends."""
        whole = self.likelihood.outputs
        return [whole, *(p.outputs or whole for p in self.predictors)]

    @property
    def row_dims(self) -> list[int]:
        """Return the number of dimensions of a row of each party's features."""
        return [p.row_dims for p in self.predictors]

    @property
    def noise_sd(self) -> Tensor:
        """Return ρ, shaped to multiply predictors: `(1 or B, 1, 1, 1)`."""
        return self.rho.reshape(-1, 1, 1, 1)

    def log_shared_prior(self, gamma: Tensor) -> Tensor:
        """Return log p(γ) of draws `(B, M, S)`, `(B, M)`."""
        return gamma.new_zeros(gamma.shape[:-1]) if self.shared_prior is None else self.shared_prior(gamma)

    def masked(self, value: Tensor, plain: Tensor | float) -> Tensor:
        """Return `value` `(B, ...)` in elements with noise and priors, `plain` in the others."""
        if self.active is None:
            return value
        return torch.where(self.active.reshape(-1, *(1,) * (value.ndim - 1)), value, plain)

    def cut(self, values: Sequence[Tensor], keys: Callable[[], Tensor] | None = None) -> Tensor:
        """Combine the parties' values at the cut layer and apply the top network, `(B, M, C, n)`.

        Args:
            values: `(B, M, C_j, n)` each.
            keys: makes the keys `(B,)` of a top network's draws in training mode.
        """
        combined = self.combine(values)
        if self.top is None:
            return combined
        return self.top(combined.mT.flatten(1, 2), None, keys).unflatten(1, (combined.shape[1], -1)).mT

    def centre(self, gamma: Tensor, combined: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return intercept + offset + `combined`, `(B, M, C, n)`, and the likelihood's own parameters, `(B, M, S)`.

        Raises:
            ValueError: another number of outputs than the likelihood's.
        """
        if combined.shape[-2] != self.likelihood.outputs:
            raise ValueError(
                f"Expected {self.likelihood.outputs} numbers a row for the likelihood, but got {combined.shape[-2]}; "
                "see `widths`, `combine` and `top`"
            )
        intercept, shared = self.split_shared(gamma)
        centre = combined if intercept is None else combined + intercept
        return (centre if offset is None else centre + offset.reshape(-1, 1, 1, offset.shape[-1])), shared

    def etas(self, thetas: Sequence[Tensor], data: VerticalData) -> list[Tensor]:
        """Return g_j of every party, `(B, M, C, n)` each, for draws of γ, θ_1, …, θ_J `(B, M, d_j)`."""
        return [p.forward(theta, x) for p, theta, x in zip(self.predictors, thetas[1:], data.features)]

    def predictor(self, thetas: Sequence[Tensor], data: VerticalData) -> tuple[Tensor, Tensor]:
        """Return intercept + offset + Σ_j g_j, `(B, M, C, n)`, and the likelihood's own parameters, for draws."""
        return self.centre(thetas[0], self.cut(self.etas(thetas, data)), data.offset)

    def split_shared(self, gamma: Tensor) -> tuple[Tensor | None, Tensor]:
        """Split γ `(B, M, S)` into intercepts `(B, M, C, 1)`, if there are any, and the likelihood's parameters."""
        if not self.intercept:
            return None, gamma
        outputs = self.likelihood.outputs
        return gamma[..., :outputs].unsqueeze(-1), gamma[..., outputs:]

    def log_likelihood(
        self, y: Tensor, total: Tensor, shared: Tensor, deviations: Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        r"""Return the log-likelihood of every row, `(B, M, n)`.

        The augmented model's is :math:`\log p(y | s, \gamma)` (equation 6), the power model's
        :math:`\sum_j w_j \log p(y | s - e_j, \gamma)` with :math:`e_j = z_j - \eta_j` (equation 7).

        Args:
            y: `(1 or B, 1, n)`.
            total: intercept + offset + s, s = Σ_j z_j, `(B, M, C, n)`.
            shared: the likelihood's own parameters, `(B, M, S)`.
            deviations: e_j, `(J, B, M, C, n)`; None for the augmented model.
            weights: w `(B, J)`; 1/J by default.
        """
        if deviations is None:
            return self.likelihood.log_prob(y, total, shared)
        each = self.likelihood.log_prob(y, total - deviations, shared)
        return each.mean(0) if weights is None else (weights.T[:, :, None, None] * each).sum(0)
