"""Hierarchical Bayesian models of devices, as factors that expectation propagation takes.

`linear`, `generalised` (logistic, Poisson) and `shrinkage` say what a device's rows are, `normal` how the devices'
coefficients hang together; `of` joins any two.
"""

from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, Model, of
from fedtorch.models.hierarchical.hierarchy import Hierarchy, normal
from fedtorch.models.hierarchical.linear_devices import adapted, expected_residual, linear

__all__ = [
    "Conditional",
    "DeviceLikelihood",
    "Hierarchy",
    "Model",
    "adapted",
    "expected_residual",
    "linear",
    "normal",
    "of",
]
