"""Figures of federations and their data.

Every function returns a matplotlib `Figure` that belongs to no window: save it with `figure.savefig`, or let a notebook
show it. Where a function takes a run, that is a `Run`, a `Federation`, a `History`, or the table that they give.

>>> import fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3), clients=20, seed=0)
>>> figure = ft.plots.client_distribution(data)
>>> figure.axes[0].get_ylabel()
'rows'
"""

from fedtorch.plots.clients import client_distribution as client_distribution
from fedtorch.plots.grids import heat_map as heat_map
from fedtorch.plots.matrices import device_correlation as device_correlation, inclusion_map as inclusion_map
from fedtorch.plots.networks import directed_network as directed_network, network as network
from fedtorch.plots.runs import (
    bytes_against as bytes_against,
    curves as curves,
    groups as groups,
    worst_client as worst_client,
)
