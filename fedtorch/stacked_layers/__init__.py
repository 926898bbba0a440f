"""Replacements of operations that `torch.vmap` cannot batch, batches wrongly or evaluates one client at a time.

`StackedOperations` is a mode around `vmap`. Inside it, all calls of these operations are replaced: in layers of
`torch.nn`, subclasses of them, or functions. Outside of the mode torch is unchanged: no rule is registered with
`torch.vmap`, and no object of the user is modified.

>>> import torch
>>> net = torch.nn.GRU(3, 4, batch_first=True)
>>> clients = {name: torch.stack([p, 2 * p]) for name, p in net.named_parameters()}
>>> rows = torch.ones(2, 5, 7, 3)  # two clients with five sequences of seven steps
>>> run = lambda tensors, x: torch.func.functional_call(net, tensors, (x,))[0]
>>> with StackedOperations():
...     torch.vmap(run)(clients, rows).shape
torch.Size([2, 5, 7, 4])
"""

from fedtorch.stacked_layers._branches import Divergence as Divergence, by_branches as by_branches
from fedtorch.stacked_layers._mode import StackedOperations as StackedOperations, WithoutReading as WithoutReading
