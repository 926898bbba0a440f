"""Hierarchical Bayesian models of devices, as factors that expectation propagation takes.

`linear`, `generalised` (logistic, Poisson) and `shrinkage` say what a device's rows are, `normal` how the devices'
coefficients hang together; `of` joins any two.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
