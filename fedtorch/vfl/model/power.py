r"""The power-likelihood model: every party has a power of the likelihood, in which its own predictor has no noise.

.. math::
    \prod_j p\big(y_i \mid b + o_i + \eta_{ij} + \textstyle\sum_{k \ne j} z_{ik}, \gamma\big)^{w_j}, \qquad
    \eta_{ij} = g_j(x_{ij}, \theta_j), \qquad z_{ij} \sim N(\eta_{ij}, \rho^2), \qquad w_j = 1/J .

With a Gaussian likelihood of known σ it is the augmented model with ρ → ρ(J−1)/J; with unknown σ it differs from that
by a factor that depends on σ. With one party it is the model without noise. The product of powers is not normalised
over y, so that bounds of different models are not comparable: compare predictive scores (`fedtorch.vfl.log_score`).

Learnt weights do not rank the parties, and cannot. With :math:`e_j = z_j - \eta_j` and :math:`h = b + o +
\sum_j \eta_j`, party j's likelihood is :math:`p(y \mid h + \sum_k e_k - e_j)`, so that integrating z out leaves

.. math:: Z(w) = \int p(\gamma, \theta) \prod_i \int \prod_j p\big(y_i \mid h_i + \textstyle\sum_k e_k - e_j,
          \gamma\big)^{w_j}\, dN(e \mid 0, \rho^2 I)\, d(\gamma, \theta) .

The parties' data enter through h alone, which all J likelihoods share, and the e_j are exchangeable: Z does not change
when the weights are permuted, whichever party knows more. Moreover log Z is convex in w (a log-sum of exponentials of
linear functions), so that equal weights are its minimum and its maxima give one party all the weight. `concentration`
keeps the weights in the interior and does not make them informative. Which weights are learnt depends on the guide,
whose z is closer to its posterior for some parties than for others: the party with all the signal got the most weight
with `mean_field` and the least with `amortised`. To rank parties, use `fedtorch.vfl.fit.prediction.lost_score` (the
loss in predictive score without a party's features) and `spread` (how much the party moves the predictor).

Source: Hassan et al., section 3.3, equation (7). Learnt weights are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fedtorch.vfl.model.augmented import augmented
from fedtorch.vfl.model.likelihoods import ResponseLikelihood
from fedtorch.vfl.model.predictors import Predictor, Prior
from fedtorch.vfl.model.split_nn import NetworkPredictor
from fedtorch.vfl.model.vertical import VerticalModel


def power(
    likelihood: ResponseLikelihood,
    predictors: Sequence[Predictor | NetworkPredictor],
    rho: float | Tensor,
    *,
    intercept: bool = True,
    shared_prior: Prior | None = None,
    concentration: float | None = None,
) -> VerticalModel:
    r"""Make the power-likelihood model; the parties have to know the response.

    Args:
        likelihood: of the response; from `fedtorch.vfl.model.likelihoods`, or your own.
        predictors: one per party, from `fedtorch.vfl.linear`, `multilevel` and `NetworkPredictor`, or your own.
        rho: standard deviation of the noise; one for all, or `(B,)` for a batch of models.
        intercept: whether the server has an intercept.
        shared_prior: of the intercept and the likelihood's shared parameters; N(0, 1) each by default.
        concentration: learn the weights w instead of 1/J each, with :math:`\text{concentration} \cdot n/J \cdot
            \sum_j \log w_j` added to the bound. Do not read them as a ranking of the parties, see above.

    Raises:
        ValueError: no party, or ρ or `concentration` that is not positive.

    >>> from fedtorch.vfl.model import likelihoods
    >>> from fedtorch.vfl import linear
    >>> power(likelihoods.gaussian(), [linear(5), linear(6)], rho=1.0).sizes
    [2, 5, 6]
    """
    if concentration is not None and not concentration > 0:
        raise ValueError(f"Expected a positive concentration of the parties' weights, but got {concentration}")
    model = augmented(likelihood, predictors, rho, intercept=intercept, shared_prior=shared_prior)
    return replace(model, power=True, concentration=concentration)
