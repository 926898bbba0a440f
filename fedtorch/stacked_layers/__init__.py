"""What `torch.vmap` cannot batch, or batches client by client: recurrent layers, attention on the CPU, and branches.

So are counts of integers, of which confusion matrices and scores by class are made.

Importing the package gives `torch.vmap` a rule for each, below autograd and above the kernels: operations for which
torch has none keep their meaning and their gradients, and nothing else changes. Where a later torch has a rule of its
own, that one stays.

>>> import torch
>>> import fedtorch.stacked_layers
>>> net = torch.nn.GRU(3, 4, batch_first=True)
>>> clients = {name: torch.stack([p, 2 * p]) for name, p in net.named_parameters()}
>>> rows = torch.ones(2, 5, 7, 3)  # of two clients: five sequences of seven steps
>>> run = lambda tensors, x: torch.func.functional_call(net, tensors, (x,))[0]
>>> torch.vmap(run)(clients, rows).shape
torch.Size([2, 5, 7, 4])
"""

from fedtorch.stacked_layers import (
    _composite as _composite,
    _counting as _counting,
    _cross_entropy as _cross_entropy,
    _pooling as _pooling,
)
from fedtorch.stacked_layers._adapt import adapt as adapt, adapt_alone as adapt_alone
from fedtorch.stacked_layers._branches import ReadsValues as ReadsValues, by_branches as by_branches
from fedtorch.stacked_layers._linear import StackedLinear as StackedLinear
from fedtorch.stacked_layers._recurrent import faster_alone as faster_alone
