"""Hierarchical Bayesian models of devices, as factors that expectation propagation takes.

`linear`, `generalised` (logistic, Poisson) and `shrinkage` say what a device's rows are, `normal` how the devices'
coefficients hang together; `of` joins any two.
"""

from fedtorch.models.hierarchical.factor import (
    Conditional as Conditional,
    DeviceLikelihood as DeviceLikelihood,
    Model as Model,
    of as of,
)
from fedtorch.models.hierarchical.hierarchy import Hierarchy as Hierarchy, normal as normal
from fedtorch.models.hierarchical.linear_devices import (
    adapted as adapted,
    expected_residual as expected_residual,
    linear as linear,
)
