r"""Differential privacy of single rows for least squares: noise once, on the sums that a client's problem is made of.

With features scaled to φ of norm at most 1 and targets to y of norm at most 1, a client's problem is a function of
M = Σ_i r_i r_iᵀ with r = (φ, 1, y), and of its number of rows. A row of zeros in place of another changes the numbers
of M (each pair off the diagonal once, by √2) by at most

.. math:: \Delta = \sqrt{(\|r\|^2)^2 - 1} \le \sqrt 8, \quad\text{without an intercept}\quad \Delta \le 2,

so noise of z·Δ on them is one release, and everything later, rounds without end, is made of what was released. What the
noise has made indefinite is cut back to the nearest positive semidefinite M.

*Who is protected:* one row of one client, against a row of zeros; the numbers of rows are public. *From whom:*
everybody, the server included.

Source: Dwork, Talwar, Thakurta and Zhang (2014), "Analyze Gauss", Algorithm 1, with pairs as above.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch.data import BadClients
from fedtorch.federation.algorithm import LocalSolver
from fedtorch.federation.local_solvers.least_squares import least_squares
from fedtorch.models.linear import LinearHead, Spectral, SufficientStatistics, spectral
from fedtorch.trust.privacy.accountant import Release
from fedtorch.trust.privacy.analytic import check_noise
from fedtorch.trust.privacy.clipping import check_clip
from fedtorch.trust.privacy.entropy import Entropy, from_system
from fedtorch.trust.privacy.ledger import NO_GUARANTEE, SYSTEM, Claim, Ledger
from fedtorch.trust.privacy.mechanisms import gaussian
from fedtorch.trust.privacy.spending import Spending, on_grid, one_process

ADJACENCY = "zero-out: one row of one client has features and targets of zeros instead of its own"
ADVERSARY = "everybody, the server included, who sees anything that is made of the sums"


class SpentOnce(Spending):
    """A budget that is spent when a run is made, and not by its rounds."""

    _blocks = 0

    def cohort(self, cohort: Any, clients: int) -> Any:
        """Writes the release down; the cohort is the run's."""
        super().cohort(cohort, clients)
        super().spend(0, None, torch.tensor(0))
        self._blocks = 0
        return cohort

    def block(self) -> str:
        """A phase of its own for the next block of clients."""
        self._blocks += 1
        return f"sums of block {self._blocks}"

    def allows(self) -> bool:
        """Rounds release nothing further."""
        return True

    def spend(self, round: int, asked: Tensor | None, key: Tensor) -> None:
        """Rounds release nothing further."""


def sufficient_statistics(
    module: nn.Linear | LinearHead,
    *,
    clip_features: float,
    clip_targets: float,
    noise: float,
    delta: float,
    ridge: float = 1.0,
    steps: int | None = None,
    budget: float | None = None,
    ledger: Path | str | None = None,
    entropy: Entropy | None = None,
) -> LocalSolver:
    """`ft.least_squares` on noised sums, for any algorithm and any number of rounds at the price of one release.

    The release is made, and written into the ledger, when a run is made; a run that is resumed makes its sums anew.

    Args:
        module: an `nn.Linear` or a `LinearHead`; its feature map must not have been learnt from the rows.
        clip_features: rows whose features have a larger Euclidean norm, without the intercept, are scaled down to it.
        clip_targets: likewise for targets.
        noise: z, in units of the sensitivity Δ.
        delta: δ, below one over any client's rows.
        ridge: added to the scaled X'X, in units of z·Δ·√p, about the norm of the noise in p features; 0 for none.
        steps: of gradient descent a round; None for the minimiser.
        budget: the largest ε of the ledger; a run that would exceed it is not made.
        ledger: a file that only grows; None keeps it in memory.
        entropy: of the noise; default: the operating system's.

    Raises:
        ValueError: settings out of range; when a run is made, too large a δ, or targets that do not fit.
        RuntimeError: when a run is made, the budget is spent.
    """
    for bound in (clip_features, clip_targets):
        check_clip(bound)
    check_noise(noise)
    if not 0 <= ridge < math.inf:
        raise ValueError(f"Expected a ridge of at least 0, but got {ridge}")
    local = least_squares(module, steps=steps)
    entropy = from_system() if entropy is None else entropy
    claim = Claim("example", ADJACENCY, ADVERSARY, SYSTEM if entropy.guarantees else NO_GUARANTEE)
    spending = SpentOnce(Ledger(ledger, claim, delta, budget), Release(float(noise)), 1, entropy, one_process)
    told = {
        "clip_features": clip_features,
        "clip_targets": clip_targets,
        "noise": noise,
        "delta": delta,
        "ridge": ridge,
    }
    return dataclasses.replace(
        local,
        prepare=partial(_prepare, local.module, spending, (clip_features, clip_targets), ridge, delta),
        settings={**local.settings, **{f"privacy.{name}": value for name, value in told.items()}},
        budget=spending,
    )


