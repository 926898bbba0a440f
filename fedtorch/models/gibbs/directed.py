r"""Directed graphical models of several sites, with feedback loops: linear structural equations with Laplace errors.

.. math:: Y_{ki} = \theta_k Y_{ki} + E_{ki},\quad E_{kij} \sim \text{Laplace}(0, b_{kj}),\quad
    \theta_{kjh} \sim N(\theta_{jh}, \lambda_{kjh}^2 \tau_{jh}^2),\quad 1/b_{kj} \sim \text{Gamma}(a_\sigma, b_\sigma)

where θ_kjh is the direct effect of h on j, θ_kjj = 0, and the graph may have cycles. Every θ_k has a spectral radius
below one, so that feedback dies away; the prior is the hierarchy of `sparse` restricted to such θ_k,
which leaves all its other conditionals as they are. Errors that are not normal tell causes from effects. With
e = (I − θ_k) y the density of a site's rows is

.. math:: |\det(I - \theta_k)|^{n_k} \prod_i \prod_j \frac{1}{2 b_{kj}} e^{-|e_{ij}| / b_{kj}}.

`regression()` is the clients' half of a Gibbs sampler; the server's is `sparse.hierarchy()` on the
p · (p − 1) effects, cause by cause within each row j. A sweep takes one row of θ_k after another by a Metropolis step:

- the step δ is normal with covariance s² (Y'Y/b_j² + D⁻¹)⁻¹, D = diag(λ² τ²), where the length s has a law of its own;
  the Fisher information of a Laplace location is 1/b², so that the step fits what is known of the row
- with M = (I − θ_k)⁻¹, det(I − θ*) = det(I − θ_k) (1 − δ'M e_j), and M* = M + M e_j δ'M / (1 − δ'M e_j)
- the residuals of the row change by Y δ.

Such steps hardly leave a site's local mode, in which two rows share what belongs to one of them, so between them pairs
of rows j, l are turned, as in independent component analysis. The rows u_j = (e_j − θ_j) / b_j of the whitening matrix
go to (cos φ u_j − sin φ u_l, sin φ u_j + cos φ u_l), with signs for which both diagonal elements are positive and φ
uniform; a sweep turns every other row with one drawn at random. That keeps the determinant and the volume of u; in
terms of (θ_j, 1/b_j), u_j has the volume b_j^{-(p − 1)}.

λ is drawn as in the sparse regression and 1/b_kj ~ Gamma(a_σ + n_k, b_σ + Σ_i |e_ij|).

Source: Kidd, Wang, Xu and Ni (2023), "Federated learning for sparse Bayesian models", section 2.4, whose acceptance
ratio is printed for one observation and without the stability of θ*. Laplace errors are their normal ones with
exponential variances, integrated out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import exact, random
from fedtorch.models.gibbs import graphical
from fedtorch.models.gibbs._directed_walk import RowPrior, Walk, spectral_radius as spectral_radius
from fedtorch.models.gibbs._gaussian_conditional import elimination
from fedtorch.models.gibbs.deviations import Deviation, horseshoe
from fedtorch.models.gibbs.kernels import LocalKernel, Sums, check_start
from fedtorch.models.gibbs.sparse import MOST_PRECISE, GlobalVariables
from fedtorch.models.rows import client_by_client

__all__ = ["regression"]


class DirectedSite(NamedTuple):
    """A client's variables; `(K, C, ...)`, q = p · (p − 1) effects."""

    theta: Tensor  # (..., q) θ_k without its diagonal, row by row
    precision: Tensor  # (..., q) 1/λ²
    auxiliary: Tensor  # (..., q) 1/ν
    noise: Tensor  # (..., p) 1/b
    accepted: Tensor  # (...) share of the proposals that were accepted in the last round


class Observations(NamedTuple):
    """The clients' rows; float64."""

    y: Tensor  # (K, N, p), rows beyond a client's count are zeros
    gram: Tensor  # (K, p, p) Y'Y
    count: Tensor  # type: ignore[assignment]  # (K,)


