"""Sparse Bayesian models as the two halves of a Gibbs sampler: what a site draws, and what the server draws."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
