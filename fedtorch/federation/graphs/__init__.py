"""Federated learning networks: the graph, what it promises, how to learn it, and its clusters."""

from fedtorch.federation.graphs import (
    clustering,
    consensus,
    diagnostics,
    discrepancy,
    learning,
    recipes,
    regressors,
    solvers,
)
from fedtorch.federation.graphs.consensus import without_server
from fedtorch.federation.graphs.diagnostics import Diagnostics, diagnose
from fedtorch.federation.graphs.network import Components, Network
from fedtorch.federation.graphs.unlabelled import unlabelled
from fedtorch.federation.graphs.unreliable_edges import unreliable_edges

__all__ = [
    "Components",
    "Diagnostics",
    "Network",
    "clustering",
    "consensus",
    "diagnose",
    "diagnostics",
    "discrepancy",
    "learning",
    "recipes",
    "regressors",
    "solvers",
    "unlabelled",
    "unreliable_edges",
    "without_server",
]
