"""Federated learning networks: the graph, what it promises, how to learn it, its clusters, and solvers of GTV
minimisation with linear models. Nothing here needs a federation."""

from fedtorch.networks import (
    bounds as bounds,
    clustering as clustering,
    diagnostics as diagnostics,
    discrepancy as discrepancy,
    learning as learning,
    solvers as solvers,
)
from fedtorch.networks.bounds import Diagnostics as Diagnostics
from fedtorch.networks.diagnostics import diagnose as diagnose
from fedtorch.networks.network import Components as Components, Network as Network
