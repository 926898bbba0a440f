"""Local solvers: how a client works on its own problem, given what the others think (`Quadratic`)."""

from fedtorch.federation.local_solvers.gradient_descent import gradient_descent
from fedtorch.federation.local_solvers.least_squares import least_squares
from fedtorch.federation.local_solvers.lightning_fit import lightning_fit

__all__ = ["gradient_descent", "least_squares", "lightning_fit"]
