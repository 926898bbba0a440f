"""Where searches for the modes of θ begin, at nodes of φ that move: at what the modes before foretell."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-9  # of each variance of nodes, what is added to tell apart directions in which they do not vary
_BEYOND = 1.0  # ranges of the modes before, by which a foretold one may lie outside


class Starts:
    """The last θ of each client's nodes, of which modes at other nodes are a linear function, nearly.

    >>> starts, ids = Starts(1), torch.tensor([0])
    >>> starts.at(ids, torch.tensor([[[0.0]]]), 1)  # nothing is known
    >>> starts.keep(ids, torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[5.0], [7.0]]]))
    >>> starts.at(ids, torch.tensor([[[0.5], [2.0], [4.0]]]), 1).round(decimals=3).flatten()  # not too far outside
    tensor([6., 9., 9.])
    """

    def __init__(self, clients: int) -> None:
        self._known = torch.zeros(clients, dtype=torch.bool)
        self._phi = self._theta = torch.zeros(0)

    def at(self, ids: Tensor, phi: Tensor, size: int) -> Tensor | None:
        """Return θ `(M, R, size)` for clients at nodes φ `(M, R, p)`; None where nothing is known of one."""
        if not bool(self._known[ids].all()):
            return None
        before, theta = self._phi[ids], self._theta[ids, :, :size]
        if before.shape == phi.shape and torch.equal(before, phi):
            return theta
        centre, middle = before.mean(1, keepdim=True), theta.mean(1, keepdim=True)
        away = before - centre
        gram = away.mT @ away
        still = away.abs().amax(1) == 0
        gram.diagonal(dim1=-2, dim2=-1).mul_(1 + _LEAST).add_(still)
        slope = torch.linalg.solve_ex(gram, away.mT @ (theta - middle)).result
        least, most = theta.amin(1, keepdim=True), theta.amax(1, keepdim=True)
        reach = _BEYOND * (most - least)
        return (middle + (phi - centre) @ slope).clamp(least - reach, most + reach)

    def keep(self, ids: Tensor, phi: Tensor, theta: Tensor) -> None:
        """Keep θ `(M, R, d)` at nodes φ `(M, R, p)`."""
        fits = self._phi.shape[1:] == phi.shape[1:] and self._theta.shape[-1] >= theta.shape[-1]
        if not fits:
            self._known.zero_()
            clients, nodes = len(self._known), phi.shape[1]
            self._phi = phi.new_zeros(clients, nodes, phi.shape[2])
            self._theta = theta.new_zeros(clients, nodes, max(theta.shape[-1], self._theta.shape[-1]))
        self._phi[ids], self._known[ids] = phi, theta.isfinite().all((1, 2)).to(self._known.device)
        self._theta[ids, :, : theta.shape[-1]] = theta
