r"""Predictions for rows that all parties hold, and scores that compare models.

Bounds of the augmented and the power model are not comparable (the product of powers is not normalised over y);
predictive log scores are. The model's noise on the predictor is part of its prediction. Its variance is Jρ² in the
augmented model and, by the Gaussian closed form, :math:`J\,[\rho(J-1)/J]^2` in the power model.

>>> import torch, fedtorch as ft
>>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(1.0), [ft.vfl.linear(1), ft.vfl.linear(1)], rho=1.0)
>>> x = torch.tensor([[-1.0], [1.0]])
>>> data = ft.vfl.VerticalData((x, x), torch.tensor([-2.0, 2.0]))
>>> thetas = [torch.zeros(1, 1, 1), 2 * torch.ones(1, 1, 1), torch.zeros(1, 1, 1)]  # all comes from the first party
>>> predictor(model, thetas, data)[0]
tensor([[[[-2.,  2.]]]])
>>> score = log_score(model, thetas, data, noise=0.0)
>>> torch.allclose(score, torch.distributions.Normal(0.0, 1.0).log_prob(torch.zeros(1, 2)))
True
>>> lost_score(model, thetas, data, noise=0.0)  # without the first, both rows are two standard deviations away
tensor([[[2., 2.], [0., 0.]]])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.vfl.fit.sfvi import VariationalFit
from fedtorch.vfl.model.checks import prepared
from fedtorch.vfl.model.collapsed import collapsed_log_likelihood, noise_variance
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData


def predictor(model: VerticalModel, thetas: Sequence[Tensor], data: VerticalData) -> tuple[Tensor, Tensor]:
    """Return intercept + offset + Σ_j g_j, `(B, M, C, n)`, and the likelihood's own parameters, for draws of γ, θ.

    Every party sends its g_j of the new rows. With many draws these reveal much of its features, so sum them securely.

    Args:
        model: the model.
        thetas: `(B, M, d_j)` each, for example `fit.sample(draws)`.
        data: rows; of the response only shape and range are used.
    """
    return model.predictor(thetas, prepared(model, data))


def log_score(
    model: VerticalModel,
    thetas: Sequence[Tensor],
    data: VerticalData,
    *,
    noise: Tensor | float | None = None,
    points: int = 32,
) -> Tensor:
    r"""Return the predictive log-density of each row, :math:`\log \frac1M \sum_m p(y_i | \theta^{(m)})`, `(B, n)`.

    Args:
        model: the model.
        thetas: draws of γ, θ_1, …, θ_J, `(B, M, d_j)` each.
        data: held-out rows with their response.
        noise: variance of the noise on the predictor, the model's by default; 0 for no noise.
        points: of the quadrature over the noise.
    """
    batch = prepared(model, data)
    return _scored(model, batch.y, *model.predictor(thetas, batch), noise, points)


def _scored(
    model: VerticalModel, y: Tensor, centre: Tensor, shared: Tensor, noise: Tensor | float | None, points: int
) -> Tensor:
    """Return `log_score` of predictors `(B, M, C, n)`."""
    variance = noise_variance(model) if noise is None else torch.as_tensor(noise, dtype=torch.float64)
    if bool((variance == 0).all()):
        rows = model.likelihood.log_prob(y, centre, shared)
    else:
        rows = collapsed_log_likelihood(model, y, centre, shared, points, power=False, variance=variance)
    return rows.logsumexp(1) - math.log(centre.shape[1])


def lost_score(
    model: VerticalModel,
    thetas: Sequence[Tensor],
    data: VerticalData,
    *,
    noise: Tensor | float | None = None,
    points: int = 32,
) -> Tensor:
    """Return how much the log score of each row falls when a party's g_j is replaced by its mean.

    This ranks the parties by information: on rows that were not trained on, the loss without a party of pure noise is
    chance alone. Average over rows; differences between parties are paired by row. Arguments are those of `log_score`.

    Returns:
        `(B, J, n)`.
    """
    batch = prepared(model, data)
    etas = torch.stack(model.etas(thetas, batch))
    whole, shared = model.centre(thetas[0], etas.sum(0), batch.offset)
    without = [_scored(model, batch.y, whole - eta + eta.mean(-1, True), shared, noise, points) for eta in etas]
    return _scored(model, batch.y, whole, shared, noise, points).unsqueeze(1) - torch.stack(without, 1)


def spread(fit: VariationalFit, data: VerticalData, draws: int = 100, *, seed: int = 0) -> Tensor:
    """Return how much each party moves the predictor: the posterior mean of the sd of g_j over rows, `(B, J)`.

    This ranks the parties by influence, and each discloses one number only; `lost_score` ranks them by information.

    >>> import fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(1.0), [ft.vfl.linear(1), ft.vfl.linear(1)], rho=1.0)
    >>> guide, key = ft.vfl.Guide(ft.vfl.noiseless(), ft.vfl.fit.guide.point()), ft.random.key(0)
    >>> q = ft.vfl.fit.guide.initial(model, guide, 3, 1, key)
    >>> mean = q.parties[0]["theta"]["mean"].fill_(2.0)  # the second party's stays at 0
    >>> x = torch.tensor([[-1.0], [0.0], [1.0]])
    >>> data = VerticalData((x, x), torch.zeros(3))
    >>> spread(VariationalFit(model, guide, data, steps=1, start=q), data)
    tensor([[2., 0.]])
    """
    batch = prepared(fit.model, data)
    thetas = fit.sample(draws, seed=seed)
    return torch.stack([eta.std(-1).mean((1, 2)) for eta in fit.model.etas(thetas, batch)], -1)
