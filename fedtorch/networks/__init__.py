"""Federated learning networks: graphs, bounds, learning of graphs, clusters, and solvers of GTV minimisation with
linear models. Nothing here needs a federation.

>>> import torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = ft.networks.solvers.linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> ft.networks.solvers.direct(problem).parameters.flatten()  # drawn towards each other
tensor([1., 2.], dtype=torch.float64)
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
