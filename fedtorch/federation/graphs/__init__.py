"""Federated learning networks: the graph, what it promises, how to learn it, and its clusters."""

from fedtorch.federation.graphs import clustering, diagnostics, discrepancy, learning
from fedtorch.federation.graphs.diagnostics import Diagnostics, diagnose
from fedtorch.federation.graphs.network import Components, Network

__all__ = [
    "Components",
    "Diagnostics",
    "Network",
    "clustering",
    "diagnose",
    "diagnostics",
    "discrepancy",
    "learning",
]