def _prepare(
    module: nn.Linear | LinearHead,
    spending: SpentOnce,
    clips: tuple[float, float],
    ridge: float,
    delta: float,
    data: Any,
) -> Spectral:
    small = (data.count * delta >= 1).nonzero()[:, 0].cpu()
    if len(small):
        raise BadClients(small, f"expected delta below one over its {int(data.count[small[0]])} rows, but got {delta}")
    x, y = data.batch
    y = (y[..., None] if y.ndim == 2 else y).to(torch.float64)
    if isinstance(module, nn.Linear):
        outputs, intercept, features = module.out_features, module.bias is not None, x.to(torch.float64)
    else:
        outputs, intercept = 1, module.intercept
        with torch.no_grad():
            features = module.feature_map(x).to(torch.float64)
    if y.shape[2:] != (outputs,):
        raise ValueError(f"Expected targets of shape ({outputs},), but got {tuple(y.shape[2:])}")
    scaled = [_cut(part, clip) * data.mask[..., None] for part, clip in zip((features, y), clips)]
    if intercept:
        scaled.insert(1, data.mask[..., None].to(torch.float64))
    rows = torch.cat(scaled, 2)
    noised = released(rows.mT @ rows, intercept, features.shape[2], spending)
    own = features.shape[2] + intercept
    sizes = torch.ones(rows.shape[2], dtype=torch.float64, device=rows.device)
    sizes[: features.shape[2]], sizes[own:] = clips
    added = ridge * spending.release.noise * sensitivity(intercept) * math.sqrt(own)
    noised[:, range(own), range(own)] += added
    whole = noised * sizes[:, None] * sizes
    power = whole[:, own:, own:].diagonal(dim1=1, dim2=2).sum(1)
    statistics = SufficientStatistics(whole[:, :own, :own], whole[:, :own, own:], power, data.count.to(torch.float64))
    return spectral(statistics.per_row())._replace(count=data.count)


def sensitivity(intercept: bool) -> float:
    """Δ: by how much one row, against a row of zeros, changes M, each pair off the diagonal counted once by √2."""
    return math.sqrt((2 + intercept) ** 2 - intercept)


def released(sums: Tensor, intercept: bool, constant: int, spending: SpentOnce) -> Tensor:
    """M `(K, m, m)` with noise on every number once, cut back to positive semidefinite; its constant is public."""
    clients, size = sums.shape[:2]
    row, column = torch.triu_indices(size, size)
    scale = torch.where(row == column, 1.0, math.sqrt(0.5)).to(torch.float64)
    scales = (scale * spending.release.noise * sensitivity(intercept)).repeat(clients)
    uniforms = partial(spending.entropy.uniforms, spending.open(spending.block()))
    noise = gaussian.draw(uniforms, len(scales)) * scales
    upper = on_grid(sums[:, row, column].cpu().flatten() + noise, scales).reshape(clients, -1)
    noised = torch.zeros(clients, size, size, dtype=torch.float64)
    noised[:, row, column] = upper
    noised[:, column, row] = upper
    if intercept:
        noised[:, constant, constant] = sums[:, constant, constant].cpu()
    values, vectors = torch.linalg.eigh(noised)
    return (vectors * values.clamp(min=0)[:, None] @ vectors.mT).to(sums.device)


def _cut(rows: Tensor, bound: float) -> Tensor:
    """Rows `(K, N, d)` in units of the bound, those beyond it of norm one; rows that are not finite are zeros."""
    norm = rows.norm(dim=2, keepdim=True) / bound
    return torch.where(norm.isfinite(), rows / bound / norm.clamp(min=1), 0.0)
