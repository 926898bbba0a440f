"""Sparse Bayesian models as the two halves of a Gibbs sampler: what a site draws, and what the server draws."""
