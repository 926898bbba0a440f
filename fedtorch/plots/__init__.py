"""Figures of federations and their data.

Every function returns a matplotlib `Figure` that belongs to no window: save it with `figure.savefig`, or let a notebook
show it. Where a function takes a run, that is a `Federation`, a `History`, or the table that either gives.

>>> import fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3), clients=20, seed=0)
>>> figure = ft.plots.client_distribution(data)
>>> figure.axes[0].get_ylabel()
'rows'
"""

from fedtorch.plots.clients import client_distribution
from fedtorch.plots.grids import heat_map
from fedtorch.plots.matrices import device_correlation, inclusion_map
from fedtorch.plots.networks import directed_network, network
from fedtorch.plots.runs import bytes_against, curves, worst_client

__all__ = [
    "bytes_against",
    "client_distribution",
    "curves",
    "device_correlation",
    "directed_network",
    "heat_map",
    "inclusion_map",
    "network",
    "worst_client",
]
