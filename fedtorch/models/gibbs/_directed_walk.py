"""The random walk on the effects of a directed model: steps of a row, and turns of two; see `directed`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.models.gibbs import graphical
from fedtorch.models.gibbs._gaussian_conditional import Fold

_ROWS = 32  # rows that are added side by side


class RowPrior(NamedTuple):
    """The prior of the rows of θ and of 1/b, as a turn needs it."""

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
    """The state of the walk: the sites' effects θ `(p, p, K, C)`, their residuals `(p, N, K, C)` and M = (I − θ)⁻¹.

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
        """Make M anew, so that the errors of its updates do not add up."""
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
        """Propose to turn row j with another one, and return 1/b `(p, K, C)` after it; M is left as it was."""
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
        """Return a pair of rows of the whitening matrix, turned by an angle, as rows of θ."""
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
        """Return where, of the sites `(K, C)` that are wanted, θ with these rows `(2, p, K, C)` is stable."""
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
    """A pair of rows after a turn."""

    theta: Tensor  # (2, p, K, C)
    noise: Tensor  # (2, K, C) 1/b
    errors: Tensor  # (2, N, K, C) residuals
    scaled: Tensor  # (2, K, C) Σ_i |e_i| / b


def _rotated(rows: Tensor, angle: Tensor) -> Tensor:
    """Return two rows `(2, ..., K, C)` turned by angles `(K, C)`."""
    cosine, sine = angle.cos(), angle.sin()
    return torch.stack([cosine * rows[0] - sine * rows[1], sine * rows[0] + cosine * rows[1]])
