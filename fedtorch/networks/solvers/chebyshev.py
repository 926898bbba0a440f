r"""Chebyshev iteration: as quick as conjugate gradients up to a factor, without sums over the network.

With P the diagonal blocks of Q, the eigenvalues of P⁻¹Q are below 2, because 2P − Q has blocks Q_i and the signless
Laplacian of the network, all positive semi-definite. Only the smallest eigenvalue is needed; it is estimated from some
rounds of conjugate gradients, which are Lanczos rounds, need two sums over the network each, and also improve the
parameters. From then on a node receives its neighbours' messages only:

.. math:: \delta \leftarrow \rho' \rho\, \delta + \frac{2\rho'}{c} P^{-1} r, \qquad w \leftarrow w + \delta, \qquad
    r \leftarrow r - Q\delta, \qquad \rho' = 1 / (2m/c - \rho)

for eigenvalues between m − c and m + c. If the residual falls much more slowly than predicted, there are smaller
eigenvalues than estimated. They dominate the residual by then, so its Rayleigh quotient estimates them, and the
iteration restarts.

Source: Golub and Varga (1961); Saad, "Iterative methods for sparse linear systems", Algorithm 12.1.

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem
>>> from fedtorch.networks.solvers.chebyshev import chebyshev
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> chebyshev(problem).parameters.flatten().round(decimals=6)
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fedtorch.networks.solvers.conjugate_gradient import ConjugateGradients
from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import CHECK_EVERY, Monitor, Solution, Watch, start_at

_SLOW = 0.3  # a fall of the residual in a window that shows no convergence
_MARGIN = 0.5  # Ritz values decrease to the eigenvalue; too small an estimate costs less than too large a one


def chebyshev(
    problem: LinearProblem,
    *,
    lanczos_rounds: int = 64,
    smallest: float | None = None,
    rounds: int = 100_000,
    tolerance: float = 1e-10,
    start: Tensor | None = None,
    watch: Watch | None = None,
) -> Solution:
    """Solve by Chebyshev iteration (local after its Lanczos rounds), quick for a network without a server.

    Returns the solution of least norm: if there are several, nodes of a component average once at the end.

    Args:
        problem: squared penalty.
        lanczos_rounds: rounds of conjugate gradients that estimate the smallest eigenvalue; they are counted.
        smallest: the smallest non-zero eigenvalue of P⁻¹Q if it is known, which saves the sums of these rounds.
        rounds: most rounds in all.
        tolerance: of `LinearProblem.optimality`, which is checked every 20 rounds; 0 takes all rounds.
        start: `(n, d)`; default: zeros.
        watch: see `fedgd`.

    Raises:
        ValueError: fewer than two Lanczos rounds where they are needed, or a `smallest` that is not between 0 and 2.
    """
    if smallest is not None and not 0 < smallest < 2:
        raise ValueError(f"Expected the smallest eigenvalue between 0 and 2, but got {smallest}")
    if smallest is None and lanczos_rounds < 2:
        raise ValueError(f"Expected at least 2 Lanczos rounds, but got {lanczos_rounds}; or pass smallest=")
    monitor = Monitor(problem, tolerance, rounds, CHECK_EVERY, watch)
    first = ConjugateGradients(problem, start_at(problem, start), monitor, started=start is not None)
    stop = monitor.small(first.residual, first.w)
    if smallest is None:
        for _ in range(lanczos_rounds):
            stop = stop or first.step()
        smallest = 2.0 if stop else _MARGIN * first.smallest_eigenvalue()
    while not stop:
        monitor.smallest = partial(float, smallest)
        stop = _iterate(first, monitor, smallest)
        if not stop:
            quotient = _rayleigh_quotient(first, monitor)
            smallest = min(_MARGIN * quotient, smallest / 2) if quotient > 0 else smallest / 2
    return monitor.solution(first.w, "local", problem.minimum_norm)


def _iterate(state: ConjugateGradients, monitor: Monitor, smallest: float) -> bool:
    """Iterate from `state`, in place, until the solution (True), or until `smallest` proves too large (False)."""
    w, r, problem = state.w, state.residual, state.problem
    middle, half = (2 + smallest) / 2, (2 - smallest) / 2
    window = max(CHECK_EVERY, int(2 * (2 / smallest) ** 0.5))  # rounds in which the residual should fall by about e⁻⁴
    rho, delta = half / middle, state.precondition(r) / middle
    since, before = monitor.rounds, monitor.optimality
    while True:
        w.add_(delta)
        r.sub_(problem.product(delta))
        stop = monitor.tell(w)
        if stop or monitor.due():
            if monitor.small(r, w) or stop:
                return True
            if monitor.rounds - since >= window:
                if monitor.optimality > _SLOW * before:
                    return False
                since, before = monitor.rounds, monitor.optimality
        following = 1 / (2 * middle / half - rho)
        delta.mul_(following * rho).add_(state.precondition(r), alpha=2 * following / half)
        rho = following


def _rayleigh_quotient(state: ConjugateGradients, monitor: Monitor) -> float:
    """Return z'Qz / z'Pz at z = P⁻¹r, which is not below the smallest eigenvalue; a round of messages and two sums."""
    z = state.precondition(state.residual)
    monitor.rounds += 1
    monitor.sums += 2
    return float((z * state.problem.product(z)).sum() / (z * state.residual).sum())
