r"""Federated multi-output Gaussian processes: exact by sums, and by averaging as published.

Units share latent processes g, and each has its own likelihood, amplitudes and smoothing widths; see
`fedtorch.models.gaussian_process`. In a round of `fedmgp` a unit receives the shared hyperparameters θ and q(g), and

1. takes `steps` steps up its own part of the bound, E_q[log p(y_m | f_m)], in its own hyperparameters φ_m;
2. sends the gradient of that part with respect to θ at fixed q, and
3. its site, the likelihood of g given its outputs: for Gaussian noise exactly B_m = V_m'V_m/σ_m² and a_m =
   V_m'y_m/σ_m².

The server adds the sites up, and q(g) = N(Λ⁻¹ Σ a_m, Λ⁻¹) with Λ = C_gg⁻¹ + Σ B_m is the posterior that a central
computation gives. At that q the gradient at fixed q is the gradient of the collapsed bound (the envelope theorem), so θ
and φ go up the marginal likelihood of all units. θ moves at fixed q(g), not at fixed whitened values, which would tie
q to the covariance that moves.

Given g, every unit's weight is tied to the others', so that a common factor of all weights would move slowly. The
variances of the latent processes are therefore in θ: they are that factor, and the server moves it (parameter
expansion). Steps of a tenth reach a central optimiser's bound within half a nat after some tens of rounds and then
fluctuate by a nat; shorter ones (lr=0.03, server_lr=0.03) need some hundreds and end within a tenth.

For other likelihoods the site is the natural gradient of E_q[log p(y_m | f_m)], with a `damping` below 1: partitioned
variational inference, which for Gaussian noise without damping is the exact sum. If the likelihood is log-concave
(Bernoulli, Poisson, Laplace) it ends at the best q(g). For heavy tails (Student-t) rows of negative curvature are
treated as flat, and it ends some thousandths of a nat below.

Units with a process of their own (`ConvolvedGP(own_kernel=...)`) send B_m = V_m'(Ω_m + Σ_m)⁻¹V_m and a_m = V_m'(Ω_m +
Σ_m)⁻¹y_m, with that process in Ω_m. Its posterior stays at the unit: the client's module has it after `observe(x, y)`
with its own rows.

A unit also sends (1, φ_m)(1, φ_m)' of its amplitudes and the logarithms of its noise and smoothing, φ_m. From the sum
`join` estimates the prior for a further unit.

Disclosure: B_m and a_m of a unit with no more rows than inducing values determine its outputs, given its inputs and
hyperparameters; sums over several units do not. φ_m is sent too, and summed in the same way. `fedmgp` warns about units
with so few rows. Messages are trees of one fixed shape whatever the number of rows, and the server uses only sums of
them and of gradients, so a secure summation can be placed between units and server; this module has none, and without
one the server sees each message.

`fedmgp_average` is the source's Algorithm 2, which averages local optima of (μ, Cholesky factor of M). It is biased: a
unit's local optimum weights the prior as if the unit were alone.

Source: Chung and Al Kontar (2024), "Federated multi-output Gaussian processes", (13) to (16) and Algorithm 2; Bui et
al. (2018), "Partitioned variational inference"; Khan and Lin (2017) for the natural gradients.
"""

from fedtorch.federation.algorithms.multi_output_gp.average import fedmgp_average as fedmgp_average
from fedtorch.federation.algorithms.multi_output_gp.exact import fedmgp as fedmgp
