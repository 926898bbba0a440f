"""What a vertical model is: a likelihood of the sum of the parties' predictors, and noise ρ on each of them.

`augmented` and `power` make one; `VerticalData` is what it is fitted to. Batch first (folds × models × seeds), then
Monte Carlo draws, then outputs, and rows last: predictors are `(B, M, C, n)`. What does not differ over the batch has
no leading dimension, or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.vfl.likelihoods import Likelihood
from fedtorch.vfl.predictors import Predictor, Prior, normal_prior

__all__ = ["Batch", "VerticalData", "VerticalModel", "check_known", "check_response", "prepared"]


_CHECKED = 2**16  # rows that are checked at a time, so that checks take no memory that grows with the rows


class VerticalData(NamedTuple):
    """Aligned rows: the parties' features, and what the server (and perhaps the parties) know of them."""

    features: tuple[Tensor, ...]  # (n, p_j) or (B, n, p_j), one per party
    response: Tensor  # (n,) or (B, n)
    offset: Tensor | None = None  # (n,) or (B, n), added to the predictor
    weight: Tensor | None = None  # (n,) or (B, n), zero for the rows that a fold leaves out
    present: Tensor | None = None  # (n, J) bool, False for the rows that a party lacks; split networks take these
    weight_total: Tensor | None = None  # () or (B,), the sum of the weights of all rows, where these are a minibatch


