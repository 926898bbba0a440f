r"""Maximum marginal likelihood of hierarchical models, the estimates of mixed-model software, and REML.

The devices' factors f_k(φ) = ∫ p(y_k | θ_k) p(θ_k | φ) dθ_k multiply to the marginal likelihood of the shared
parameters,

.. math:: \ell(\varphi) = \sum_k \log f_k(\varphi), \qquad \varphi = (\mu, \zeta),

whose logarithm is a sum over clients at any φ. A round evaluates it at a few nodes around the present estimate, where
each client sends one number per node. The server computes value, gradient and second derivatives from these sums
(central differences of fourth order) and takes a step of Newton's method, which it undoes and damps if the likelihood
did not grow. No prior is used, except for the first estimate.

With `restricted`, ℓ is integrated over the means μ with a flat prior, which is residual or restricted maximum
likelihood (REML) of linear models, whose ℓ is quadratic in μ,

.. math:: \ell_R(\zeta) = \ell(\hat\mu(\zeta), \zeta) - \tfrac12 \log |I(\zeta)| + \tfrac m2 \log 2\pi, \qquad
    I = -\partial^2 \ell / \partial \mu\, \partial \mu' .

The model defines how θ_k is integrated: exactly in `hierarchical.linear`, by Laplace's method or adaptive Gauss-Hermite
quadrature in `generalised` (`inner=`).

Source: Laird and Ware (1982), "Random-effects models for longitudinal data", Biometrics 38; Bates, Mächler, Bolker and
Walker (2015), "Fitting linear mixed-effects models using lme4", Journal of Statistical Software 67(1), section 3.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
