"""Metrics by sums, so that clients send statistics and the server computes the metric of all their rows.

`StackedMetric.update` turns `K` clients' predictions into sums, leaves `(K, ...)`; `compute` finishes sums of
any batch shape. One client's metric is `compute` of its own sums. The global metric is `compute` of the sums
added over clients: it equals the metric of the pooled rows, which a mean of the clients' metrics does not.

>>> import torch
>>> from fedtorch import metrics, tree
>>> accuracy = metrics.accuracy()
>>> logits = torch.tensor([[2.0, -1.0, 3.0], [1.0, 0.0, 0.0]])   # (K, N)
>>> target = torch.tensor([[1, 1, 1], [0, 0, 0]])
>>> mask = torch.tensor([[True, True, True], [True, False, False]])   # the second client has one row
>>> sums = accuracy.update(logits, target, mask)
>>> accuracy.compute(sums)
tensor([0.6667, 0.0000], dtype=torch.float64)
>>> accuracy.compute(tree.map(lambda leaf: leaf.sum(0), sums))
tensor(0.5000, dtype=torch.float64)
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
