"""Sparse Bayesian models as the two halves of a Gibbs sampler: a site's draws, and the server's draws."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
