"""Aggregates that some wrong clients cannot move far: a rule a file, and the wrapper that puts one to use.

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import robust
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=12, seed=0)
>>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
>>> defended = average | robust.rule(robust.krum(faulty=2))
>>> ft.run(defended, ft.InProcess(data), rounds=3).number
3
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
