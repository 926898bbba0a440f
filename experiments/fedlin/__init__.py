"""Hierarchical linear models (FedLin)."""
