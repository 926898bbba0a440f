r"""Differential privacy of single rows for linear models: noise is added once, to a client's sufficient statistics.

With features scaled to φ of norm at most 1 and targets to y of norm at most 1, a client's problem is a function of
M = Σ_i r_i r_iᵀ with r = (φ, 1, y), and of its number of rows. A row of zeros in place of another changes the numbers
of M (each pair off the diagonal once, by √2) by at most

.. math:: \Delta = \sqrt{(\|r\|^2)^2 - 1} \le \sqrt 8, \quad\text{without an intercept}\quad \Delta \le 2,

Noise with standard deviation z·Δ on these numbers is one release; everything computed from it afterwards, over any
number of rounds, is post-processing. A noised M that is indefinite is projected onto the positive semidefinite
matrices.

Least squares (`sufficient_statistics`, also in HM1), conjugate EP and Gibbs samplers of linear regression
(`NoisedSums`) are therefore private in any number of rounds. A Gibbs sampler of the rows themselves has no finite ε,
because the likelihood through which a draw depends on a row is unbounded. On clipped and noised sums a draw is
post-processing.

*Who is protected:* one row of one client, against a row of zeros; the numbers of rows are public. *From whom:*
everybody, the server included.

Source: Dwork, Talwar, Thakurta and Zhang (2014), "Analyze Gauss", Algorithm 1, with pairs as above.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch.data import BadClients
from fedtorch.federation.algorithm import Algorithm, LocalSolver
from fedtorch.federation.solvers.least_squares import least_squares
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.models.linear import LinearHead, Spectral, SufficientStatistics, spectral
from fedtorch.models.rows import regression_fields
from fedtorch.random.entropy import Entropy, from_system
from fedtorch.trust.privacy._checks import check_clip, check_noise
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, SYSTEM, Claim, Ledger
from fedtorch.trust.privacy.accounting.spending import Spending, on_grid, one_process
from fedtorch.trust.privacy.noise import gaussian

ADJACENCY = "zero-out: one row of one client has features and targets of zeros instead of its own"
ADVERSARY = "everybody, the server included, who sees anything that is made of the sums"


class _SpentOnce(Spending):
    """A budget that is spent once, when the run is built, instead of in each round."""

    _blocks = 0

    def cohort(self, cohort: Any, clients: int) -> Any:
        """Write the release into the ledger; return the run's cohort unchanged."""
        super().cohort(cohort, clients)
        super().spend(0, None, torch.zeros(0, dtype=torch.int64))
        self._blocks = 0
        return cohort

    def planned(self, rounds: int) -> Counter[Release]:
        """Count the single release of a run; its rounds release nothing further."""
        return Counter({self.release: self.count})

    def block(self) -> str:
        """Return the phase under which the next block of clients draws its noise."""
        self._blocks += 1
        return f"sums of block {self._blocks}"

    def allows(self) -> bool:
        """Allow every round: rounds release nothing further."""
        return True

    def spend(self, round: int, asked: Tensor | None, keys: Tensor) -> None:
        """Allow every round: rounds release nothing further.

        Raises:
            RuntimeError: no noised sums have been computed, so the model uses something else.
        """
        if not self._blocks:
            raise RuntimeError("Expected a model that uses the noised sums, but got another; pass statistics=")


