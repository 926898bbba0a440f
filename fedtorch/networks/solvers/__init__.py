"""Solvers of GTV minimisation for linear models, one per file; read `problem.py` first.

Local solvers, in which a node receives only its neighbours' messages between checks of optimality: `fedgd`, `fedrelax`,
`chebyshev` (after its first rounds), `admm`, `primal_dual`. Reference solvers, in which every round needs sums over the
network or the whole problem in one place: `conjugate_gradient`, `direct`, `proximal_averaging` (a server averages).
Minibatches (FedSGD) and active sets need rows and keys: they are `ft.gtv` with `ft.gradient_descent(batch_size=…)` and
a cohort.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
