"""Federated learning networks: the graph, what it promises, and how to learn it."""

from fedtorch.federation.graphs.network import Components, Network

__all__ = ["Components", "Network"]
