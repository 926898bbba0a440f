"""Data of many clients: sources, partitions and stacking.

>>> import fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3, minimum=10), clients=20, seed=0)
>>> training, validation = data.split(0.7, seed=0)
>>> len(training), int(data.counts.sum())
(20, 1797)
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
