r"""Directed graphical models of several sites, with feedback loops: linear structural equations with Laplace errors.

.. math:: Y_{ki} = \theta_k Y_{ki} + E_{ki},\quad E_{kij} \sim \text{Laplace}(0, b_{kj}),\quad
    \theta_{kjh} \sim N(\theta_{jh}, \lambda_{kjh}^2 \tau_{jh}^2),\quad 1/b_{kj} \sim \text{Gamma}(a_\sigma, b_\sigma)

where θ_kjh is the direct effect of h on j, θ_kjj = 0, and the graph may have cycles. Every θ_k has a spectral radius
below one, so that feedback decays; the prior is the hierarchy of `sparse` restricted to such θ_k, which leaves all its
other conditionals unchanged. Errors that are not normal distinguish causes from effects. With e = (I − θ_k) y the
density of a site's rows is

.. math:: |\det(I - \theta_k)|^{n_k} \prod_i \prod_j \frac{1}{2 b_{kj}} e^{-|e_{ij}| / b_{kj}}.

`regression()` is the clients' half of a Gibbs sampler; the server's is `sparse.hierarchy()` on the p · (p − 1) effects,
cause by cause within each row j. A sweep updates one row of θ_k after another by a Metropolis step:

- the step δ is normal with covariance s² (Y'Y/b_j² + D⁻¹)⁻¹, D = diag(λ² τ²), where the length s is random; the Fisher
  information of a Laplace location is 1/b², so that the step fits the uncertainty of the row
- with M = (I − θ_k)⁻¹, det(I − θ*) = det(I − θ_k) (1 − δ'M e_j), and M* = M + M e_j δ'M / (1 − δ'M e_j)
- the residuals of the row change by Y δ.

Such steps hardly leave a site's local mode, in which two rows share the effects of one of them, so pairs of rows j, l
are also rotated, as in independent component analysis. The rows u_j = (e_j − θ_j) / b_j of the whitening matrix go to
(cos φ u_j − sin φ u_l, sin φ u_j + cos φ u_l), with signs for which both diagonal elements are positive and φ uniform;
a sweep turns every other row with one drawn at random. That keeps the determinant and the volume of u; in terms of
(θ_j, 1/b_j), u_j has the volume b_j^{-(p − 1)}.

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
from fedtorch._lazy import only
from fedtorch.models.gibbs import graphical
from fedtorch.models.gibbs._gaussian_conditional import Fold, elimination
from fedtorch.models.gibbs.deviations import Deviation, horseshoe
from fedtorch.models.gibbs.kernels import LocalKernel, Sums, check_start
from fedtorch.models.gibbs.sparse import MOST_PRECISE, GlobalVariables
from fedtorch.models.rows import client_by_client

__all__ = ["regression"]
__dir__ = only(__all__)
_ROWS = 32  # rows that are added together


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
            raise ValueError("Expected a start of spectral radius below 1, but got a larger; use graphical.start(p)")
        ones = torch.ones_like(start)
        return DirectedSite(start, ones, ones, ones[:, : matrix.shape[-1]], torch.zeros_like(ones[:, 0]))

    def sweep(
        received: GlobalVariables, site: DirectedSite, data: Observations, keys: Tensor, sweeps: int
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
        centre, shared = _front(received.theta), _front(received.precision)
        w, u, noise = (_front(leaf) for leaf in (site.precision, site.auxiliary, site.noise))
        propose = _proposals(data, chains)
        walk = Walk(data.y, data.count, graphical.square(graphical.by_response(site.theta)))
        whole = walk.whole(centre)
        for s in range(sweeps):
            prior = w * shared
            rows = RowPrior(whole, walk.whole(prior), noise_shape, received.noise)
            for j in range(s % 2, p, 2):
                noise = walk.turn(j, turns[s, j], noise, rows)
            steps = propose(noise, prior, normals[s])
            walk.refresh()
            for j in range(p):
                row = slice(j * (p - 1), (j + 1) * (p - 1))
                walk.move(j, steps[row] * lengths[s, j], centre[row], prior[row], noise[j], logs[s, j])
            delta = walk.effects() - centre
            w, u = deviation.update(w, u, delta * delta * (shared / 2), tuple(part[s] for part in mixing))
            noise = gammas[s] / (received.noise + walk.absolute)
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
    return Observations(y, client_by_client(lambda rows: rows.mT @ rows, data.count, y), data.count)


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


class RowPrior(NamedTuple):
    """The prior of the rows of θ and of 1/b, for a rotation."""

    centre: Tensor  # (p, p, K, C) of θ
    precision: Tensor  # (p, p, K, C)
    shape: float  # of 1/b
    rate: Tensor


def spectral_radius(matrix: Tensor) -> Tensor:
    """Return the largest modulus of an eigenvalue, `(..., p, p)` -> `(...)`."""
    return torch.linalg.eigvals(matrix).abs().amax(-1)


def _stable(matrices: Tensor) -> Tensor:
    """Return which of the matrices `(M, p, p)` have a spectral radius below one."""
    power = matrices
    for _ in range(6):
        power = power @ power
    doubtful = ~(power.abs().sum(-1).amax(-1) < 1)  # the norm of a power bounds that power of the radius
    stable = ~doubtful
    if bool(doubtful.any()):
        stable[doubtful] = spectral_radius(matrices[doubtful]) < 1
    return stable


class Walk:
    """State of a sweep: the sites' effects θ `(p, p, K, C)`, their residuals `(p, N, K, C)` and M = (I − θ)⁻¹.

    Sums are added in one order and padding adds zeros at the end, so a site's numbers are the same bits in any block.
    """

    def __init__(self, y: Tensor, count: Tensor, theta: Tensor) -> None:
        clients, chains, p, _ = theta.shape
        size = -(-y.shape[1] // _ROWS) * _ROWS
        self.p, self.count = p, count.to(torch.float64)[:, None]
        self.others = graphical.other_variables(p).to(theta.device)
        self.unit = torch.eye(p, dtype=theta.dtype, device=theta.device)[..., None, None]
        self.y = y.new_zeros(p, size, clients, 1)
        self.y[:, : y.shape[1], :, 0] = y.permute(2, 1, 0)
        self.theta = theta.permute(2, 3, 0, 1).contiguous()
        self.accepted = theta.new_zeros(clients, chains)
        self.products = theta.new_empty(p - 1, size, clients, chains)
        self.add_products = Fold(self.products)
        self.small = theta.new_empty(p - 1, p, clients, chains)
        self.add_small = Fold(self.small)
        self.quadratic = theta.new_empty(p - 1, clients, chains)
        self.add_quadratic = Fold(self.quadratic)
        self.of_rows = theta.new_empty(_ROWS, clients, chains)
        self.add_rows = Fold(self.of_rows)
        self.errors = torch.stack([self.y[j] - self._fitted(j, self.theta[j, self.others[j]]) for j in range(p)])
        self.absolute = torch.stack([self._absolute(error) for error in self.errors])

    def refresh(self) -> None:
        """Recompute M, so that the errors of its updates do not add up."""
        clients, chains = self.accepted.shape
        matrices = (torch.eye(self.p, dtype=self.theta.dtype, device=self.theta.device) - self._square()).flatten(0, 1)
        inverses = [torch.linalg.inv(matrix.clone()) for matrix in matrices]  # each aligned alike
        stacked = torch.stack(inverses) if inverses else matrices
        self.inverse = stacked.reshape(clients, chains, self.p, self.p).permute(2, 3, 0, 1).contiguous()

    def move(self, j: int, step: Tensor, centre: Tensor, prior: Tensor, noise: Tensor, log: Tensor) -> None:
        """Propose to add `step` `(p − 1, K, C)` to row j."""
        others = self.others[j]
        current = self.theta[j, others]
        torch.mul(step.unsqueeze(1), self.inverse[others], out=self.small)
        along = self.add_small().clone()  # δ'M
        ratio = 1 - along[j]
        errors = self.errors[j] - self._fitted(j, step)
        absolute = self._absolute(errors)
        torch.mul(prior * step, current - centre + step / 2, out=self.quadratic)
        gain = self.count * ratio.abs().log() - (absolute - self.absolute[j]) * noise - self.add_quadratic()
        new = current + step
        where = (log < gain).nonzero(as_tuple=True)
        matrices = self._square()[where].contiguous()
        matrices[:, j, others] = new[:, where[0], where[1]].mT
        taken = torch.zeros_like(gain, dtype=torch.bool)
        taken[where] = _stable(matrices)
        self.theta[j, others] = torch.where(taken, new, current)
        self.errors[j] = torch.where(taken, errors, self.errors[j])
        self.absolute[j] = torch.where(taken, absolute, self.absolute[j])
        change = torch.where(taken, along / ratio, 0.0)
        self.inverse = self.inverse + self.inverse[:, j].unsqueeze(1) * change
        self.accepted += taken

    def turn(self, j: int, uniforms: Tensor, noise: Tensor, prior: RowPrior) -> Tensor:
        """Propose a rotation of row j with another one, and return 1/b `(p, K, C)` after it; M is not updated."""
        other = (j + 1 + (uniforms[0] * (self.p - 1)).long()) % self.p
        pair = _Pair(torch.stack([torch.full_like(other, j), other]))
        theta, before = pair.rows(self.theta), pair.rows(noise)
        turned = self._turned(pair, 2 * torch.pi * uniforms[1], theta, before)
        gain = self._gain(pair, turned, theta, before, prior)
        taken = self._stable_with(uniforms[2].log() < gain, pair, turned.theta)
        self.theta = pair.replaced(self.theta, turned.theta, taken)
        self.absolute = pair.replaced(self.absolute, turned.scaled / turned.noise, taken)
        self.errors = pair.replaced(self.errors, turned.errors, taken)
        return pair.replaced(noise, turned.noise, taken)

    def _turned(self, pair: _Pair, angle: Tensor, theta: Tensor, noise: Tensor) -> _Turned:
        """Return a pair of rows of the whitening matrix, rotated by an angle, as rows of θ."""
        unit = pair.rows(self.unit.expand_as(self.theta))
        whitened = _rotated((unit - theta) * noise[:, None], angle)
        diagonal = whitened.gather(1, pair.numbers[:, None])
        scaled = _rotated(pair.rows(self.errors) * noise[:, None], angle)
        absolute = torch.stack([self._absolute(error) for error in scaled])
        return _Turned(unit - whitened / diagonal, diagonal[:, 0].abs(), scaled / diagonal, absolute)

    def _gain(self, pair: _Pair, turned: _Turned, theta: Tensor, noise: Tensor, prior: RowPrior) -> Tensor:
        """Return the logarithm of the ratio of densities after a turn and before, `(K, C)`."""
        gain = pair.rows(self.absolute) * noise - turned.scaled + (prior.shape - self.p) * (turned.noise / noise).log()
        gain = gain - prior.rate * (turned.noise - noise)
        middle = (theta + turned.theta) / 2
        pull = pair.rows(prior.precision) * (theta - turned.theta) * (middle - pair.rows(prior.centre))
        return sum((*gain, *pull.flatten(0, 1)))

    def _stable_with(self, wanted: Tensor, pair: _Pair, theta: Tensor) -> Tensor:
        """Return at which requested sites `(K, C)` θ with these rows `(2, p, K, C)` is stable."""
        where = wanted.nonzero(as_tuple=True)
        matrices = self._square()[where].contiguous()
        places = pair.numbers[:, where[0], where[1]].mT[..., None].expand(-1, -1, self.p)
        matrices.scatter_(1, places, theta[:, :, where[0], where[1]].permute(2, 0, 1))
        taken = torch.zeros_like(wanted)
        taken[where] = _stable(matrices)
        return taken

    def whole(self, values: Tensor) -> Tensor:
        """Return `(q, K, C)` as rows with a diagonal of zeros, `(p, p, K, C)`."""
        index = self.others[..., None, None].expand(-1, -1, *values.shape[1:])
        return values.new_zeros(self.p, *self.theta.shape[1:]).scatter_(1, index, values.unflatten(0, (self.p, -1)))

    def effects(self) -> Tensor:
        """Return θ without its diagonal, `(q, K, C)`."""
        index = self.others[..., None, None].expand(-1, -1, *self.accepted.shape)
        return self.theta.gather(1, index).flatten(0, 1)

    def _fitted(self, j: int, effects: Tensor) -> Tensor:
        """Return the fitted values `(N, K, C)` of variable j under effects `(p − 1, K, C)`."""
        torch.mul(self.y[self.others[j]], effects.unsqueeze(1), out=self.products)
        return self.add_products().clone()

    def _absolute(self, errors: Tensor) -> Tensor:
        """Return Σ_i |e_i|, `(N, K, C)` -> `(K, C)`."""
        blocks = errors.abs().unflatten(0, (-1, _ROWS))
        self.of_rows.zero_()
        for block in blocks:
            self.of_rows.add_(block)
        return self.add_rows().clone()

    def _square(self) -> Tensor:
        return self.theta.permute(2, 3, 0, 1)


class _Pair(NamedTuple):
    """Two rows of every site, which differ from site to site."""

    numbers: Tensor  # (2, K, C)

    def rows(self, table: Tensor) -> Tensor:
        """Return these rows of `(p, ..., K, C)`."""
        return table.gather(0, self._index(table))

    def replaced(self, table: Tensor, rows: Tensor, where: Tensor) -> Tensor:
        """Return a table `(p, ..., K, C)` that has other rows at the sites `where`."""
        return table.scatter(0, self._index(table), torch.where(where, rows, self.rows(table)))

    def _index(self, table: Tensor) -> Tensor:
        clients, chains = self.numbers.shape[1:]
        return self.numbers.reshape(2, *[1] * (table.ndim - 3), clients, chains).expand(2, *table.shape[1:])


class _Turned(NamedTuple):
    """A pair of rows after a rotation."""

    theta: Tensor  # (2, p, K, C)
    noise: Tensor  # (2, K, C) 1/b
    errors: Tensor  # (2, N, K, C) residuals
    scaled: Tensor  # (2, K, C) Σ_i |e_i| / b


def _rotated(rows: Tensor, angle: Tensor) -> Tensor:
    """Return two rows `(2, ..., K, C)` turned by angles `(K, C)`."""
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack([cosine * rows[0] - sine * rows[1], sine * rows[0] + cosine * rows[1]])
