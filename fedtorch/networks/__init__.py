"""Federated learning networks: the graph, what it promises, how to learn it, its clusters, and solvers of GTV
minimisation with linear models. Nothing here needs a federation."""

from fedtorch.networks import bounds, clustering, diagnostics, discrepancy, learning, solvers
from fedtorch.networks.bounds import Diagnostics
from fedtorch.networks.diagnostics import diagnose
from fedtorch.networks.network import Components, Network

__all__ = [
    "Components",
    "Diagnostics",
    "Network",
    "bounds",
    "clustering",
    "diagnose",
    "diagnostics",
    "discrepancy",
    "learning",
    "solvers",
]
