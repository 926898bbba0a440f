"""Federated learning networks (GTV)."""
