"""Models as `nn.Module`s, independent of the federation.

>>> import torch, fedtorch as ft
>>> from fedtorch.models import linear
>>> head = linear.LinearHead(2)
>>> head(torch.ones(3, 2)).shape
torch.Size([3])
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
