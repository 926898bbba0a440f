"""Solvers of GTV minimisation for linear models: one idea, one file; `problem.py` is the one to read first.

Local, because between checks of optimality a node hears its neighbours only: `fedgd`, `fedrelax`, `chebyshev` (after
its first rounds), `admm`, `primal_dual`. Reference, because every round needs sums over the network or the whole
problem in one place: `conjugate_gradient`, `direct`, `proximal_averaging` (a server averages). Minibatches (FedSGD) and
active sets need rows and keys: they are `ft.gtv` with `ft.gradient_descent(batch_size=…)` and a cohort.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
