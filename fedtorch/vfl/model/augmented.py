r"""The augmented-variable model: the likelihood depends on noisy predictors only.

.. math::
    y_i \sim p(y \mid b + o_i + \textstyle\sum_j z_{ij}, \gamma), \qquad
    z_{ij} \sim N(g_j(x_{ij}, \theta_j), \rho^2), \qquad \theta_j \sim p_j .

Given z, the parties' parameters θ_j are independent of each other and of the response, which can stay with the server.
Only s = Σ_j z_j is identified. With a Gaussian likelihood the model is the regression with noise variance σ² + Jρ².

Source: Hassan et al., section 3.2, equation (6). ρ is a standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.vfl.model.likelihoods import ResponseLikelihood
from fedtorch.vfl.model.predictors import Predictor, Prior, normal_prior
from fedtorch.vfl.model.split_nn import NetworkPredictor
from fedtorch.vfl.model.vertical import VerticalModel


def augmented(
    likelihood: ResponseLikelihood,
    predictors: Sequence[Predictor | NetworkPredictor],
    rho: float | Tensor,
    *,
    intercept: bool = True,
    shared_prior: Prior | None = None,
) -> VerticalModel:
    """Make the augmented-variable model.

    Args:
        likelihood: of the response; from `fedtorch.vfl.model.likelihoods`, or your own.
        predictors: one per party, from `fedtorch.vfl.linear`, `multilevel` and `NetworkPredictor`, or your own.
        rho: standard deviation of the noise; one for all, or `(B,)` for a batch of models.
        intercept: whether the server has an intercept.
        shared_prior: of the intercept and the likelihood's shared parameters; N(0, 1) each by default.

    Raises:
        ValueError: no party, or ρ that is not positive.

    >>> from fedtorch.vfl.model import likelihoods
    >>> from fedtorch.vfl import linear
    >>> augmented(likelihoods.bernoulli(), [linear(5), linear(6)], rho=1.0).sizes
    [1, 5, 6]
    """
    noise = torch.as_tensor(rho, dtype=torch.float64).reshape(-1)
    if not predictors:
        raise ValueError("Expected at least one party's predictor, but got none")
    if not bool(((noise > 0) & noise.isfinite()).all()):
        raise ValueError(f"Expected positive rho, but got {noise.tolist()}; towards 0 the model becomes the exact one")
    prior = shared_prior or normal_prior()
    return VerticalModel(likelihood, tuple(predictors), noise, intercept=intercept, shared_prior=prior)


def attenuation(variance: float | Tensor) -> float | Tensor:
    r"""Return the factor by which noise on a logistic predictor shrinks slopes, :math:`1/\sqrt{1 + \pi v/8}`.

    A logistic curve averaged over N(0, v) is close to a logistic curve whose slope is smaller by this factor (MacKay
    1992). The factor is an approximation: for v up to 10 and normal predictors, it is within 3.1 % of that of a large
    sample where predictors have sds up to 2, and within 6 % up to 5. The augmented model has v = Jρ² and therefore
    reports slopes inflated by the inverse. Multiply these slopes, and their sds, by the factor to compare them with
    those of a model without noise. A plain model fitted to data with noise v is attenuated (0.847 at v = 1). The
    factor is for two classes alone: noise leaves the slopes of Gaussian and log-linear responses as they are.

    Args:
        variance: v of the noise on the predictor, as by `ft.vfl.noise_variance(model)`.

    >>> round(attenuation(1.0), 3)
    0.847
    """
    return 1 / (1 + math.pi * variance / 8) ** 0.5
