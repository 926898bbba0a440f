"""Solvers of GTV minimisation for linear models: one idea, one file; `problem.py` is the one to read first.

Local, because between checks of optimality a node hears its neighbours only: `fedgd`, `fedrelax`, `chebyshev` (after
its first rounds), `admm`, `primal_dual`. Reference, because every round needs sums over the network or the whole
problem in one place: `conjugate_gradient`, `direct`, `proximal_averaging` (a server averages). Minibatches (FedSGD) and
active sets need rows and keys: they are `ft.gtv` with `ft.gradient_descent(batch_size=…)` and a cohort.
"""

from fedtorch.networks.solvers.admm import admm as admm
from fedtorch.networks.solvers.chebyshev import chebyshev as chebyshev
from fedtorch.networks.solvers.conjugate_gradient import conjugate_gradient as conjugate_gradient
from fedtorch.networks.solvers.direct import direct as direct
from fedtorch.networks.solvers.fedgd import fedgd as fedgd, safe_rate as safe_rate
from fedtorch.networks.solvers.fedrelax import fedrelax as fedrelax
from fedtorch.networks.solvers.penalties import (
    Penalty as Penalty,
    equal as equal,
    huber as huber,
    norm1 as norm1,
    norm2 as norm2,
    squared as squared,
)
from fedtorch.networks.solvers.primal_dual import primal_dual as primal_dual
from fedtorch.networks.solvers.problem import LinearProblem as LinearProblem, linear_problem as linear_problem
from fedtorch.networks.solvers.proximal_averaging import proximal_averaging as proximal_averaging
from fedtorch.networks.solvers.robust_loss import robust_loss as robust_loss
from fedtorch.networks.solvers.solution import Solution as Solution
