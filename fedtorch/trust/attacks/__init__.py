"""Attacks by clients as values: wrong rows join data with `|`, wrong messages join an algorithm.

The others measure how much can be learnt from a federation's messages and models: training rows' membership
(`membership`), rows (`gradient_inversion`, `model_inversion`, `split.split_inversion`), labels (`label_scores`) and
private attributes (`local_problem`, `learnt_attribute`).

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import attacks
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
>>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
>>> from fedtorch.trust.attacks.lies import claimed_rows
>>> attacked = average | attacks.sign_flip([0, 1], scale=3.0) | claimed_rows([0, 1], factor=10.0)
>>> ft.run(attacked, ft.InProcess(data | attacks.shifted_labels([2], by=100.0)), rounds=3).number
3
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
