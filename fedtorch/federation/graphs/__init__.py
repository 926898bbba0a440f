"""Federated learning networks: the graph, what it promises, and how to learn it."""

from fedtorch.federation.graphs import diagnostics, discrepancy, learning
from fedtorch.federation.graphs.diagnostics import Diagnostics, diagnose
from fedtorch.federation.graphs.network import Components, Network

__all__ = ["Components", "Diagnostics", "Network", "diagnose", "diagnostics", "discrepancy", "learning"]
