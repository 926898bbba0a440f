"""Hierarchical Bayesian models of devices, as factors for expectation propagation.

`linear`, `generalised` (logistic, Poisson) and `shrinkage` define a device's likelihood, `normal` the distribution of
the devices' coefficients; `of` joins any two.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