class NoisedSums:
    """Clipped row sums with noise, at the price of one release, for models whose data enter only by these sums.

    The release is made, and written into the ledger, when a run is built; a resumed run makes its sums anew. Pass the
    object as `statistics=` to `hierarchical.linear` or `gibbs.sparse.regression`, then wrap the algorithm with
    `algorithm | sums.protect()`: noise can only be drawn by an algorithm that is tied to the ledger.

    Args:
        clip_features: rows whose features have a larger Euclidean norm, without the intercept, are scaled down to it.
        clip_targets: likewise for targets.
        noise: z, in units of the sensitivity Δ.
        delta: δ, below one over any client's rows.
        ridge: added to the scaled X'X, in units of z·Δ·√p, about the norm of the noise in p features; 0 for none.
        budget: the largest ε of the ledger; a run that would exceed it is refused.
        ledger: an append-only file; None keeps the ledger in memory.
        entropy: source of the noise; default: the operating system's.

    Attributes:
        settings: the arguments that enter a run's fingerprint.
        spending: the budget for the algorithm.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.gibbs import sparse
        >>> from fedtorch.trust import privacy
        >>> x = torch.nn.functional.normalize(ft.random.normal(ft.random.key(0), (4, 500, 2)), dim=2)
        >>> data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(4)])
        >>> sums = privacy.NoisedSums(clip_features=1.0, clip_targets=1.0, noise=2.0, delta=1e-4)
        >>> sampler = ft.gibbs(sparse.regression(statistics=sums), sparse.hierarchy(), sweeps=10, chains=1)
        >>> run = ft.run(sampler | sums.protect(), ft.InProcess(data), torch.zeros(2), rounds=20)
        >>> round(float(run.history["epsilon"].iloc[-1]), 2)
        1.7
    """

    def __init__(
        self,
        *,
        clip_features: float,
        clip_targets: float,
        noise: float,
        delta: float,
        ridge: float = 1.0,
        budget: float | None = None,
        ledger: Path | str | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        for bound in (clip_features, clip_targets):
            check_clip(bound)
        check_noise(noise)
        if not 0 <= ridge < math.inf:
            raise ValueError(f"Expected a ridge of at least 0, but got {ridge}")
        entropy = from_system() if entropy is None else entropy
        claim = Claim("example", ADJACENCY, ADVERSARY, SYSTEM if entropy.guarantees else NO_GUARANTEE)
        self.clips, self.ridge, self.delta = (clip_features, clip_targets), ridge, delta
        self.spending = _SpentOnce(Ledger(ledger, claim, delta, budget), Release(float(noise)), 1, entropy, one_process)
        about = {"clip_features": clip_features, "clip_targets": clip_targets, "noise": noise, "delta": delta}
        self.settings = {**about, "ridge": ridge}

    def protect(self) -> Wrapper:
        """Build the wrapper that attaches this budget to an algorithm whose model uses these sums.

        Raises:
            ValueError: the wrapped algorithm already has a budget.
        """

        def wrap(algorithm: Algorithm) -> Algorithm:
            if algorithm.budget is not None:
                raise ValueError("Expected an algorithm without a budget, but got one: choose one level of privacy")
            return dataclasses.replace(algorithm, budget=self.spending)

        return Wrapper(Stage.PRIVACY, "sums.protect", wrap, self.settings)

    def __call__(self, data: Any, features: int | None = None) -> SufficientStatistics:
        """Compute the noised sums of a block of rows x `(d,)`, y `()`; the plain ones are
        `models.linear.block_statistics`.

        Raises:
            BadClients: clients with 1/δ rows or more. RuntimeError: called outside a run of a wrapped algorithm.
        """
        return self.of(*regression_fields(data.batch, features), data.mask, data.count)

    def of(self, x: Tensor, y: Tensor, mask: Tensor, rows: Tensor, intercept: bool = False) -> SufficientStatistics:
        """Compute the sums of x `(K, N, d)` and y `(K, N)` or `(K, N, o)`; an intercept makes p = d + 1."""
        small = (rows * self.delta >= 1).nonzero()[:, 0].cpu()
        if len(small):
            most = int(rows[small[0]])
            raise BadClients(small, f"expected delta below one over its {most} rows, but got {self.delta}")
        outputs = y if y.ndim == 3 else y[..., None]
        parts = [_cut(part.to(torch.float64), clip) * mask[..., None] for part, clip in zip((x, outputs), self.clips)]
        if intercept:
            parts.insert(1, mask[..., None].to(torch.float64))
        joined, width = torch.cat(parts, 2), x.shape[2] + intercept
        noised = _released(joined.mT @ joined, intercept, x.shape[2], self.spending)
        sizes = torch.ones(joined.shape[2], dtype=torch.float64, device=joined.device)
        sizes[: x.shape[2]], sizes[width:] = self.clips
        added = self.ridge * self.spending.release.noise * sensitivity(intercept) * math.sqrt(width)
        noised[:, range(width), range(width)] += added
        whole = noised * sizes[:, None] * sizes
        power = whole[:, width:, width:].diagonal(dim1=1, dim2=2).sum(1)
        cross = whole[:, :width, width:] if y.ndim == 3 else whole[:, :width, width]
        return SufficientStatistics(whole[:, :width, :width], cross, power, rows.to(torch.float64))


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
    """Build `ft.least_squares` on `NoisedSums`, for any algorithm (`ft.matrix_normal` included) and any number of
    rounds.

    Args:
        module: an `nn.Linear` or a `LinearHead`; its feature map must not have been learnt from the rows.
        clip_features: this and the arguments below are those of `NoisedSums`.
        clip_targets: bound on the norm of a row's targets.
        noise: z, in units of the sensitivity Δ.
        delta: δ, below one over any client's rows.
        ridge: added to the scaled X'X.
        steps: gradient steps a round; None for the minimiser.
        budget: the largest ε of the ledger; a run that would exceed it is not made.
        ledger: a file that only grows; None keeps it in memory.
        entropy: source of the noise; default: the operating system's.

    Raises:
        ValueError: settings out of range; at the start of a run, too large a δ or targets of the wrong shape.
        RuntimeError: at the start of a run, the budget is spent.
    """
    bounds = {"clip_features": clip_features, "clip_targets": clip_targets}
    sums = NoisedSums(**bounds, noise=noise, delta=delta, ridge=ridge, budget=budget, ledger=ledger, entropy=entropy)
    local = least_squares(module, steps=steps)
    return dataclasses.replace(
        local,
        prepare=partial(_prepare, local.module, sums),
        settings={**local.settings, **{f"privacy.{name}": value for name, value in sums.settings.items()}},
        statistics=lambda prepared: prepared.statistics.all_rows(),
        budget=sums.spending,
    )


def _prepare(module: nn.Linear | LinearHead, sums: NoisedSums, data: Any) -> Spectral:
    x, y = data.batch
    y = y[..., None] if y.ndim == 2 else y
    if isinstance(module, nn.Linear):
        outputs, intercept, features = module.out_features, module.bias is not None, x
    else:
        outputs, intercept = 1, module.intercept
        with torch.no_grad():
            features = module.block_design(x)[..., : module.features]
    if y.shape[2:] != (outputs,):
        raise ValueError(f"Expected targets of shape ({outputs},), but got {tuple(y.shape[2:])}")
    statistics = sums.of(features, y, data.mask, data.count, intercept)
    return spectral(statistics.per_row())._replace(count=data.count)


def sensitivity(intercept: bool) -> float:
    """Return Δ, the largest change of M when one row becomes zeros; entries off the diagonal count once, times √2."""
    return math.sqrt((2 + intercept) ** 2 - intercept)


def _released(sums: Tensor, intercept: bool, constant: int, spending: _SpentOnce) -> Tensor:
    """Add noise to every entry of M `(K, m, m)`, except the public constant, and project onto the semidefinite cone."""
    clients, size = sums.shape[:2]
    row, column = torch.triu_indices(size, size)
    scale = torch.where(row == column, 1.0, math.sqrt(0.5)).to(torch.float64)
    scales = (scale * spending.release.noise * sensitivity(intercept)).repeat(clients)
    uniforms = partial(spending.entropy.uniforms, spending.open(spending.block()))
    noise = gaussian.draw(uniforms, len(scales)) * scales
    upper = on_grid(sums[:, row, column].cpu().flatten() + noise, scales).reshape(clients, len(row))
    noised = torch.zeros(clients, size, size, dtype=torch.float64)
    noised[:, row, column] = upper
    noised[:, column, row] = upper
    if intercept:
        noised[:, constant, constant] = sums[:, constant, constant].cpu()
    values, vectors = torch.linalg.eigh(noised)
    return (vectors * values.clamp(min=0)[:, None] @ vectors.mT).to(sums.device)


def _cut(rows: Tensor, bound: float) -> Tensor:
    """Divide rows `(K, N, d)` by the bound and clip them to norm one; rows that are not finite become zeros."""
    norm = rows.norm(dim=2, keepdim=True) / bound
    return torch.where(norm.isfinite(), rows / bound / norm.clamp(min=1), 0.0)
