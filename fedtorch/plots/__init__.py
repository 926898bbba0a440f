"""Figures of federations and their data.

Every function returns a matplotlib `Figure` without a window: save it with `figure.savefig`, or display it in a
notebook. Functions of a run's history accept a `Run`, a `Federation`, a `History`, or their table. `forest`,
`shrinkage`, `funnel`, `calibration` and `predictive_check` need the `Run` of a hierarchical model.

>>> import fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3), clients=20, seed=0)
>>> figure = ft.plots.client_distribution(data)
>>> figure.axes[0].get_ylabel()
'rows'
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