def regression(
    *,
    deviation: Deviation | None = None,
    noise_shape: float = 1.0,
    step: float = 1.0,
    names: Sequence[str] | None = None,
) -> LocalKernel:
    """Return the clients' half, effects of variables on each other. Rows are y `(p,)`, centred, of comparable scales.

    Args:
        deviation: the prior of the effects' deviations from the global ones; default `horseshoe()`.
        noise_shape: a_σ. Where the server samples b_σ, its `noise_shape` is p · a_σ: every site has p scales.
        step: length of proposals, relative to that of the best random walk on a normal distribution; a proposal's own
            length is uniform between 0 and twice that.
        names: the variables' names, for messages.

    Raises:
        ValueError: an argument is not positive; or, when a population is bound, rows of another form, fewer than two
            variables, NaN, or a variable that is constant in a client's rows.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import directed, graphical, sparse
        >>> e = ft.random.exponential(ft.random.key(0), (5, 60, 2), torch.float64)
        >>> y = e - ft.random.exponential(ft.random.key(1), (5, 60, 2), torch.float64)
        >>> y[..., 1] += y[..., 0]  # 0 causes 1
        >>> algorithm = ft.gibbs(directed.regression(), sparse.hierarchy(), sweeps=3, chains=2)
        >>> data = ft.InProcess(ft.data.from_tensors(list(y)))
        >>> sampler = ft.Sampler(burn_in=10)
        >>> run = ft.run(algorithm, data, graphical.start(2), rounds=30, record=sampler)
        >>> graphical.square(sampler.mean()["theta"]).round().int().tolist()
        [[0, 0], [1, 0]]
        >>> site = run.tensors()  # the variables of 5 clients in 2 chains
        >>> bool((directed.spectral_radius(graphical.square(graphical.by_response(site.theta))) < 1).all())
        True
        >>> 0.1 < float(site.accepted.mean()) < 0.9
        True
    """
    for name, number in (("noise_shape", noise_shape), ("step", step)):
        if not number > 0:
            raise ValueError(f"Expected a positive {name}, but got {number}")
    deviation = horseshoe() if deviation is None else deviation

    def init(start: Tensor) -> DirectedSite:
        matrix = graphical.square(graphical.by_response(start))
        if not bool((spectral_radius(matrix) < 1).all()):
            raise ValueError("Expected a start with a spectral radius below 1, but got another; use graphical.start(p)")
        ones = torch.ones_like(start)
        return DirectedSite(start, ones, ones, ones[:, : matrix.shape[-1]], torch.zeros_like(ones[:, 0]))

    def sweep(
        heard: GlobalVariables, site: DirectedSite, data: Observations, keys: Tensor, sweeps: int
    ) -> DirectedSite:
        chains, q = site.theta.shape[1:]
        p = data.y.shape[-1]
        check_start(q, p * (p - 1))
        for_steps, for_lengths, for_accepting, for_noise, for_mixing, for_turns = random.split(keys, 6)
        normals = _front(random.normal(for_steps, (sweeps, q), torch.float64))
        lengths = _front(random.uniform(for_lengths, (sweeps, p), torch.float64)) * (2 * 2.38 * step / (p - 1) ** 0.5)
        logs = _front(random.uniform(for_accepting, (sweeps, p), torch.float64)).log()
        shape = noise_shape + data.count.to(torch.float64)[:, None, None, None]
        gammas = _front(random.gamma(for_noise, shape, (sweeps, p), torch.float64))
        mixing = [_front(part) for part in deviation.noise(for_mixing, (sweeps, q))]
        turns = _front(random.uniform(for_turns, (sweeps, p, 3), torch.float64))
        centre, shared = _front(heard.theta), _front(heard.precision)
        w, u, noise = (_front(leaf) for leaf in (site.precision, site.auxiliary, site.noise))
        propose = _proposals(data, chains)
        walk = Walk(data.y, data.count, graphical.square(graphical.by_response(site.theta)))
        whole = walk.whole(centre)
        for s in range(sweeps):
            prior = w * shared
            rows = RowPrior(whole, walk.whole(prior), noise_shape, heard.noise)
            for j in range(s % 2, p, 2):
                noise = walk.turn(j, turns[s, j], noise, rows)
            steps = propose(noise, prior, normals[s])
            walk.refresh()
            for j in range(p):
                row = slice(j * (p - 1), (j + 1) * (p - 1))
                walk.move(j, steps[row] * lengths[s, j], centre[row], prior[row], noise[j], logs[s, j])
            delta = walk.effects() - centre
            w, u = deviation.update(w, u, delta * delta * (shared / 2), tuple(part[s] for part in mixing))
            noise = gammas[s] / (heard.noise + walk.absolute)
        accepted = walk.accepted / (sweeps * p)
        back = lambda leaf: leaf.movedim(0, -1)
        return DirectedSite(back(walk.effects()), back(w.clamp_max(MOST_PRECISE)), back(u), back(noise), accepted)

    return LocalKernel(init, lambda data: observations(data, names), sweep, _report)


def _report(site: DirectedSite) -> Sums:
    """Return the sums over sites that the server needs: see `sparse.report`; Σ 1/b runs over variables."""
    first, second = exact.products(site.precision, site.theta)
    return {
        "clients": (torch.ones_like(site.noise[..., 0]),),
        "precision": (site.precision,),
        "first": first,
        "second": second,
        "noise": site.noise.unbind(-1),
    }


def observations(data: Any, names: Sequence[str] | None = None) -> Observations:
    """Return the clients' rows, checked as `fedtorch.models.gibbs.graphical.rows` does."""
    y = graphical.rows(data, names)
    return Observations(y, client_by_client(lambda own: own.mT @ own, data.count, y), data.count)


def _proposals(data: Observations, chains: int) -> Any:
    """Return the function (1/b `(p, K, C)`, prior precisions `(q, K, C)`, standard normals) -> steps `(q, K, C)`."""
    clients, p, _ = data.gram.shape
    others = graphical.other_variables(p).to(data.gram.device)
    gram = data.gram[:, others[:, :, None], others[:, None]].flatten(0, 1)
    nothing = gram.new_zeros(clients * p)
    centre = gram.new_zeros(clients * p, chains, p - 1)
    draw = elimination(gram, centre[:, 0], nothing, centre)

    def propose(noise: Tensor, prior: Tensor, z: Tensor) -> Tensor:
        flat = lambda leaf: leaf.unflatten(0, (p, p - 1)).permute(1, 2, 0, 3).reshape(p - 1, -1)
        delta, _ = draw((noise * noise).transpose(0, 1).reshape(-1), flat(prior), flat(z))
        return delta.reshape(p - 1, clients, p, chains).permute(2, 0, 1, 3).reshape(p * (p - 1), clients, chains)

    return propose


def _front(values: Tensor) -> Tensor:
    """Return `(K, C, ...)` as `(..., K, C)`."""
    return values.movedim((0, 1), (-2, -1)).contiguous()
