r"""Gaussian processes of many units that are made from latent processes which all units share.

Unit m observes y_m at inputs x_m, and f_m depends on the latent processes at J inducing inputs, g = g(w), by

.. math::
    p(f_m | g) = N(V_m g, \Omega_m), \qquad V_m = C_{f_m g} C_{gg}^{-1}, \qquad
    \Omega_m = C_{f_m f_m} - V_m C_{g f_m}.

A unit's information about g enters the posterior q(g) = N(μ, M) as one Gaussian factor, its *site*, and factors
multiply. For Gaussian noise the best q and the bound of the marginal likelihood are in closed form: with B_m =
V_m'V_m/σ_m² and a_m = V_m'y_m/σ_m²,

.. math::
    q(g) = N(\Lambda^{-1} \textstyle\sum_m a_m, \Lambda^{-1}), \qquad \Lambda = C_{gg}^{-1} + \textstyle\sum_m B_m,
    \qquad \log p(y) \ge \log N(y; 0, V C_{gf} + \Sigma) - \tfrac12 \textstyle\sum_m \operatorname{tr}(\Omega_m) /
    \sigma_m^2 .

q is joint over the latent processes; the source factorises it, which gives a looser bound. With `exact_units` a unit's
own residual Ω_m is not approximated by its diagonal, B_m = V_m'(Ω_m + σ_m² I)⁻¹V_m, which costs O(N_m³) and gives the
sharper log N(y; 0, bdiag Ω_m + V C_gf + Σ) of (10). With `own_kernel` each unit has an independent process δ_m besides
the latent ones; its covariance is part of Ω_m, so that such units are exact ones.

All numbers of q belong to whitened values t, g = basis · t, with a fixed `basis`: the Cholesky factor of C_gg at some
hyperparameters. In central training those are the current ones; in a federation they are the initial ones, so that a
unit's earlier site stays valid for g when the shared hyperparameters move.

Source: Chung and Al Kontar (2024), "Federated multi-output Gaussian processes", equations (7) to (18); Titsias (2009)
for the closed form.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
