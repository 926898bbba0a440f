r"""Expectation propagation: the posterior of the shared parameters, from sums of normal sites.

The posterior of the shared parameters φ is p(φ) ∏_k f_k(φ), where f_k(φ) = ∫ p(y_k | θ_k) p(θ_k | φ) dθ_k needs client
k's data. Client k approximates f_k by a site q_k, with the natural parameters (r_k, Q_k) of a normal density; the
server keeps q(φ) = p(φ) ∏ q_k(φ), whose parameters are sums. In a round, with damping δ,

.. math::
    \text{cavity}_k = q / q_k, \qquad
    q_k \leftarrow q_k^{1-\delta} \bigl(\mathrm{proj}[\text{cavity}_k f_k] / \text{cavity}_k\bigr)^\delta ,

where proj is the normal density with the same mean and covariance, computed by `project`. A site may be indefinite, and
most sites of a converged hierarchical model are; q and the cavities must be densities.

The first round is a summed one: clients send a summary, from which the server makes a first estimate. Each client
starts with an equal share of it, so that the first cavities are neither the bare prior nor narrow. From zero sites, as
printed (Algorithm 3), the method breaks in its first step. Clients that join later start from a zero site.

The step length, and the return of all clients to earlier good sites, are in `_damping`. A client whose cavity is still
not a density after some retreats, as with few clients of very different sizes, keeps its site, and the report names it.

Hyperpriors that are not normal are factors of one coordinate each; the server keeps a site for each and renews it as a
client would (`Factor`).

Source: Yue, Kontar, Estrada Gómez (2022), "Federated data analytics: a study on linear models", Algorithms 2 and 3;
Vehtari et al. (2020), "Expectation propagation as a way of life".
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
