"""Sparse Bayesian models by Gibbs sampling (FedSparse)."""