class Batch(NamedTuple):
    """`VerticalData` or a minibatch of it, in shapes that broadcast."""

    features: tuple[Tensor, ...]  # (n, p_j) or (B, n, p_j)
    y: Tensor  # (1 or B, 1, n)
    offset: Tensor | None  # (1 or B, 1, 1, n)
    weight: Tensor | None  # (1 or B, 1, n), rows in the data per row of a minibatch included
    rows: Tensor | None  # (n,) which rows a minibatch has

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Σ_i w_i v_i, `(B, M, n)` -> `(B, M)`."""
        return values.sum(-1) if self.weight is None else (values * self.weight).sum(-1)

    def take(self, rows: Tensor) -> Batch:
        """The minibatch of these rows `(m,)`, weighted so that its sums are unbiased for those of all rows."""
        scale = self.y.shape[-1] / len(rows)
        one = self.y.new_full((1, 1, len(rows)), scale)
        weight = one if self.weight is None else self.weight.index_select(-1, rows) * scale
        features = tuple(x.index_select(-2, rows) for x in self.features)
        offset = None if self.offset is None else self.offset.index_select(-1, rows)
        return Batch(features, self.y.index_select(-1, rows), offset, weight, rows)


@dataclass(frozen=True)
class VerticalModel:
    """Made by `augmented` or `power`.

    Attributes:
        likelihood: of the response.
        predictors: one per party.
        rho: standard deviation of z_j given θ_j, `(1,)` or `(B,)`.
        power: whether every party has a likelihood of its own, with its own η_j in place of z_j.
        intercept: whether the server has one for each output.
        shared_prior: of the server's γ = (intercepts, the likelihood's shared parameters).
        concentration: of the Dirichlet prior of learnt weights, per row and party; None for weights 1/J.
    """

    likelihood: Likelihood
    predictors: tuple[Predictor, ...]
    rho: Tensor
    power: bool
    intercept: bool
    shared_prior: Prior
    concentration: float | None = None

    @property
    def sizes(self) -> list[int]:
        """Coordinates of γ, θ_1, …, θ_J."""
        outputs = self.likelihood.outputs if self.intercept else 0
        return [outputs + len(self.likelihood.shared), *(p.size for p in self.predictors)]

    @property
    def noise_sd(self) -> Tensor:
        """ρ, shaped to multiply predictors: `(1 or B, 1, 1, 1)`."""
        return self.rho.reshape(-1, 1, 1, 1)

    def split_shared(self, gamma: Tensor) -> tuple[Tensor | None, Tensor]:
        """γ `(B, M, S)` as intercepts `(B, M, C, 1)`, if there are any, and the likelihood's own parameters."""
        if not self.intercept:
            return None, gamma
        outputs = self.likelihood.outputs
        return gamma[..., :outputs].unsqueeze(-1), gamma[..., outputs:]

    def log_likelihood(
        self, y: Tensor, total: Tensor, shared: Tensor, deviations: Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        r"""Log-likelihood of every row, `(B, M, n)`.

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


def checked_model(
    likelihood: Likelihood,
    predictors: Sequence[Predictor],
    rho: float | Tensor,
    *,
    power: bool,
    intercept: bool,
    shared_prior: Prior | None,
    concentration: float | None = None,
) -> VerticalModel:
    """A model whose parts fit each other.

    Raises:
        ValueError: no party, ρ that is not positive, or a concentration that is not.
    """
    noise = torch.as_tensor(rho, dtype=torch.float64).reshape(-1)
    if not predictors:
        raise ValueError("Expected at least one party's predictor, but got none")
    if not bool(((noise > 0) & noise.isfinite()).all()):
        raise ValueError(f"Expected positive rho, but got {noise.tolist()}; towards 0 the model becomes the exact one")
    if concentration is not None and not concentration > 0:
        raise ValueError(f"Expected a positive concentration of the parties' weights, but got {concentration}")
    prior = shared_prior or normal_prior()
    return VerticalModel(likelihood, tuple(predictors), noise, power, intercept, prior, concentration)


def check_known(data: VerticalData) -> None:
    """Raises `ValueError` unless offset and weights are finite, of the response's rows, and weights from 0 on."""
    rows = data.response.shape[-1]
    if not rows:
        raise ValueError("Expected at least one row, but got none; see how the parties' rows were aligned")
    for name, value in (("offset", data.offset), ("weight", data.weight)):
        if value is None:
            continue
        if value.shape[-1] != rows:
            raise ValueError(f"Expected {name} of {rows} rows, but got shape {tuple(value.shape)}")
        if not bool(value.isfinite().all()) or (name == "weight" and bool((value < 0).any())):
            raise ValueError(f"Expected a finite offset and weights from 0 on, but got {name} with others")


def check_response(likelihood: Likelihood, data: VerticalData) -> None:
    """Raises `ValueError` unless the likelihood has the response of every row whose weight is not 0."""
    y = data.response
    if data.weight is not None:
        y, weight = torch.broadcast_tensors(y, data.weight.to(y.device))
        first = (weight > 0).long().argmax(-1, keepdim=True)  # stands in for those that do not count
        y = torch.where(weight > 0, y, y.gather(-1, first))
    likelihood.check(y)


def prepared(model: VerticalModel, data: VerticalData) -> Batch:
    """Checks the data against the model, and shapes them.

    Raises:
        ValueError: parties, rows, widths or dtypes that do not fit, values that are not finite, negative weights, or a
            response that the likelihood does not have.
    """
    if len(data.features) != len(model.predictors):
        raise ValueError(f"Expected features of {len(model.predictors)} parties, but got {len(data.features)}")
    rows = data.response.shape[-1]
    for j, (x, predictor) in enumerate(zip(data.features, model.predictors)):
        if x.ndim not in (2, 3) or x.shape[-2:] != (rows, predictor.width):
            raise ValueError(
                f"Expected features ({rows}, {predictor.width}) of party {j}, but got {tuple(x.shape)}; align the rows"
            )
        if not all(bool(part.isfinite().all()) for part in x.split(_CHECKED, -2)):
            raise ValueError(f"Expected finite features of party {j}, but got NaN or Inf; impute them first")
    check_known(data)
    if data.present is not None and not bool(data.present.all()):
        raise ValueError("Expected rows that all parties have, but got absent ones; align with all parties required")
    dtype = data.features[0].dtype
    if not dtype.is_floating_point or any(x.dtype != dtype for x in data.features):
        raise ValueError(
            f"Expected features of one floating-point dtype, but got {[str(x.dtype) for x in data.features]}; "
            "convert them with .to(torch.float64)"
        )
    check_response(model.likelihood, data)

    def shaped(value: Tensor | None, ones: int) -> Tensor | None:
        if value is None:
            return None
        return value.to(dtype).reshape(-1, *(1,) * ones, rows)

    y = shaped(data.response, 1)
    assert y is not None
    return Batch(tuple(data.features), y, shaped(data.offset, 2), shaped(data.weight, 1), None)
