"""Aggregates that some wrong clients cannot move far: a rule a file, and the wrapper that puts one to use.

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import robust
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=12, seed=0)
>>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
>>> defended = average | robust.rule(robust.krum(faulty=2))
>>> ft.run(defended, ft.InProcess(data), rounds=3).number
3
"""

from fedtorch.federation.exchanges.robust.bulyan import bulyan as bulyan
from fedtorch.federation.exchanges.robust.clipping import (
    centred_clipping as centred_clipping,
    norm_bounding as norm_bounding,
)
from fedtorch.federation.exchanges.robust.fltrust import fltrust as fltrust
from fedtorch.federation.exchanges.robust.geometric_median import geometric_median as geometric_median
from fedtorch.federation.exchanges.robust.krum import krum as krum
from fedtorch.federation.exchanges.robust.median import median as median
from fedtorch.federation.exchanges.robust.mixing import nearest_neighbour_mixing as nearest_neighbour_mixing
from fedtorch.federation.exchanges.robust.rules import Rule as Rule
from fedtorch.federation.exchanges.robust.trimmed_mean import trimmed_mean as trimmed_mean
from fedtorch.federation.exchanges.robust.wrapper import rule as rule
